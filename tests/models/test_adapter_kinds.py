"""Adapters made by plain PEFT, on tied and untied embeddings: what posttrain loads, saves and trains on computes the
same as plain transformers with PEFT, or it is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from posttrain.errors import ModelError
from posttrain.models import tiny
from posttrain.models.load import LoadedModel
from posttrain.models.merge_adapter import merged_copy
from posttrain.models.save import save

from .test_save import move

Load = Callable[..., LoadedModel]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's warnings about tied embeddings

ROWS = len(tiny.build_tokenizer())
IDS = torch.tensor([[1, 5, 40, 41, 60, 61, 62, 7, 8, 100, ROWS - 1, 20]])
CLOSE = 2e-5  # for logits of about 2: float32 rounding

EMBED, HEAD, Q = "embed_tokens", "lm_head", "q_proj"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": [Q, "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "embedding": {"target_modules": [Q, EMBED]},
    "head": {"target_modules": [Q, HEAD]},
    "both": {"target_modules": [EMBED, HEAD]},
    "regex": {"target_modules": r".*(q_proj|embed_tokens)"},
    "saved embedding": {"target_modules": [Q], "modules_to_save": [EMBED]},
    "saved head": {"target_modules": [Q], "modules_to_save": [HEAD]},
    "saved both": {"target_modules": [Q], "modules_to_save": [EMBED, HEAD]},
    "saved block": {"target_modules": [Q], "modules_to_save": ["mlp", "norm"]},
    "tokens": {"target_modules": [Q], "trainable_token_indices": [5, 40, 41]},
    "tokens of the head": {"target_modules": [Q], "trainable_token_indices": {HEAD: [5, 40]}},
    "tokens and head": {"target_modules": [Q, HEAD], "trainable_token_indices": [5, 40]},
    "kept tied, embedding": {"target_modules": [Q, EMBED], "ensure_weight_tying": True},
    "kept tied, head": {"target_modules": [Q, HEAD], "ensure_weight_tying": True},
    "kept tied, saved": {"target_modules": [Q], "modules_to_save": [EMBED], "ensure_weight_tying": True},
    "patterns": {"target_modules": [Q, EMBED], "rank_pattern": {Q: 3}, "alpha_pattern": {EMBED: 7}},
    "rslora": {"target_modules": [Q, EMBED], "use_rslora": True},
    "dora": {"target_modules": [Q, EMBED, HEAD], "use_dora": True},
    "bias": {"target_modules": [Q, HEAD], "bias": "all"},
    "parameters": {"target_modules": [Q], "target_parameters": ["mlp.gate_proj.weight"]},
    "repeated layers": {"target_modules": [Q], "layer_replication": [[0, 2], [1, 2]]},
}
STAYS_TIED = {"plain", "all-linear", "saved block", "tokens", "parameters", "repeated layers"} | {
    kind for kind in KINDS if kind.startswith("kept tied")
}


def make_base(folder: Path, *, tied: bool) -> Path:
    model, tokenizer = tiny.build(0)
    if not tied:
        model.config.tie_word_embeddings = False
        head = model.lm_head.weight.detach()
        model.lm_head.weight = torch.nn.Parameter(head + 0.02 * torch.randn_like(head))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / str(request.param), tied=request.param)


def is_tied(base: Path) -> bool:
    return base.name == "True"


def make_adapter(base: Path, folder: Path, more: int = 0, **config: Any) -> Path:
    """Write a perturbed adapter with PEFT; `more` tokens are added to the model before."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    if more:
        model.resize_token_embeddings(ROWS + more, mean_resizing=False)
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **config))
    move(peft, 0.1)
    peft.save_pretrained(folder)
    return folder


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids).logits
    return found


def with_peft(base: Path, folder: Path, more: int = 0, ids: torch.Tensor = IDS) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base)
    if more:
        model.resize_token_embeddings(ROWS + more, mean_resizing=False)
    return logits(PeftModel.from_pretrained(model, str(folder)), ids)


