"""Factors: one number per row that multiplies its advantage, after normalization and before any bonus.

A factor is computed from rewards, answers, a data column or the time that a row took. Several factors multiply.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import group_mean, group_min, group_sum, number_groups, require_field, require_rewards
from posttrain.batch import RolloutBatch, row_mean
from posttrain.errors import UserError
from posttrain.options import Column
from posttrain.registry import register


@dataclass(frozen=True)
class GroupFactor:
    """A factor by row and by group.

    `by_row` [N]; `by_group` [K], the same in ascending order of the group ids; `measure` [K]: the quantity that the
    factor was computed from.
    """

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
    """Scale down updates of groups whose answers disagree (SEED-GRPO) -> [N].

    Rows with the same answer form a cluster; a row without an answer is its own cluster. SE = -sum p ln p over the
    clusters, in nats; p is the cluster's share of softmax(mean log-prob of a row) (`rao`, the reference code) or of the
    rows (`frequency`); `mc`: -mean of ln p over the clusters, with p as for rao (the paper). With x = SE / ln(group
    size) the factor is 1 / (1 + alpha x), max(1 - alpha x, 0), or exp(-alpha x). alpha is the reference code's; the
    paper's text has 0.02. Both change advantages by a few percent at most; values around 1 have a visible effect. Meant
    for centered advantages without a standard deviation. Not suited to free text without extractable answers.
    """
    return semantic_entropy_terms(batch, alpha=alpha, fn=fn, estimator=estimator).by_row


def semantic_entropy_terms(
    batch: RolloutBatch, *, alpha: float = 0.0417, fn: str = "reciprocal", estimator: str = "rao"
) -> GroupFactor:
    """Compute the factor of `semantic_entropy`, with the entropies in nats as its measure."""
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
    """Return the cluster number of each row [N], 0..C-1, and the group that each cluster belongs to [C]."""
    alone = -1 - torch.arange(len(answers), device=answers.device)
    labels = torch.stack([group, torch.where(answers < 0, alone, answers)])
    pairs, cluster = torch.unique(labels, dim=1, return_inverse=True)
    return cluster, pairs[0]


def _log_shares(batch: RolloutBatch, group: Tensor, estimator: str) -> Tensor:
    """Compute ln of each row's weight in its group [N]; the weights of a group sum to 1."""
    if estimator == "frequency":
        score = torch.zeros(len(batch), dtype=require_rewards(batch).dtype, device=batch.mask.device)
    else:
        score = mean_logp(batch)
    return score - _log_sum_exp(score, group, int(group.max()) + 1 if len(group) else 0)[group]


def _log_sum_exp(values: Tensor, key: Tensor, groups: int) -> Tensor:
    """Compute ln sum exp of values [N] by key [N] -> [groups]."""
    start = values.new_full((groups,), -torch.inf)
    highest = start.scatter_reduce(0, key, values, "amax")
    return highest + values.new_zeros(groups).index_add(0, key, (values - highest[key]).exp()).log()


