"""A prompt sampler of one's own: what was solved most often so far comes first, and gets fewer rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.curriculum.difficulty import add_counts, estimate_pass_rate
from posttrain.curriculum.protocol import Group, Plan, Pool, Request, Sampler


@dataclass(frozen=True, kw_only=True)
class EasiestFirst(Sampler):
    saved: int = 1  # rollouts fewer for prompts that are always solved

    def start(self, pool: Pool) -> dict[str, Any]:
        return {"tallies": {}}

    def propose(self, state: dict[str, Any], request: Request, pool: Pool) -> Plan:
        rates = [estimate_pass_rate(state["tallies"], uid, unseen=0.5) for uid in pool.uids]
        prompts = sorted(range(len(pool)), key=lambda n: -rates[n])[: request.prompts]
        return Plan(prompts, [request.group_size - self.saved * (rates[n] == 1) for n in prompts])

    def update(
        self, state: dict[str, Any], groups: Sequence[Group], pool: Pool, *, step: int, planned: int
    ) -> dict[str, Any]:
        return {"tallies": add_counts(state["tallies"], groups)}
