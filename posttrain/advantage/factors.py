"""Factors: one number a row that multiplies its advantage, after the normaliser and before any bonus.

A factor looks at the rewards, at the answers, at the data row or at the time a row took. Factors multiply each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import group_mean, group_min, group_sum, number_groups, require_field, rewards_of
from posttrain.batch import RolloutBatch, row_mean
from posttrain.errors import UserError
from posttrain.options import Column
from posttrain.registry import register


@dataclass(frozen=True)
class GroupFactor:
    """`by_row` [N] is the factor; `by_group` [K] the same by group in rising order of the group ids; `measure` [K] what
    it was made from."""

    by_row: Tensor
    by_group: Tensor
    measure: Tensor


@register(
    "factor",
    "semantic_entropy",
    paper="2505.12346",
    needs=("groups", "answer_ids", "old_logp"),
    note="The paper's focal scaling is not offered: no formula was found.",
)
def semantic_entropy(
    batch: RolloutBatch,
    *,
    alpha: float = 0.0417,
    fn: Literal["reciprocal", "linear", "exponential"] = "reciprocal",
    estimator: Literal["rao", "frequency", "mc"] = "rao",
) -> Tensor:
    """SEED-GRPO: smaller updates where the answers of a group disagree -> [N].

    Rows with the same answer are a cluster; a row without an answer is a cluster of its own. SE = -sum p ln p over the
    clusters, in nats; p is the cluster's share of softmax(mean log-prob of a row) (`rao`, the reference code) or of the
    rows (`frequency`); `mc`: -mean of ln p over the clusters, p as for rao (the paper). With x = SE / ln(group size):
    1 / (1 + alpha x), max(1 - alpha x, 0), or exp(-alpha x). alpha is the reference code's; the paper's text has 0.02.
    Either moves advantages by a few percent at most; around 1 is visible. Meant for centred advantages without a
    standard deviation. Free text without extractable answers is no case for it.
    """
    return semantic_entropy_terms(batch, alpha=alpha, fn=fn, estimator=estimator).by_row


def semantic_entropy_terms(
    batch: RolloutBatch, *, alpha: float = 0.0417, fn: str = "reciprocal", estimator: str = "rao"
) -> GroupFactor:
    """The factor of `semantic_entropy`, and the entropies in nats."""
    answers = require_field(batch.answer_ids, "answer_ids")
    group = number_groups(batch.group_ids)
    cluster, owner = _clusters(answers, group)
    log_share = _log_shares(batch, group, estimator)
    log_p = _log_sum_exp(log_share, cluster, len(owner))
    if estimator == "mc":
        entropy = -group_mean(log_p, owner)
    else:
        entropy = -group_sum(torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0), owner)
    entropy = entropy.clamp(min=0.0)  # rounding
    size = group_sum(torch.ones_like(log_share), group)
    x = torch.where(size > 1, entropy / size.clamp(min=2).log(), 0.0)
    scale = {
        "reciprocal": 1 / (1 + alpha * x),
        "linear": (1 - alpha * x).clamp(min=0),
        "exponential": (-alpha * x).exp(),
    }[fn]
    return GroupFactor(scale[group], scale, entropy)


def _clusters(answers: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Cluster number by row [N], 0..C-1, and the group that each cluster belongs to [C]."""
    alone = -1 - torch.arange(len(answers), device=answers.device)
    labels = torch.stack([group, torch.where(answers < 0, alone, answers)])
    pairs, cluster = torch.unique(labels, dim=1, return_inverse=True)
    return cluster, pairs[0]


def _log_shares(batch: RolloutBatch, group: Tensor, estimator: str) -> Tensor:
    """ln of each row's weight in its group [N]; the weights of a group sum to 1."""
    if estimator == "frequency":
        score = torch.zeros(len(batch), dtype=rewards_of(batch).dtype, device=batch.mask.device)
    else:
        score = mean_logp(batch)
    return score - _log_sum_exp(score, group, int(group.max()) + 1 if len(group) else 0)[group]


