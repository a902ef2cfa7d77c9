"""Advantage transforms: terms added row by row after the factors. Each acts on the advantages that it is given."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from posttrain.advantage.factors import mean_logp
from posttrain.advantage.group import group_mean, group_min, group_sum, number_groups, require_field, require_rewards
from posttrain.batch import RolloutBatch
from posttrain.registry import register


@register(
    "advantage_transform",
    "confidence",
    paper="2602.05281",
    needs=("groups", "old_logp", "prompt_logp"),
    note="Follows a review and a note; rounding up and the same low_frac on the prompt are not from the paper.",
)
def confidence(
    batch: RolloutBatch, *, alpha: float = 0.3, low_frac: float = 0.2, skip_all_correct: bool = False
) -> Tensor:
    """Lower the advantage of confident answers relative to their prompt -> [N] (ProGRPO).

    A + alpha * (confidence in the prompt - confidence in the answer).

    Confidence of a token sequence: exp of the mean of the ceil(low_frac * n) lowest of its n log-probs, 1 if the
    sequence is empty. Right answers that the policy was sure of get less, which keeps its entropy up. Groups whose
    rewards sum to 0 and rows without a score are unchanged; skip_all_correct also leaves groups without a wrong row
    unchanged (one source does). For rewards of at least 0. The paper does not state alpha (0.1 to 0.5 is worth trying).
    """
    advantages = require_field(batch.advantages, "advantages")
    rewards = require_rewards(batch)
    group = number_groups(batch.group_ids)
    unscored = rewards.isnan()
    changed = group_sum(torch.where(unscored, 0.0, rewards), group) != 0
    if skip_all_correct:
        right = rewards if batch.correct is None else batch.correct
        changed &= group_min(torch.where(unscored | right.isnan(), torch.inf, right), group) <= 0
    sure = confidences(batch, low_frac=low_frac)
    bonus = torch.where(changed[group] & ~unscored, alpha * (sure["prompt"] - sure["answer"]), 0.0).to(advantages)
    return advantages + (bonus if advantages.dim() == 1 else torch.where(batch.mask, bonus[:, None], 0.0))


def confidences(batch: RolloutBatch, *, low_frac: float = 0.2) -> dict[str, Tensor]:
    """Return the confidence in the `prompt` and in the `answer` of each row [N]."""
    mask = require_field(batch.prompt_mask, "prompt_mask").bool()
    return {
        "prompt": sequence_confidence(require_field(batch.prompt_logp, "prompt_logp"), mask, low_frac),
        "answer": sequence_confidence(require_field(batch.old_logp, "old_logp"), batch.mask, low_frac),
    }


def sequence_confidence(logp: Tensor, mask: Tensor, low_frac: float) -> Tensor:
    """Compute exp of the mean of the lowest log-probs of each row [N,T] -> [N].

    The ceil(low_frac * n) lowest, at least 1, of the row's n log-probs.
    """
    ascending = torch.where(mask, logp.detach(), torch.inf).sort(-1).values
    count = mask.sum(-1)
    taken = torch.ceil(low_frac * count - 1e-9).clamp(min=1).minimum(count)  # 0.28 * 25 is 7.000000000000001
    low = torch.arange(ascending.shape[-1], device=mask.device) < taken[:, None]
    return (torch.where(low, ascending, 0.0).sum(-1) / taken.clamp(min=1)).exp()


@register("advantage_transform", "novelty", paper="2510.06672", needs=("groups", "old_logp", "correct"))
def novelty(batch: RolloutBatch, *, lam: float = 2.5, kappa: float = 0.5) -> Tensor:
    """Add min(max(lam * (1 - eta), 0), kappa * A) to the advantage of right rows with A > 0 -> [N] (XRPO's sharpening).

    eta = exp(mean log-prob of the row - its mean over the group): a right answer less likely than its group gets more,
    at most (1 + kappa) A. All-right and all-wrong groups stay 0. Empty rows are excluded from the group's mean.
    """
    advantages = require_field(batch.advantages, "advantages")
    correct = require_field(batch.correct, "correct")
    if advantages.dim() == 2:
        correct = correct[:, None]
    gain = lam * (1 - relative_likelihood(batch)).to(advantages)
    gain = gain if advantages.dim() == 1 else gain[:, None]
    boosted = advantages + torch.minimum(gain.clamp(min=0), kappa * advantages)
    return torch.where((correct == 1) & (advantages > 0), boosted, advantages)


def relative_likelihood(batch: RolloutBatch) -> Tensor:
    """Compute exp(mean log-prob of a row - mean of that over its group) [N]; an empty row has a mean log-prob of 0."""
    score = mean_logp(batch)
    group = number_groups(batch.group_ids)
    known = torch.where(batch.mask.any(-1), score, math.nan)
    return (score - group_mean(known, group)[group]).exp()
