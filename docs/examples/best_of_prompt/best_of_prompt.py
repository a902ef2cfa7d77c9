"""Replay of one's own: the best rollout that a prompt has ever had joins each later group without a better one."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.replay.protocol import Replay, Request, Row, Stock


@dataclass(frozen=True, kw_only=True)
class BestOfPrompt(Replay):
    least: float = 0.5  # reward from which on a rollout is stored

    def replace(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> dict[int, int]:
        best = {row.uid: place for place, row in enumerate(stored)}
        top: dict[int, float] = {}
        for row in fresh:
            top[row.group] = max(top.get(row.group, 0.0), row.reward or 0.0)
        last = {row.group: place for place, row in enumerate(fresh)}
        return {
            place: best[fresh[place].uid]
            for group, place in last.items()
            if fresh[place].uid in best and (stored[best[fresh[place].uid]].reward or 0.0) > top[group]
        }

    def store(self, fresh: Sequence[Row], stored: Sequence[Row], request: Request) -> Stock:
        rows = [*stored, *fresh]
        best: dict[str, int] = {}
        for place, row in enumerate(rows):
            reward = row.reward or 0.0
            if reward >= self.least and (row.uid not in best or reward > (rows[best[row.uid]].reward or 0.0)):
                best[row.uid] = place
        places = sorted(best.values())
        return Stock([n for n in places if n < len(stored)], [n - len(stored) for n in places if n >= len(stored)])
