"""Weights sent to an engine: the adapter in PEFT's format, and merged weights computed without changing the model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from posttrain.errors import ModelError
from posttrain.models import adapters
from posttrain.models.load import LoadedModel, load
from posttrain.models.merge_adapter import merged_copy
from posttrain.models.weights import dense_weights, published_config, write_adapter
from posttrain.recipe.engine_sections import Server, Vllm
from posttrain.recipe.sections import Lora, Model
from posttrain.rollout.servers import make_served

from ..train.vision_families import save_seeing


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_engine_config_contains_the_position_layout(kind: str, tmp_path: Path) -> None:
    """To transformers, a configuration without it means the layout that checkpoints of Qwen3-VL state."""
    seeing = load(Model(path=str(save_seeing(kind, tmp_path / kind)), vision="all"), tmp_path)
    text = seeing.model.config.get_text_config()
    rope = published_config(seeing).get_text_config().rope_parameters
    assert rope == text.rope_parameters | ({"mrope_interleaved": True} if kind == "qwen3_vl" else {})
    del text.rope_parameters["mrope_section"]
    assert published_config(seeing).get_text_config().rope_parameters == rope


@pytest.fixture
def adapted(loaded: LoadedModel) -> Any:
    """Return a model with a slightly trained adapter."""
    model = adapters.add(loaded.model, Lora(rank=3, alpha=6))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 1000)
    return model


def test_adapter_files_equal_those_of_peft(adapted: Any, tmp_path: Path) -> None:
    adapted.save_pretrained(tmp_path / "peft", selected_adapters=["default"], save_embedding_layers=False)
    (tmp_path / "ours").mkdir()  # left by a failed run
    ours = write_adapter(adapted, tmp_path / "ours", torch.float32)
    expected = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    found = load_file(ours / "adapter_model.safetensors")
    assert found.keys() == expected.keys() and len(found) > 0
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    theirs, config = (json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path / "peft", ours))
    for key in ("r", "lora_alpha", "peft_type", "use_rslora", "rank_pattern", "alpha_pattern"):
        assert config[key] == theirs[key], key
    assert sorted(config["target_modules"]) == sorted(theirs["target_modules"])


def test_adapter_is_rounded_to_the_engines_dtype(adapted: Any, tmp_path: Path) -> None:
    folder = write_adapter(adapted, tmp_path / "half", torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()} == {torch.bfloat16}


def test_merged_weights_equal_the_saved_model(adapted: Any) -> None:
    found, expected = dict(dense_weights(adapted, merged=True)), merged_copy(adapted).state_dict()
    assert found.keys() == expected.keys() - {"lm_head.weight"}  # tied: sent once
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    plain = dict(dense_weights(adapted))
    changed = {name for name in found if not torch.equal(found[name], plain[name])}
    assert changed == {name for name in found if name.endswith("_proj.weight")}


def adapted_by(loaded: LoadedModel, **more: Any) -> Any:
    """Return the model with a disturbed adapter on q_proj, or as `more` says."""
    torch.manual_seed(0)
    model = get_peft_model(loaded.model, LoraConfig(**{"r": 3, "target_modules": ["q_proj"], **more}))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize(
    "more",
    [
        {"use_rslora": True, "lora_alpha": 5},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 7}},
    ],
    ids=str,
)
def test_each_layer_has_its_own_rank_and_scale(loaded: LoadedModel, more: dict[str, Any]) -> None:
    model = adapted_by(loaded, **more)
    expected = merged_copy(model).state_dict()
    found = dict(dense_weights(model, merged=True))
    assert any("q_proj" in name for name in found)
    assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in found.items())


@pytest.mark.parametrize("more", [{"bias": "all"}, {"target_modules": ["q_proj", "embed_tokens"]}], ids=str)
def test_adapters_that_are_no_matrix_product_are_merged_by_the_trainer(
    loaded: LoadedModel, more: dict[str, Any]
) -> None:
    loaded.model.lm_head.weight = torch.nn.Parameter(loaded.model.lm_head.weight.detach().clone())  # not tied
    model = adapted_by(loaded, **more)
    adapters.check_plain_lora(model.get_base_model())
    expected = merged_copy(model).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in dense_weights(model, merged=True))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True, "target_modules": ["model.layers.0.self_attn.q_proj"]}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj", "lm_head"]}, "a part on lm_head, whose weight is tied"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "a part on model.embed_tokens, whose weight is tied"),
    ],
)
def test_adapters_that_cannot_be_merged_raise_before_vllm_starts(
    loaded: LoadedModel, more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    if "lora_bias" in more:
        size = loaded.model.config.hidden_size
        loaded.model.model.layers[0].self_attn.q_proj = torch.nn.Linear(size, size)
    lora = dataclasses.replace(loaded, model=adapted_by(loaded, **more))
    section = Vllm(merge_adapter=True, server=Server(urls=["http://localhost:1"]))
    with pytest.raises(ModelError, match=f"an adapter with {named}.* cannot be merged"):
        make_served(section, lora, scratch=tmp_path, max_len=64)
