"""VL-DAC: credit by step. A step is a turn of the model; its tokens share the step's advantage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.advantage.group import require_field, rewards_of
from posttrain.advantage.steps import REWARD, steps_of
from posttrain.advantage.tokens import backwards
from posttrain.batch import Credit, RolloutBatch
from posttrain.registry import register


@register(
    "advantage",
    "step_gae",
    paper="2508.04280",
    needs=("values", "turn_ids"),
    note="The authors skip a branch of the clip at ratios above 10; loss.dual_clip does the same job.",
)
def step_gae(batch: RolloutBatch, *, gamma: float = 0.99, lam: float = 0.95) -> Credit:
    """Generalised advantage estimation over the turns of each row, normalised over all turns of the batch -> [N,T].

    A turn's value is read at its first trained token, before anything of it is known, and its critic learns the return
    there and at the turn's other tokens. A turn's reward is what rewards by turn gave it; the rest of the row's reward
    stands at its last turn, where the episode ends. Rows without a score are left out.
    """
    require_field(batch.values, "values")
    scored = ~rewards_of(batch).isnan()
    steps = steps_of(batch.replace(mask=batch.mask & scored[:, None]))
    rows = steps.batch
    values, dones = require_field(rows.values, "values")[:, 0], require_field(rows.dones, "dones")
    found = step_terms(rows.components[REWARD], values, dones, gamma=gamma, lam=lam)
    return Credit(steps.spread(found.advantages), steps.spread(found.returns))


@dataclass(frozen=True)
class StepAdvantages:
    """advantages [N], raw [N] before normalisation, returns [N] (what a critic learns)."""

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
    """Backwards over steps [N]: delta = r + gamma V' (1 - done) - V, A = delta + gamma lam (1 - done) A'.

    V' after the last step is bootstrap_value. returns = A + V; advantages = (A - mean) / (std + 1e-8), unbiased; a
    single step has 0. Nothing leaks over a done.
    """
    goes_on = 1.0 - dones.to(values.dtype)
    after = torch.cat([values[1:], values.new_tensor([bootstrap_value])[: len(values)]])
    delta = rewards + gamma * after * goes_on - values
    raw = backwards(delta, gamma * lam * goes_on.to(delta)).to(values)
    spread = raw.std() if len(raw) > 1 else raw.new_zeros(())
    centred = raw - raw.mean() if len(raw) else raw
    return StepAdvantages(torch.where(spread > 0, centred / (spread + 1e-8), 0.0), raw, raw + values)
