"""Roles of a workflow's calls, in the batch and in metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posttrain.batch import Rollout, RolloutBatch

GROUP_STRIDE = 10_000_000  # offset between the group numbers of the several groups of one prompt


def role_fields(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the batch fields about the roles of its rows; {} without a workflow."""
    if all(r.call is None for r in rollouts):
        return {}
    names = [r.call.role if r.call is not None else "" for r in rollouts]
    roles = tuple(sorted(set(names)))
    return {
        "roles": roles,
        "agent_ids": torch.tensor([roles.index(name) for name in names]),
        "prompt_ids": torch.tensor([r.group % GROUP_STRIDE for r in rollouts]),
    }


def role_metrics(rollouts: Sequence[Rollout], batch: RolloutBatch) -> dict[str, float]:
    """Compute metrics by role; {} without a workflow.

    Calls per rollout; and of trained calls their mean reward, share of correct ones, tokens, and share of rows with an
    advantage. batch: with advantages.
    """
    calls = {r.trajectory: r.call.calls for r in rollouts if r.call is not None}
    every = [call for of_rollout in calls.values() for call in of_rollout]
    values = {
        f"roles/{role}/calls": sum(call.role == role for call in every) / len(calls)
        for role in sorted({call.role for call in every})
    }
    if cut := {r.trajectory for r in rollouts if r.call is not None and r.call.cut}:
        values["roles/out_of_room"] = len(cut) / len(calls)
    advantages = None if batch.advantages is None else batch.advantages.reshape(len(batch), -1).ne(0).any(-1).tolist()
    for role in sorted({r.call.role for r in rollouts if r.call is not None}):
        here = [n for n, r in enumerate(rollouts) if r.call is not None and r.call.role == role]
        values[f"roles/{role}/tokens"] = sum(len(rollouts[n].sampled_ids) for n in here) / len(here)
        for what, numbers in (
            ("reward", [rollouts[n].reward for n in here]),
            ("correct", [rollouts[n].correct for n in here]),
            ("advantages", [] if advantages is None else [advantages[n] for n in here]),
        ):
            if known := [float(number) for number in numbers if number is not None]:
                values[f"roles/{role}/{what}"] = sum(known) / len(known)
    return values
