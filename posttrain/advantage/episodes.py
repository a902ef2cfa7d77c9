"""VL-DAC: generalized advantage estimation over the turns of the model; all tokens of a turn share its advantage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.advantage.group import require_field, require_rewards
from posttrain.advantage.steps import REWARD, split_into_steps
from posttrain.advantage.tokens import returns_of_scored_rows, reverse_scan
from posttrain.batch import Credit, RolloutBatch
from posttrain.registry import register


@register(
    "advantage",
    "step_gae",
    paper="2508.04280",
    needs=("values", "turn_ids"),
    note="The authors skip one branch of the clip at ratios above 10; loss.dual_clip has the same effect.",
)
def step_gae(batch: RolloutBatch, *, gamma: float = 0.99, lam: float = 0.95) -> Credit:
    """Compute generalized advantages over the turns of each row, normalized over all turns of the batch -> [N,T].

    The value of a turn is read at its first trained token, before any of the turn is known; the critic learns the
    return at that token and at the turn's other tokens. The reward of a turn is the sum of its per-turn rewards; the
    remainder of the row's reward is assigned to the last turn, where the episode ends. Rows without a score are
    excluded.
    """
    require_field(batch.values, "values")
    scored = ~require_rewards(batch).isnan()
    steps = split_into_steps(batch.replace(mask=batch.mask & scored[:, None]))
    rows = steps.batch
    values, dones = require_field(rows.values, "values")[:, 0], require_field(rows.dones, "dones")
    found = step_terms(rows.components[REWARD], values, dones, gamma=gamma, lam=lam)
    return Credit(steps.spread(found.advantages), returns_of_scored_rows(batch, steps.spread(found.returns)))


@dataclass(frozen=True)
class StepAdvantages:
    """Result of `step_terms`: advantages [N], raw [N] before normalization, returns [N] (the critic's targets)."""

    advantages: Tensor
    raw: Tensor
    returns: Tensor


def step_terms(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
    bootstrap_value: float = 0.0,
) -> StepAdvantages:
    """Compute backwards over steps [N]: delta = r + gamma V' (1 - done) - V, A = delta + gamma lam (1 - done) A'.

    V' after the last step is bootstrap_value. returns = A + V; advantages = (A - mean) / (std + 1e-8), unbiased; a
    single step gets 0. Nothing propagates across a done.
    """
    not_done = 1.0 - dones.to(values.dtype)
    after = torch.cat([values[1:], values.new_tensor([bootstrap_value])[: len(values)]])
    delta = rewards + gamma * after * not_done - values
    raw = reverse_scan(delta, gamma * lam * not_done.to(delta)).to(values)
    spread = raw.std() if len(raw) > 1 else raw.new_zeros(())
    centered = raw - raw.mean() if len(raw) else raw
    return StepAdvantages(torch.where(spread > 0, centered / (spread + 1e-8), 0.0), raw, raw + values)
