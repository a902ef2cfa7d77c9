"""Uniform sampling of prompts."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.curriculum.protocol import Plan, Pool, Request, Sampler, State
from posttrain.registry import register


@register("sampler", "uniform")
@dataclass(frozen=True, kw_only=True)
class Uniform(Sampler):
    """Each prompt once an epoch, in an order drawn from the seed (`data.shuffle: false`: in data order),
    `rollout.group_size` rollouts each."""

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        return Plan(request.stream, [request.group_size] * len(request.stream))
