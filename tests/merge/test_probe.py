"""The probe of a merged model adapts to the model: few positions or tokens, no tokenizer; models that cannot run are
refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from posttrain.errors import MergeError
from posttrain.models import tiny

Merge = Callable[..., dict[str, Any]]


def save(folder: Path, seed: int, kind: str, tokenizer: bool = True, **config: Any) -> None:
    torch.manual_seed(seed)
    made = getattr(transformers, f"{kind}Config")(**config)
    special = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration"}
    architecture = special.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, architecture)(made)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    if tokenizer:
        tiny.build_tokenizer().save_pretrained(folder)


SMALL = {"vocab_size": 114, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {**SMALL, "n_embd": 16, "n_layer": 2, "n_head": 2}
OPT = {**SMALL, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "pad_token_id": 0,
       "word_embed_proj_dim": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "tokenizer"),
    [
        ("GPT2", {**GPT2, "n_positions": 64}, True),  # the text has more characters, one token each
        ("GPT2", {**GPT2, "n_positions": 16}, True),
        ("GPT2", {**GPT2, "n_positions": 1}, True),
        ("GPT2", {**GPT2, "n_positions": 16}, False),
        ("GPT2", {**GPT2, "n_positions": 64, "vocab_size": 7}, False),
        ("OPT", {**OPT, "max_position_embeddings": 20}, True),
        ("T5", {"vocab_size": 114, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}, True),
        ("Mpt", {"vocab_size": 114, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 24}, True),
    ],
)
def test_models_with_few_positions_can_be_merged(
    tmp_path: Path, merge: Merge, kind: str, config: dict[str, Any], tokenizer: bool
) -> None:
    for seed, name in enumerate(("a", "b")):
        save(tmp_path / name, seed, kind, tokenizer, **config)
    summary = merge(merge_method="linear", models=[{"model": "a"}, {"model": "b"}])
    assert summary["probe"]["logit_gap"] > 0
    a, b, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b", "run/final"))
    assert all(torch.allclose(merged[name], (a[name] + b[name]) / 2) for name in a)


def test_models_that_cannot_run_are_refused_before_writing(
    tmp_path: Path, merge: Merge, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.merge import run as stage

    for seed, name in enumerate(("a", "b")):
        save(tmp_path / name, seed, "GPT2", **GPT2, n_positions=64)

    def broken(*_: Any, **__: Any) -> None:
        raise IndexError("index out of range in self")

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", broken)
    monkeypatch.setattr(stage, "write_merged", lambda *_: pytest.fail("the merge began"))
    with pytest.raises(MergeError, match=r"cannot run it on 64 tokens.*IndexError: index out of range"):
        merge(merge_method="linear", models=[{"model": "a"}, {"model": "b"}])
    assert not (tmp_path / "run" / "final").exists()
