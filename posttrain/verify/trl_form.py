"""Support for rewards in TRL's form, `def f(completions, **kwargs) -> list`: its built-in arguments. Pure functions.

TRL calls a reward with lists: the completions (texts, or lists of messages if the prompt is a conversation), `prompts`
in the same form, `completion_ids`, every column of the data, `trainer_state`, and two logging functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import CodeType, SimpleNamespace
from typing import Any

# TRL's names of the arguments it passes besides the data columns. `prompts` and `completions` are always available.
BUILT_INS = ("completion_ids", "trainer_state", "log_extra", "log_metric")
FOR_ALL = BUILT_INS[1:]  # one value per call, not one per row
# Columns that hold a gold answer: a function that takes every column counts as reading the gold answer only if its code
# names one of these columns.
GOLD_COLUMNS = ("answer", "solution", "ground_truth", "gold", "label", "target", "reference")


def log_extra(column: str, values: Sequence[Any]) -> None:
    """Accept the arguments of TRL's `log_extra` without logging; return parts instead (docs/rewards.md)."""


def log_metric(name: str, value: float) -> None:
    """Accept the arguments of TRL's `log_metric` without logging; return parts instead (docs/rewards.md)."""


def built_in(name: str, token_ids: Sequence[int], step: int) -> Any:
    """Return the value of a TRL built-in argument for one row."""
    if name == "completion_ids":
        return list(token_ids)
    if name == "trainer_state":
        return SimpleNamespace(global_step=step)
    return {"log_extra": log_extra, "log_metric": log_metric}[name]


def conversation(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the messages of a row whose prompt is a conversation; None for a text prompt."""
    for column in ("prompt", "messages"):
        if isinstance(row.get(column), list):
            return list(row[column])
    return None


def completion(row: Mapping[str, Any], text: str) -> str | list[dict[str, str]]:
    """Return a completion in TRL's form: a list of one message if the prompt is a conversation, else the text."""
    return text if conversation(row) is None else [{"role": "assistant", "content": text}]


def names_gold(code: CodeType | None) -> bool:
    """Return whether the code of a function names a column of gold answers, as in `kwargs["answer"]`."""
    constants = code.co_consts if code is not None else ()
    named = any(constant in GOLD_COLUMNS for constant in constants if isinstance(constant, str))
    return named or any(names_gold(constant) for constant in constants if isinstance(constant, CodeType))
