"""Group losses on one score per row: correct answers against wrong ones.

They receive all rows of a group together and return one value per group. `weights` are the weights of the groups in the
mean over the groups of the optimizer batch.

Shapes: logp [N,T]; values, weights and stats [K], one per group.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from posttrain.batch import GroupLoss, RolloutBatch, row_mean
from posttrain.loss.clip import token_log_ratio, token_ratio
from posttrain.registry import register

Score = Literal["logL", "Lratio"]


@register(
    "group_loss",
    "disco",
    paper="2505.12366",
    needs=("groups", "correct", "every_row", "own_credit"),
    note=(
        "The penalty's gradient is that of the released code, half of the paper's. The released code uses disco_b for"
        " `disco` with Lratio; here the paper's formula is used. The KL is the mean over the groups of one forward"
        " pass."
    ),
)
def disco(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    objective: Literal["disco", "disco_b"] = "disco",
    score: Score = "logL",
    tau: float = 10.0,
    kl_type: Literal["k1", "k3"] = "k1",
    kl_delta: float = 1e-4,
    kl_beta: float = 1e3,
) -> GroupLoss:
    """Compute DisCO: correct answers score higher than wrong ones, within a trust region; no clip, no advantages.

    Score of a row: mean of logp (`logL`; tau 10 in the paper) or of r = exp(logp - old_logp) (`Lratio`; tau 1). For a
    group with both classes J = mean of the correct scores - tau log(mean over the wrong ones of exp(score / tau)), so
    hard wrong answers weigh more, or for `disco_b` minus their mean. Other groups have J = 0 and stay in the mean.
    Loss: -J + kl_beta / 2 * max(K - kl_delta, 0)^2, K = mean over all tokens of old_logp - logp (`k1`) or r - 1 - ln r
    (`k3`). Empty rows and rows of unknown correctness are in no class; correct means correct > 0.5. Stats: `disco/gap`,
    `disco/kl`.
    """
    key, groups = group_key(batch.group_ids)
    scores = disco_scores(batch, logp, score=score)
    right, wrong = classes(batch)
    counts = group_total(right, key, groups), group_total(wrong, key, groups)
    mixed = (counts[0] > 0) & (counts[1] > 0)
    gap = group_total(torch.where(right, scores, 0.0), key, groups) / counts[0].clamp(min=1)
    if objective == "disco":
        gap = gap - tau * log_mean_exp(scores / tau, wrong, key, groups, counts[1])
    else:
        gap = gap - group_total(torch.where(wrong, scores, 0.0), key, groups) / counts[1].clamp(min=1)
    gap = torch.where(mixed, gap, 0.0)
    kl = kl_to_old(batch, logp, kl_type=kl_type)
    values = -gap + kl_beta / 2 * (kl - kl_delta).clamp(min=0).square()
    return GroupLoss(values, {"disco/gap": gap.detach(), "disco/kl": kl.detach().expand(groups)})


def disco_scores(batch: RolloutBatch, logp: Tensor, *, score: Score) -> Tensor:
    """Return the mean over the trained tokens of logp or of the ratio [N]; 0 for an empty row."""
    return row_mean(logp if score == "logL" else token_ratio(batch, logp), batch.mask)


def kl_to_old(batch: RolloutBatch, logp: Tensor, *, kl_type: Literal["k1", "k3"]) -> Tensor:
    """Return the mean over all trained tokens of KL(old || pi), estimated on the old policy's samples; a scalar."""
    log_ratio = token_log_ratio(batch, logp)
    values = -log_ratio if kl_type == "k1" else token_ratio(batch, logp) - 1 - log_ratio
    return torch.where(batch.mask, values, 0.0).sum() / batch.mask.sum().clamp(min=1)


@register("group_loss", "pacs", needs=("groups", "correct", "every_row", "own_credit"))
def pacs(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    beta: float = 1.0,
    reward: Literal["log_ratio_sum", "mean_logp"] = "log_ratio_sum",
    score: Literal["rloo", "grpo", "naive"] = "rloo",
    class_balance: bool = True,
) -> GroupLoss:
    """Compute cross-entropy of correctness with an implicit reward as logit: bounded gradients, no advantages.

    q = beta * sum of logp - old_logp, or beta * mean of logp. psi = q - mean of the group's other q (`rloo`), (q -
    mean) / (std + 1e-6) (`grpo`) or q (`naive`), with gradient through all of it; a single row has psi = q. Loss: mean
    over rows of w * cross-entropy(psi, correct); class_balance: w = rows / (2 * rows of the class) in a group with both
    classes, else 1. Rows of unknown correctness are ignored. The authors' code has beta 1 or 2. Stats: `pacs/loss`.
    """
    key, groups = group_key(batch.group_ids)
    known, labels = _labels(batch)
    psi = pacs_scores(batch, logp, beta=beta, reward=reward, score=score)
    weights = pacs_weights(batch, class_balance=class_balance)
    losses = weights * binary_cross_entropy_with_logits(psi, labels.to(psi.dtype), reduction="none")
    rows = group_total(known, key, groups)
    values = group_total(torch.where(known, losses, 0.0), key, groups) / rows.clamp(min=1)
    return GroupLoss(values, {"pacs/loss": values.detach()}, weights=rows)


