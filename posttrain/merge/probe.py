"""Check of a merged model: transformers loads it completely, and its logits on a fixed text are finite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import MergeError, PosttrainError, RunError
from posttrain.merge.blocks import one_thread
from posttrain.merge.sources import Source
from posttrain.models.load import max_positions

TEXT = "The capital of France is Paris. 17 + 25 = 42, because 17 + 20 = 37 and 37 + 5 = 42."
FALLBACK_TOKENS = 32  # for a model without a tokenizer


def probe_ids(tokenizer: Source, model: Source) -> list[int]:
    """Return token ids of a fixed text, at most as many as `model` has positions and all within its embedding.

    Consecutive ids, which include special tokens on which bfloat16 models overflow, are used only if the text has no
    ids.
    """
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model.folder)
    size = config.get_text_config().vocab_size
    token_ids: list[int] = []
    if tokenizer.vocabulary is not None:
        token_ids = [i for i in AutoTokenizer.from_pretrained(tokenizer.folder)(TEXT)["input_ids"] if i < size]
    return (token_ids or [i % size for i in range(FALLBACK_TOKENS)])[: max_positions(config)]


def compute_logits(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits [1, T, V] of a model folder on T token ids, computed in the stored dtype, as float32.

    Raises MergeError if transformers cannot run the model, RunError if the model does not load completely or its logits
    are not finite.
    """
    try:
        with one_thread():  # for a few tokens, most of the time is spent reading the weights
            found = _run_model(folder, tokens)
    except PosttrainError:
        raise
    except Exception as cause:  # whatever an architecture raises on input_ids alone
        raise MergeError(
            f"transformers cannot run it on {len(tokens)} tokens, so a merge of it cannot be verified: "
            f"{type(cause).__name__}: {cause}",
            where=str(folder),
        ) from cause
    if not torch.isfinite(found).all():
        raise RunError("its logits are not finite", where=str(folder))
    return found


@torch.no_grad()
def _run_model(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Load a model folder with transformers and return its logits.

    Raises RunError if weights are missing or unexpected.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    architectures = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    loader: Any = getattr(transformers, architectures[0], transformers.AutoModelForCausalLM)
    model, info = loader.from_pretrained(folder, dtype="auto", output_loading_info=True)
    wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        raise RunError(f"transformers does not load it whole: {wrong}", where=str(folder))
    inputs = {"input_ids": torch.tensor([list(tokens)])}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    found: torch.Tensor = model.eval()(**inputs).logits.float()
    return found


def compare_logits(before: torch.Tensor, after: torch.Tensor) -> dict[str, float | None]:
    """Return the largest difference of two outputs (None if their shapes differ) and the largest logit of the second.

    Tensors of any shape.
    """
    same = before.shape == after.shape
    return {
        "logit_gap": float((after - before).abs().max()) if same else None,
        "largest_logit": float(after.abs().max()),
    }
