"""Several rewards, each normalised by itself and then added: none drowns in the variance of another.

A channel is {rewards, condition, among, weight} (see `options.Channel`). GDPO is a channel a component and one more
scaling over the batch; HDPO is two channels, one of them among right rows only, each with a clipped loss of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.gate import component, open_rows
from posttrain.advantage.group import centred_and_scaled, component_weights
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
    weights: dict[str, float] | None = None,
    conditions: dict[RewardName, Gate] | None = None,
    eps: float = 1e-4,
    batch_norm: BatchNorm = "sequence",
) -> Tensor:
    """Sum of w_k (r_k - mean) / (std + eps) by group and component, then scaled over the batch -> [N].

    Weights act on the normalised components: by default the recipe's weights of the rewards; `weights` changes those
    that it names, 0 leaves one out. conditions: component -> gate; outside it the component is 0 (length counts only
    where the answer is right: {length: {on: accuracy, min: 1.0}}). A missing component (NaN) adds 0; a row without any
    stays out of the batch statistics and gets 0. batch_norm: (s - mean) / (std + eps) over the rows; `token` over all
    trained tokens -> [N,T], as in the authors' verl code; `none`. stds have ddof 1. With one component this is GRPO and
    a second scaling.
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
    """`pre_batch` [N], the weighted sum of normalised components, and `advantages`.

    Raises UserError for components that the batch does not have.
    """
    used = {**component_weights(batch), **(weights or {})}
    names = [name for name, weight in used.items() if weight != 0]
    strange = [name for name in (conditions or {}) if name not in used]
    if strange or not names:
        what = (
            f"a condition on `{strange[0]}`, which is no reward component" if strange else "no component has a weight"
        )
        raise UserError(what, allowed=f"the batch has: {', '.join(batch.components) or 'none'}")
    parts: list[Channel] = [{"rewards": {name: 1.0}, "condition": (conditions or {}).get(name, {})} for name in names]
    found = channel_terms(batch, channels=parts, eps=eps)
    total = torch.stack([used[name] * a for name, a in zip(names, found["advantages"], strict=True)]).sum(0)
    known = ~torch.stack(found["rewards"]).isnan().all(0)
    return {"pre_batch": total, "advantages": _over_batch(batch, total, known, eps, batch_norm)}


@register("advantage", "channels", paper="2604.08545", needs=("groups", "components"))
def channels(
    batch: RolloutBatch, *, channels: list[Channel], eps: float = 1e-6, separate: bool = False
) -> ChannelAdvantages:
    """One advantage a channel, (r - mean) / (std + eps) among the channel's rows of the group, times its weight -> [N].

    A channel's reward is the sum of its components times their factors. Rows outside `among` are compared with nobody
    and get 0, as does one that is alone. The advantage is the sum over the channels; with `separate` (HDPO) that of the
    first channel, and the others, numbered from 1, wait for the regulariser `channel_clip`, one each: the sum differs
    from it where signs differ at a clipped token, and in the denominators. Raises UserError where no channel is given.
    """
    if not channels:
        raise UserError("advantage `channels` has no channel")
    found = channel_terms(batch, channels=channels, eps=eps)["advantages"]
    parts = {str(n): channel.get("weight", 1.0) * found[n] for n, channel in enumerate(channels)}
    return ChannelAdvantages(parts["0"] if separate else torch.stack(list(parts.values())).sum(0), parts)


def channel_rewards(batch: RolloutBatch, channel: Channel) -> Tensor:
    """The reward of a channel [N]: 0 where its condition fails, NaN outside `among` or with every component missing."""
    table = torch.stack([factor * component(batch, name) for name, factor in channel["rewards"].items()]).double()
    rewards = torch.where(table.isnan().all(0), torch.nan, table.nan_to_num(nan=0.0).sum(0))
    if channel.get("condition"):
        rewards = torch.where(open_rows(batch, channel["condition"]) | rewards.isnan(), rewards, 0.0)
    return torch.where(open_rows(batch, channel.get("among")), rewards, torch.nan)


def channel_advantages(batch: RolloutBatch, channel: Channel, eps: float) -> Tensor:
    """(r - mean) / (std + eps) of the group over the rows that have the channel's reward [N], without its weight."""
    return centred_and_scaled(channel_rewards(batch, channel), batch.group_ids, eps=eps)


def channel_terms(batch: RolloutBatch, *, channels: list[Channel], eps: float) -> dict[str, list[Tensor]]:
    """`rewards` and `advantages` [N] of each channel, without weights."""
    return {
        "rewards": [channel_rewards(batch, channel) for channel in channels],
        "advantages": [channel_advantages(batch, channel, eps) for channel in channels],
    }


def _over_batch(batch: RolloutBatch, total: Tensor, known: Tensor, eps: float, batch_norm: BatchNorm) -> Tensor:
    if batch_norm == "none":
        return total
    if batch_norm == "token":
        return whiten_values(total[:, None].expand(batch.mask.shape), batch.mask & known[:, None], whitening="verl")
    one = torch.zeros_like(batch.group_ids)
    return centred_and_scaled(torch.where(known, total, torch.nan), one, eps=eps)
