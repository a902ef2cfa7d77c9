"""The recipe in a run directory (resolved.json): its values, and which of them may change on resume."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain import terminal
from posttrain.errors import UserError
from posttrain.path_resolution import split_function
from posttrain.renamed_keys import current_key
from posttrain.run.atomic_io import read_json
from posttrain.run.fingerprint import Fact, differences

# What may change on resume: how long the run continues and what it keeps, never what it computes. A pipeline's
# stages are compared one by one, each with its own directory.
MAY_CHANGE = {
    "run.output",
    "run.steps",
    "run.epochs",
    "run.max_minutes",
    "run.save_every",
    "run.keep_checkpoints",
    "run.keep_rollouts",
    "run.log_every",
    "run.max_idle_steps",
    "run.hang_minutes",
    "model.shard",
    "model.parallel",
    "rollout.vllm.server",  # the samples do not depend on where servers are
    "track",
}
MAY_CHANGE_IN_PIPELINE = {"parallel", "seeds", "table", "stages", "defaults"}


def refuse_other_recipe(
    path: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    may_change: set[str] | None = None,
    inputs: Mapping[str, Fact] | None = None,
) -> None:
    """Raise UserError if a value differs from before and is not in `may_change` (default: `_may_change`).

    inputs: files that the recipe names now, by key. A model or file may have moved; then a note is printed.
    """
    may_change = _may_change(now) if may_change is None else may_change
    differ = differing_values(before, now, may_change)
    known = _read_inputs(path) or {}
    for key, (old, new) in list(differ.items()):
        if inputs and key in known and key in inputs and _is_moved(key, old, new, known[key], inputs[key]):
            terminal.note(f"{key} was {old}, is {new}: the files are the same")
            del differ[key]
    if not differ:
        return
    again = f"remove its directory to run the stage again (rm -r {shlex.quote(str(path))}), " if _is_stage(path) else ""
    hint = f"undo the change, {again}or start a new run with another --output"
    if any(key in known or key.endswith("model.path") for key in differ):
        hint += (
            "; what has moved may be named at its new place if its files are the same as at the start, or be linked at "
            "its old place: ln -s NEW OLD"
        )
    raise UserError(
        f"the run in {path} was made with another recipe: {'; '.join(describe_differences(differ))}",
        allowed=f"only these may change: {', '.join(sorted(may_change))}",
        hint=hint,
    )


def _is_stage(path: Path) -> bool:
    """Return whether a run directory is that of a stage (`seed-0/NAME`) of a pipeline's run."""
    return (read_json(path.parent.parent / "resolved.json") or {}).get("stage") == "pipeline"


def _is_moved(key: str, old: Any, new: Any, before: Fact, now: Fact) -> bool:
    """Return whether two values of a key are paths of the same files. before, now: the files.

    A function may be another one of the same file. The name of a data file, without its folder, is part of its rows'
    ids.
    """
    if before.compared != now.compared or any(split_function(str(value)) for value in (old, new)):
        return False
    return not key.endswith("source") or Path(old).name == Path(new).name


def differing_values(
    before: Mapping[str, Any], now: Mapping[str, Any], may_change: set[str] | None = None
) -> dict[str, tuple[Any, Any]]:
    """Return each value that differs and may not change (default of `may_change`: `_may_change`), by key, as (before,
    now)."""
    may_change = _may_change(now) if may_change is None else may_change
    old = {current_key(key): value for key, value in flatten(before).items()}
    new = flatten(json.loads(json.dumps(now)))
    pairs = {key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and not _is_under(key, may_change)}


def describe_differences(differ: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return `KEY was A, is B` for each value."""
    return [f"{key} was {old!r}, is {new!r}" for key, (old, new) in differ.items()]


def _may_change(now: Mapping[str, Any]) -> set[str]:
    """Return the keys of a recipe that may change when its run is resumed."""
    return MAY_CHANGE | (MAY_CHANGE_IN_PIPELINE if now.get("stage") == "pipeline" else set())


def refuse_other_inputs(path: Path, now: Mapping[str, Fact] | None, allow_changed: bool) -> None:
    """Raise UserError if files that the recipe names have changed since the run was last started. With `allow_changed`,
    print a note instead. Files of arguments and scripts of tasks that the earlier start did not hash (older versions
    did not) are not compared.
    """
    before = _read_inputs(path)
    if before is None or now is None:
        return
    new = {key for key, fact in now.items() if key not in before and (".params." in key or "task:" in fact.shown)}
    differ = differences(before, {key: fact for key, fact in now.items() if key not in new})
    changes = [f"{key} was {old.shown}, is {new.shown}" for key, (old, new) in differ.items()]
    if changes and not allow_changed:
        raise UserError(
            f"files have changed since the run in {path} was last started",
            allowed="\n  ".join(changes),
            hint="put them back, start a new run with another --output, or go on with these: --resume --allow-changed",
        )
    for line in changes:
        terminal.note(f"continues with a changed file: {line}")


def _read_inputs(path: Path) -> dict[str, Fact] | None:
    """Return the files that the recipe of a run named at its last start, by key; None if they were not hashed."""
    found = read_json(path / "inputs.json")
    return None if found is None else {key: Fact(**fact) for key, fact in found.items()}


def read_resolved(path: Path, stage: str) -> dict[str, Any]:
    """Return the values of a run of that stage. Raises UserError, with what `path` is instead."""
    if not path.is_dir():
        what = f"{path} is a file, not a run directory" if path.exists() else f"there is no directory {path}"
        raise UserError(
            what, hint=f"name the directory of an `{stage}` run: runs/RECIPE/TIME-HASH, or what --output said"
        )
    found = read_json(path / "resolved.json")
    if found is None:
        hint = f"name the directory of an `{stage}` run, which holds that file"
        raise UserError(f"{path} is not a run directory: it has no resolved.json", hint=hint)
    if found.get("stage") != stage:
        inside = (p.parent for p in sorted(path.glob("seed-*/*/resolved.json")) if read_json(p).get("stage") == stage)
        better = next(inside, None)
        hint = f"name its stage: {shlex.quote(str(better))}" if better else f"name the directory of an `{stage}` run"
        raise UserError(f"{path} is a run of stage {found.get('stage')}, not of {stage}", hint=hint)
    return {current_key(key): value for key, value in found.items()}


def read_model_section(path: Path) -> dict[str, Any]:
    """Return the section `model` of a run's recipe; {} if it has none, or the directory is not a run."""
    return (read_json(path / "resolved.json") or {}).get("model") or {}


def _is_under(key: str, allowed: set[str]) -> bool:
    return any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in allowed)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested values as `{"rewards[0].weight": 1.0}`; empty mappings and lists stay as leaves."""
    if isinstance(value, Mapping) and value:
        pairs = [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)) and value:
        pairs = [(f"{prefix}[{number}]", item) for number, item in enumerate(value)]
    else:
        return {prefix: value}
    return {name: leaf for key, item in pairs for name, leaf in flatten(item, key).items()}
