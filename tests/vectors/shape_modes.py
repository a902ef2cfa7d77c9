"""Vector cases of rollouts in several rows, as calls of the product. As in mechanics.py, no formula lives here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mechanics import Adapter, Case, tensor
from torch import Tensor

from posttrain.batch import RolloutBatch
from posttrain.loss.aggregate import aggregate, count_trajectory_tokens, totals
from posttrain.loss.clip import clip
from posttrain.loss.correction import tis


def chunked_loss(logp, old_logp, rollout_logp, mask, trajectory, advantages, *, eps_low, eps_high, clip_c, tis_cap):
    """Compute Delethink's loss from the parts of its preset. advantages: one per trajectory, numbered from 0."""
    ids, mask = trajectory.long(), mask.bool()
    batch = RolloutBatch(ids, mask, advantages=advantages[ids], old_logp=old_logp, rollout_logp=rollout_logp)
    values = clip(batch, logp, clip_low=eps_low, clip_high=eps_high, dual_clip=clip_c).values
    values = tis(batch, logp, clip_max=tis_cap).apply(values)
    tokens = count_trajectory_tokens(mask, ids)
    return aggregate(values, mask, "trajectory_mean", totals(mask, True, tokens), None, tokens)


def with_subgroups(advantage: Callable[..., Tensor], scale: str) -> Adapter:
    """Compute group advantages where each prompt's rows with and without experience form separate groups."""

    def run(case: Case) -> dict[str, Any]:
        rewards, guided = (case["inputs"][name] for name in ("rewards", "guided"))
        places = [(prompt, flag) for prompt, row in enumerate(guided) for flag in row]
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        groups = torch.tensor([numbers[place] for place in places])
        rows = tensor(rewards).flatten()
        batch = RolloutBatch(groups, torch.ones(len(rows), 1).bool(), rewards=rows)
        return {"advantages": advantage(batch, scale=scale)}

    return run
