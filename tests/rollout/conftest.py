"""A model that generates in milliseconds and has a head size supported by vLLM's kernels (32)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.batch import Prompt
from posttrain.models import tiny
from posttrain.models.load import LoadedModel

SUMS = ("458+367=?", "12+5=?", "7+8=?", "999+111=?", "hello world", "40+2=?")


def small_model(tokenizer: Any, seed: int = 0) -> Any:
    """A 2-layer Llama with grouped-query attention and tied embeddings. Its weights have a scale at which some tokens
    are near certain and others are not."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session", autouse=True)
def _short_library_calls(short_library_calls: None) -> None: ...


@pytest.fixture
def loaded() -> LoadedModel:
    tokenizer = tiny.build_tokenizer()
    return LoadedModel(
        model=small_model(tokenizer),
        tokenizer=tokenizer,
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
        source="test",
    )


@pytest.fixture
def prompts(loaded: LoadedModel) -> list[Prompt]:
    """Prompts of different lengths."""
    ids = [tuple(loaded.tokenizer.encode(text, add_special_tokens=False)) for text in SUMS]
    return [Prompt(uid=f"p{i}", row={}, text=text, ids=ids[i]) for i, text in enumerate(SUMS)]