def elsewhere(folder: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_external_adapter_gives_the_logits_of_peft(loaded: Load, base: Path, kind: str, tmp_path: Path) -> None:
    """Loaded to generate, trained on with a fresh adapter, and saved."""
    folder = make_adapter(base, tmp_path / "adapter", **KINDS[kind])
    expected = with_peft(base, folder)
    assert (expected - elsewhere(base)).abs().max() > 1e-2, "the adapter does something"
    again = loaded(folder, training=False)
    assert not again.is_lora
    assert torch.allclose(logits(again.model), expected, atol=CLOSE)
    assert again.model.config.tie_word_embeddings == (is_tied(base) and kind in STAYS_TIED)
    assert save(again, tmp_path / "dense")["kind"] == "full"
    assert torch.allclose(elsewhere(tmp_path / "dense"), expected, atol=CLOSE)

    on = loaded(folder, lora={"rank": 2, "targets": [Q]})
    with on.model.disable_adapter():
        assert torch.allclose(logits(on.model), expected, atol=CLOSE)
    move(on.model)
    moved = logits(on.model)
    assert (moved - expected).abs().max() > 1e-3
    assert save(on, tmp_path / "on")["kind"] == "merged"
    assert torch.allclose(elsewhere(tmp_path / "on"), moved, atol=CLOSE)


@pytest.mark.parametrize("targets", [[Q, EMBED], [Q, HEAD], [EMBED, HEAD]], ids="+".join)
def test_own_adapter_on_embeddings(loaded: Load, base: Path, targets: list[str], tmp_path: Path) -> None:
    model = loaded(base, lora={"rank": 4, "targets": targets})
    move(model.model, 0.1)
    expected = logits(model.model)
    assert save(model, tmp_path / "out")["kind"] == "adapter"
    assert torch.allclose(with_peft(base, tmp_path / "out"), expected, atol=CLOSE)
    assert torch.allclose(logits(loaded(tmp_path / "out", training=False).model), expected, atol=CLOSE)


@pytest.mark.parametrize("targets", [[Q, EMBED], [Q, HEAD]], ids="+".join)
def test_merged_model_over_tiny_is_untied(loaded: Load, targets: list[str], tmp_path: Path) -> None:
    model = loaded(lora={"rank": 4, "targets": targets})
    move(model.model, 0.1)
    expected = logits(model.model)
    assert save(model, tmp_path / "out")["kind"] == "merged"
    assert torch.allclose(elsewhere(tmp_path / "out"), expected, atol=CLOSE)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(model.model), expected) and model.model.config.tie_word_embeddings


RESIZED = {
    "nothing else": {"target_modules": [Q]},
    "both": {"target_modules": [EMBED, HEAD]},
    "saved both": {"target_modules": [Q], "modules_to_save": [EMBED, HEAD]},
    "saved embedding": {"target_modules": [Q], "modules_to_save": [EMBED]},
    "kept tied": {"target_modules": [Q], "modules_to_save": [EMBED], "ensure_weight_tying": True},
    "tokens": {"target_modules": [Q], "trainable_token_indices": [ROWS, ROWS + 1, ROWS + 2]},
    "some tokens": {"target_modules": [Q], "trainable_token_indices": [ROWS, ROWS + 2]},
}


@pytest.mark.parametrize("kind", RESIZED)
def test_added_tokens(loaded: Load, base: Path, kind: str, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "adapter", 3, **RESIZED[kind])
    ids = torch.cat([IDS, torch.arange(ROWS, ROWS + 3)[None]], 1)
    expected = with_peft(base, folder, 3, ids)
    model = loaded(folder, training=False).model
    assert model.config.vocab_size == ROWS + 3
    assert torch.allclose(logits(model, ids), expected, atol=CLOSE)


def test_added_tokens_without_stored_rows_are_refused(loaded: Load, tmp_path: Path) -> None:
    """PEFT stores only the embedding that it adapts; the untied head's rows for new tokens are lost."""
    base = make_base(tmp_path / "base", tied=False)
    folder = make_adapter(base, tmp_path / "adapter", 3, target_modules=[Q, EMBED])
    with pytest.raises(ModelError, match=r"with 113 tokens, its base has 110, and .* the new embeddings of lm_head"):
        loaded(folder, training=False)


def test_adapter_whose_base_was_resized_after_training(loaded: Load, base: Path, tmp_path: Path) -> None:
    """The base was resized and saved after training: nothing needs resizing, and nothing is stored twice."""
    folder = make_adapter(base, tmp_path / "adapter", 3, target_modules=[Q, EMBED, HEAD])
    big = AutoModelForCausalLM.from_pretrained(base)
    big.resize_token_embeddings(ROWS + 3, mean_resizing=False)
    big.save_pretrained(tmp_path / "big")
    shutil.copy(base / "tokenizer.json", tmp_path / "big")
    shutil.copy(base / "tokenizer_config.json", tmp_path / "big")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(tmp_path / "big")})
    )
    expected = with_peft(tmp_path / "big", folder)
    assert torch.allclose(logits(loaded(folder, training=False).model), expected, atol=CLOSE)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"lora_bias": True}, "cannot be merged into its base: .*lora_bias"),
        ({"alora_invocation_tokens": [7, 8]}, "alora_invocation_tokens does more than change weights"),
    ],
    ids=["lora_bias", "alora"],
)
def test_adapters_that_no_plain_model_can_represent_are_refused(
    loaded: Load, base: Path, config: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = make_adapter(base, tmp_path / "adapter", target_modules=[Q], **config)
    with pytest.raises(ModelError, match=told) as error:
        loaded(folder, training=False)
    assert str(folder) in str(error.value) and "hint: generate with it in PEFT" in str(error.value)


def test_prefix_tuning_is_refused_before_anything_is_loaded(loaded: Load, base: Path, tmp_path: Path) -> None:
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "prefix")
    with pytest.raises(ModelError, match=r"of type PREFIX_TUNING .* cannot be merged"):
        loaded(tmp_path / "prefix", training=False)


