"""DRPO: DisCO with length weights; shorter correct answers weigh more, and no correct answer is ever pushed down."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import GroupLoss, RolloutBatch, row_mean
from posttrain.loss.groups import classes, group_key, group_total, kl_to_old, log_mean_exp
from posttrain.registry import register


@register(
    "group_loss",
    "drpo",
    paper="2510.04474",
    needs=("groups", "correct", "own_credit"),
    note=(
        "The KL is the mean over the groups of one forward pass. The released code's loss differs by a constant; the"
        " gradient is the same."
    ),
)
def drpo(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    tau: float = 10.0,
    lam: float = 0.1,
    kl_delta: float = 1e-4,
    kl_beta: float = 1e3,
    kl_type: Literal["k1", "k3"] = "k1",
    max_length: float | None = None,
) -> GroupLoss:
    """Compute -J, J = sum over correct rows of w s - tau log(mean over wrong rows of exp(s / tau)).

    s = mean logp of a row. w ~ exp((1 - n / max_length) / lam), n the tokens of a correct row, normalized to sum 1 over
    the group's correct rows: of two correct answers the shorter gets the larger push, and the gradient never lowers a
    correct one. A large lam removes the length preference (DisCO). Groups without both classes have J = 0 and stay in
    the mean. Loss: -J + stop(max(0, kl_beta * (K - kl_delta))) * K, K the mean over all tokens of old_logp - logp
    (`k1`) or r - 1 - ln r (`k3`), r = exp(logp - old_logp). max_length: of a completion; None takes the longest of the
    step. Empty rows and rows of unknown correctness are in no class. Reads correctness instead of rewards, so other
    reward components have no effect. logp [N,T]; values and stats [K]: `drpo/gap`, `drpo/kl`.
    """
    key, groups = group_key(batch.group_ids)
    correct, wrong = classes(batch)
    correct_count, wrong_count = group_total(correct, key, groups), group_total(wrong, key, groups)
    scores = row_mean(logp, batch.mask)
    weights = drpo_weights(batch, lam=lam, max_length=max_length).to(scores)
    pull = group_total(weights * scores, key, groups)
    gap = torch.where(
        (correct_count > 0) & (wrong_count > 0),
        pull - tau * log_mean_exp(scores / tau, wrong, key, groups, wrong_count),
        0.0,
    )
    kl = kl_to_old(batch, logp, kl_type=kl_type)
    trust = (kl_beta * (kl.detach() - kl_delta)).clamp(min=0) * kl
    return GroupLoss(-gap + trust, {"drpo/gap": gap.detach(), "drpo/kl": kl.detach().expand(groups)})


def drpo_weights(batch: RolloutBatch, *, lam: float, max_length: float | None = None) -> Tensor:
    """Return w [N], float64: sums to 1 over the correct rows of each group with both classes, 0 in all other rows."""
    key, groups = group_key(batch.group_ids)
    correct, wrong = classes(batch)
    correct = correct & (group_total(wrong, key, groups) > 0)[key]
    longest = batch.mask.shape[1] if max_length is None else max_length
    exponent = torch.where(correct, (1 - batch.mask.sum(-1).double() / longest) / lam, -torch.inf)
    highest = exponent.new_full((groups,), -torch.inf).scatter_reduce(0, key, exponent, "amax")
    shifted = torch.where(correct, exponent - torch.where(correct, highest[key], 0.0), -torch.inf).exp()
    return shifted / group_total(shifted, key, groups)[key].clamp(min=torch.finfo(shifted.dtype).tiny)
