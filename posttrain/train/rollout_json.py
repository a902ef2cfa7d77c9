"""Queued rollouts in a checkpoint: scored rollouts of coming steps, as JSON with uids in place of prompts.

Floats read back exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.batch import Prompt
from posttrain.train import prompt_sampler
from posttrain.train.collect import StepRollouts
from posttrain.train.rollout_values import rollout_from_dict, rollout_to_dict
from posttrain.verify.failures import Calls

FILE = "queued_rollouts.json"


def write(folder: Path, batches: Sequence[StepRollouts]) -> None:
    """Write the rollouts of several steps."""
    (folder / FILE).write_text(json.dumps([to_dict(batch) for batch in batches]))


def read(folder: Path, prompts: Sequence[Prompt]) -> list[StepRollouts]:
    """Read the rollouts that `write` stored; [] if there are none. prompts: those that the uids name."""
    if not (folder / FILE).is_file():
        return []
    by_uid = {p.uid: p for p in prompts}
    return [from_dict(values, by_uid) for values in json.loads((folder / FILE).read_text())]


def to_dict(batch: StepRollouts) -> dict[str, Any]:
    """Convert a step's rollouts to JSON values, without the seconds that collecting took."""
    rows = list(map(rollout_to_dict, batch.rollouts))
    fields = {name: getattr(batch, name) for name in ("step", "metrics", "calls", "position")}
    return {"rollouts": rows, **fields, "groups": list(map(prompt_sampler.to_dict, batch.groups))}


def from_dict(values: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> StepRollouts:
    """Restore a step's rollouts: the inverse of `to_dict`. prompts: by uid."""
    return StepRollouts(
        step=values["step"],
        rollouts=[rollout_from_dict(row, prompts[row["prompt"]]) for row in values["rollouts"]],
        metrics=dict(values["metrics"]),
        calls=[Calls._make(calls) for calls in values["calls"]],
        position=values["position"],
        groups=list(map(prompt_sampler.from_dict, values.get("groups", ()))),
    )
