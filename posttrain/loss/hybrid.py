"""Losses for groups that contain given solutions or hinted rows in addition to the policy's own samples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import clip_stats, clipped_surrogate, token_advantages, token_ratio
from posttrain.registry import register


@register(
    "loss",
    "rl_plus",
    paper="2508.00222",
    needs=("external",),
    note=(
        "The authors' script divides the token sum by the maximum length only; here `fixed` divides by rows too, so the"
        " learning rate does not carry over."
    ),
)
def rl_plus(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    gamma: float = 0.5,
    remove_clip: bool = True,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> TokenLoss:
    """Compute REINFORCE with ratios on own tokens, and multiple importance sampling on tokens of a given solution.

    Own tokens: -A r, or with remove_clip False the clipped surrogate (r = exp(logp - old_logp)). External tokens, with
    p = exp(logp), p_old = exp(old_logp): -A sg[(1 - p)^gamma] * 2 p / (1.5 p_old + 0.5): the proposal is a mixture of
    the old policy and the midpoint between it and certainty, and gamma focuses the gradient on tokens that the policy
    finds unlikely. Aggregation `fixed`. Advantages are over the whole group, external rows included. Filter out
    external solutions that are judged wrong: they are pushed down. logp, values and stats [N,T]: `off_policy_ratio`,
    and those of `clip`.
    """
    external = torch.zeros_like(batch.mask) if batch.external is None else batch.external.bool() & batch.mask
    high = clip_low if clip_high is None else clip_high
    advantages = token_advantages(batch, logp)
    ratio = token_ratio(batch, logp)
    own_loss = -advantages * ratio if remove_clip else clipped_surrogate(ratio, advantages, clip_low, high)
    prob = torch.where(external, logp, 0.0).exp()
    old = logp.detach() if batch.old_logp is None else batch.old_logp.detach()
    prob_old = torch.where(external, old, 0.0).exp()
    mixture = 2 * prob / (prob_old + 0.5 * (prob_old + 1))
    focus = (1 - prob.detach()).clamp(min=0) ** gamma
    values = torch.where(external, -advantages * focus * mixture, own_loss)
    stats = {"off_policy_ratio": torch.where(external, mixture.detach(), 0.0)}
    stats |= clip_stats(ratio, advantages, clip_low, high)
    return TokenLoss(torch.where(batch.mask, values, 0.0), stats)


@register(
    "loss",
    "guide",
    paper="2506.13923",
    needs=("hinted", "old_logp"),
    note=(
        "The authors' quantile includes padding; here it is over the hinted tokens. Both are over one micro-batch, so"
        " `percentile` depends on batch.micro_tokens and on the number of ranks."
    ),
)
def guide(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    strategy: Literal["percentile", "constant", "power"] = "percentile",
    value: float = 0.9,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> TokenLoss:
    """Compute the clipped surrogate for plain rows, and -A s(r) for rows sampled with a hint and trained on without it.

    r = exp(logp - old_logp), logp under the plain prompt and old_logp under the prompt with the hint. constant: s = r /
    (r + value); percentile: the same with the `value` quantile of r over hinted tokens, at least 1e-4, instead of
    value; power: s = r^value. Text that is natural only with the hint has a small r and hardly any gradient. Hinted
    rows are not clipped. Stat [N,T]: `guide/shaped`, and those of `clip`.
    """
    high = clip_low if clip_high is None else clip_high
    advantages, ratio = token_advantages(batch, logp), token_ratio(batch, logp)
    hinted = torch.zeros_like(batch.mask) if batch.hinted is None else batch.mask & batch.hinted.bool()[:, None]
    shaped = ratio**value if strategy == "power" else ratio / (ratio + _ratio_offset(ratio, hinted, strategy, value))
    values = torch.where(hinted, -advantages * shaped, clipped_surrogate(ratio, advantages, clip_low, high))
    stats = {"guide/shaped": torch.where(hinted, shaped.detach(), 0.0), **clip_stats(ratio, advantages, clip_low, high)}
    return TokenLoss(torch.where(batch.mask, values, 0.0), stats)


def _ratio_offset(ratio: Tensor, hinted: Tensor, strategy: str, value: float) -> Tensor | float:
    """Return the offset in s(r) = r / (r + offset): `value`, or its quantile of the ratios of hinted tokens."""
    chosen = ratio.detach()[hinted]
    if strategy == "constant" or not len(chosen):
        return value
    return chosen.double().quantile(value).clamp(min=1e-4).to(ratio.dtype)


def nll_less_entropy(batch: RolloutBatch, logp: Tensor, *, entropy_coef: float = 0.001) -> TokenLoss:
    """Compute -logp - entropy_coef * H at each trained token, H the policy's entropy with its gradient (`new_entropy`).

    Its mean over tokens is ReLIFT's supervised loss (2506.07527). logp and values [N,T]; stat [N,T]: `nll`.
    """
    nll = -torch.where(batch.mask, logp, 0.0)
    entropy = torch.zeros_like(nll) if batch.new_entropy is None else torch.where(batch.mask, batch.new_entropy, 0.0)
    return TokenLoss(nll - entropy_coef * entropy, {"nll": nll.detach()})
