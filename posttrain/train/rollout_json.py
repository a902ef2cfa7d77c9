"""Rollouts in a checkpoint: those of steps to come, scored, as JSON with uids in place of prompts.

Floats read back exactly.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.batch import Prompt, Rollout, Segment, ToolCall, Turn, Variant
from posttrain.train import prompt_sampler
from posttrain.train.collect import StepRollouts
from posttrain.verify.failures import Calls

FILE = "queued_rollouts.json"


def write(folder: Path, batches: Sequence[StepRollouts]) -> None:
    """Write the rollouts of some steps."""
    (folder / FILE).write_text(json.dumps([to_dict(batch) for batch in batches]))


def read(folder: Path, prompts: Sequence[Prompt]) -> list[StepRollouts]:
    """The rollouts that `write` left there, none if it did not. prompts: those that the uids name."""
    if not (folder / FILE).is_file():
        return []
    by_uid = {p.uid: p for p in prompts}
    return [from_dict(values, by_uid) for values in json.loads((folder / FILE).read_text())]


def to_dict(batch: StepRollouts) -> dict[str, Any]:
    """All but the seconds that it took, as values of JSON."""
    rows = [{f.name: getattr(r, f.name) for f in dataclasses.fields(r) if f.name != "prompt"} for r in batch.rollouts]
    for row, r in zip(rows, batch.rollouts, strict=True):
        row |= {
            "prompt": r.prompt.uid,
            "segments": [dataclasses.asdict(s) for s in r.segments],
            "turns": [dataclasses.asdict(t) for t in r.turns],
            "variant": None if r.variant is None else dataclasses.asdict(r.variant),
            "sampled": [r.prompt.text, list(r.prompt.ids)] if r.variant or r.trajectory is not None else None,
        }
    rest = {name: getattr(batch, name) for name in ("step", "metrics", "calls", "position")}
    return {"rollouts": rows, **rest, "groups": list(map(prompt_sampler.to_dict, batch.groups))}


def from_dict(values: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> StepRollouts:
    """The inverse of `to_dict`. prompts: by uid."""
    return StepRollouts(
        step=values["step"],
        rollouts=[_rollout(row, _prompt(row, prompts[row["prompt"]])) for row in values["rollouts"]],
        metrics=dict(values["metrics"]),
        calls=[Calls._make(calls) for calls in values["calls"]],
        position=values["position"],
        groups=list(map(prompt_sampler.from_dict, values.get("groups", ()))),
    )


def _prompt(row: Mapping[str, Any], plain: Prompt) -> Prompt:
    """The prompt that was sampled from: the data's, a variant of it, or one that a shape made."""
    if not row.get("sampled"):
        return plain
    (text, ids), columns = row["sampled"], (row["variant"] or {"columns": {}})["columns"]
    return dataclasses.replace(plain, row={**plain.row, **columns}, text=text, ids=tuple(ids))


def _rollout(row: Mapping[str, Any], prompt: Prompt) -> Rollout:
    lists = {
        "segments": tuple(map(_segment, row["segments"])),
        "turns": tuple(map(_turn, row["turns"])),
        "part_ends": tuple(row["part_ends"]),
        "against": tuple(row["against"]),
        "turn_rewards": tuple(row["turn_rewards"]),
        "turn_scores": {name: tuple(scores) for name, scores in row["turn_scores"].items()},
    }
    kept = {name: value for name, value in row.items() if name != "sampled"}
    return Rollout(**{**kept, "prompt": prompt, **lists, **_variant_fields(row)})


def _variant_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a variant has set; a checkpoint that knew none lacks them."""
    variant, ids = row.get("variant"), row.get("loss_ids")
    return {
        "variant": None if variant is None else Variant(**{**variant, "begin": tuple(variant["begin"])}),
        "loss_ids": None if ids is None else tuple(ids),
    }


def _turn(values: Mapping[str, Any]) -> Turn:
    return Turn(**{**values, "calls": tuple(ToolCall(**call) for call in values["calls"])})


def _segment(values: Mapping[str, Any]) -> Segment:
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Segment(**fields)
