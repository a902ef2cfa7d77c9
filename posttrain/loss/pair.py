"""Losses on preference pairs. All take a PairBatch of P pairs and return losses [P]; the loss is their mean."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.batch import PairBatch, PairLoss
from posttrain.errors import UserError
from posttrain.registry import register


@register("pair_loss", "dpo", paper="2305.18290", needs=("ref_logp",))
def dpo(
    batch: PairBatch,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    variant: Literal["sigmoid", "robust"] = "sigmoid",
    reference_free: bool = False,
) -> PairLoss:
    """Logistic loss on z = beta * ((chosen - ref_chosen) - (rejected - ref_rejected)), log-probs summed over tokens.

    With label smoothing e, `sigmoid` is -(1-e) log s(z) - e log s(-z) (conservative DPO); `robust` is
    (-(1-e) log s(z) + e log s(-z)) / (1 - 2e), unbiased when labels are flipped with probability e (arXiv 2403.00409).
    reference_free takes both references as 0 and needs none. Stats [P]: chosen_rewards, rejected_rewards, margins (beta
    times the log-ratios and their gap) and accuracy (1 where chosen is above rejected).
    """
    if variant == "robust" and label_smoothing >= 0.5:
        raise UserError(
            f"label_smoothing {label_smoothing} with variant robust",
            allowed="below 0.5: labels must be right more often",
        )
    chosen, rejected = batch.chosen_logp, batch.rejected_logp
    if not reference_free:
        if batch.ref_chosen_logp is None or batch.ref_rejected_logp is None:
            raise ValueError("dpo needs the reference's log-probs, or reference_free")
        chosen = chosen - batch.ref_chosen_logp.detach()
        rejected = rejected - batch.ref_rejected_logp.detach()
    z = beta * (chosen - rejected)
    losses = robust(z, label_smoothing) if variant == "robust" else smoothed(z, label_smoothing)
    return PairLoss(losses, _stats(chosen, rejected, beta))


@register("pair_loss", "simpo", paper="2405.14734")
def simpo(
    batch: PairBatch,
    *,
    beta: float = 2.0,
    gamma_beta_ratio: float = 0.5,
    label_smoothing: float = 0.0,
    sft_weight: float = 0.0,
    variant: Literal["sigmoid", "hinge"] = "sigmoid",
) -> PairLoss:
    """Logistic loss on z = beta * (mean chosen log-prob - mean rejected log-prob - gamma_beta_ratio); no reference.

    `hinge` is max(0, 1 - z). sft_weight adds that many times the chosen side's mean negative log-prob. A length of 0
    counts as 1. Stats [P]: chosen_rewards, rejected_rewards (beta times the mean log-probs), margins, accuracy.
    """
    if variant == "hinge" and label_smoothing:
        raise UserError("label_smoothing has no meaning with variant hinge", hint="remove it, or use variant sigmoid")
    if batch.chosen_length is None or batch.rejected_length is None:
        raise ValueError("simpo needs the lengths of both sides")
    chosen = batch.chosen_logp / batch.chosen_length.clamp(min=1)
    rejected = batch.rejected_logp / batch.rejected_length.clamp(min=1)
    z = beta * (chosen - rejected - gamma_beta_ratio)
    losses = torch.relu(1 - z) if variant == "hinge" else smoothed(z, label_smoothing)
    return PairLoss(losses - sft_weight * chosen, _stats(chosen, rejected, beta))


def smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    """-(1-e) log s(z) - e log s(-z)."""
    return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)


def robust(z: Tensor, label_smoothing: float) -> Tensor:
    """(-(1-e) log s(z) + e log s(-z)) / (1 - 2e)."""
    unscaled = -(1 - label_smoothing) * logsigmoid(z) + label_smoothing * logsigmoid(-z)
    return unscaled / (1 - 2 * label_smoothing)


def mean(values: Tensor, pairs: float | None = None) -> Tensor:
    """Sum over these pairs [P] / pairs of the whole optimiser batch (default: P). No pair gives 0, with its graph."""
    return values.sum() / max(len(values) if pairs is None else pairs, 1)


def _stats(chosen: Tensor, rejected: Tensor, beta: float) -> dict[str, Tensor]:
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "chosen_rewards": beta * chosen,
        "rejected_rewards": beta * rejected,
        "margins": beta * (chosen - rejected),
        "accuracy": (chosen > rejected).to(chosen.dtype),
    }
