"""Prompt curriculum learning: selects prompts of intermediate difficulty, as predicted by a value model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.curriculum.protocol import Group, Plan, Pool, Request, Sampler, State
from posttrain.curriculum.selection import select_nearest
from posttrain.registry import register


@register(
    "sampler",
    "pcl",
    paper="2510.01135",
    needs=("values",),
    note=(
        "Read from summaries of the paper, whose value model is a language model of its own. Here it is a linear head"
        " on the policy's last hidden state of the prompt, trained with the policy's weights fixed, so that a step"
        " costs one forward pass of the candidates and a checkpoint a few kilobytes more. value_lr, value_steps and"
        " warmup_steps are ours."
    ),
)
@dataclass(frozen=True, kw_only=True)
class Pcl(Sampler):
    """Selects, out of candidate_factor * prompts_per_step candidates, the prompts_per_step prompts whose predicted
    value is nearest to `target`.

    Candidates are the next prompts of the uniform order. After each step the value head takes value_steps Adam steps
    (value_lr) on the mean of (prediction - group mean)^2; metric: the quantity whose group mean is taken. During the
    first warmup_steps steps prompts are taken in the uniform order, because the head is untrained.
    """

    candidate_factor: int = 4
    target: float = 0.5
    warmup_steps: int = 4
    metric: Literal["correct", "reward"] = "correct"
    value_lr: float = 1e-3
    value_steps: int = 8

    def places(self, prompts: int) -> int:
        return self.candidate_factor * prompts

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        if request.step < self.warmup_steps or not request.values:
            chosen = list(range(min(request.prompts, len(request.stream))))
        else:
            chosen = select_nearest(request.values, request.prompts, self.target)
        prompts = [request.stream[index] for index in chosen]
        return Plan(prompts, [request.group_size] * len(prompts))

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        known = [rate for group in groups if (rate := group.pass_rate) is not None]
        return {"distance": sum(abs(rate - self.target) for rate in known) / len(known)} if known else state

    def metrics(self, state: State) -> dict[str, float]:
        return {"distance_to_target": state["distance"]} if "distance" in state else {}
