"""Credit within a thought: DECS penalizes only the tokens after the answer was first reached."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.gate import completion_lengths, get_component, is_correct
from posttrain.advantage.group import normalize_by_group, number_groups
from posttrain.batch import RolloutBatch
from posttrain.options import ScoreName
from posttrain.registry import register


@register("advantage", "decs", paper="2509.25827", needs=("groups", "correct", "components", "every_token"))
def decs(
    batch: RolloutBatch,
    *,
    max_length: float,
    r_plus: float = 1.1,
    r_zero: float = 1.0,
    eps: float = 1e-6,
    redundant_top: Literal["r_plus", "r_zero"] = "r_plus",
    start: ScoreName = "necessary_prefix/start",
    end: ScoreName = "necessary_prefix/end",
) -> Tensor:
    """Normalize the rewards of DECS over the group's rows at each position -> [N,T].

    (r_ij - mean_j) / (std_j + eps) over the rows at position j.

    r_ij is `decs_rewards`, which depends on correctness alone and not on the rewards. Positions without a trained token
    get 0. Do not combine it with another length reward. Groups of one give 0.
    """
    rewards = decs_rewards(
        batch, max_length=max_length, r_plus=r_plus, r_zero=r_zero, redundant_top=redundant_top, start=start, end=end
    )
    width = rewards.shape[1]
    key = number_groups(batch.group_ids)[:, None] * width + torch.arange(width, device=rewards.device)
    advantages = normalize_by_group(rewards.flatten(), key.flatten(), eps=eps).reshape(rewards.shape)
    return torch.where(batch.mask, advantages, 0.0)


def decs_rewards(
    batch: RolloutBatch,
    *,
    max_length: float,
    r_plus: float = 1.1,
    r_zero: float = 1.0,
    redundant_top: Literal["r_plus", "r_zero"] = "r_plus",
    start: str = "necessary_prefix/start",
    end: str = "necessary_prefix/end",
) -> Tensor:
    """Return rewards by position [N,T]: 0 in wrong rows, r_plus in right ones, less at redundant positions.

    Right rows also have r_plus after their end. Redundant positions have r_plus - (r_plus - r_zero) * L / max_length.
    They run from component `start` (token position; negative or missing: none) up to, not including, `end`, the last
    token of the thought. redundant_top `r_zero` is the paper's equation, r_zero - (r_plus - r_zero) * L / max_length;
    the authors' code, and their text, have r_plus. Unknown correctness: NaN.
    """
    position = torch.arange(batch.mask.shape[1], device=batch.mask.device)
    first = get_component(batch, start).double().nan_to_num(nan=-1.0)[:, None]
    last = get_component(batch, end).double().nan_to_num(nan=-1.0)[:, None]
    redundant = (first >= 0) & (position >= first) & (position < last)
    top = r_plus if redundant_top == "r_plus" else r_zero
    low = (top - (r_plus - r_zero) * completion_lengths(batch) / max_length)[:, None]
    rewards = torch.where(is_correct(batch)[:, None], torch.where(redundant, low, r_plus), 0.0)
    assert batch.correct is not None
    return torch.where(batch.correct.isnan()[:, None], torch.nan, rewards)


@register("credit_assignment", "control_token", paper="2505.13379", needs=("every_token",))
def control_token(batch: RolloutBatch, *, alpha: float = 0.001) -> Tensor:
    """Rescale advantages so that the mode token and the later tokens have separate means -> [N,T] (DeGRPO).

    The token mean becomes alpha * (mean over first tokens) + (mean over all later tokens).

    The first token chooses the mode (`<short>` or `<think>`); with an ordinary token mean its weight would depend on
    the completion lengths. Use with `loss.aggregation: token_mean`; a clipped surrogate scales with its advantage. The
    counts are those of the whole step, so with several minibatches the two means are those of the step on average.
    """
    assert batch.advantages is not None
    first = torch.zeros_like(batch.mask)
    first[:, :1] = batch.mask[:, :1]
    advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None].expand(first.shape)
    later = batch.mask & ~first
    tokens = float(batch.mask.sum())
    control, answer = alpha * tokens / max(float(first.sum()), 1.0), tokens / max(float(later.sum()), 1.0)
    return torch.where(first, control * advantages, torch.where(later, answer * advantages, 0.0))
