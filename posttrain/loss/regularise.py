"""Regularisers beside the policy loss: likelihood preservation, given solutions, and distances to a reference.

Shapes: logp, values and stats [N,T], if not stated otherwise.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from posttrain.batch import RolloutBatch, TokenLoss, row_mean
from posttrain.loss.clip import limit_value, token_advantages, token_log_ratio
from posttrain.registry import register

FORWARD_LIMITS = (-20.0, 5.0)


@register("regulariser", "llds", paper="2512.04220", needs=("several_updates", "every_row"))
def llds(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    gate: Literal["action", "response", "token"] = "action",
    answer_weight: float = 1.0,
    denominator: Literal["preserved", "all"] = "preserved",
) -> TokenLoss:
    """Penalize falling likelihood of good answers: w max(0, old_logp - logp) on rows with A >= 0 (coef 0.2).

    gate `action`: a run of trained tokens (between tool outputs) is active if the sum of its log-probs fell;
    `response`: the same for the whole row; `token`: always. answer_weight: w of the tokens of the final answer, 1
    elsewhere (the paper anneals it as min(searches / 2, 1)). denominator: trained tokens of the rows with A >= 0
    (paper), or of all rows (code). With per-token advantages, a row counts by their sum. In the first update of a step
    no likelihood has fallen yet: the term needs two or more updates. Stats [N,T]: `llds/active`, `llds/fallen`.
    """
    fallen = -token_log_ratio(batch, logp)
    advantages = token_advantages(batch, logp)
    kept = batch.mask & (advantages.sum(-1, keepdim=True) >= 0)
    active = kept & fallen_gate(fallen.detach(), batch.mask, gate) & (fallen.detach() > 0)
    weights = torch.ones_like(fallen)
    if batch.answer_mask is not None:
        weights = torch.where(batch.answer_mask.bool() & batch.mask, answer_weight, weights)
    values = torch.where(active, weights * fallen, 0.0)
    stats = {"llds/active": active.to(logp.dtype), "llds/fallen": values.detach()}
    return TokenLoss(values, stats, counted=kept if denominator == "preserved" else batch.mask)


def fallen_gate(fallen: Tensor, mask: Tensor, gate: str) -> Tensor:
    """Return the tokens [N,T] whose run of trained tokens, row, or self has a lower log-prob than before.

    fallen [N,T] is 0 where the mask is 0.
    """
    if gate == "token":
        return mask
    if gate == "response":
        return mask & (fallen.sum(-1, keepdim=True) > 0)
    starts = mask & ~torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=-1)
    run = starts.long().cumsum(-1)  # index of the token's run; cells between runs add 0 to the previous run
    sums = fallen.new_zeros(len(mask), mask.shape[1] + 1).scatter_add(-1, run, fallen)
    return mask & (sums.gather(-1, run) > 0)


@register("regulariser", "hint_nll", paper="2509.06923", needs=("hinted", "hint_mask", "every_row"))
def hint_nll(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Compute SEELE's supervised term: mean over rows of the mean negative log-likelihood of the hint.

    Rows without a hint do not count. The authors use coef 0.001. Stat [N]: `hint_nll`. Raises ValueError for a batch
    without hint_mask.
    """
    if batch.hint_mask is None:
        raise ValueError("hint_nll needs hint_mask")
    hint = batch.hint_mask.bool()
    rows = row_mean(-logp, hint)
    # one cell per row with a hint
    first = batch.mask & (batch.mask.long().cumsum(-1) == 1) & hint.any(-1, keepdim=True)
    return TokenLoss(torch.where(first, rows[:, None], 0.0), {"hint_nll": rows.detach()}, counted=first)


