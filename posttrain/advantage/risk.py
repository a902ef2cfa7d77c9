"""RiskPO: advantages from the mixed value at risk of bundles of questions, which rarely have only equal rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import require_rewards
from posttrain.batch import Remembered, RolloutBatch
from posttrain.errors import UserError, count_noun
from posttrain.registry import register

Credit = Literal["uniform", "std", "sum_mean"]
Variant = Literal["paper", "released"]


@register(
    "advantage",
    "riskpo",
    paper="2510.00911",
    needs=("groups", "every_group", "equal_groups"),
    note="`paper` follows a note that quotes the equation; the released code differs in weights and credit. "
    "Bundles take rollouts in sampling order, which is equivalent to a shuffle.",
)
def riskpo(
    batch: RolloutBatch,
    *,
    bundle_size: int = 5,
    alpha: float = 0.2,
    beta: float = 0.8,
    omega: float = 0.5,
    lr_q: float = 0.1,
    variant: Variant = "paper",
    credit: Credit = "uniform",
    w_mix: float = 1.5,
    natural_baseline: bool = True,
    divide_by_std: bool = False,
    eps: float = 1e-6,
) -> Remembered:
    """Compute the mixed value at risk of bundles of prompts -> [N] (RiskPO).

    Remembers the quantiles q_lo and q_hi of the bundle scores.

    Every `bundle_size` consecutive prompts form a bundle; its j-th sample is the j-th rollout of each prompt, its score
    R the sum of their rewards. `paper`: a = -(1 + omega) (q_lo - R)+ + (R - q_lo)+ - (R - q_hi)+ + q_lo - q_hi: never
    positive, 0 from q_hi on, steepest below q_lo. `released`: (w_mix * cv + rv) / (w_mix + 1), see `bundle_advantages`.
    credit: how a becomes row advantages, see `row_advantages`. Quantiles are updated by lr_q * (level - share of scores
    below them); the first step uses the batch's own quantiles. Groups must be of one size and fill the bundles; a row
    without a score drops its bundle. Do not add a group normalization: it would cancel the shape. Raises UserError for
    groups of several sizes, or if their number is not a multiple of bundle_size.
    """
    groups = list(dict.fromkeys(batch.group_ids.tolist()))
    rows = [(batch.group_ids == number).nonzero()[:, 0] for number in groups]
    sizes = {len(row) for row in rows}
    if len(sizes) > 1 or len(groups) % bundle_size:
        what = f"groups of sizes {sorted(sizes)}" if len(sizes) > 1 else count_noun(len(groups), "group")
        raise UserError(
            f"riskpo cannot make bundles of {bundle_size} prompts from {what}",
            allowed="groups of one size, their number a multiple of advantage.bundle_size",
            hint="set rollout.prompts_per_step to such a multiple, and filter no groups with keep",
        )
    order = torch.cat(rows)
    last = batch.memory.get("riskpo") or {}
    risk = risk_terms(
        require_rewards(batch).detach()[order].reshape(len(groups), -1),
        torch.arange(len(groups), device=order.device) // bundle_size,
        q_lo=last.get("q_lo"),
        q_hi=last.get("q_hi"),
        alpha=alpha,
        beta=beta,
        omega=omega,
        lr_q=lr_q,
        variant=variant,
        credit=credit,
        w_mix=w_mix,
        natural_baseline=natural_baseline,
        divide_by_std=divide_by_std,
        eps=eps,
    )
    advantages = torch.empty_like(risk.advantages)
    advantages[order] = risk.advantages
    return Remembered(advantages, {"q_lo": risk.q_next[0], "q_hi": risk.q_next[1]})


@dataclass(frozen=True)
class RiskTerms:
    """Result of `risk_terms`.

    bundle_scores, bundle_advantages [bundles, G], NaN for a dropped bundle; advantages [B * G]; q_next (lo, hi).
    """

    bundle_scores: Tensor
    bundle_advantages: Tensor
    advantages: Tensor
    q_next: tuple[float | None, float | None]


def risk_terms(
    rewards: Tensor,
    bundle_ids: Tensor,
    perm: Tensor | None = None,
    *,
    q_lo: float | None = None,
    q_hi: float | None = None,
    alpha: float = 0.2,
    beta: float = 0.8,
    omega: float = 0.5,
    lr_q: float = 0.1,
    variant: Variant = "paper",
    credit: Credit = "uniform",
    w_mix: float = 1.5,
    natural_baseline: bool = True,
    divide_by_std: bool = False,
    eps: float = 1e-6,
) -> RiskTerms:
    """Compute the advantages of `riskpo` from rewards [B,G] and bundle_ids [B].

    perm [B,G]: sample j of a bundle takes rollout perm[b, j] (default j) of each question b.
    """
    rollouts = (
        torch.arange(rewards.shape[1], device=rewards.device).expand(rewards.shape) if perm is None else perm.long()
    )
    taken = rewards.gather(1, rollouts)
    numbers = bundle_ids.unique()
    members = [(bundle_ids == number).nonzero()[:, 0] for number in numbers]
    broken = torch.stack([rewards[rows].isnan().any() for rows in members])
    scores = torch.stack([taken[rows].sum(0) for rows in members])
    scores = torch.where(broken[:, None], torch.nan, scores)
    known = scores[~broken].flatten()
    low, high = _current_quantile(known, q_lo, alpha), _current_quantile(known, q_hi, beta)
    values = bundle_advantages(scores, low, high, alpha, beta, omega, variant, w_mix, natural_baseline, eps)
    if divide_by_std:
        values = values / ((scores.std(1, keepdim=True) if scores.shape[1] > 1 else 1.0) + eps)
    advantages = torch.zeros_like(rewards)
    for rows, bundle, drop in zip(members, values, broken.tolist(), strict=True):
        if not drop:
            shares = row_advantages(bundle, rewards[rows], taken[rows], credit, eps)
            advantages[rows] = torch.zeros_like(shares).scatter(1, rollouts[rows], shares)
    q_next = _update_quantile(known, q_lo, low, alpha, lr_q), _update_quantile(known, q_hi, high, beta, lr_q)
    return RiskTerms(scores, values, advantages.flatten(), q_next)


def bundle_advantages(
    scores: Tensor,
    low: float,
    high: float,
    alpha: float,
    beta: float,
    omega: float,
    variant: Variant,
    w_mix: float,
    natural_baseline: bool,
    eps: float,
) -> Tensor:
    """Compute the mixed value at risk of scores R [bundles, G] with quantiles low and high; x+ = max(x, 0).

    released: rv = ((R - low)+ - (R - high)+ [+ low - high with natural_baseline]) / (beta - alpha + eps), cv = -(low -
    R)+ / (alpha + eps), (w_mix * cv + rv) / (w_mix + 1). Shapes: scores and result [B,G], B bundles of G samples.
    """
    tail = (low - scores).clamp(min=0)
    middle = (scores - low).clamp(min=0) - (scores - high).clamp(min=0)
    if variant == "paper":
        return -(1 + omega) * tail + middle + low - high
    ranged = (middle + (low - high if natural_baseline else 0.0)) / (beta - alpha + eps)
    return (w_mix * (-tail / (alpha + eps)) + ranged) / (w_mix + 1)


def row_advantages(bundle: Tensor, rewards: Tensor, taken: Tensor, credit: Credit, eps: float) -> Tensor:
    """Distribute a bundle's advantages [G] over the rows [questions, G] of its samples.

    uniform: the bundle's advantage. std: divided by the question's std + eps (a std of at most 1e-3 counts as 1).
    sum_mean: in proportion to the row's distance from its question's mean, so that a sample's rows add up to the
    bundle's advantage; equal shares where those distances cancel (1e-6). rewards: of the questions; taken: the same in
    sample order.
    """
    if credit == "uniform":
        return bundle.expand(taken.shape)
    if credit == "std":
        spread = rewards.std(1, keepdim=True) if rewards.shape[1] > 1 else torch.zeros_like(rewards[:, :1])
        return bundle / (torch.where(spread <= 1e-3, 1.0, spread) + eps)
    distance = taken - rewards.mean(1, keepdim=True)
    total = distance.sum(0)
    flat = total.abs() <= 1e-6
    return torch.where(flat, bundle / len(taken), bundle * distance / torch.where(flat, 1.0, total))


def _current_quantile(scores: Tensor, tracked: float | None, level: float) -> float:
    """Return the tracked quantile, or the quantile of these scores if none is tracked yet."""
    if tracked is not None:
        return tracked
    return float(torch.quantile(scores, level)) if len(scores) else 0.0


def _update_quantile(scores: Tensor, tracked: float | None, used: float, level: float, rate: float) -> float | None:
    """Return the quantile for the next step; None while no score has been seen."""
    if not len(scores):
        return tracked
    if tracked is None:
        return used
    return tracked + rate * (level - float((scores < tracked).double().mean()))
