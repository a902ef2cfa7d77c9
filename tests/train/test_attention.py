"""Which architectures may be packed: decided by a trial on the model, not by its name."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from posttrain.models.load import load
from posttrain.recipe.sections import Lora, Model
from posttrain.train import attention
from posttrain.train.attention import NAME, use_packed_attention, uses_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.context import TrainContext
from posttrain.train.logprobs import completion_logprobs
from posttrain.train.pass_checks import check_head

from .families import family

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SEQUENCES = Sequences(((1, 5, 9, 3), (1, 7, 2, 8, 4, 6, 11, 12)), (2, 3))


def small(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | more)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("kind", "more", "rate"),
    [
        ("granite", {"attention_dropout": 0.1}, 0.1),
        ("granite", {}, 0.0),
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0.2}, 0.2),
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.1}, 0.0),
    ],
)
def test_models_with_dropout_in_attention_are_not_packed(kind: str, more: dict[str, Any], rate: float) -> None:
    """The kernel for packed rows has no dropout: packed and padded training would differ."""
    model = small(kind, **more)
    assert attention.attention_dropout(model) == rate
    assert use_packed_attention(model) == (rate == 0)


def test_dropout_in_attention_counts_as_dropout_of_training_passes() -> None:
    """It is a number in the attention modules, not an nn.Dropout."""
    for rate in (0.0, 0.1):
        ctx = SimpleNamespace(loaded=SimpleNamespace(model=small("granite", attention_dropout=rate)))
        assert TrainContext.has_dropout.func(ctx) == (rate > 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("nemotron", {}),  # its layers do not pass on unknown arguments
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),  # a convolution runs over the border
        ("gpt_oss", EXPERTS),  # attention sinks, unsupported by SDPA
        ("gemma2", {}),  # capped scores
        ("llama4_text", EXPERTS),  # attention in chunks
        ("qwen2", {"attn_implementation": "eager"}),  # what the recipe asks for
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unpackable_model_is_unchanged(kind: str, more: dict[str, Any]) -> None:
    model = small(kind, **more)
    before = model.config._attn_implementation
    alone = check_head(model, SEQUENCES)
    with torch.no_grad():
        expected = completion_logprobs(model, SEQUENCES, 5)[0]
    assert not use_packed_attention(model)
    assert model.config._attn_implementation == before != NAME
    with torch.no_grad():
        assert torch.equal(completion_logprobs(model, SEQUENCES, 5)[0], expected)
    assert alone < 1e-4


@pytest.mark.parametrize("kind", ["mixtral", "jetmoe"])
def test_packed_log_probs_are_exact(kind: str) -> None:
    model = small(kind, **EXPERTS)
    with torch.no_grad():
        expected = completion_logprobs(model, SEQUENCES, 5)[0]
        assert use_packed_attention(model)
        packed = completion_logprobs(model, SEQUENCES, 5, packed=True)[0]
    torch.testing.assert_close(packed, expected, atol=2e-5, rtol=0)


def test_float32_adapters_on_a_half_precision_model_are_packed(tmp_path: Path) -> None:
    """Every LoRA run on a GPU has such adapters."""
    section = Model(path="tiny", lora=Lora(), dtype="bfloat16", device="cpu")
    loaded = load(section, tmp_path, training=True)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16, torch.float32}
    assert use_packed_attention(loaded.model)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_sliding_window_applies_without_a_mask(kind: str) -> None:
    """As when the transformers engine samples rows of one length: no mask, a cache, and a prompt longer than the
    window."""
    model = small(kind, sliding_window=3)
    ids = torch.arange(1, 16)[None]

    def steps() -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            parts = [ids, ids[:, :1], ids[:, 7:8], ids[:, 3:6]]  # a prompt, two tokens, three at once
            return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in parts], 1)

    expected = steps()
    assert use_packed_attention(model)
    torch.testing.assert_close(steps(), expected, atol=1e-5, rtol=1e-5)


LONG = Sequences(tuple(tuple(range(3, 3 + n)) for n in (30, 5, 40, 17)), (5, 2, 3, 4))
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED: dict[str, tuple[bool, dict[str, Any]]] = {  # whether it is packed, and keys
    "mistral": (True, {}),
    "mixtral": (True, {}),
    "phi3": (True, {}),
    "starcoder2": (True, {}),
    "qwen2": (True, {"use_sliding_window": True, "layer_types": [SLIDING, FULL]}),
    "qwen3_moe": (True, {"use_sliding_window": True, "layer_types": [SLIDING, SLIDING]}),
    "gemma3_text": (True, {"layer_types": [SLIDING, FULL]}),
    "gemma3n_text": (True, {"layer_types": [SLIDING, FULL]}),
    "cohere2": (True, {"layer_types": [SLIDING, FULL]}),
    "olmo3": (True, {"layer_types": [FULL, SLIDING]}),
    "exaone4": (True, {"layer_types": [SLIDING, SLIDING]}),
    "smollm3": (True, {"use_sliding_window": True, "layer_types": [SLIDING, FULL]}),
    "dots1": (True, {"layer_types": [SLIDING, FULL]}),
    "ministral": (True, {"layer_types": [SLIDING, SLIDING]}),
    "modernbert-decoder": (True, {"layer_types": [SLIDING, FULL]}),
    "qwen2_moe": (
        False,
        {"use_sliding_window": True, "layer_types": [SLIDING, FULL]},
    ),  # these get the window by the mask
    "phimoe": (False, {}),
    "doge": (False, {}),
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_rows_longer_than_a_window_are_packed_only_if_exact(kind: str) -> None:
    """Packed, they have the log-probs of padded rows; an architecture whose layers do not know their window is padded.
    A window of thousands is tried as one of 8."""
    packs, keys = WINDOWED[kind]
    for window in (4096, 8):
        model = family(kind, sliding_window=window, **keys)
        assert use_packed_attention(model) == packs == uses_packed_attention(model)
        assert model.config.sliding_window == window, "the trial leaves it as it was"
        layers = [m.sliding_window for m in model.modules() if getattr(m, "sliding_window", None)]
        assert set(layers) <= {window}
    with torch.no_grad():
        found = completion_logprobs(model, LONG, 37, packed=True)[0]
        expected = completion_logprobs(family(kind, sliding_window=8, **keys), LONG, 37)[0]
        wide = completion_logprobs(family(kind, sliding_window=64, **keys), LONG, 37)[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert (wide - expected).abs().max() > 0.1, "the window matters"


def test_window_longer_than_the_trial_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("mistral", sliding_window=4096)
    monkeypatch.setattr(attention, "WINDOWS", ())
    assert not use_packed_attention(model)


def test_unswitched_model_is_padded_even_if_packing_is_requested() -> None:
    """A teacher may have another architecture than the policy, whose state would leak into the next row."""
    model = small("lfm2", layer_types=["conv", "full_attention"])
    with torch.no_grad():
        expected = completion_logprobs(model, SEQUENCES, 5)[0]
        assert torch.equal(completion_logprobs(model, SEQUENCES, 5, packed=True)[0], expected)


def test_copied_model_is_packed_like_its_original() -> None:
    """The reference model of full training is a copy."""
    model = small("qwen2")
    assert use_packed_attention(model) and uses_packed_attention(copy.deepcopy(model))
