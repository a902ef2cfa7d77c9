"""Advantages by token: discounted returns, generalized advantage estimation, and whitening over all trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.advantage.group import normalize_by_group, require_field, require_rewards
from posttrain.batch import Credit, RolloutBatch
from posttrain.registry import register

Whitening = Literal["openrlhf", "verl"]
VARIANCE_FLOOR = 1e-8


@register("advantage", "reinforce_pp", paper="2501.03262", needs=("every_token",))
def reinforce_pp(
    batch: RolloutBatch,
    *,
    gamma: float = 1.0,
    std_norm: bool = True,
    whitening: Whitening = "openrlhf",
    skip_masked: bool = False,
) -> Tensor:
    """Whiten the return of each token over all trained tokens of the batch -> [N,T] (REINFORCE++). Needs no groups.

    Return of token t: its reward + gamma * the return of t + 1. The row's reward is at its last trained token; with
    `kl.where: reward` each token's reward also has - coef * KL (the authors use k1). std_norm False only centers. See
    `whiten_values` and `returns_to_go` for the other keys. All-wrong prompts get a negative advantage as soon as other
    prompts are solved. Rows without a score are excluded.
    """
    return reinforce_pp_terms(
        batch, gamma=gamma, std_norm=std_norm, whitening=whitening, skip_masked=skip_masked
    ).advantages


@register("advantage", "reinforce_pp_baseline", paper="2501.03262", needs=("groups", "every_token"))
def reinforce_pp_baseline(
    batch: RolloutBatch, *, std_norm: bool = True, whitening: Whitening = "openrlhf", floor: float = VARIANCE_FLOOR
) -> Tensor:
    """Subtract the group mean from the reward and whiten over all trained tokens -> [N,T] (REINFORCE++-baseline).

    Long rows weigh more in mean and variance, so the mean over rows is not 0 and a row at its group's mean may get a
    small advantage. The KL belongs in the loss here (the authors advise k2). std_norm False only subtracts the mean
    over all trained tokens. With whitening `verl` this is also DLER's batch-wise normalization (arXiv 2510.15110).
    """
    return baseline_terms(batch, std_norm=std_norm, whitening=whitening, floor=floor).advantages


@register("advantage", "gae", paper="1506.02438", needs=("values",))
def gae(
    batch: RolloutBatch,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
) -> Credit:
    """Compute generalized advantages from a value model, as in verl -> [N,T]; see `gae_terms`.

    With lam 1 and gamma 1 the advantage is the future rewards minus the value; long chains of thought often use lam 1.
    whiten: (A - mean) / sqrt(variance + 1e-8) over all trained tokens. The returns that the value model learns are not
    whitened, and NaN in rows without a score, from which it learns nothing.
    """
    found = gae_terms(batch, gamma=gamma, lam=lam, whiten=whiten)
    return Credit(found.advantages, returns_of_scored_rows(batch, found.returns))


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages [N,T]: whitened, before whitening (`raw`), and returns (targets of a value model)."""

    advantages: Tensor
    raw: Tensor
    returns: Tensor


@dataclass(frozen=True)
class BaselineAdvantages:
    """Advantages [N,T], and centered [N]: rewards minus their group's mean."""

    advantages: Tensor
    centered: Tensor


def reinforce_pp_terms(
    batch: RolloutBatch, *, gamma: float, std_norm: bool, whitening: Whitening, skip_masked: bool
) -> TokenAdvantages:
    """Compute the advantages of `reinforce_pp` and the returns that they are made from."""
    mask = scored_mask(batch)
    returns = returns_to_go(token_rewards(batch), mask, gamma, skip_masked=skip_masked)
    return TokenAdvantages(whiten_values(returns, mask, whitening=whitening, scale=std_norm), returns, returns)


def baseline_terms(
    batch: RolloutBatch, *, std_norm: bool = True, whitening: Whitening = "openrlhf", floor: float = VARIANCE_FLOOR
) -> BaselineAdvantages:
    """Compute the advantages of `reinforce_pp_baseline` and the centered rewards that they are made from."""
    centered = normalize_by_group(require_rewards(batch), batch.group_ids, scale="none")
    mask = scored_mask(batch)
    tokens = torch.where(mask, centered[:, None], 0.0)
    return BaselineAdvantages(whiten_values(tokens, mask, whitening=whitening, floor=floor, scale=std_norm), centered)


def scored_mask(batch: RolloutBatch) -> Tensor:
    """Return the mask [N,T] without rows whose reward is NaN."""
    return batch.mask if batch.rewards is None else batch.mask & ~batch.rewards.isnan()[:, None]


def returns_of_scored_rows(batch: RolloutBatch, returns: Tensor) -> Tensor:
    """Return the returns [N,T] with NaN in rows whose reward is NaN: a critic would otherwise learn 0 there."""
    return returns if batch.rewards is None else returns.masked_fill(batch.rewards.isnan()[:, None], torch.nan)


