"""Rollouts and length limit per task, from the task's results so far (DART)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.curriculum.protocol import Group, Plan, Pool, Request, Sampler, State
from posttrain.errors import UserError
from posttrain.registry import register


@register(
    "sampler",
    "by_task",
    paper="2509.23866",
    needs=("groups", "unequal", "limits"),
    note=(
        "The paper says that easy tasks get fewer rollouts and that lengths are limited by task; our sources do not say"
        " how. The line between `above` and 1, all numbers, and tokens in place of steps are ours."
    ),
)
@dataclass(frozen=True, kw_only=True)
class ByTask(Sampler):
    """Uniform prompt order; tasks that succeed often get fewer rollouts, limited to the length that their successes
    need.

    A task whose share of correct answers over its last `window` judged rollouts is above `above` gets fewer rollouts
    than `rollout.group_size`, down to `least` if all are correct (`rollouts_by_rate`). After a task's first success its
    rollouts are limited to `slack` times the tokens of its longest success, at least `shortest` (`limit_by_success`);
    until then to `rollout.max_new_tokens`. All turns and replies of a rollout count. A truncated rollout counts as
    failed, as always."""

    above: float = 0.6
    least: int = 2
    window: int = 16
    slack: float = 1.5
    shortest: int = 32

    def __post_init__(self) -> None:
        if not 0 <= self.above < 1 or self.least < 1 or self.slack < 1 or self.window < 1 or self.shortest < 1:
            raise UserError(
                f"above {self.above}, least {self.least}, slack {self.slack}, window {self.window}, shortest"
                f" {self.shortest}",
                allowed="0 <= above < 1, the others 1 or more",
            )

    def start(self, pool: Pool) -> State:
        """See `Sampler.start`. recent: uid -> its newest judged rollouts, oldest first; longest: uid -> tokens of its
        longest success."""
        del pool
        return {"recent": {}, "longest": {}}

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        """See `Sampler.propose`."""
        uids = [pool.uids[n] for n in request.stream]
        rates = [sum(known) / len(known) if (known := state["recent"].get(uid)) else None for uid in uids]
        size, most = request.group_size, request.max_new_tokens
        return Plan(
            request.stream,
            [rollouts_by_rate(rate, size, least=self.least, above=self.above) for rate in rates],
            limits=[
                limit_by_success(state["longest"].get(uid), most, slack=self.slack, shortest=self.shortest)
                for uid in uids
            ],
        )

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        """See `Sampler.update`."""
        del pool, step, planned
        recent, longest = dict(state["recent"]), dict(state["longest"])
        for group in groups:
            judged = [value for value in group.correct if value is not None]
            if judged:
                recent[group.uid] = [*recent.get(group.uid, []), *judged][-self.window :]
            right = [
                n for n, value in zip(group.lengths, group.correct, strict=True) if value is not None and value > 0.5
            ]
            if right:
                longest[group.uid] = max(longest.get(group.uid, 0), *right)
        return {"recent": recent, "longest": longest}

    def metrics(self, state: State) -> dict[str, float]:
        """See `Sampler.metrics`."""
        lengths = list(state["longest"].values())
        return {"solved_tasks": len(lengths), **({"success_tokens": sum(lengths) / len(lengths)} if lengths else {})}

    def most(self, prompts: int, group_size: int) -> tuple[int, int]:
        """See `Sampler.most`."""
        return prompts * group_size, group_size


def rollouts_by_rate(rate: float | None, size: int, *, least: int = 2, above: float = 0.6) -> int:
    """Return the number of rollouts for a success rate: `size` up to a rate of `above` or if the rate is unknown, then
    ceil(size * (1 - rate) / (1 - above)), at least `least`."""
    if rate is None or rate <= above:
        return size
    return max(min(least, size), math.ceil(size * (1 - rate) / (1 - above) - 1e-9))


def limit_by_success(longest: int | None, most: int, *, slack: float = 1.5, shortest: int = 32) -> int:
    """Return ceil(slack * longest) clamped to [shortest, most]; `most` if the task has no success (longest None)."""
    return most if longest is None else min(most, max(shortest, math.ceil(slack * longest)))
