"""Conversion of trackers and of evaluation during training from other tools."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from posttrain.path_resolution import ROW_FILES
from posttrain.recipe.foreign.draft import Draft, Leaf
from posttrain.recipe.foreign.source import Given

TRACKERS = ("wandb", "tensorboard", "trackio", "mlflow")
_NO_TRACKER = ("none", "console", "all")  # all: every installed tracker
_EVALUATES = ("rl", "sft", "dpo")


def _trackers(draft: Draft, given: Given, _: str) -> None:
    """Convert a tracker name or a list of names; the project has its own key."""
    if draft.stage not in (*_EVALUATES, "reward_model"):
        draft.leave(given, f"stage {draft.stage} has no trackers")
        return
    project = draft.get("wandb_project", "trackio_project_name", "trainer.project_name")
    for name in given.value if isinstance(given.value, list) else [given.value]:
        if name in TRACKERS:
            _track(draft, str(name), project, draft.origin(given.key))
        elif name not in _NO_TRACKER:
            draft.leave(given, f"{name} is not one of the trackers {', '.join(TRACKERS)}")


def _tracker_project(draft: Draft, given: Given, _: str) -> None:
    """axolotl: convert a project name, which enables the tracker."""
    if not draft.get("report_to"):
        _track(draft, given.key.partition("_")[0], given.value, draft.origin(given.key))


def _tracker_on(draft: Draft, given: Given, _: str) -> None:
    name = next((tracker for tracker in TRACKERS if tracker in given.key), "")
    if given.value and name:
        _track(draft, name, draft.get("wandb_project", "logger.wandb.project"), draft.origin(given.key))


def _track(draft: Draft, name: str, project: Any, origin: str) -> None:
    entries = draft.values.setdefault("track", [])
    if all(entry["use"].value != name for entry in entries):
        entries.append({"use": Leaf(name, origin), **({"project": Leaf(str(project), "")} if project else {})})


def _eval_every(draft: Draft, given: Given, _: str) -> None:
    """Convert the number of steps between evaluations, if the file also names the data and enables evaluation."""
    data = _held_out(draft)
    switched = draft.get("eval_strategy", "evaluation_strategy", default="no")
    if not isinstance(given.value, int) or given.value < 1 or switched != "steps":
        draft.leave(given, "no evaluation by steps is switched on")
    elif draft.stage not in _EVALUATES or data is None:
        draft.leave(given, "write `eval: {every: 50, data: {source: held_out.jsonl}}`: the file names no data for it")
    else:
        updates = draft.updates_a_step() if given.key == "eval_steps" else 1  # verl and OpenRLHF count steps
        origin = draft.origin(given.key)
        every = math.ceil(given.value / updates)
        draft.set_default("eval.every", every, f"{origin}; {updates} updates a step" if updates > 1 else origin)
        for key, value in data.items():
            draft.set_default(f"eval.data.{key}", value, f"what {given.key} measures")
        if draft.stage == "rl":
            draft.set_default("eval.n", 1, "one completion a prompt")


def _held_out(draft: Draft) -> dict[str, Any] | None:
    """Return the source of the evaluation rows: a named data set, or another split of the training data (TRL)."""
    named = draft.get("eval_dataset", "val_dataset", "data.val_files", "eval.dataset")
    if isinstance(named, list) and named:
        if len(named) > 1:
            draft.note(f"`eval.data` has one source, {named[0]}; {', '.join(map(str, named[1:]))} is not evaluated")
        named = named[0]
    if isinstance(named, str) and named:
        source, _hash, size = named.partition("#")
        return {"source": source, **({"size": int(size)} if size.isdigit() else {})}
    if any(setting.key == "eval_dataset" for setting, _ in draft.foreign.unread):
        return None  # made by code, which may not be the other split
    if draft.foreign.table.name in ("trl", "open_r1") and isinstance(name := draft.get("dataset_name"), str):
        if name.endswith(ROW_FILES):
            return None  # a file has no splits, so the evaluation would run on training rows
        config, split = draft.get("dataset_config"), draft.get("dataset_test_split", default="test")
        return {"source": name, **({"config": config} if config else {}), "split": split}
    return None


def _held_out_data(draft: Draft, given: Given, _: str) -> None:
    """Report evaluation data without a number of steps; otherwise `_eval_every` has read it."""
    steps = ("eval_steps", "trainer.test_freq", "eval.steps")
    values = (draft.foreign.given[key].value for key in steps if key in draft.foreign.given)
    if not any(isinstance(value, int) and value > 0 for value in values):
        draft.leave(given, "write `eval: {every: 50, data: {source: ...}}` to evaluate while training")


def _share_held_out(draft: Draft, given: Given, _: str) -> None:
    found = re.fullmatch(r"[\d.]+", str(given.value))
    what = "a share" if found and float(given.value) < 1 else "a number"
    draft.leave(
        given, f"{what} of the rows for evaluation: divide the data, and write `eval: {{every: 50, data: ...}}`"
    )


TRANSFORMS: dict[str, Callable[[Draft, Given, str], None]] = {
    "eval_every": _eval_every,
    "held_out_data": _held_out_data,
    "share_held_out": _share_held_out,
    "tracker_on": _tracker_on,
    "tracker_project": _tracker_project,
    "trackers": _trackers,
}
