"""Complete objective of VL-DAC, with one row per environment step.

In `rl` a row is a whole rollout with all its turns, so no recipe runs this function; its advantage (`step_gae`, by
turn), loss, KL and value loss are available as components.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.advantage.episodes import StepAdvantages, step_terms
from posttrain.advantage.group import require_field, require_rewards
from posttrain.batch import RolloutBatch
from posttrain.loss.aggregate import aggregate, totals
from posttrain.loss.clip import clip as clipped
from posttrain.loss.kl import k3
from posttrain.loss.value import clipped_value_loss


@dataclass(frozen=True)
class StepLoss:
    """loss = policy + value; `policy` includes the KL, `value` its coefficient. Scalars with gradient."""

    loss: Tensor
    policy: Tensor
    value: Tensor
    steps: StepAdvantages


def step_loss(
    batch: RolloutBatch,
    logp: Tensor,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
    clip: float = 0.1,
    kl_coef: float = 0.0,
    vf_coef: float = 0.5,
    bootstrap_value: float = 0.0,
) -> StepLoss:
    """Compute the VL-DAC loss: credit assignment per step, clipping per token.

    Rows are steps; `values` and `new_values` [N] are the critic's values of their states. Policy: clip(r, A_step) +
    kl_coef * k3, averaged over a step's tokens, then over steps. Value: vf_coef * mean over all steps, including steps
    without tokens, of max((v - R)^2, (v_old + clip(v - v_old, -clip, clip) - R)^2). The paper uses kl_coef 0.04.
    """
    old, new = require_field(batch.values, "values").detach(), require_field(batch.new_values, "new_values")
    steps = step_terms(
        require_rewards(batch),
        old,
        require_field(batch.dones, "dones"),
        gamma=gamma,
        lam=lam,
        bootstrap_value=bootstrap_value,
    )
    batch = batch.replace(advantages=steps.advantages)
    values = clipped(batch, logp, clip_low=clip).values
    if kl_coef:
        values = values + kl_coef * k3(batch, logp).values
    policy = aggregate(values, batch.mask, "seq_mean_token_mean", totals(batch.mask))
    halves = clipped_value_loss(new, old, steps.returns, clip=clip)
    value = vf_coef * 2 * halves.mean() if len(halves) else torch.zeros_like(policy)
    return StepLoss(policy + value, policy, value, steps)
