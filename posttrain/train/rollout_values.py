"""Conversion of a rollout to JSON values, with its prompt's uid in place of the prompt. Floats read back exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from posttrain.batch import (
    CallRecord,
    Node,
    Prompt,
    PromptImages,
    Rollout,
    Segment,
    Stored,
    ToolCall,
    Turn,
    Variant,
    WorkflowCall,
)
from posttrain.images import Image


def rollout_to_dict(r: Rollout) -> dict[str, Any]:
    """Convert a rollout to JSON values, with its prompt's uid."""
    row = {f.name: getattr(r, f.name) for f in dataclasses.fields(r) if f.name != "prompt"}
    images, call = r.prompt.images, r.call  # of images, only the positions: the images themselves are in the data
    positions = images and [list(images.short_ids), images.length]
    sampled = [r.prompt.text, list(r.prompt.ids), r.prompt.adapter, positions]
    return row | {
        "prompt": r.prompt.uid,
        "segments": [dataclasses.asdict(s) for s in r.segments],
        "turns": [dataclasses.asdict(t) for t in r.turns],
        "variant": None if r.variant is None else dataclasses.asdict(r.variant),
        "sampled": sampled if r.variant or r.trajectory is not None else None,
        "stored": None if r.stored is None else dataclasses.asdict(r.stored),
        "call": call and [[list(record) for record in call.calls], call.number, call.compared, call.cut],
    }


def rollout_from_dict(row: Mapping[str, Any], plain: Prompt) -> Rollout:
    """Restore a rollout: the inverse of `rollout_to_dict`. plain: the data's prompt with that uid."""
    stored = row.get("stored")
    lists: dict[str, Any] = {
        "stored": None
        if stored is None
        else Stored(stored["step"], tuple(stored["logps"]), tuple(stored["advantages"])),
        "segments": tuple(map(_segment, row["segments"])),
        "turns": tuple(map(_turn, row["turns"])),
        "part_ends": tuple(row["part_ends"]),
        "nodes": tuple(Node(*node) for node in row.get("nodes", ())),
        "ends": tuple(row.get("ends", ())),
        "against": tuple(row["against"]),
        "turn_rewards": tuple(row["turn_rewards"]),
        "turn_scores": {name: tuple(scores) for name, scores in row["turn_scores"].items()},
    }
    if row.get("call") is not None:
        calls, *others = row["call"]
        lists["call"] = WorkflowCall(tuple(CallRecord(*call) for call in calls), *others)
    fields = {name: value for name, value in row.items() if name != "sampled"}
    return Rollout(**{**fields, "prompt": _prompt(row, plain), **lists, **_variant_fields(row)})


def _prompt(row: Mapping[str, Any], plain: Prompt) -> Prompt:
    """Return the prompt that was sampled from: the data's, a variant of it, or a prompt that a shape made."""
    if not row.get("sampled"):
        return plain
    (text, ids, *more), columns = row["sampled"], (row["variant"] or {"columns": {}})["columns"]
    adapter, positions = [*more, None, None][:2]  # older files have neither; positions: of the prompt's images
    images = None if positions is None else PromptImages(plain.shown, tuple(positions[0]), positions[1])
    row = {**plain.row, **columns}
    return dataclasses.replace(plain, row=row, text=text, ids=tuple(ids), adapter=adapter, images=images)


def _variant_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a variant has set; older checkpoints lack them."""
    variant, ids = row.get("variant"), row.get("loss_ids")
    return {
        "variant": None if variant is None else Variant(**{**variant, "begin": tuple(variant["begin"])}),
        "loss_ids": None if ids is None else tuple(ids),
    }


def _turn(values: Mapping[str, Any]) -> Turn:
    return Turn(**{**values, "calls": tuple(ToolCall(**{**call, "images": ()}) for call in values["calls"])})


def _segment(values: Mapping[str, Any]) -> Segment:
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    if (shown := fields.get("images")) is not None:
        images = tuple(Image(**image) for image in shown["shown"])
        fields["images"] = PromptImages(images, tuple(shown["short_ids"]), shown["length"])
    return Segment(**fields)
