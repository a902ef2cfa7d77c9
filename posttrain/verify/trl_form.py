"""Rewards in TRL's form, `def f(completions, **kwargs) -> list`: what it offers them, in its form. Pure.

TRL calls a reward with lists: the completions (texts, or lists of messages where the prompt is a conversation),
`prompts` alike, `completion_ids`, every column of the data, `trainer_state`, and two functions that log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import CodeType, SimpleNamespace
from typing import Any

# What it offers beside the columns, by its names. `prompts` and `completions` are always there.
BUILT_INS = ("completion_ids", "trainer_state", "log_extra", "log_metric")
FOR_ALL = BUILT_INS[1:]  # one for the call, not one a row
# Columns of a right answer: a function that takes every column reads the answer only if its code names one of them.
GOLD_COLUMNS = ("answer", "solution", "ground_truth", "gold", "label", "target", "reference")


def log_extra(column: str, values: Sequence[Any]) -> None:
    """What TRL's `log_extra` takes; nothing is logged: return parts instead (docs/rewards.md)."""


def log_metric(name: str, value: float) -> None:
    """What TRL's `log_metric` takes; nothing is logged: return parts instead (docs/rewards.md)."""


def built_in(name: str, token_ids: Sequence[int], step: int) -> Any:
    """The value of a built-in for one row."""
    if name == "completion_ids":
        return list(token_ids)
    if name == "trainer_state":
        return SimpleNamespace(global_step=step)
    return {"log_extra": log_extra, "log_metric": log_metric}[name]


def conversation(row: Mapping[str, Any]) -> list[Any] | None:
    """The messages of a row whose prompt is a conversation; None for a text."""
    for column in ("prompt", "messages"):
        if isinstance(row.get(column), list):
            return list(row[column])
    return None


def completion(row: Mapping[str, Any], text: str) -> str | list[dict[str, str]]:
    """A completion as TRL would give it: a message where the row's prompt is a conversation."""
    return text if conversation(row) is None else [{"role": "assistant", "content": text}]


def names_gold(code: CodeType | None) -> bool:
    """Whether the code of a function names a column of right answers, as in `kwargs["answer"]`."""
    constants = code.co_consts if code is not None else ()
    named = any(one in GOLD_COLUMNS for one in constants if isinstance(one, str))
    return named or any(names_gold(one) for one in constants if isinstance(one, CodeType))
