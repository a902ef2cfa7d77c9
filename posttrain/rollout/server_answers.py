"""Reading a vLLM server's answers: JSON bodies, the settings it was started with, and why a connection ended."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from posttrain.errors import RecipeError


def check_matches(about: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    """Raise RecipeError for a server that was started for another model, a shorter window or another vLLM.

    about: the server's description of itself (`vllm_process.about`). wanted: the values of this run, as far as they
    matter. `boot_id` in it means that weights cannot leave this machine.
    """
    if wanted.get("boot_id") not in (None, about["boot_id"]):
        raise RecipeError(
            "without a GPU, weights can only be sent to servers on the trainer's machine",
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
    """Return the values of a model's configuration that determine the names and shapes of its weights."""
    text = config.get("text_config") or config
    deciding = re.compile("size|num_|_dim|layers|heads|experts|model_type|architectures|tie_word|hidden_act")
    kinds = (int, str, list)
    return {key: value for key, value in text.items() if deciding.search(key) and isinstance(value, kinds)}


def read_values(body: bytes) -> dict[str, Any]:
    """Return the JSON object of an answer; {} for an empty body, and {"error": text} for anything else."""
    try:
        values = json.loads(body or b"{}")
    except ValueError:
        return {"error": body[:200].decode(errors="replace")}
    return values if isinstance(values, dict) else {"error": values}


def connection_reason(cause: BaseException) -> str:
    """Return the operating system's message for a failed connection, from below the HTTP library's exceptions."""
    below: BaseException | None = cause
    while below is not None:
        if isinstance(below, OSError) and below.errno:
            return os.strerror(below.errno)
        below = below.exceptions[0] if isinstance(below, BaseExceptionGroup) else below.__cause__ or below.__context__
    return str(cause) or type(cause).__name__
