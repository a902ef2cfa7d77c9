"""Curriculum by stages: easy prompts first, harder ones in later stages (SARI, CRAFT-GUI)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain import source_locations
from posttrain.curriculum.difficulty import add_counts, estimate_pass_rate
from posttrain.curriculum.protocol import Group, Plan, Pool, Request, Sampler, State
from posttrain.curriculum.selection import Mode, Stage, curriculum_stage, draw_weighted, stage_at
from posttrain.errors import DataError, UserError, count_noun
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
    """Stages by difficulty: the run is split into one equal part per boundary, and part s draws prompts of difficulty
    <= boundaries[s].

    `exclusive`: only those above the previous boundary. temperature: prompts near the boundary are drawn more often,
    with weight exp(-|difficulty - boundary| / temperature); null = equal. column: a data column with difficulties from
    0 to 1 (1 = hard); null = 1 - pass rate of the prompt's rollouts so far. Prompts without a difficulty get `unseen`;
    0 draws them in the first stage, which measures them. A stage without prompts draws from all prompts; a run warns.
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
        if self.column is not None:
            _refuse_other_scales(pool, self.column)
        return {"tallies": {}, "step": 0}

    def notes(self, pool: Pool) -> list[str]:
        """Return warnings about prompts that no stage draws and stages without prompts, if `column` is set."""
        if self.column is None:
            return []
        notes, hard = [], [self._difficulty({}, n, pool) for n in range(len(pool))]
        above = sum(value > self.boundaries[-1] for value in hard)
        if above:
            what = f"{above} of {count_noun(len(pool), 'prompt')} have a `{self.column}` above the last boundary"
            notes.append(f"{what} {self.boundaries[-1]:g}: no stage draws them")
        for number in range(len(self.boundaries)):
            stage = curriculum_stage(hard, number / len(self.boundaries), self.boundaries, mode=self.mode)
            if not any(stage.allowed):
                below = f"{self.boundaries[number - 1]:g} < " if self.mode == "exclusive" and number else ""
                rule = f"{below}{self.column} <= {self.boundaries[number]:g}"
                notes.append(f"stage {number} has no prompt ({rule}), and draws from all")
        return notes

    def propose(self, state: State, request: Request, pool: Pool) -> Plan:
        stage = self._stage(state, request.step, request.total_steps, pool)
        taken = set(request.taken)
        weights = [0.0 if n in taken else p for n, p in enumerate(stage.probabilities)]
        weights = weights if any(weights) else stage.probabilities
        prompts = draw_weighted(weights, request.prompts, random.Random(request.seed).random)
        return Plan(prompts, [request.group_size] * len(prompts))

    def update(self, state: State, groups: Sequence[Group], pool: Pool, *, step: int, planned: int) -> State:
        stage = stage_at(step / max(pool.steps, 1), len(self.boundaries))
        return {"tallies": add_counts(state["tallies"], groups), "step": planned, "stage": stage}

    def metrics(self, state: State) -> dict[str, float]:
        return {"stage": float(state["stage"])} if "stage" in state else {}

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
            return 1 - estimate_pass_rate(state["tallies"], pool.uids[n], 1 - self.unseen)
        value = pool.rows[n].get(self.column)
        return self.unseen if value is None or value != value else float(value)


def _refuse_other_scales(pool: Pool, column: str) -> None:
    """Raise DataError for difficulties outside of 0 to 1; the hint rescales them."""
    given = [(uid, row.get(column)) for uid, row in zip(pool.uids, pool.rows, strict=True)]
    known = [(uid, float(value)) for uid, value in given if isinstance(value, int | float) and not math.isnan(value)]
    outside = [uid for uid, value in known if not 0 <= value <= 1]
    if outside:
        values = [value for _, value in known]
        low, high = min(values), max(values)
        raise DataError(
            f"`{column}` is {low:g} to {high:g}: {len(outside)} of {len(pool)} prompts are outside of 0 to 1",
            where=source_locations.describe_rows(outside),
            allowed="difficulties from 0 (easy) to 1 (hard)",
            hint=f"write ({column} - {low:g}) / {high - low:g} into a column, and name that one" if high > low else "",
        )
