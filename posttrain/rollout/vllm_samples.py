"""Prompts as vLLM takes them, and log-probs out of its RequestOutputs, in the trainer's process and in a server's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from posttrain.images import Image, open_image

_picture = functools.lru_cache(maxsize=16)(open_image)  # requests of one prompt follow each other


def engine_prompt(ids: Sequence[int], shown: Sequence[Image]) -> dict[str, Any]:
    """Return a prompt for vLLM: token ids as its renderer would make them of text. With images: one token per image,
    which vLLM's own processor expands, and the images."""
    if not shown:
        return {"type": "token", "prompt_token_ids": list(ids)}
    return {"prompt_token_ids": list(ids), "multi_modal_data": {"image": [_picture(image) for image in shown]}}


def sampled_logprobs(sample: Any) -> list[float]:
    """Return the log-prob of each token of a CompletionOutput whose request set `logprobs: 0` and `flat_logprobs`."""
    flat = sample.logprobs
    return [flat.logprobs[i] for i in flat.start_indices]


def prompt_logprobs(output: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-prob of each token of a RequestOutput's prompt after the first."""
    return [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
