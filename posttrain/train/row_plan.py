"""Plan of which rows each step of sft, dpo and reward models takes, and how steps are cut into forward passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from posttrain.recipe.stages import DpoRecipe, RewardModelRecipe, SftRecipe
from posttrain.seeds import PromptSampler
from posttrain.train import data_parallel
from posttrain.train.load_balancing import StepOrder

TrainRecipe = SftRecipe | DpoRecipe | RewardModelRecipe


@dataclass(frozen=True)
class RowPlan:
    """Number of rows of a run and of its steps. Only the last step may have fewer than `size` rows."""

    rows: int  # over the whole run, counting every pass over the data
    size: int  # rows per optimizer step, over all ranks
    micro: int  # rows per forward pass

    @property
    def steps(self) -> int:
        return math.ceil(self.rows / self.size)


def row_plan(recipe: TrainRecipe, n_rows: int) -> RowPlan:
    """Return the plan for run.steps optimizer steps, or run.epochs passes over the data, or one pass."""
    size = recipe.batch.size
    rows = recipe.run.steps * size if recipe.run.steps else (recipe.run.epochs or 1) * n_rows
    return RowPlan(rows, size, micro_size(size, recipe.batch.micro_size or size, data_parallel.data_parallel_size()))


def micro_size(size: int, most: int, ranks: int) -> int:
    """Return the rows per forward pass: the largest divisor of `size` up to `most` that leaves rows for every rank.

    If possible, all ranks have the same number of micro-batches.
    """
    fitting = [rows for rows in range(1, min(most, max(size // ranks, 1)) + 1) if size % rows == 0]
    even = [rows for rows in fitting if size // rows % ranks == 0]
    return max(even or fitting)


class RowOrder(torch.utils.data.Sampler[int]):
    """Sampler of row indices for all steps after `start`, from the endless stream of passes; depends on the seed
    alone.
    """

    def __init__(self, sampler: PromptSampler, planned: RowPlan, start: int, order: StepOrder | None = None) -> None:
        self.sampler, self.plan, self.start, self.order = sampler, planned, start, order

    def __iter__(self) -> Iterator[int]:
        for first in range(self.start * self.plan.size, self.plan.rows, self.plan.size):
            rows = list(self.sampler.take(first, min(self.plan.size, self.plan.rows - first)))
            several = len(rows) > self.plan.micro  # within one forward pass, order changes only the rounding
            yield from self.order(rows, self.plan.micro) if self.order and several else rows

    def __len__(self) -> int:
        return self.plan.rows - self.start * self.plan.size
