"""Replay kind that replaces a rollout of a failed group with a stored success (ARPO)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from posttrain.errors import UserError
from posttrain.registry import register
from posttrain.replay.protocol import Replay, Request, Row, Stock


@register("replay", "success", paper="2505.16282", needs=("groups", "replaces"))
@dataclass(frozen=True, kw_only=True)
class Success(Replay):
    """Replaces the first rollout of a failed group with a stored success of the same prompt (ARPO).

    A group has failed if its rewards have a population std below std_max and a mean below mean_max. The success is
    drawn uniformly from the prompt's stored rollouts. Fresh rollouts with a reward above success_min are stored, the
    newest `capacity` per prompt; replayed rollouts are not stored again. max_age: steps after which a stored rollout is
    dropped; null = never.
    """

    capacity: int = 8
    std_max: float = 0.05
    mean_max: float = 0.2
    success_min: float = 0.1
    max_age: int | None = None

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise UserError(f"capacity {self.capacity}", allowed="1 or more")
        if self.max_age is not None and self.max_age < 1:
            raise UserError(f"max_age {self.max_age}", allowed="1 or more, or null")

    def replace(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> dict[int, int]:
        able = [index for index, row in enumerate(stored) if not self._is_too_old(row, request)]
        draw = random.Random(request.seed)
        swaps = choose_successes(
            fresh,
            [stored[index] for index in able],
            lambda _, count: draw.randrange(count),
            std_max=self.std_max,
            mean_max=self.mean_max,
        )
        return {index: able[n] for index, n in swaps.items()}

    def store(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Stock:
        join = [n for n, row in enumerate(fresh) if row.reward is not None and row.reward > self.success_min]
        stay = [n for n, row in enumerate(stored) if not self._is_too_old(row, request)]
        gone = find_oldest([*(stored[n].uid for n in stay), *(fresh[n].uid for n in join)], self.capacity)
        return Stock(
            [index for n, index in enumerate(stay) if n not in gone],
            [index for n, index in enumerate(join, len(stay)) if n not in gone],
        )

    def _is_too_old(self, row: Row, request: Request) -> bool:
        return self.max_age is not None and request.age(row) > self.max_age


def choose_successes(
    fresh: Sequence[Row],
    stored: Sequence[Row],
    pick: Callable[[int, int], int],
    *,
    std_max: float = 0.05,
    mean_max: float = 0.2,
) -> dict[int, int]:
    """Return index of the first row of each failed group -> index of a stored row of its prompt, if there is one.

    pick: (number of the group in order of first appearance, number of stored rows of its prompt) -> index of one.
    """
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(fresh):
        groups.setdefault(row.group, []).append(index)
    choices: dict[str, list[int]] = {}
    for index, row in enumerate(stored):
        choices.setdefault(row.uid, []).append(index)
    swaps = {}
    for number, indices in enumerate(groups.values()):
        candidates = choices.get(fresh[indices[0]].uid, [])
        if candidates and has_failed([fresh[n].reward for n in indices], std_max=std_max, mean_max=mean_max):
            swaps[indices[0]] = candidates[pick(number, len(candidates))]
    return swaps


def has_failed(rewards: Sequence[float | None], *, std_max: float = 0.05, mean_max: float = 0.2) -> bool:
    """Return whether the known rewards of a group have a population std below std_max and a mean below mean_max."""
    known = [reward for reward in rewards if reward is not None]
    return bool(known) and pstdev(known) < std_max and fmean(known) < mean_max


def find_oldest(uids: Sequence[str], capacity: int) -> set[int]:
    """Return the indices of entries that `capacity` later entries of the same uid follow."""
    seen: dict[str, int] = {}
    gone = set()
    for index in reversed(range(len(uids))):
        seen[uids[index]] = seen.get(uids[index], 0) + 1
        if seen[uids[index]] > capacity:
            gone.add(index)
    return gone