def _log_sum_exp(values: Tensor, key: Tensor, groups: int) -> Tensor:
    """ln sum exp of values [N] by key [N] -> [groups]."""
    start = values.new_full((groups,), -torch.inf)
    highest = start.scatter_reduce(0, key, values, "amax")
    return highest + values.new_zeros(groups).index_add(0, key, (values - highest[key]).exp()).log()


def mean_logp(batch: RolloutBatch) -> Tensor:
    """Mean log-prob of the trained tokens of each row under the policy that sampled it [N]; 0 for an empty row."""
    return row_mean(require_field(batch.old_logp, "old_logp"), batch.mask)


@register(
    "factor",
    "adora",
    paper="2602.10019",
    needs=("groups",),
    note="The paper also amplifies by difficulty for strong models; its factors were not found, so w_tas is 1.",
)
def adora(
    batch: RolloutBatch,
    *,
    w_tds: float = 0.1,
    w_tas: float = 1.0,
    correct_threshold: float = 0.5,
    max_length: int = 4096,
    variant: Literal["llm", "vlm"] = "llm",
) -> Tensor:
    """ADORA: groups in which thinking longer does not pay count less -> [N], w_tas or w_tds.

    A group is temporarily advantageous (w_tas) if its longest correct answer is longer than the mean of its wrong
    answers shorter than max_length, else disadvantageous (w_tds). Correct: reward > correct_threshold. max_length just
    under the generation limit keeps cut-off answers from counting as short and wrong. llm: no correct answer is w_tds,
    no short wrong one w_tas; vlm the other way round. It prefers groups where long wins: not with a length penalty.
    """
    return adora_terms(
        batch, w_tds=w_tds, w_tas=w_tas, correct_threshold=correct_threshold, max_length=max_length, variant=variant
    ).by_row


def adora_terms(
    batch: RolloutBatch,
    *,
    w_tds: float = 0.1,
    w_tas: float = 1.0,
    correct_threshold: float = 0.5,
    max_length: float = 4096,
    variant: str = "llm",
) -> GroupFactor:
    """The factor of `adora`; measure: 1 where the group is temporarily advantageous."""
    rewards = rewards_of(batch)
    lengths = batch.mask.sum(-1) if batch.lengths is None else batch.lengths
    lengths = lengths.to(rewards)
    group = number_groups(batch.group_ids)
    correct = rewards > correct_threshold
    wrong_short = ~correct & ~rewards.isnan() & (lengths < max_length)
    longest = -group_min(torch.where(correct, -lengths, torch.inf), group)  # -inf where nothing is correct
    has_short = group_sum(wrong_short.to(rewards), group) > 0
    mean_short = group_mean(torch.where(wrong_short, lengths, torch.nan), group)
    if variant == "llm":
        advantageous = longest > torch.where(has_short, mean_short, -torch.inf)
    else:
        advantageous = (longest > torch.where(has_short, mean_short, torch.inf)) | (longest == -torch.inf)
    weight = torch.where(advantageous, rewards.new_tensor(w_tas), rewards.new_tensor(w_tds))
    return GroupFactor(weight[group], weight, advantageous.to(rewards))


@register("factor", "negative_scale", needs=("groups",))
def negative_scale(batch: RolloutBatch, *, base: float = 0.5, coef: float = 1.5) -> Tensor:
    """GUI-Libra's success-adaptive negative gradient scaling -> [N]: clip(base + coef * the group's mean reward, 0, 1)
    where the advantage is negative, else 1.

    For rewards in [0, 1] that cannot see every right answer (one reference, several valid actions). With the defaults
    groups with a mean of 1/3 and more keep full negatives. A negative mean reward may silence all negatives. The sum of
    the advantages becomes positive: watch the entropy, and keep a small KL (about 1e-3), as the authors advise.
    """
    factor = negative_scale_terms(batch, base=base, coef=coef).by_row
    advantages = require_field(batch.advantages, "advantages")
    return torch.where(advantages < 0, factor if advantages.dim() == 1 else factor[:, None], 1.0)