@register("regulariser", "entropy_bonus", needs=("new_entropy", "every_row"))
def entropy_bonus(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Compute -H, the negative policy entropy in nats at each trained token; coef > 0 keeps H from falling.

    The gradient is that of the entropy itself, through all logits, which takes more memory than a policy loss alone. A
    common coef is 1e-3. Stat [N,T]: `entropy_bonus`. Raises ValueError for a batch without new_entropy.
    """
    if batch.new_entropy is None:
        raise ValueError("entropy_bonus needs new_entropy")
    values = -torch.where(batch.mask, batch.new_entropy, 0.0).to(logp.dtype)
    return TokenLoss(values, {"entropy_bonus": -values.detach()})


@register(
    "regulariser",
    "calibrl",
    needs=("expert_logp", "correct"),
    note=(
        "Comparing two texts position by position is only a rough scale. After the expert's end the authors' code reads"
        " padding; here the expert's mean log-prob is used there, or everywhere with expert_baseline: mean."
    ),
)
def calibrl(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    negative_slope: float = 0.5,
    expert_baseline: Literal["position", "mean"] = "position",
) -> TokenLoss:
    """Compute |A| * LeakyReLU(-s (logp - expert_logp)), s = +1 for a correct and -1 for a wrong row.

    Correct answers are pushed above the expert's likelihood and wrong ones below it, only weakly (negative_slope) once
    they have passed it. Rows without an expert, or of unknown correctness, have no term. Stat [N,T]: `calibrl/reached`.
    The authors use coef 0.1 and aggregation token_mean. Raises ValueError for a batch without expert_logp or
    correctness.
    """
    if batch.expert_logp is None or batch.correct is None:
        raise ValueError("calibrl needs expert_logp and correctness")
    expert = torch.where(batch.mask, batch.expert_logp.detach().to(logp.dtype), torch.nan)
    average = expert.nanmean(-1, keepdim=True)
    expert = average.expand(expert.shape) if expert_baseline == "mean" else expert.where(~expert.isnan(), average)
    sign = torch.where(batch.correct.isnan(), 0.0, torch.where(batch.correct > 0.5, 1.0, -1.0)).to(logp.dtype)[:, None]
    used = batch.mask & ~expert.isnan()
    gap = torch.where(used, logp, 0.0) - torch.where(used, expert, 0.0)
    values = token_advantages(batch, logp).abs() * leaky_relu(-sign * gap, negative_slope)
    reached = (sign * gap.detach() > 0).to(logp.dtype)
    return TokenLoss(torch.where(used, values, 0.0), {"calibrl/reached": reached})


@register(
    "regulariser",
    "forward_kl",
    paper="2510.03865",
    needs=("tempered_ref_logp", "rewards", "every_row"),
    note=(
        "The forward KL and the tempered reference come from a summary of the paper; the linear dependence of the power"
        " on the reward, phi_min and the coefficient are guesses."
    ),
)
def forward_kl(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    phi_min: float = 0.5,
    reward_min: float = 0.0,
    reward_max: float = 1.0,
) -> TokenLoss:
    """Compute RAPO's forward KL to the reference raised to a power that depends on the reward: rho ln rho - rho + 1.

    rho = exp(hat - logp), hat = log_softmax(phi * reference logits) of the sampled token, phi from `reference_power`:
    correct answers stay near the reference, wrong ones near a flattened one, so they may explore. Gradient -rho ln rho.
    hat - logp is limited to [-20, 5], beyond which the gradient is that at the limit. phi_min 1 is the plain forward KL
    to the reference. Stat [N,T]: `forward_kl`. Raises ValueError for a batch without tempered_ref_logp.
    """
    del phi_min, reward_min, reward_max  # already used by the reference policy's pass, see reference_power
    if batch.tempered_ref_logp is None:
        raise ValueError("forward_kl needs the log-probs of the tempered reference")
    hat = torch.where(batch.mask, batch.tempered_ref_logp.detach(), 0.0)
    gap = limit_value(hat - torch.where(batch.mask, logp, 0.0), *FORWARD_LIMITS)
    values = torch.where(batch.mask, gap.exp() * gap - gap.exp() + 1, 0.0)
    return TokenLoss(values, {"forward_kl": values.detach()})


def reference_power(
    batch: RolloutBatch, *, phi_min: float = 0.5, reward_min: float = 0.0, reward_max: float = 1.0
) -> Tensor:
    """Return phi [N] = phi_min + (1 - phi_min) * reward scaled to [0, 1]; 1 for unscored rows or an empty reward range.

    Raises ValueError for a batch without rewards.
    """
    if batch.rewards is None:
        raise ValueError("the batch has no rewards")
    if reward_max <= reward_min:
        return torch.ones_like(batch.rewards)
    share = ((batch.rewards - reward_min) / (reward_max - reward_min)).clamp(0, 1)
    return (phi_min + (1 - phi_min) * share).nan_to_num(nan=1.0)


def tempered_reference(
    batch: RolloutBatch,
    logits: Tensor,
    tokens: Tensor,
    *,
    phi_min: float = 0.5,
    reward_min: float = 0.0,
    reward_max: float = 1.0,
) -> Tensor:
    """Return log_softmax(phi * logits) of the tokens [N,T], 0 where masked, from reference logits [N,T,V] in memory.

    A run never holds these logits: its reference pass computes the same with a temperature of 1 / phi for each row.
    """
    power = reference_power(batch, phi_min=phi_min, reward_min=reward_min, reward_max=reward_max)
    every = (power[:, None, None].to(logits.dtype) * logits).log_softmax(-1)
    chosen = torch.where(batch.mask, tokens.long(), 0)
    return torch.where(batch.mask, every.gather(-1, chosen[..., None])[..., 0], 0.0)