def test_adapter_with_biases_over_4_bit_weights_is_refused(loaded: Load, base: Path, tmp_path: Path) -> None:
    """The biases would be needed twice, as trained parameters and as the reference."""
    pytest.importorskip("bitsandbytes")
    folder = make_adapter(base, tmp_path / "adapter", target_modules=[Q], bias="all")
    assert loaded(folder, training=False, quantize="nf4").is_lora
    with pytest.raises(ModelError, match="cannot be trained further on a 4-bit base") as error:
        loaded(folder, quantize="nf4", lora={})
    assert "leave out model.quantize" in str(error.value)


@pytest.mark.parametrize("kind", ["embedding", "saved both", "tokens"])
def test_adapter_on_embeddings_over_4_bit_weights(loaded: Load, base: Path, kind: str, tmp_path: Path) -> None:
    """Nothing is merged: the adapter is trained further unchanged, and PEFT reads the saved adapter on the same
    base.
    """
    pytest.importorskip("bitsandbytes")
    model = loaded(make_adapter(base, tmp_path / "adapter", **KINDS[kind]), quantize="nf4", lora={})
    before = logits(model.model)
    move(model.model)
    report = save(model, tmp_path / "out")
    assert (report["kind"], report["logit_gap"]) == ("adapter", 0.0)
    assert (logits(model.model) - before).abs().max() > 1e-3
    again = loaded(tmp_path / "out", training=False, quantize="nf4")
    assert torch.allclose(logits(again.model), logits(model.model), atol=CLOSE)


def test_adapter_with_a_missing_tensor_is_refused(loaded: Load, base: Path, tmp_path: Path) -> None:
    """PEFT only warns and continues with the fresh factor; the trained values would be lost."""
    from safetensors.torch import load_file, save_file

    folder = make_adapter(base, tmp_path / "adapter", target_modules=[Q])
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"does not fit its base: .*layers.1.self_attn.q_proj.lora_B"):
        loaded(folder, training=False)


def test_inexact_merge_is_detected(loaded: Load, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.models import merge_adapter

    folder = make_adapter(base, tmp_path / "adapter", target_modules=[Q, EMBED])
    monkeypatch.setattr(merge_adapter, "_add_products", lambda _: None)
    monkeypatch.setattr(merge_adapter, "_untie_adapted_weights", lambda _: None)
    if is_tied(base):
        with pytest.raises(ModelError, match="cannot be merged into its base: logits change by"):
            loaded(folder, training=False)
    else:
        loaded(folder, training=False)


def test_merged_copy_does_not_use_the_original_weights(loaded: Load, base: Path) -> None:
    """TRL's trainers replace the model's forward, and the replacement holds a reference to the original's method."""
    model = loaded(base, lora={"rank": 4, "targets": [Q], "dropout": 0.5})
    move(model.model, 0.1)
    expected = logits(model.model)
    inner = model.model.get_base_model()
    original = inner.forward
    inner.forward = lambda *args, **kwargs: original(*args, **kwargs)
    model.model.train()
    merged = merged_copy(model.model)
    with torch.no_grad():
        inner.model.norm.weight.zero_()
    assert torch.allclose(logits(merged), expected, atol=CLOSE)


def test_readme_names_the_base_of_the_adapter(loaded: Load, base: Path, tmp_path: Path) -> None:
    first = loaded(base, lora={"rank": 2})
    move(first.model)
    save(first, tmp_path / "first")
    assert f'base_model: "{base}"' in (tmp_path / "first" / "README.md").read_text()
    second = loaded(tmp_path / "first", lora={"rank": 2})
    move(second.model)
    save(second, tmp_path / "second")
    readme = (tmp_path / "second" / "adapter" / "README.md").read_text()
    assert str(base) not in readme and "base_model" not in readme
    assert f"An adapter on `{tmp_path / 'first'}`, which is an adapter itself" in readme
    config = json.loads((tmp_path / "second" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None
    with pytest.raises(ModelError, match="names no base model") as error:
        loaded(tmp_path / "second" / "adapter", training=False)
    assert "use the run's final/" in str(error.value)
