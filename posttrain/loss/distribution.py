"""Distribution matching: fits the policy to ref * exp(reward / beta), and the KL on the policy's own samples.

Shapes: losses of a batch take logp [N,T] and return values [N,T], or [K], one per group; `match_distribution` takes the
n samples of one prompt, all tensors [S]; functions of a log-ratio alone take any shape.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from posttrain.batch import GroupLoss, PairBatch, RolloutBatch, TokenLoss
from posttrain.loss.groups import group_key, group_total
from posttrain.loss.kl import log_ratio_to_reference
from posttrain.loss.pair import dpo, mean
from posttrain.registry import register

Divergence = Literal["forward_kl", "reverse_kl", "js", "tv"]


class Matching(NamedTuple):
    """One prompt's loss [], its log Z [], and the detached pseudo-reward of each sample [n]."""

    loss: Tensor
    log_z: Tensor
    pseudo_rewards: Tensor


def match_distribution(
    logps: Tensor,
    proposal_logps: Tensor,
    ref_logps: Tensor,
    rewards: Tensor,
    *,
    beta: float = 0.1,
    divergence: Divergence = "forward_kl",
    baseline: float = 0.0,
    log_z: float | None = None,
    max_weight: float | None = None,
) -> Matching:
    """Fit pi to p = ref exp(R / beta) / Z on n samples of one prompt (arXiv 2205.11275), log-probs summed over tokens.

    -mean sg[(pi / proposal) (v - baseline)] log pi, v = -f'(pi / p): forward_kl p / pi; reverse_kl -(log(pi / p) + 1);
    js -(log 2 - softplus(-log(pi / p))); tv -sign(log(pi / p)) / 2. Z is estimated by importance sampling unless given.
    max_weight limits pi / proposal, whose variance is huge for long texts. A reward of -inf excludes a sample from p:
    it adds nothing to Z, and has no gradient in reverse_kl.
    """
    now = logps.detach()
    target = ref_logps.detach() + rewards / beta
    estimate = torch.logsumexp(target - proposal_logps.detach(), 0) - math.log(max(len(logps), 1))
    z = estimate if log_z is None else torch.as_tensor(log_z, dtype=now.dtype, device=now.device)
    log_t = now - (target - z)
    value = pseudo_rewards(log_t, divergence)
    weight = torch.exp(now - proposal_logps.detach())
    weight = weight if max_weight is None else weight.clamp(max=max_weight)
    advantage = torch.where(value.isfinite(), value - baseline, 0.0)
    return Matching(-(weight * advantage * logps).sum() / max(len(logps), 1), z, value)


def pseudo_rewards(log_t: Tensor, divergence: Divergence) -> Tensor:
    """Return -f'(t) given log t, t = policy / target."""
    if divergence == "forward_kl":
        return torch.exp(-log_t)
    if divergence == "reverse_kl":
        return -(log_t + 1)
    if divergence == "js":
        return -(math.log(2) - softplus(-log_t))
    return -torch.sign(log_t) / 2


@register(
    "group_loss",
    "gdc",
    paper="2205.11275",
    needs=("groups", "ref_logp", "every_row", "own_credit"),
    note="The loss is that of the authors' toolkit for f-DPG; a fixed baseline replaces its moving average.",
)
def gdc(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    beta: float = 0.1,
    divergence: Divergence = "forward_kl",
    baseline: float = 0.0,
    max_weight: float | None = 10.0,
) -> GroupLoss:
    """Fit the policy to ref * exp(reward / beta) without mode collapse: -mean sg[(pi / old) (v - baseline)] sum log pi.

    v: by divergence, with t = pi / target: forward_kl 1 / t; reverse_kl -(log t + 1); js -(log 2 - softplus(-log t));
    tv -sign(log t) / 2. log Z is estimated from the group, so groups should be large and completions short. max_weight
    limits the importance weight. Unscored rows are ignored. Stats: `gdc/log_z`, `gdc/kl` (mean log t: KL to the
    target). Raises ValueError for a batch without rewards.
    """
    if batch.rewards is None:
        raise ValueError("gdc needs rewards")
    now, ratio = _row_sums(batch, logp)
    old = now.detach() if batch.old_logp is None else torch.where(batch.mask, batch.old_logp, 0.0).sum(-1)
    ref = (now - ratio).detach()
    key, groups = group_key(batch.group_ids)
    values, log_z, kl = [], [], []
    for group in range(groups):
        rows = (key == group) & ~batch.rewards.isnan()
        rewards = batch.rewards[rows].to(now)
        found = match_distribution(
            now[rows], old[rows], ref[rows], rewards,
            beta=beta, divergence=divergence, baseline=baseline, max_weight=max_weight,
        )  # fmt: skip
        scored = bool(rows.any())
        values.append(found.loss)
        log_z.append(found.log_z if scored else now.new_zeros(()))
        kl.append((ratio[rows].detach() - rewards / beta).mean() + found.log_z if scored else now.new_zeros(()))
    return GroupLoss(torch.stack(values), {"gdc/log_z": torch.stack(log_z), "gdc/kl": torch.stack(kl)})


def online_kl(batch: RolloutBatch, logp: Tensor, *, baseline: Literal["none", "rloo"] = "none") -> TokenLoss:
    """Compute sg[k - b] * logp per token, with the gradient of the KL to the reference on own samples.

    k = sum over the row of logp - ref_logp; b = 0, or with `rloo` the mean k of the other rows of the group (0 without
    others), so groups must be whole. The loss is the mean over rows of row sums; its value has no meaning, the stat
    `online_kl/kl` (k) does.
    """
    k = log_ratio_to_reference(batch, logp).sum(-1).detach()
    if baseline == "rloo":
        key, groups = group_key(batch.group_ids)
        others = group_total(torch.ones_like(k), key, groups)[key] - 1
        b = (group_total(k, key, groups)[key] - k) / others.clamp(min=1)
    else:
        b = torch.zeros_like(k)
    values = torch.where(batch.mask, (k - b)[:, None] * logp, 0.0)
    return TokenLoss(values, {"online_kl/kl": k})


class Hybrid(NamedTuple):
    """Result of `hypo`: the total loss and its parts."""

    loss: Tensor  # [] to be minimized
    dpo_loss: Tensor  # []
    kl: Tensor  # [] mean k of the samples


def hypo(
    pairs: PairBatch,
    batch: RolloutBatch,
    logp: Tensor,
    *,
    beta: float = 0.05,
    kl_coef: float = 1e-4,
    baseline: Literal["none", "rloo"] = "none",
) -> Hybrid:
    """Compute HyPO (arXiv 2406.01462): DPO on offline pairs plus kl_coef times `online_kl` on samples.

    The KL is the mean of row sums. Shapes: pairs [P]; logp [N,T]; results []. The estimator is the standard score
    function; the paper's own code was not available.
    """
    offline = mean(dpo(pairs, beta=beta).losses)
    online = online_kl(batch, logp, baseline=baseline)
    rows = max(len(batch), 1)
    return Hybrid(
        offline + kl_coef * online.values.sum() / rows, offline.detach(), online.stats["online_kl/kl"].sum() / rows
    )


def _row_sums(batch: RolloutBatch, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs, and log-ratios to the reference, summed over the trained tokens of each row [N]."""
    return torch.where(batch.mask, logp, 0.0).sum(-1), log_ratio_to_reference(batch, logp).sum(-1)
