"""What goes to an engine: the adapter as PEFT would write it, and sums that leave the model as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from posttrain.errors import EngineError
from posttrain.models import adapters
from posttrain.models.load import LoadedModel
from posttrain.models.save import merged_state
from posttrain.recipe.sections import Lora
from posttrain.rollout.core import read_base
from posttrain.rollout.weights import dense_weights, factors, with_factors, write_adapter, write_base


@pytest.fixture
def adapted(loaded: LoadedModel) -> Any:
    """A model whose adapter has been trained a little."""
    model = adapters.add(loaded.model, Lora(rank=3, alpha=6))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 1000)
    return model


def test_an_adapter_is_what_peft_writes(adapted: Any, tmp_path: Path) -> None:
    adapted.save_pretrained(tmp_path / "peft", selected_adapters=["default"], save_embedding_layers=False)
    (tmp_path / "ours").mkdir()  # left by a run that broke
    ours = write_adapter(adapted, tmp_path / "ours", torch.float32)
    expected = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    found = load_file(ours / "adapter_model.safetensors")
    assert found.keys() == expected.keys() and len(found) > 0
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    theirs, config = (json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path / "peft", ours))
    for key in ("r", "lora_alpha", "peft_type", "use_rslora", "rank_pattern", "alpha_pattern"):
        assert config[key] == theirs[key], key
    assert sorted(config["target_modules"]) == sorted(theirs["target_modules"])


def test_an_adapter_is_rounded_to_the_engine_s_type(adapted: Any, tmp_path: Path) -> None:
    folder = write_adapter(adapted, tmp_path / "half", torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()} == {torch.bfloat16}


def test_merged_weights_are_those_of_the_saved_model(adapted: Any) -> None:
    found, expected = dict(dense_weights(adapted, merged=True)), merged_state(adapted)
    assert found.keys() == expected.keys() - {"lm_head.weight"}  # tied: it comes once
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    plain = dict(dense_weights(adapted))
    changed = {name for name in found if not torch.equal(found[name], plain[name])}
    assert changed == {name for name in found if name.endswith("_proj.weight")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_and_factors_make_the_merged_weights(
    loaded: LoadedModel, adapted: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """To the last bit, and only some numbers travel."""
    for name, parameter in adapted.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.to(dtype)
    lora = LoadedModel(adapted, loaded.tokenizer, loaded.eos_ids, loaded.pad_id, "test")
    held = read_base(write_base(lora, tmp_path / "base", dtype))
    sent = factors(adapted)
    assert sent is not None and all(tensor.dtype == torch.float32 for tensor in sent.values())
    found = dict(with_factors(held.items(), sent, torch.device("cpu")))
    expected = dict(dense_weights(adapted, merged=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert any(not torch.equal(found[name], held[name]) for name in held)
    with pytest.raises(EngineError, match="no weight for model"):
        dict(with_factors([(n, t) for n, t in held.items() if "gate_proj" not in n], sent, torch.device("cpu")))


@pytest.mark.parametrize(
    "more", [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"lora_bias": True}], ids=str
)
def test_an_adapter_that_is_more_than_products_has_no_factors(loaded: LoadedModel, more: dict[str, Any]) -> None:
    config = LoraConfig(r=3, target_modules=["q_proj"], **more)
    if "lora_bias" in more:
        loaded.model.model.layers[0].self_attn.q_proj = torch.nn.Linear(
            loaded.model.config.hidden_size, loaded.model.model.layers[0].self_attn.q_proj.out_features
        )
        config.target_modules = ["model.layers.0.self_attn.q_proj"]
    assert factors(get_peft_model(loaded.model, config)) is None
