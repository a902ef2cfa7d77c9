"""Group rewards beyond a weighted sum: a capped reward model, a rank among items, a comparison with an opponent."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.advantage.factors import get_numeric_column
from posttrain.advantage.gate import get_component
from posttrain.advantage.group import center_by_group, group_mean, group_std, group_sum, number_groups
from posttrain.batch import RolloutBatch
from posttrain.options import Column, ScoreName
from posttrain.registry import register


@register(
    "group_reward",
    "hybrid",
    paper="2504.16656",
    needs=("components",),
    note="Reconstructed: Skywork R1V2 names calibrated thresholds without a formula; all numbers are guesses.",
)
def hybrid(
    batch: RolloutBatch,
    *,
    rule: ScoreName = "rule",
    rm: ScoreName = "rm",
    fmt: ScoreName = "format",
    w_rule: float = 1.0,
    w_rm: float = 0.5,
    w_fmt: float = 0.5,
    rm_cap: float = 1.0,
    rm_center: float = 0.0,
    rm_scale: float = 1.0,
) -> Tensor:
    """Mix a rule, a capped reward model and a format reward -> [N]; replaces the weighted sum of the rewards.

    w_rule * rule + w_rm * min(sigmoid((rm - rm_center) / rm_scale), rm_cap) + w_fmt * fmt. rule, rm, fmt: names of
    reward components. A component that does not apply (NaN) is skipped; a row without any component stays NaN. Keep
    w_rm * rm_cap below w_rule, or a wrong answer may outrank a right one. rm_center and rm_scale: running median and
    spread of the reward model on the starting policy.
    """
    model = torch.sigmoid((get_component(batch, rm) - rm_center) / rm_scale).clamp(max=rm_cap)
    parts = torch.stack([w_rule * get_component(batch, rule), w_rm * model, w_fmt * get_component(batch, fmt)])
    mixed = torch.where(parts.isnan().all(0), torch.nan, parts.nan_to_num(nan=0.0).sum(0))
    return mixed if batch.rewards is None else torch.where(batch.rewards.isnan(), torch.nan, mixed)


@register("group_reward", "thurstone", paper="2505.14460", needs=("components", "columns"))
def thurstone(
    batch: RolloutBatch,
    *,
    prediction: ScoreName = "prediction",
    target: Column = "target",
    source: Column | None = None,
    weight: float = 1.0,
    eps: float = 1e-6,
) -> Tensor:
    """Add weight * how well a predicted number ranks among other items to the reward (VisualQuality-R1) -> [N].

    prediction: the component with the number parsed from the answer (NaN: none found, no rank reward); target: a column
    of the data row; source: a numeric column; only items of the same source are compared. See `rank_rewards`.
    """
    sources = None if source is None else get_numeric_column(batch, source)
    ranks = rank_rewards(
        get_component(batch, prediction), get_numeric_column(batch, target), batch.group_ids, sources, eps=eps
    )
    return weight * ranks if batch.rewards is None else batch.rewards + weight * ranks


def rank_rewards(
    predictions: Tensor, targets: Tensor, group_ids: Tensor, sources: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """Compute the mean fidelity between predicted and true order over the other items (Thurstone model) -> [N].

    predictions, targets, sources [N]; an item is a group, and its target is that of its first row. Against item z: x =
    (prediction - mean_z) / sqrt(var + var_z + eps), p = Phi(x), g = 1, 0 or 0.5 for a target above, below or equal to
    z's; fidelity = sqrt(p g + eps) + sqrt((1 - p)(1 - g) + eps). Means and unbiased variances are over the item's rows
    with a prediction (one row: 0). Without a prediction or another item the reward is 0.
    """
    group = number_groups(group_ids)
    count, mean, var = _moments(predictions, group)
    first = torch.stack([(group == z).nonzero()[0, 0] for z in range(len(mean))])
    truth = targets[first]
    x = (predictions[:, None] - mean) / (var[group][:, None] + var + eps).sqrt()
    p = torch.special.ndtr(x)
    g = (torch.sign(truth[group][:, None] - truth) + 1) / 2
    fidelity = (p * g + eps).sqrt() + ((1 - p) * (1 - g) + eps).sqrt()
    other = (group[:, None] != torch.arange(len(mean), device=group.device)) & (count > 0)
    if sources is not None:
        other = other & (sources[:, None] == sources[first])
    other = other & ~predictions.isnan()[:, None]
    return torch.where(other, fidelity, 0.0).sum(1) / other.sum(1).clamp(min=1)


def _moments(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute count, mean and unbiased variance [K] of values [N] by group, excluding NaN."""
    known = ~values.isnan()
    count = group_sum(known.to(values), group)
    return (
        count,
        group_mean(values, group),
        group_std(center_by_group(values, known, group, count), group, count, 1).square(),
    )


@register("group_reward", "versus_opponent", paper="2505.19731", needs=("rewards", "opponent_rewards"))
def versus_opponent(batch: RolloutBatch, *, scale: float | None = None) -> Tensor:
    """Compute the chance to beat the opponent's answers to the same prompt, minus 1/2 -> [N], -1/2 to 1/2.

    A higher reward wins, equal rewards are half a win; with scale the chance is sigmoid((R - R') / scale), as in a
    Bradley-Terry model. Mean over the opponent's scored answers; 0 if there is none. Raises ValueError for a batch
    without rewards of the policy or of the opponent.
    """
    if batch.rewards is None or batch.opponent_rewards is None:
        raise ValueError("versus_opponent needs rewards of the policy and of its opponent")
    gap = batch.rewards[:, None] - batch.opponent_rewards.to(batch.rewards)
    won = (torch.sign(gap) + 1) / 2 if scale is None else torch.sigmoid(gap / scale)
    known = ~batch.opponent_rewards.isnan()
    margin = torch.where(known, won - 0.5, 0.0).sum(-1) / known.sum(-1).clamp(min=1)
    return torch.where(batch.rewards.isnan(), batch.rewards, margin)
