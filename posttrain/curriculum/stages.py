"""Easy prompts first, harder ones in later stages (SARI, CRAFT-GUI)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.curriculum.difficulty import add_counts, rate
from posttrain.curriculum.protocol import Group, Plan, Pool, Request, Sampler, State
from posttrain.curriculum.selection import Mode, Stage, curriculum_stage, weighted_draw
from posttrain.errors import UserError
from posttrain.options import PartialColumn
from posttrain.registry import register


@register(
    "sampler",
    "curriculum_stage",
    paper="2504.15900",
    note=(
        "Reconstructed from the abstracts of SARI and CRAFT-GUI (2508.11360), which state easy-to-hard stages alone:"
        " boundaries, probabilities, the measure of difficulty, and stages of equal length are guesses."
    ),
)
@dataclass(frozen=True, kw_only=True)
class CurriculumStage(Sampler):
    """Stages by difficulty: with S boundaries, the s-th S-th of the run draws prompts of difficulty <= boundaries[s].

    `exclusive`: and harder than the boundary before. temperature: prompts near the boundary are drawn more often, by
    exp(-|difficulty - boundary| / temperature); null = all alike. column: a data column with difficulties from 0 to 1
    (1 = hard); null = 1 - the pass rate of the prompt's rollouts so far. Prompts without a difficulty have `unseen`: 0
    draws them in the first stage, where they are measured. A stage without prompts draws from all.
    """

    boundaries: tuple[float, ...] = (0.3, 0.6, 1.0)
    mode: Mode = "cumulative"
    temperature: float | None = None
    column: PartialColumn | None = None
    unseen: float = 0.0

    def __post_init__(self) -> None:
        if not self.boundaries or list(self.boundaries) != sorted(self.boundaries):
            raise UserError(f"boundaries {list(self.boundaries)}", allowed="one number or more, rising")

    def start(self, pool: Pool) -> State:
        return {"tallies": {}, "step": 0}

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        stage = self._stage(state, request.step, request.total_steps, pool)
        taken = set(request.taken)
        weights = [0.0 if n in taken else p for n, p in enumerate(stage.probabilities)]
        weights = weights if any(weights) else stage.probabilities
        prompts = weighted_draw(weights, request.prompts, random.Random(request.seed).random)
        return Plan(prompts, [request.group_size] * len(prompts))

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        return {"tallies": add_counts(state["tallies"], groups), "step": planned}

    def _stage(self, state: State, step: int, total: int, pool: Pool) -> Stage:
        return curriculum_stage(
            [self._difficulty(state, n, pool) for n in range(len(pool))],
            step / max(total, 1),
            self.boundaries,
            mode=self.mode,
            temperature=self.temperature,
        )

    def _difficulty(self, state: State, n: int, pool: Pool) -> float:
        if self.column is None:
            return 1 - rate(state["tallies"], pool.uids[n], 1 - self.unseen)
        value = pool.rows[n].get(self.column)
        return self.unseen if value is None or value != value else float(value)
