"""Several rewards, each normalized separately and then added, so that the variance of one does not drown another.

A channel is {rewards, condition, among, weight} (see `options.Channel`). GDPO has one channel per component and one
more normalization over the batch; HDPO has two channels, one of them among right rows only, each with its own clipped
loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.gate import evaluate_gate, get_component
from posttrain.advantage.group import component_weights, normalize_by_group
from posttrain.advantage.tokens import whiten_values
from posttrain.batch import ChannelAdvantages, RolloutBatch
from posttrain.errors import UserError
from posttrain.options import Channel, Gate, RewardName
from posttrain.registry import register

BatchNorm = Literal["sequence", "token", "none"]


@register("advantage", "gdpo", paper="2601.05242", needs=("groups", "components"))
def gdpo(
    batch: RolloutBatch,
    *,
    weights: dict[RewardName, float] | None = None,
    conditions: dict[RewardName, Gate] | None = None,
    eps: float = 1e-4,
    batch_norm: BatchNorm = "sequence",
) -> Tensor:
    """Normalize each reward component by group, add them with weights, and normalize over the batch -> [N] (GDPO).

    The weighted sum of w_k (r_k - mean) / (std + eps) over components k is normalized a second time over the batch.
    Weights act on the normalized components. They default to the recipe's reward weights; `weights` overrides those
    that it names, and 0 drops a component. conditions: component -> gate; outside its gate a component is 0 (for
    example, length counts only where the answer is right: {length: {on: accuracy, min: 1.0}}). A missing component
    (NaN) adds 0; a row without any component is excluded from the batch statistics and gets 0. batch_norm: `sequence`
    is (s - mean) / (std + eps) over the rows, s: the weighted sum; `token` over all trained tokens -> [N,T], as in the
    authors' verl code; `none` skips it. Standard deviations have ddof 1. With a single component this is GRPO with a
    second normalization.
    """
    return gdpo_terms(batch, weights=weights, conditions=conditions, eps=eps, batch_norm=batch_norm)["advantages"]


def gdpo_terms(
    batch: RolloutBatch,
    *,
    weights: Mapping[str, float] | None = None,
    conditions: Mapping[str, Gate] | None = None,
    eps: float = 1e-4,
    batch_norm: BatchNorm = "sequence",
) -> dict[str, Tensor]:
    """Return `pre_batch` [N], the weighted sum of normalized components, and `advantages`.

    Raises UserError for components that the batch does not have.
    """
    used = {**component_weights(batch), **(weights or {})}
    names = [name for name, weight in used.items() if weight != 0]
    unknown = [name for name in (conditions or {}) if name not in used]
    if unknown or not names:
        what = (
            f"a condition on `{unknown[0]}`, which is not a reward component"
            if unknown
            else "no component has a weight"
        )
        raise UserError(what, allowed=f"the batch has: {', '.join(batch.components) or 'none'}")
    parts: list[Channel] = [{"rewards": {name: 1.0}, "condition": (conditions or {}).get(name, {})} for name in names]
    found = channel_terms(batch, channels=parts, eps=eps)
    total = torch.stack([used[name] * a for name, a in zip(names, found["advantages"], strict=True)]).sum(0)
    known = ~torch.stack(found["rewards"]).isnan().all(0)
    return {"pre_batch": total, "advantages": _normalize_over_batch(batch, total, known, eps, batch_norm)}


@register("advantage", "channels", paper="2604.08545", needs=("groups", "components"))
def channels(
    batch: RolloutBatch, *, channels: list[Channel], eps: float = 1e-6, separate: bool = False
) -> ChannelAdvantages:
    """Normalize the reward of each channel among its rows of the group, times its weight -> [N].

    (r - mean) / (std + eps), r: the reward of the channel, the sum of its components times their factors. Rows outside
    `among` are excluded from the statistics and get 0, as does the only row of its group. The advantage is the sum over
    the channels. With `separate` (HDPO) the advantage is that of the first channel, and the regulariser `channel_clip`
    trains on the other channels, numbered from 1, one each; this differs from the sum at clipped tokens where signs
    differ, and in the denominators. Raises UserError if no channel is given.
    """
    if not channels:
        raise UserError("advantage `channels` has no channel")
    found = channel_terms(batch, channels=channels, eps=eps)["advantages"]
    parts = {str(n): channel.get("weight", 1.0) * found[n] for n, channel in enumerate(channels)}
    return ChannelAdvantages(parts["0"] if separate else torch.stack(list(parts.values())).sum(0), parts)


def channel_rewards(batch: RolloutBatch, channel: Channel) -> Tensor:
    """Return the reward of a channel [N]: 0 if its condition fails, NaN outside `among` or without components."""
    table = torch.stack([factor * get_component(batch, name) for name, factor in channel["rewards"].items()]).double()
    rewards = torch.where(table.isnan().all(0), torch.nan, table.nan_to_num(nan=0.0).sum(0))
    if channel.get("condition"):
        rewards = torch.where(evaluate_gate(batch, channel["condition"]) | rewards.isnan(), rewards, 0.0)
    return torch.where(evaluate_gate(batch, channel.get("among")), rewards, torch.nan)


def channel_advantages(batch: RolloutBatch, channel: Channel, eps: float) -> Tensor:
    """Compute (r - mean) / (std + eps) of the group over the rows with the channel's reward [N], unweighted."""
    return normalize_by_group(channel_rewards(batch, channel), batch.group_ids, eps=eps)


def channel_terms(batch: RolloutBatch, *, channels: list[Channel], eps: float) -> dict[str, list[Tensor]]:
    """Return `rewards` and `advantages` [N] of each channel, without the channel weights."""
    return {
        "rewards": [channel_rewards(batch, channel) for channel in channels],
        "advantages": [channel_advantages(batch, channel, eps) for channel in channels],
    }


def _normalize_over_batch(
    batch: RolloutBatch, total: Tensor, known: Tensor, eps: float, batch_norm: BatchNorm
) -> Tensor:
    """Apply the second normalization of GDPO over the rows or trained tokens of the batch."""
    if batch_norm == "none":
        return total
    if batch_norm == "token":
        return whiten_values(total[:, None].expand(batch.mask.shape), batch.mask & known[:, None], whitening="verl")
    one = torch.zeros_like(batch.group_ids)
    return normalize_by_group(torch.where(known, total, torch.nan), one, eps=eps)
