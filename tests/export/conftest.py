"""Small models of the architectures that can be written as GGUF, with a byte-level BPE tokenizer, and run
directories.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "What is 17 + 25? It is 42, they'll say.",
    "def add(a, b):\n    return a + b\n",
    "apples and pears, the sum",
] * 4


def byte_level(split: str = "qwen2", template: str | None = CHATML, **changes: Any) -> Any:
    """Train a tokenizer of about 300 tokens on CORPUS. changes: keys of tokenizer.json's model."""
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split != "qwen2")
    first = {
        "qwen2": [pre_tokenizers.Split(Regex(QWEN), "isolated")],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "odd": [pre_tokenizers.Whitespace()],
    }.get(split, [])
    core.pre_tokenizer = pre_tokenizers.Sequence([*first, level]) if first else level
    core.decoder = decoders.ByteLevel()
    if split == "qwen2":
        core.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    core.add_tokens([AddedToken(t, normalized=False, special=False) for t in ("<think>", "</think>")])
    if changes:
        values = json.loads(core.to_str())
        values["model"] |= changes
        core = Tokenizer.from_str(json.dumps(values))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = template
    return made


def small(kind: str, tokenizer: Any, **changes: Any) -> Any:
    """Build a model with random weights. kind: llama, mistral, qwen2, qwen3; changes: configuration keys."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    heads = {"head_dim": 128} if kind == "qwen3" else {"sliding_window": None} if kind == "mistral" else {}
    values = {
        "vocab_size": len(tokenizer) + 3,  # more rows than tokens, as Qwen's has
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind in ("qwen2", "qwen3"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "initializer_range": 0.2,
        **heads,
        **changes,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # or they would all be 0 and 1
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="session", autouse=True)
def _short_library_calls(short_library_calls: None) -> None: ...


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[..., Path]:
    """A model folder: `folder_of("qwen2", dtype=torch.bfloat16)`."""

    def make(kind: str = "llama", *, dtype: torch.dtype = torch.float32, tokenizer: Any = None, **changes: Any) -> Path:
        words = tokenizer or byte_level()
        folder = tmp_path / f"{kind}-model"
        small(kind, words, **changes).to(dtype).save_pretrained(folder)
        words.save_pretrained(folder)
        return folder

    return make


def a_run(path: Path, stage: str, model: str, **more: Any) -> Path:
    """Write a finished run's directory without its model. more: keys of its recipe; `summary` is another file."""
    path.mkdir(parents=True)
    summary = more.pop("summary", {"steps": 8, "loss_last": 0.25, "train_seconds": 3.5})
    values = {"stage": stage, "model": {"path": model}, "data": {"source": "rows.jsonl"}, **more}
    (path / "resolved.json").write_text(json.dumps(values))
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "env.json").write_text(json.dumps({"packages": {"posttrain": "9.9", "torch": "8.8"}}))
    return path
