"""Rows of samples as calls of a reward, and results of calls as results of rows: one row a call, or lists of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify.load import LoadedReward
from posttrain.verify.trl_form import FOR_ALL
from posttrain.verify.worker import Call, Result, Target


def target_of(reward: LoadedReward, limit: float) -> Target:
    """The reward as a worker calls it; limit: seconds a call."""
    return Target(reward.target, reward.params, reward.batched, reward.is_async, limit, per_turn=reward.per_turn)


def calls_of(
    reward: LoadedReward, target: int, first: int, completions: Sequence[Any], arguments: Sequence[Mapping[str, Any]]
) -> list[Call]:
    """The calls that score all rows; row k has the number first + k, a call that of its first row.

    An optional column that only some rows of a batch have is None in the others.
    """
    if not reward.batched:
        return [
            Call(first + k, target, completion, dict(given))
            for k, (completion, given) in enumerate(zip(completions, arguments, strict=True))
        ]
    size = reward.batch_size or max(1, len(completions))
    calls = []
    for start in range(0, len(completions), size):
        rows = arguments[start : start + size]
        names = dict.fromkeys(name for row in rows for name in row)
        listed = {name: [row.get(name) for row in rows] for name in names}
        listed |= {name: rows[0][name] for name in FOR_ALL if reward.trl_form and name in reward.built_ins}
        calls.append(Call(first + start, target, list(completions[start : start + size]), listed))
    return calls


def rows_of(call: Call, result: Result) -> list[Result]:
    """What became of each row of a call. One that raised or was late did so for all; its time is shared."""
    if not isinstance(call.completion, list):
        return [result]
    seconds = result.seconds / len(call.completion)
    values = result.value if result.kind == "value" else [result.value] * len(call.completion)
    return [Result(call.number + k, result.kind, value, seconds) for k, value in enumerate(values)]
