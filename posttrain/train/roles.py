"""The roles of a workflow's calls, in the batch and in metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posttrain.batch import Rollout, RolloutBatch

APART = 10_000_000  # added to the number of a prompt's group for each further group of the same prompt


def role_fields(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Fields of the batch about the roles of its rows; {} without a workflow."""
    if all(r.call is None for r in rollouts):
        return {}
    names = [r.call.role if r.call is not None else "" for r in rollouts]
    roles = tuple(sorted(set(names)))
    return {
        "roles": roles,
        "agent_ids": torch.tensor([roles.index(name) for name in names]),
        "prompt_ids": torch.tensor([r.group % APART for r in rollouts]),
    }


def role_metrics(rollouts: Sequence[Rollout], batch: RolloutBatch) -> dict[str, float]:
    """By role: calls a rollout, and of trained ones their mean reward, the share of right ones, their tokens, and the
    share of rows with an advantage. {} without a workflow. batch: with advantages."""
    calls = {r.trajectory: r.call.calls for r in rollouts if r.call is not None}
    said = [one for of_one in calls.values() for one in of_one]
    values = {
        f"roles/{role}/calls": sum(one.role == role for one in said) / len(calls)
        for role in sorted({one.role for one in said})
    }
    if cut := {r.trajectory for r in rollouts if r.call is not None and r.call.cut}:
        values["roles/out_of_room"] = len(cut) / len(calls)
    advantages = None if batch.advantages is None else batch.advantages.reshape(len(batch), -1).ne(0).any(-1).tolist()
    for role in sorted({r.call.role for r in rollouts if r.call is not None}):
        here = [n for n, r in enumerate(rollouts) if r.call is not None and r.call.role == role]
        values[f"roles/{role}/tokens"] = sum(len(rollouts[n].sampled) for n in here) / len(here)
        for what, numbers in (
            ("reward", [rollouts[n].reward for n in here]),
            ("correct", [rollouts[n].correct for n in here]),
            ("advantages", [] if advantages is None else [advantages[n] for n in here]),
        ):
            if known := [float(number) for number in numbers if number is not None]:
                values[f"roles/{role}/{what}"] = sum(known) / len(known)
    return values
