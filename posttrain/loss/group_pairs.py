"""Group losses on pairs of rows of one prompt.

Shapes: logp [N,T]; values and stats [K], one per group.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.batch import GroupLoss, RolloutBatch, row_mean
from posttrain.loss.clip import bounded_exp, clipped_surrogate, token_log_ratio
from posttrain.loss.groups import group_key, group_total
from posttrain.loss.kl import log_ratio_to_reference
from posttrain.loss.pair_rounds import contrastive
from posttrain.options import RewardName
from posttrain.registry import register


@register(
    "group_loss",
    "copg",
    paper="2406.19185",
    needs=("groups", "ref_logp", "every_row", "own_credit"),
    note=(
        "Derived again from summaries of the paper. The paper does not state beta; another model's report divides by"
        " group size - 1 instead of taking the mean over pairs."
    ),
)
def copg(batch: RolloutBatch, logp: Tensor, *, beta: float = 0.1) -> GroupLoss:
    """Compute the contrastive policy gradient beta / 2 (u_i - u_j)^2 - (R_i - R_j)(u_i - u_j).

    u = sum of logp - ref_logp of a row. Mean over the unordered pairs of rows in the batch that share a prompt. Its
    gradient is that of RLOO on R - beta u, valid for samples of any policy without importance weights. No length
    normalization. Unscored rows form no pair; beta 0.03 to 0.3 is sensible. Stat: `copg/gap` (mean |u_i - u_j| of a
    group).
    """
    u = log_ratio_to_reference(batch, logp).sum(-1)
    first, second = pairs(batch)
    rewards = _require_rewards(batch).to(u.dtype)
    gap, reward_gap = u[first] - u[second], rewards[first] - rewards[second]
    return _mean_by_group(batch, first, contrastive(gap, reward_gap, beta), {"copg/gap": gap.detach().abs()})


@register(
    "group_loss",
    "p3o",
    paper="2310.00212",
    needs=("groups", "ref_logp", "every_row", "own_credit"),
    note=("The two clipped forms are rebuilt from the paper's description. The paper does not state beta."),
)
def p3o(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    variant: Literal["v1", "v2"] = "v1",
    beta: float = 0.05,
    clip: float = 0.2,
) -> GroupLoss:
    """Compute pairwise PPO, which depends only on the difference of two rewards of one prompt.

    D = the difference of R - beta * sum of old_logp - ref_logp; w = exp(sum of logp - old_logp), the exponent limited
    to +-20. v1 clips separately: (max(-D w_1, -D clip(w_1)) + max(D w_2, D clip(w_2))) / 2; v2 jointly: max(-D q, -D
    clip(q)) / 2 with q = w_1 / w_2; clip to 1 +- `clip`. Mean over the unordered pairs of the batch that share a
    prompt. Make one update per step: sequence ratios explode. Stat: `p3o/ratio`.
    """
    log_ratio = token_log_ratio(batch, logp).sum(-1)
    rewards = regularized_rewards(batch, _old_logp(batch, logp), beta=beta).to(log_ratio.dtype)
    first, second = pairs(batch)
    reward_gap = rewards[first] - rewards[second]
    if variant == "v1":
        ratio = bounded_exp(log_ratio)
        values = clipped_surrogate(ratio[first], reward_gap, clip, clip)
        values = values + clipped_surrogate(ratio[second], -reward_gap, clip, clip)
        reported_ratio = ratio[first]
    else:
        reported_ratio = bounded_exp(log_ratio[first] - log_ratio[second])
        values = clipped_surrogate(reported_ratio, reward_gap, clip, clip)
    return _mean_by_group(batch, first, values / 2, {"p3o/ratio": reported_ratio.detach()})


@register(
    "group_loss",
    "trpa",
    paper="2504.04524",
    needs=("groups", "ref_logp", "every_row", "own_credit"),
    note=(
        "The trust region is the regulariser `kl_old`. If the batch has no pair, the loss has no beta, as in the"
        " authors' code."
    ),
)
def trpa(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    beta: float = 0.1,
    anisotropy: float = 2.5,
    level: RewardName | None = None,
) -> GroupLoss:
    """Compute -log sigmoid(kappa beta (s_i - s_j)) over pairs of rows of one prompt with i better than j.

    s = mean of logp - mean of ref_logp over a row; kappa = anisotropy if i is of the best level, else 1; mean over all
    pairs of the batch. level: the reward component that holds levels, 1 the best (correct and well-formed), then 2
    (wrong), 3 (no answer found), 4 (ill-formed); without it a higher reward is better and correct rows are the best
    level. Ties and unscored rows form no pair. If the whole batch has no pair: mean over rows of -log sigmoid(s or,
    below the best level, -s). Stats: `trpa/pairs` (a group's number of pairs), `trpa/accuracy`.
    """
    key, groups = group_key(batch.group_ids)
    rank, best = levels(batch, level)
    s = row_mean(log_ratio_to_reference(batch, logp), batch.mask)
    first, second = pairs(batch, ordered=rank)
    if len(first) == 0:
        rows = ~rank.isnan()
        count = group_total(rows, key, groups)
        losses = torch.where(rows, -logsigmoid(torch.where(best, s, -s)), 0.0)
        values, none = group_total(losses, key, groups) / count.clamp(min=1), torch.zeros_like(count)
        return GroupLoss(values, {"trpa/pairs": none}, weights=none)
    margin = torch.where(best[first], anisotropy, 1.0) * beta * (s[first] - s[second])
    right = (margin.detach() > 0).to(s.dtype)
    found = _mean_by_group(batch, first, -logsigmoid(margin), {"trpa/accuracy": right})
    return GroupLoss(found.values, {"trpa/pairs": found.weights, **found.stats}, found.weights)  # type: ignore[dict-item]


def levels(batch: RolloutBatch, level: str | None) -> tuple[Tensor, Tensor]:
    """Return a rank [N] (lower = better, NaN = unscored) and the rows of the best level, bool [N].

    Raises ValueError for a batch that has neither correctness nor the component.
    """
    if level is not None:
        rank = batch.components[level].detach()
        return rank, rank == 1
    if batch.correct is None:
        raise ValueError("trpa needs to know which rows are correct, or a component with levels")
    return -_require_rewards(batch), batch.correct > 0.5


def pairs(batch: RolloutBatch, ordered: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the row indices [P], [P] of pairs with one group id.

    Without `ordered`: unordered pairs of scored rows. With `ordered` [N]: pairs whose first row has the smaller value.
    """
    rank = _require_rewards(batch) if ordered is None else ordered
    rows = torch.arange(len(batch), device=rank.device)
    scored = ~rank.isnan()
    allowed = (batch.group_ids[:, None] == batch.group_ids) & scored[:, None] & scored
    allowed &= rows[:, None] < rows if ordered is None else rank[:, None] < rank
    first, second = allowed.nonzero(as_tuple=True)
    return first, second


def regularized_rewards(batch: RolloutBatch, logp: Tensor, *, beta: float) -> Tensor:
    """Return reward - beta * sum over the row of logp - ref_logp [N], detached."""
    return (_require_rewards(batch) - beta * log_ratio_to_reference(batch, logp).sum(-1)).detach()


def _mean_by_group(batch: RolloutBatch, first: Tensor, values: Tensor, stats: dict[str, Tensor]) -> GroupLoss:
    """Return means by group of values [P]; a group is weighted by its number of pairs, and is 0 without pairs."""
    key, groups = group_key(batch.group_ids)
    group = key[first]
    count = group_total(torch.ones_like(group), group, groups)

    def mean(x: Tensor) -> Tensor:
        return group_total(x, group, groups) / count.clamp(min=1)

    return GroupLoss(mean(values), {name: mean(x) for name, x in stats.items()}, weights=count)


def _require_rewards(batch: RolloutBatch) -> Tensor:
    """Return the batch's rewards [N], detached."""
    if batch.rewards is None:
        raise ValueError("the batch has no rewards")
    return batch.rewards.detach()


def _old_logp(batch: RolloutBatch, logp: Tensor) -> Tensor:
    """Return old_logp [N,T], or the detached logp without it."""
    return logp.detach() if batch.old_logp is None else batch.old_logp
