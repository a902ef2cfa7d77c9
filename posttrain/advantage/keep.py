"""Group filters (`keep`): which groups stay in the batch, and the state of refilling dropped ones.

Shapes: filters return the rows that stay, bool [N].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.gate import count_correct, group_pass_rates
from posttrain.advantage.group import group_mean, number_groups, require_rewards
from posttrain.batch import RolloutBatch
from posttrain.curriculum import difficulty
from posttrain.errors import UserError
from posttrain.registry import register

Metric = Literal["correct", "reward"]
Status = Literal["open", "full", "short", "error"]


@register("keep", "dynamic_sampling", paper="2503.14476", needs=("groups",))
def dynamic_sampling(
    batch: RolloutBatch, *, metric: Metric = "correct", tol: float = 0.0, keep_single: bool = True
) -> Tensor:
    """Keep groups whose rows differ: max - min of the metric > tol -> rows that stay, bool [N].

    metric: `correct` (right or wrong), or `reward`. The default is correctness because a reward with a length or format
    term also differs within an all-wrong group, which would then be kept. Rows whose reward could not be scored (NaN)
    are ignored; a scored row with a NaN metric raises UserError. Groups of one row stay, unless keep_single is False.
    Dropped rows leave the batch: neither their tokens nor their rows count in a denominator. Raises ValueError for a
    batch without the metric, UserError as `group_has_spread` does.
    """
    values = batch.correct if metric == "correct" else batch.rewards
    if values is None:
        raise ValueError(f"the batch has no {metric}, which dynamic_sampling filters on")
    unscored = torch.zeros_like(values, dtype=torch.bool) if batch.rewards is None else batch.rewards.isnan()
    return group_has_spread(values, batch.group_ids, tol=tol, ignore=unscored, keep_single=keep_single)


def group_has_spread(
    metric: Tensor, group_ids: Tensor, *, tol: float = 0.0, ignore: Tensor | None = None, keep_single: bool = True
) -> Tensor:
    """Return the rows [N] whose group has max - min of metric [N] > tol, or is a single row.

    Rows in `ignore` [N] do not count. max - min and not the std: in floating point the std of three times 0.1 is not 0.
    Raises UserError for a row outside of `ignore` whose metric is NaN.
    """
    counted = torch.ones_like(group_ids, dtype=torch.bool) if ignore is None else ~ignore
    unknown = counted & metric.isnan()
    if unknown.any():
        groups = group_ids[unknown].unique().tolist()
        raise UserError(
            f"the metric that `keep` filters on is unknown (NaN) for scored rows of groups {groups}: unknown is neither"
            " right nor wrong",
            hint="if the reward that judges correctness has no score and other rewards do, write `metric: reward`, or"
            " `on_none: skip_row` in that reward",
        )
    key, size = torch.unique(group_ids, return_inverse=True, return_counts=True)[1:]
    start = metric.new_full(size.shape, torch.inf)
    lowest = start.scatter_reduce(0, key, torch.where(counted, metric, torch.inf), "amin")
    highest = (-start).scatter_reduce(0, key, torch.where(counted, metric, -torch.inf), "amax")
    return ((keep_single & (size == 1)) | (highest - lowest > tol))[key]


@register("keep", "some_right", paper="2505.21178", needs=("groups", "correct"))
def some_right(batch: RolloutBatch) -> Tensor:
    """Keep groups with at least one right answer, all-right groups included (ConciseR's second stage)."""
    key, rates = group_pass_rates(batch)
    return (rates > 0)[key]


@register("keep", "mixed", paper="2505.21178", needs=("groups", "correct"))
def keep_mixed_groups(batch: RolloutBatch) -> Tensor:
    """Keep groups with a right and a wrong answer; unlike `dynamic_sampling`, a group of one never stays."""
    return mixed_plus_solved(batch, kappa=0.0)


@register("keep", "mixed_plus_solved", paper="2509.25827", needs=("groups", "correct"))
def mixed_plus_solved(batch: RolloutBatch, *, kappa: float = 0.0) -> Tensor:
    """Keep groups with a right and a wrong answer, and `count_admitted` of the groups in which every answer is right.

    DECS: the solved prompts drive the shortening. kappa is their share of the kept groups; the controller `redundancy`
    changes it. The paper samples them at random; here the first ones are taken, since prompts come in random order.
    """
    key, rates = group_pass_rates(batch)
    is_mixed, solved = (rates > 0) & (rates < 1), rates == 1
    count = count_admitted(kappa, int(is_mixed.sum()), int(solved.sum()))
    return (is_mixed | (solved & (solved.cumsum(0) <= count)))[key]


def count_admitted(kappa: float, mixed: int, solved: int) -> int:
    """Return how many solved groups to keep beside the mixed ones, so that kappa is their share.

    floor(kappa * mixed / (1 - kappa)), at most all.
    """
    if kappa <= 0:
        return 0
    # 0.2 * 172 / 0.8 is 42.99999999999999
    return solved if kappa >= 1 else min(solved, math.floor(kappa * mixed / (1 - kappa) + 1e-9))


@register(
    "keep",
    "balanced_difficulty_filter",
    paper="2504.03380",
    needs=("correct", "groups"),
    note="Read from summaries of the paper: the band that won its comparison is not known; 0.2 to 0.8 is a guess.",
)
def balanced_difficulty_filter(batch: RolloutBatch, *, t_low: float = 0.2, t_high: float = 0.8) -> Tensor:
    """Keep groups whose pass rate is between t_low and t_high, both included -> rows that stay, bool [N].

    The pass rate is the share of right rows among the judged ones; a group without a judged row is dropped. Balanced
    means t_low = 1 - t_high; t_low 0 or t_high 1 filters one side alone. With `rollout.max_gen_batches` above 1, other
    prompts replace the dropped ones.
    """
    assert batch.correct is not None
    rates = row_pass_rates(batch.correct, batch.group_ids)
    return torch.tensor(
        [rate == rate and difficulty.in_band(rate, t_low, t_high) for rate in rates.tolist()],
        device=batch.group_ids.device,
    )


def row_pass_rates(correct: Tensor, group_ids: Tensor) -> Tensor:
    """Return for each row [N] the share of right rows among the judged rows of its group; NaN without a judged row."""
    key, passed, judged = count_correct(correct, group_ids)
    return (passed / judged)[key]


@register("keep", "reward_band", paper="2506.13923", needs=("groups", "rewards"))
def reward_band(batch: RolloutBatch, *, low: float = 0.001, high: float = 0.999) -> Tensor:
    """Keep groups whose mean reward is between low and high, both included -> rows that stay, bool [N].

    Rows that could not be scored do not count, and a group of only such rows is dropped.
    """
    group = number_groups(batch.group_ids)
    mean = group_mean(require_rewards(batch), group)
    return ((mean >= low) & (mean <= high))[group]


@register("keep", "kl_rollback", paper="2505.20777", needs=("old_logp", "ref_logp", "kl_threshold"))
def kl_rollback(batch: RolloutBatch) -> Tensor:
    """Drop groups whose mean token KL to the reference is above a threshold -> rows that stay, bool [N].

    The threshold comes from the sampler `taco`, which sets the prompts of these groups aside.
    The KL is the mean over a group's trained tokens of the k3 estimate; a KL equal to the threshold stays.
    """
    threshold = batch.sampler_state.get("kl_threshold")
    if threshold is None:
        return torch.ones_like(batch.group_ids, dtype=torch.bool)
    assert batch.old_logp is not None and batch.ref_logp is not None
    gap = torch.where(batch.mask, batch.ref_logp - batch.old_logp, 0.0).double()
    key = torch.unique(batch.group_ids, return_inverse=True)[1]
    sums = torch.zeros(int(key.max()) + 1, dtype=torch.float64, device=key.device)
    tokens = sums.clone()
    sums.index_add_(0, key, (gap.exp() - 1 - gap).sum(-1))
    tokens.index_add_(0, key, batch.mask.sum(-1).double())
    return (sums / tokens.clamp(min=1) <= threshold)[key]


@dataclass(frozen=True)
class Refill:
    """State of collecting groups over generation batches until `want` groups have passed the filter.

    Immutable: `add` returns the next state.

    max_batches: limit of generation batches, 0 = no limit. `kept` holds one tuple per batch with one flag per group.
    """

    want: int
    max_batches: int = 0
    kept: tuple[tuple[bool, ...], ...] = ()
    exhausted: bool = False  # the source of prompts ended

    def add(self, flags: Sequence[bool]) -> Refill:
        """Return the state after one more batch, given which of its groups passed the filter."""
        return Refill(self.want, self.max_batches, (*self.kept, tuple(map(bool, flags))), self.exhausted)

    def end(self) -> Refill:
        """Return the state after the source of prompts is exhausted."""
        return Refill(self.want, self.max_batches, self.kept, True)

    @property
    def batches(self) -> int:
        return len(self.kept)

    @property
    def selected_groups(self) -> list[tuple[int, int]]:
        """(batch, group) of the groups to train on, in order of arrival; surplus groups are dropped."""
        passed = [(b, g) for b, flags in enumerate(self.kept) for g, flag in enumerate(flags) if flag]
        return passed[: self.want]

    @property
    def status(self) -> Status:
        """Whether to go on: open (sample more), full (enough groups), error (max_batches were not enough), short
        (source ended).
        """
        if len(self.selected_groups) >= self.want:
            return "full"
        if self.max_batches and self.batches >= self.max_batches:
            return "error"
        return "short" if self.exhausted else "open"
