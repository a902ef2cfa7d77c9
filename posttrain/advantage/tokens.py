"""Advantages by token: discounted returns, generalised advantage estimation, and whitening over all trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.advantage.group import centred_and_scaled, require_field, rewards_of
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
    """REINFORCE++: the return of each token, whitened over all trained tokens of the batch -> [N,T]. Needs no groups.

    Return of token t: its reward + gamma * the return of t + 1. The row's reward stands at its last trained token; with
    `kl.where: reward` each token's reward also has - coef * KL (the authors take k1). std_norm False only centres. See
    `whiten` and `returns_to_go` for the other keys. Prompts that are all wrong get a negative advantage as soon as
    others are solved. Rows without a score are left out.
    """
    return reinforce_pp_terms(
        batch, gamma=gamma, std_norm=std_norm, whitening=whitening, skip_masked=skip_masked
    ).advantages


@register("advantage", "reinforce_pp_baseline", paper="2501.03262", needs=("groups", "every_token"))
def reinforce_pp_baseline(
    batch: RolloutBatch, *, std_norm: bool = True, whitening: Whitening = "openrlhf", floor: float = VARIANCE_FLOOR
) -> Tensor:
    """REINFORCE++-baseline: reward - mean of its group at every token, whitened over all trained tokens -> [N,T].

    Long rows weigh more in mean and variance, so the mean over rows is not 0 and a row at its group's mean may get a
    small advantage. The KL belongs in the loss here (the authors advise k2). std_norm False only subtracts the
    mean over all trained tokens, once more. With whitening `verl` this is also DLER's batch-wise normalisation (arXiv
    2510.15110).
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
    """Generalised advantage estimation from a value model, as in verl -> [N,T]; see `gae_terms`.

    lam 1 and gamma 1: the rewards still to come - the value. Long chains of thought often take lam 1. whiten: (A -
    mean) / sqrt(variance + 1e-8) over all trained tokens. The returns that the value model learns are not whitened.
    """
    found = gae_terms(batch, gamma=gamma, lam=lam, whiten=whiten)
    return Credit(found.advantages, found.returns)


@dataclass(frozen=True)
class TokenAdvantages:
    """All [N,T]: advantages, what they were before whitening, and returns (what a value model learns)."""

    advantages: Tensor
    raw: Tensor
    returns: Tensor


@dataclass(frozen=True)
class Baselined:
    """advantages [N,T]; centred [N]: rewards less their group's mean."""

    advantages: Tensor
    centred: Tensor


def reinforce_pp_terms(
    batch: RolloutBatch, *, gamma: float, std_norm: bool, whitening: Whitening, skip_masked: bool
) -> TokenAdvantages:
    """The advantages of `reinforce_pp` and the returns that they come from."""
    mask = scored_mask(batch)
    returns = returns_to_go(token_rewards(batch), mask, gamma, skip_masked=skip_masked)
    return TokenAdvantages(whiten_values(returns, mask, whitening=whitening, scale=std_norm), returns, returns)


def baseline_terms(
    batch: RolloutBatch, *, std_norm: bool = True, whitening: Whitening = "openrlhf", floor: float = VARIANCE_FLOOR
) -> Baselined:
    """The advantages of `reinforce_pp_baseline` and the centred rewards that they come from."""
    centred = centred_and_scaled(rewards_of(batch), batch.group_ids, scale="none")
    mask = scored_mask(batch)
    tokens = torch.where(mask, centred[:, None], 0.0)
    return Baselined(whiten_values(tokens, mask, whitening=whitening, floor=floor, scale=std_norm), centred)


def scored_mask(batch: RolloutBatch) -> Tensor:
    """The mask [N,T] without rows whose reward is NaN."""
    return batch.mask if batch.rewards is None else batch.mask & ~batch.rewards.isnan()[:, None]


def token_rewards(batch: RolloutBatch) -> Tensor:
    """Rewards by token [N,T]: the batch's own, or the row's reward at its last trained token. 0 elsewhere.

    What turns earned of the row's reward (`turn_rewards`) stands at their ends, and the rest at the last token.
    """
    if batch.token_rewards is not None:
        return torch.where(scored_mask(batch), batch.token_rewards.detach(), 0.0)
    rewards, earned = rewards_of(batch).detach(), earned_by_turn(batch)
    last = torch.where(last_trained(batch.mask), (rewards - earned.sum(-1))[:, None], 0.0)
    return torch.where(scored_mask(batch), last + earned, 0.0)


