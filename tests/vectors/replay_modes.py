"""Modes for kinds of replay: groups of rewards as rows, fresh and stored. No formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mechanics import Adapter, Case, arguments

from posttrain.replay.protocol import Replay, Request, Row


def _row(uid: str, group: int, reward: float) -> Row:
    return Row(uid=uid, step=0, group=group, reward=reward, correct=None, length=1)


def into_groups(kind: Callable[..., Replay], choose: Callable[..., dict[int, int]]) -> Adapter:
    """Pass a step of groups through a replay kind with the case's random choices.

    choose: the function that the kind calls with these choices.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        rewards, uids, buffer, pick = (values.pop(name) for name in ("rewards", "uids", "buffer", "pick"))
        made, numbers = kind(**values), range(len(uids))
        fresh = [_row(uids[n], n, reward) for n in numbers for reward in rewards[n]]
        stored = [_row(uid, 0, reward) for uid, own in buffer.items() for reward in own]
        limits = {name: values[name] for name in ("std_max", "mean_max") if name in values}
        swaps = choose(fresh, stored, lambda n, _: pick[n], **limits)
        after = [stored[swaps[place]] if place in swaps else row for place, row in enumerate(fresh)]
        sampled = [row for place, row in enumerate(fresh) if place not in swaps]
        kept = made.store(sampled, stored, Request(step=0, total_steps=1, seed=0))
        rows = [*(stored[n] for n in kept.stay), *(sampled[n] for n in kept.join)]
        return {
            "replaced": [int(any(fresh[place].group == n for place in swaps)) for n in numbers],
            "rewards": [[row.reward for row, own in zip(after, fresh, strict=True) if own.group == n] for n in numbers],
            "buffer": {uid: [row.reward for row in rows if row.uid == uid] for uid in sorted({r.uid for r in rows})},
        }

    return adapter


def without_ages(function: Callable[..., Any], output: str) -> Adapter:
    """Compute the sampling probabilities of rows that are all new."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        advantages = values.pop("advantages")
        return {output: function(advantages, [0.0 for _ in advantages], power=values.pop("alpha", 1.0), **values)[1]}

    return adapter
