"""Reads the answers of a vLLM server: completions, what it was started with, and why a connection ended."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from posttrain.errors import EngineError, RecipeError
from posttrain.rollout.engine import Completion


def completion(choice: Mapping[str, Any], logprobs: bool, name: str) -> Completion:
    """A `choice` of vLLM's answer as a Completion. Raises EngineError for another end than stop, length or a pause."""
    finish: Any = "paused" if choice["finish_reason"] == "abort" else choice["finish_reason"]
    if finish not in ("stop", "length", "paused"):
        raise EngineError(f"vLLM gave up a request: finish reason {choice['finish_reason']}", where=name)
    logps = tuple(entry["logprob"] for entry in choice["logprobs"]["content"]) if logprobs else None
    ids = tuple(choice["token_ids"])
    if logps is not None and len(logps) != len(ids):
        raise EngineError(f"vLLM reported {len(logps)} log-probs for {len(ids)} tokens", where=name)
    return Completion(ids, logps, finish)


def check_matches(about: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    """Refuse a server that was started for another model, a shorter window or another vLLM. Raises RecipeError.

    about: what the server says of itself (`vllm_process.about`); wanted: the same of this run, as far as it matters.
    Its `boot_id` stands for the machine, where weights cannot leave that.
    """
    if wanted.get("boot_id") not in (None, about["boot_id"]):
        raise RecipeError(
            "without a GPU, weights go to servers on the trainer's own machine only",
            where=name,
            hint="start `posttrain serve` there, or train on a GPU",
        )
    problems = [
        f"{key} {about.get(key)}, and this run needs {value}"
        for key, value in wanted.items()
        if key not in ("model", "max_model_len", "boot_id") and about.get(key) != value
    ]
    if about["max_model_len"] < wanted["max_model_len"]:
        problems.append(f"max_model_len {about['max_model_len']}, and this run needs {wanted['max_model_len']}")
    here, there = _weight_settings(wanted["model"]), _weight_settings(about["model"])
    problems += [
        f"a model with {key} {there[key]}, and this run's has {here[key]}"
        for key in here
        if here[key] != there.get(key, here[key])
    ]
    if problems:
        raise RecipeError(
            f"the server was started with {'; '.join(problems[:4])}",
            where=name,
            hint="start it with the recipe of this run, and the same versions: posttrain serve RECIPE",
        )


def _weight_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a model's config on which the names and shapes of its weights depend."""
    text = config.get("text_config") or config
    deciding = re.compile("size|num_|_dim|layers|heads|experts|model_type|architectures|tie_word|hidden_act")
    kinds = (int, str, list)
    return {key: value for key, value in text.items() if deciding.search(key) and isinstance(value, kinds)}


def read_values(body: bytes) -> dict[str, Any]:
    """The JSON object of an answer; {} for an empty one, and what is no JSON as {"error": text}."""
    try:
        values = json.loads(body or b"{}")
    except ValueError:
        return {"error": body[:200].decode(errors="replace")}
    return values if isinstance(values, dict) else {"error": values}


def connection_reason(cause: BaseException) -> str:
    """The system's own message for a failed connection, from below the HTTP library's exceptions."""
    below: BaseException | None = cause
    while below is not None:
        if isinstance(below, OSError) and below.errno:
            return os.strerror(below.errno)
        below = below.exceptions[0] if isinstance(below, BaseExceptionGroup) else below.__cause__ or below.__context__
    return str(cause) or type(cause).__name__