def earned_by_turn(batch: RolloutBatch) -> Tensor:
    """What turns earned of the row's reward [N,T], at the last trained token of each; 0 without rewards by turn."""
    if batch.turn_rewards is None:
        return torch.zeros(batch.mask.shape, dtype=rewards_of(batch).dtype, device=batch.mask.device)
    return torch.where(batch.mask, batch.turn_rewards.detach(), 0.0).to(rewards_of(batch))


def last_trained(mask: Tensor) -> Tensor:
    """Where the last trained token of each row is, bool [N,T]; nowhere in an empty row."""
    return mask & (mask.long().flip(-1).cumsum(-1).flip(-1) == 1)


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float, *, skip_masked: bool = False) -> Tensor:
    """Reward of a token + gamma * the return of the next position [N,T], 0 where the mask is 0.

    Positions without a trained token (tool output) have no reward and discount once more, as in OpenRLHF, or are jumped
    over with skip_masked. (verl sets the running return to 0 there, which takes the credit from all earlier turns.)
    """
    rewards = torch.where(mask, rewards, 0.0)
    kept = torch.full_like(rewards, gamma)
    return torch.where(mask, backwards(rewards, torch.where(mask, kept, 1.0) if skip_masked else kept), 0.0)


def backwards(values: Tensor, kept: Tensor) -> Tensor:
    """x [..., T] with x[t] = values[t] + kept[t] * x[t + 1], and 0 behind the end.

    In log2(T) rounds: after each, x sums twice as many places and `kept` is their product. A loop over places would
    launch its kernels T times, which for long completions takes a GPU longer than a forward pass.
    """
    found, kept = values.clone(), kept.clone()
    reach = 1
    while reach < values.shape[-1]:
        found[..., :-reach] += kept[..., :-reach] * found[..., reach:]
        kept[..., :-reach] *= kept[..., reach:].clone()
        reach *= 2
    return found


def gae_terms(batch: RolloutBatch, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> TokenAdvantages:
    """The advantages of `gae`, and the raw ones and returns that a value loss learns from."""
    mask = scored_mask(batch)
    raw, returns = estimate(token_rewards(batch), require_field(batch.values, "values"), mask, gamma=gamma, lam=lam)
    return TokenAdvantages(whiten_values(raw, mask, whitening="verl") if whiten else raw, raw, returns)


def estimate(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages, not whitened, and returns [N,T] from token rewards and values [N,T].

    Backwards over the trained tokens only: delta = reward + gamma * next value - value, A = delta + gamma * lam * next
    A, return = A + value. Tool output and padding are passed over unchanged: they are no decisions. (OpenRLHF discounts
    once more at each.) After the last trained token the value is 0; a reward on a masked cell is lost.
    """
    values = torch.where(mask, values.detach(), 0.0)
    rewards = torch.where(mask, rewards.detach(), 0.0)
    after = functional.pad(values, (0, 1)).gather(-1, next_trained(mask))
    delta = torch.where(mask, rewards + gamma * after - values, 0.0)
    raw = backwards(delta, torch.where(mask, torch.full_like(delta, gamma * lam), 1.0)).to(values)
    raw = torch.where(mask, raw, 0.0)
    return raw, raw + values


def next_trained(mask: Tensor) -> Tensor:
    """Place of the next trained token behind each place [N,T]; T where there is none."""
    width = mask.shape[-1]
    place = torch.where(mask, torch.arange(width, device=mask.device), width)
    return functional.pad(place, (0, 1), value=width)[:, 1:].flip(-1).cummin(-1).values.flip(-1)


def whiten_values(
    values: Tensor, mask: Tensor, *, whitening: Whitening, scale: bool = True, floor: float = VARIANCE_FLOOR
) -> Tensor:
    """(values - mean) / standard deviation over the cells [N,T] where the mask is 1, 0 elsewhere.

    openrlhf: population variance, at least `floor`. verl: unbiased variance + floor. scale False: only centred. Equal
    values give 0, and so does a single one.
    """
    count = mask.sum()
    if count == 0:
        return torch.zeros_like(values)
    lowest = torch.where(mask, values, torch.inf).min()  # taken off first, so that equal values are exactly 0
    shifted = torch.where(mask, values - lowest, 0.0)
    centred = torch.where(mask, shifted - shifted.sum() / count, 0.0)
    if not scale:
        return centred
    squares = centred.square().sum()
    if whitening == "openrlhf":
        return centred / (squares / count).clamp(min=floor).sqrt()
    return centred / (squares / (count - 1).clamp(min=1) + floor).sqrt()
