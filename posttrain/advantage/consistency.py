"""COPO: a batch-level advantage beside the group's own, blended by how much the answers of a group agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import (
    combine_ids,
    group_mean,
    group_sum,
    normalize_by_group,
    number_groups,
    require_field,
    require_rewards,
)
from posttrain.batch import ChannelAdvantages, RolloutBatch
from posttrain.registry import register

Mode = Literal[
    "soft",
    "soft_with_zero",
    "soft_with_forced",
    "only_zero",
    "only_forced",
    "only_local",
    "only_global",
]


@dataclass(frozen=True)
class BlendedAdvantages:
    """Parts of COPO's advantages.

    entropy [K] in bits; local, overall, weight [N]: the advantages are weight * local and (1 - weight) * overall.
    """

    entropy: Tensor
    local: Tensor
    overall: Tensor
    weight: Tensor


@register("advantage", "copo", paper="2508.04138", needs=("groups", "answer_ids"))
def copo(
    batch: RolloutBatch,
    *,
    k: float = 5.0,
    b: float = 1.0,
    mode: Mode = "soft_with_zero",
    use_coef: bool = False,
    eps: float = 1e-6,
) -> ChannelAdvantages:
    """Blend group and batch advantages by how much a group's answers agree -> [N] (COPO).

    Groups that are all right or all wrong have a gradient too. Consistency-aware policy optimization. Local: (reward -
    mean of the group) / (std + eps). Global: (R - mean of R over prompts) / (std + eps), R the mean reward of the
    prompt, times 1 - lam H with use_coef (lam = (1 - 1/n) / log2 n, n rows in the group). H: entropy in bits of the
    group's answers; all rows without an answer are one category. The weight of the local part is sigmoid(k (H - b))
    where the mode's condition holds, else 0. Conditions: soft: always; soft_with_zero (the released run): reward not 0;
    soft_with_forced: local advantage not 0; only_zero and only_forced: the same conditions with weight 1; only_local
    and only_global: one part alone. Where answers agree (H below b) the global part dominates. The channels are weight
    * local and (1 - weight) * global, the advantage is their sum; loss `clip_channels` gives each channel its own
    surrogate, as the authors do.
    """
    blend = copo_terms(batch, k=k, b=b, mode=mode, use_coef=use_coef, eps=eps)
    local, overall = blend.weight * blend.local, (1 - blend.weight) * blend.overall
    return ChannelAdvantages(local + overall, {"local": local, "global": overall})


def copo_terms(
    batch: RolloutBatch,
    *,
    k: float = 5.0,
    b: float = 1.0,
    mode: Mode = "soft_with_zero",
    use_coef: bool = False,
    eps: float = 1e-6,
) -> BlendedAdvantages:
    """Return both advantages of `copo`, the weight of the local one, and the answer entropies."""
    rewards = require_rewards(batch)
    group = number_groups(batch.group_ids)
    size = group_sum(torch.ones_like(rewards), group)
    entropy = answer_entropy(require_field(batch.answer_ids, "answer_ids"), group, size)
    local = normalize_by_group(rewards, group, eps=eps)
    scored = group_sum((~rewards.isnan()).to(rewards), group) > 0
    prompt = group_mean(rewards, group)
    if use_coef:
        prompt = prompt * (1 - (1 - 1 / size) / size.clamp(min=2).log2() * entropy)
    prompt = torch.where(scored, prompt, torch.nan)
    overall = normalize_by_group(prompt, torch.zeros_like(prompt, dtype=torch.long), eps=eps)[group]
    overall = torch.where(rewards.isnan(), 0.0, overall)
    agreement = torch.sigmoid(k * (entropy - b))[group]
    return BlendedAdvantages(entropy, local, overall, local_weight(mode, agreement, rewards, local))


def answer_entropy(answers: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """Compute -sum p log2(p + 1e-8) over the answers of each group [K], in bits; -1 (no answer) is one category."""
    answer = combine_ids(group, answers.clamp(min=-1))
    owner = torch.zeros(int(answer.max()) + 1 if len(answer) else 0, dtype=torch.long, device=group.device)
    owner = owner.scatter(0, answer, group)
    share = group_sum(size.new_ones(len(answer)), answer) / size[owner]
    return -group_sum(share * (share + 1e-8).log2(), owner)


def local_weight(mode: Mode, agreement: Tensor, rewards: Tensor, local: Tensor) -> Tensor:
    """Return the weight [N] of the local advantage for a mode of `copo`."""
    one = torch.ones_like(agreement)
    nonzero, moved = (rewards != 0).to(one), (local != 0).to(one)
    weights = {
        "soft": agreement,
        "soft_with_zero": agreement * nonzero,
        "soft_with_forced": agreement * moved,
        "only_zero": nonzero,
        "only_forced": moved,
        "only_local": one,
        "only_global": torch.zeros_like(one),
    }
    return weights[mode]