def pacs_scores(batch: RolloutBatch, logp: Tensor, *, beta: float, reward: str, score: str) -> Tensor:
    """Return psi [N]; rows of unknown correctness are in no group mean and get 0."""
    key, groups = group_key(batch.group_ids)
    known, _ = _labels(batch)
    summed = reward == "log_ratio_sum"
    q = beta * (token_log_ratio(batch, logp).sum(-1) if summed else row_mean(logp, batch.mask))
    q = torch.where(known, q, 0.0)
    count = group_total(known, key, groups).to(q.dtype)
    if score == "naive":
        return q
    centered = torch.where(known, q - (group_total(q, key, groups) / count.clamp(min=1))[key], 0.0)
    alone = (count < 2)[key]
    if score == "rloo":
        return torch.where(alone, q, centered * (count / (count - 1).clamp(min=1))[key])
    variance = group_total(centered.square(), key, groups) / (count - 1).clamp(min=1)
    spread = torch.where(variance > 0, variance, 1.0).sqrt() * (variance > 0)  # no infinite gradient of sqrt at 0
    return torch.where(alone, q, centered / (spread[key] + 1e-6))


def pacs_weights(batch: RolloutBatch, *, class_balance: bool) -> Tensor:
    """Return w [N]: rows of the group / (2 * rows of the class) if the group has both classes, else 1."""
    known, right = _labels(batch)
    ones = torch.ones(len(batch), dtype=batch.correct.dtype, device=known.device)  # type: ignore[union-attr]
    if not class_balance:
        return ones
    key, groups = group_key(batch.group_ids)
    rights, wrongs = (group_total(known & side, key, groups).to(ones.dtype)[key] for side in (right, ~right))
    balanced = (rights + wrongs) / (2 * torch.where(right, rights, wrongs).clamp(min=1))
    return torch.where(known & (rights > 0) & (wrongs > 0), balanced, ones)


def group_key(group_ids: Tensor) -> tuple[Tensor, int]:
    """Return group numbers [N], 0..K-1 in order of first appearance, and K."""
    sorted_ids, key = torch.unique(group_ids, return_inverse=True)
    rows = torch.arange(len(group_ids), device=group_ids.device)
    first = torch.full_like(sorted_ids, len(group_ids)).scatter_reduce(0, key, rows, "amin")
    return first.argsort().argsort()[key], len(sorted_ids)


def group_total(values: Tensor, key: Tensor, groups: int) -> Tensor:
    """Return the sum of values [N] (flags are counted) by group number [N] -> [K]."""
    values = values.long() if values.dtype == torch.bool else values
    return values.new_zeros(groups).index_add(0, key, values)


def _labels(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Return whether correctness is known and whether the row is correct, bool [N]."""
    if batch.correct is None:
        raise ValueError("the batch has no correctness of rows")
    return ~batch.correct.isnan(), batch.correct > 0.5


def classes(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Return the correct rows and the wrong rows, bool [N]; empty rows are in neither."""
    known, right = _labels(batch)
    counted = known & batch.mask.any(-1)
    return counted & right, counted & ~right


def log_mean_exp(x: Tensor, chosen: Tensor, key: Tensor, groups: int, count: Tensor) -> Tensor:
    """Return the log of the mean of exp(x) over the chosen rows of each group [K]; 0 for groups without chosen rows."""
    start = x.new_full((groups,), -torch.inf)
    highest = start.scatter_reduce(0, key, torch.where(chosen, x.detach(), -torch.inf), "amax")
    highest = torch.where(highest.isinf(), 0.0, highest)
    total = group_total(torch.where(chosen, (x - highest[key]).exp(), 0.0), key, groups)
    return highest + torch.where(count > 0, total / count.clamp(min=1), 1.0).log()