def negative_scale_terms(batch: RolloutBatch, *, base: float = 0.5, coef: float = 1.5) -> GroupFactor:
    """The factor of `negative_scale` before the signs are looked at; measure: mean rewards."""
    group = number_groups(batch.group_ids)
    mean = group_mean(rewards_of(batch), group)
    scale = (base + coef * mean).clamp(0, 1)
    return GroupFactor(scale[group], scale, mean)


@register(
    "factor",
    "inverse_easiness",
    paper="2505.15810",
    needs=("columns",),
    note="In the authors' code the weight is a number stored with each example; this formula is a reconstruction.",
)
def inverse_easiness(batch: RolloutBatch, *, column: Column = "easiness", floor: float | None = None) -> Tensor:
    """GUI-G1's difficulty weight -> [N]: (1 / x) over the mean of 1 / x, one x a prompt of the batch.

    column: how easy a prompt is, e.g. the pass rate of a reference model (the authors use the relative size of the box
    to be hit). floor: smallest x; without one an x of 0 or less is an error. The mean weight is 1.
    """
    return inverse_easiness_terms(batch, column=column, floor=floor).by_row


def inverse_easiness_terms(
    batch: RolloutBatch, *, column: Column = "easiness", floor: float | None = None
) -> GroupFactor:
    """The factor of `inverse_easiness`; measure: x by prompt.

    Raises ValueError where a column that must be positive is not and no floor is given.
    """
    group = number_groups(batch.group_ids)
    easiness = group_mean(numbers(batch, column), group)
    if floor is not None:
        easiness = easiness.clamp(min=floor)
    if (easiness <= 0).any():
        raise ValueError(f"column `{column}` must be positive for every prompt; give a floor, such as 1 / group size")
    inverse = 1 / easiness
    weight = inverse / inverse.mean()
    return GroupFactor(weight[group], weight, easiness)


def numbers(batch: RolloutBatch, column: str) -> Tensor:
    """A column of numbers of the data rows [N]. Raises UserError for a column that the batch does not have."""
    if column not in batch.columns:
        raise UserError(f"the batch has no column `{column}` of numbers; it has: {', '.join(batch.columns) or 'none'}")
    return batch.columns[column]


@register(
    "factor",
    "duration",
    paper="2509.01684",
    needs=("columns",),
    note="Read from descriptions of the paper; floor and cap are ours.",
)
def duration(
    batch: RolloutBatch, *, column: Column = "tool_seconds", floor: float = 0.0, cap: float | None = None
) -> Tensor:
    """How long a row's action took / the mean over the batch, at least `floor` and at most `cap` -> [N].

    column: the seconds; `tool_seconds` are measured where the data has no such column: over all turns, what the slowest
    call of a turn took, or the environment's step, not what it waited for a worker.

    With workers that run for a fixed time, an action is collected the more often the faster it is; this undoes it. Rows
    without a time weigh 1; so do all if no time was measured or all are 0. A step that waits for all rows has no such
    bias and needs no weight. One very long row takes the batch: use cap (0.1 and 5 would be prudent, the paper states
    neither).
    """
    return duration_weights(numbers(batch, column), floor=floor, cap=cap)


def duration_weights(durations: Tensor, *, floor: float = 0.0, cap: float | None = None) -> Tensor:
    """durations [N] in any unit, NaN = not measured -> weights [N], of mean 1 over the measured ones if not limited."""
    known = ~durations.isnan()
    mean = torch.where(known, durations, 0.0).sum() / known.sum().clamp(min=1)
    weights = torch.where(known & (mean > 0), durations / torch.where(mean > 0, mean, 1.0), 1.0)
    return weights.clamp(min=floor, max=math.inf if cap is None else cap)