def token_rewards(batch: RolloutBatch) -> Tensor:
    """Return token rewards [N,T]: the batch's, or the row's reward at its last trained token; 0 elsewhere.

    Rewards by turn (`turn_rewards`) are at the ends of their turns, and the remainder of the row's reward at the last
    token.
    """
    if batch.token_rewards is not None:
        return torch.where(scored_mask(batch), batch.token_rewards.detach(), 0.0)
    rewards, earned = require_rewards(batch).detach(), earned_by_turn(batch)
    last = torch.where(mark_last_trained(batch.mask), (rewards - earned.sum(-1))[:, None], 0.0)
    return torch.where(scored_mask(batch), last + earned, 0.0)


def earned_by_turn(batch: RolloutBatch) -> Tensor:
    """Return the part of the row's reward that each turn earned [N,T], at the turn's last trained token.

    0 without rewards by turn.
    """
    if batch.turn_rewards is None:
        return torch.zeros(batch.mask.shape, dtype=require_rewards(batch).dtype, device=batch.mask.device)
    return torch.where(batch.mask, batch.turn_rewards.detach(), 0.0).to(require_rewards(batch))


def mark_last_trained(mask: Tensor) -> Tensor:
    """Mark the last trained token of each row, bool [N,T]; none in an empty row."""
    return mask & (mask.long().flip(-1).cumsum(-1).flip(-1) == 1)


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float, *, skip_masked: bool = False) -> Tensor:
    """Compute returns [N,T]: the reward of a token + gamma * the return of the next position; 0 where the mask is 0.

    Positions without a trained token (tool output) have no reward. They discount once more, as in OpenRLHF, or are
    skipped with skip_masked, as in verl.
    """
    rewards = torch.where(mask, rewards, 0.0)
    decay = torch.full_like(rewards, gamma)
    return torch.where(mask, reverse_scan(rewards, torch.where(mask, decay, 1.0) if skip_masked else decay), 0.0)


def reverse_scan(values: Tensor, decay: Tensor) -> Tensor:
    """Compute x[t] = values[t] + decay[t] * x[t+1] backwards over the last dimension [..., T], with x[T] = 0.

    Takes log2(T) rounds: each doubles the number of positions that x sums, and `decay` becomes their product. A loop
    over positions would launch its kernels T times, which for long completions takes a GPU longer than a forward pass.
    """
    scanned, decay = values.clone(), decay.clone()
    reach = 1
    while reach < values.shape[-1]:
        scanned[..., :-reach] += decay[..., :-reach] * scanned[..., reach:]
        decay[..., :-reach] *= decay[..., reach:].clone()
        reach *= 2
    return scanned


def gae_terms(batch: RolloutBatch, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> TokenAdvantages:
    """Compute the advantages of `gae` [N,T], with the unwhitened ones and the returns that a value loss learns from."""
    mask = scored_mask(batch)
    raw, returns = compute_gae(token_rewards(batch), require_field(batch.values, "values"), mask, gamma=gamma, lam=lam)
    return TokenAdvantages(whiten_values(raw, mask, whitening="verl") if whiten else raw, raw, returns)


def compute_gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute unwhitened advantages and returns [N,T] from token rewards and values [N,T].

    Backwards over the trained tokens only: delta = reward + gamma * next value - value, A = delta + gamma * lam * next
    A, return = A + value. Tool output and padding are skipped without discounting, because they are not decisions.
    (OpenRLHF discounts once more at each.) After the last trained token the value is 0; a reward at a masked position
    is ignored.
    """
    values = torch.where(mask, values.detach(), 0.0)
    rewards = torch.where(mask, rewards.detach(), 0.0)
    after = functional.pad(values, (0, 1)).gather(-1, find_next_trained(mask))
    delta = torch.where(mask, rewards + gamma * after - values, 0.0)
    raw = reverse_scan(delta, torch.where(mask, torch.full_like(delta, gamma * lam), 1.0)).to(values)
    raw = torch.where(mask, raw, 0.0)
    return raw, raw + values


def find_next_trained(mask: Tensor) -> Tensor:
    """Return the position of the next trained token after each position [N,T]; T if there is none."""
    width = mask.shape[-1]
    position = torch.where(mask, torch.arange(width, device=mask.device), width)
    return functional.pad(position, (0, 1), value=width)[:, 1:].flip(-1).cummin(-1).values.flip(-1)


def whiten_values(
    values: Tensor, mask: Tensor, *, whitening: Whitening, scale: bool = True, floor: float = VARIANCE_FLOOR
) -> Tensor:
    """Compute (values - mean) / standard deviation over the positions [N,T] where the mask is 1; 0 elsewhere.

    openrlhf: population variance, at least `floor`. verl: unbiased variance + floor. scale False: only centered. Equal
    values give 0, as does a single value.
    """
    count = mask.sum()
    if count == 0:
        return torch.zeros_like(values)
    lowest = torch.where(mask, values, torch.inf).min()  # subtracted first, so that equal values give exactly 0
    shifted = torch.where(mask, values - lowest, 0.0)
    centered = torch.where(mask, shifted - shifted.sum() / count, 0.0)
    if not scale:
        return centered
    squares = centered.square().sum()
    if whitening == "openrlhf":
        return centered / (squares / count).clamp(min=floor).sqrt()
    return centered / (squares / (count - 1).clamp(min=1) + floor).sqrt()