def mean_logp(batch: RolloutBatch) -> Tensor:
    """Compute the mean log-prob of each row's trained tokens under the sampling policy [N]; 0 for an empty row."""
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
    """Scale down groups in which longer answers are not the right ones (ADORA) -> [N], w_tas or w_tds.

    A group is temporarily advantageous (w_tas) if its longest correct answer is longer than the mean of its wrong
    answers shorter than max_length, else disadvantageous (w_tds). Correct means reward > correct_threshold. Set
    max_length just under the generation limit, so that truncated answers do not count as short and wrong. llm: a group
    without a correct answer gets w_tds, one without a short wrong answer w_tas; vlm: the other way round. Since it
    prefers groups where long answers win, do not combine it with a length penalty.
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
    """Compute the factor of `adora`; its measure is 1 where the group is temporarily advantageous."""
    rewards = require_rewards(batch)
    lengths = batch.mask.sum(-1) if batch.lengths is None else batch.lengths
    lengths = lengths.to(rewards)
    group = number_groups(batch.group_ids)
    correct = rewards > correct_threshold
    wrong_short = ~correct & ~rewards.isnan() & (lengths < max_length)
    longest = -group_min(torch.where(correct, -lengths, torch.inf), group)  # -inf without a correct row
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
    """Scale negative advantages by clip(base + coef * the group's mean reward, 0, 1); the factor is 1 elsewhere -> [N].

    GUI-Libra's success-adaptive negative gradient scaling, for rewards in [0, 1] that miss some right answers (one
    reference, several valid actions). With the defaults, groups with a mean of at least 1/3 keep full negatives. A
    negative mean reward may set all negatives to 0. The sum of the advantages becomes positive: monitor the entropy,
    and keep a small KL (about 1e-3), as the authors advise.
    """
    factor = negative_scale_terms(batch, base=base, coef=coef).by_row
    advantages = require_field(batch.advantages, "advantages")
    return torch.where(advantages < 0, factor if advantages.dim() == 1 else factor[:, None], 1.0)


def negative_scale_terms(batch: RolloutBatch, *, base: float = 0.5, coef: float = 1.5) -> GroupFactor:
    """Compute the factor of `negative_scale` for advantages of any sign; its measure is the mean reward."""
    group = number_groups(batch.group_ids)
    mean = group_mean(require_rewards(batch), group)
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
    """Weight rows by GUI-G1's difficulty: (1 / x) over the mean of 1 / x, one x per prompt of the batch -> [N].

    column: how easy a prompt is, e.g. the pass rate of a reference model (the authors use the relative size of the
    target box). floor: smallest x; without a floor, an x of 0 or less is an error. The mean weight is 1.
    """
    return inverse_easiness_terms(batch, column=column, floor=floor).by_row


def inverse_easiness_terms(
    batch: RolloutBatch, *, column: Column = "easiness", floor: float | None = None
) -> GroupFactor:
    """Compute the factor of `inverse_easiness`; its measure is x by prompt.

    Raises ValueError if the column is not positive for every prompt and no floor is given.
    """
    group = number_groups(batch.group_ids)
    easiness = group_mean(get_numeric_column(batch, column), group)
    if floor is not None:
        easiness = easiness.clamp(min=floor)
    if (easiness <= 0).any():
        raise ValueError(f"column `{column}` must be positive for every prompt; give a floor, such as 1 / group size")
    inverse = 1 / easiness
    weight = inverse / inverse.mean()
    return GroupFactor(weight[group], weight, easiness)


def get_numeric_column(batch: RolloutBatch, column: str) -> Tensor:
    """Return a numeric column of the data rows [N]. Raises UserError for a column that the batch does not have."""
    if column not in batch.columns:
        raise UserError(f"the batch has no column `{column}` of numbers; it has: {', '.join(batch.columns) or 'none'}")
    return batch.columns[column]


@register(
    "factor",
    "duration",
    paper="2509.01684",
    needs=("columns",),
    note="Follows descriptions of the paper, which have no floor or cap.",
)
def duration(
    batch: RolloutBatch, *, column: Column = "tool_seconds", floor: float = 0.0, cap: float | None = None
) -> Tensor:
    """Weight rows by the duration of their action over the batch mean, at least `floor` and at most `cap` -> [N].

    column: the seconds. `tool_seconds` are measured if the data has no such column: the sum over turns of the turn's
    slowest call, or of the environment's step, without the time spent waiting for a worker.

    Workers that run for a fixed time collect fast actions more often; this factor corrects that bias. A step that waits
    for all rows has no such bias and needs no weight. Rows without a time have weight 1; all rows have weight 1 if no
    time was measured or all are 0. One very long row can dominate the batch: use cap (0.1 and 5 are cautious limits;
    the paper states neither).
    """
    return duration_weights(get_numeric_column(batch, column), floor=floor, cap=cap)


def duration_weights(durations: Tensor, *, floor: float = 0.0, cap: float | None = None) -> Tensor:
    """Compute weights [N] from durations [N] in any unit (NaN = not measured).

    Without limits the measured rows have mean weight 1.
    """
    known = ~durations.isnan()
    mean = torch.where(known, durations, 0.0).sum() / known.sum().clamp(min=1)
    weights = torch.where(known & (mean > 0), durations / torch.where(mean > 0, mean, 1.0), 1.0)
    return weights.clamp(min=floor, max=math.inf if cap is None else cap)
