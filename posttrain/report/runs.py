"""Runs under a folder: search, description, filters, notes and removal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, did_you_mean
from posttrain.report.curves import Curves
from posttrain.run import status
from posttrain.run.atomic_io import explain_write_errors, read_json, write_text
from posttrain.run.lock import describe_holder, is_locked
from posttrain.run.resolved_recipe import flatten

NOTE = "note.txt"
HEADLINES = ("accuracy", "reward", "eval/accuracy", "loss")  # the first available one is shown in run lists


@dataclass(frozen=True)
class RunRow:
    """One run in a list.

    stage: `sweep of STAGE` for a sweep. values: flat values of its recipe. metrics: names in its metrics.jsonl. when:
    time of its newest change, seconds since 1970.
    """

    path: Path
    stage: str
    state: str
    message: str
    step: int
    steps: int | None
    headline: tuple[str, float] | None
    when: float
    note: str
    values: dict[str, Any]
    metrics: frozenset[str]


def find_runs(folder: Path, *, inner: bool = False) -> Iterator[Path]:
    """Yield run directories at and under `folder`, sorted by name. inner: also the stages of pipelines."""
    if (folder / "resolved.json").is_file():
        yield folder
        if not inner:
            return
    try:
        entries = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in entries:
        if not name.startswith(".") and name not in ("checkpoints", "final", "best", "logs", "rollouts", "track"):
            yield from find_runs(folder / name, inner=inner)


def is_sweep(run: Path) -> bool:
    """Return whether a run directory is a sweep (`posttrain sweep` or `merge --sweep`).

    A sweep is not a pipeline, has no steps and contains other runs.
    """
    values = read_json(run / "resolved.json")
    if values is None or "stages" in values or (run / "metrics.jsonl").exists():
        return False
    return any(inner_run != run for inner_run in find_runs(run, inner=True))


def describe(run: Path) -> RunRow:
    """Return the list entry of a run."""
    values = read_json(run / "resolved.json") or {}
    stage = str(values.get("stage", "?"))
    summary = read_json(run / "summary.json") or {}
    curves = Curves(run / "metrics.jsonl")
    curves.read_more()
    found = status.read(run)
    newest = ((name, summary.get(name, curves.recent(name, steps=1))) for name in HEADLINES)
    headline = next(((name, value) for name, value in newest if value is not None), None)
    signs = (run / name for name in ("summary.json", "metrics.jsonl", "status.json", "resolved.json"))
    return RunRow(
        path=run,
        stage=f"sweep of {stage}" if is_sweep(run) else stage,
        state=found.state,
        message=found.message,
        step=int(curves.last.get("step", 0)),
        steps=found.steps or (values.get("run") or {}).get("steps"),
        headline=headline,
        when=max((sign.stat().st_mtime for sign in signs if sign.exists()), default=0.0),
        note=_read_note(run),
        values=flatten(values),
        metrics=frozenset(curves.points),
    )


_COMPARISON = re.compile(r"([\w.\[\]-]+) *(>=|<=|!=|==|>|<)")


def matches(row: RunRow, words: Sequence[str]) -> bool:
    """Return whether all filter words match.

    KEY=VALUE compares a recipe value, numbers as numbers; other words must occur in path, stage, state, method or note.
    """
    text = " ".join((str(row.path), row.stage, row.state, str(row.values.get("algorithm") or ""), row.note)).lower()
    for word in words:
        key, equals, value = word.partition("=")
        if equals and not _equals(row.values.get(_as_flat_key(key)), value):
            return False
        if not equals and word.lower() not in text:
            return False
    return True


def _equals(known: Any, typed: str) -> bool:
    """Return whether a recipe value is the one that was typed: `1e-4` is 0.0001, `null` None, `true` True."""
    if isinstance(known, int | float) and not isinstance(known, bool):
        with contextlib.suppress(ValueError):
            return float(typed) == known
    return ("null" if known is None else str(known)).lower() == typed.lower().replace("none", "null")


def _as_flat_key(key: str) -> str:
    """Return a key as `flatten` writes it: `rewards.0.use` -> `rewards[0].use`."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key)


def check_filters(rows: Sequence[RunRow], words: Sequence[str]) -> None:
    """Raise UserError for a comparison other than `=`, and for KEY=VALUE whose key no recipe of the runs has."""
    known = {key for row in rows for key in row.values}
    allowed = "allowed: KEY=VALUE of a recipe value (loss.use=gspo), or TEXT in path, stage, state, method or note"
    for word in words:
        key, equals, _ = word.partition("=")
        if other := _COMPARISON.match(word):
            raise UserError(f"--filter {word}: `{other[2]}` is not supported, only `=`", allowed=allowed)
        flat = _as_flat_key(key)
        if equals and flat not in known:
            below = sorted(one for one in known if one.startswith((f"{flat}.", f"{flat}[")))
            hint = f"`{key}` is a section with {', '.join(below[:6])}" if below else did_you_mean(key, known)
            if not hint and any(key in row.metrics for row in rows):
                hint = f"`{key}` is a metric, and runs are not filtered by metrics; `posttrain diff A B` compares them"
            raise UserError(f"--filter {word}: no recipe of these runs has the key `{key}`", allowed=allowed, hint=hint)


def write_note(run: Path, text: str) -> None:
    """Write the note of a run; an empty text removes it. Raises UserError for a path that is not a run directory."""
    _check_run(run)
    if text.strip():
        write_text(run / NOTE, text.strip() + "\n")
    else:
        (run / NOTE).unlink(missing_ok=True)


def check_removable(run: Path) -> None:
    """Raise UserError for a path that is not a run directory, is a link, or is in use by a process."""
    _check_run(run)
    if run.is_symlink():
        raise UserError(f"{run} is a link; only run directories themselves are removed", hint=f"it is {run.resolve()}")
    for inner in find_runs(run, inner=True):
        if is_locked(inner):
            holder, advice = describe_holder(inner)
            raise UserError(f"another process is working in {inner}: {holder}", hint=advice)


def size_of(run: Path) -> int:
    """Return the total size in bytes of all files under a run directory."""
    return sum((Path(folder) / name).lstat().st_size for folder, _, names in os.walk(run) for name in names)


def remove(run: Path) -> None:
    """Remove a run directory with all its contents, after the checks of `check_removable`."""
    check_removable(run)
    with explain_write_errors(run):
        shutil.rmtree(run)


def _check_run(run: Path) -> None:
    if not (run / "resolved.json").is_file():
        raise UserError(
            f"{run} is not a run directory: it has no resolved.json", hint="`posttrain runs` lists those under runs/"
        )


def _read_note(run: Path) -> str:
    path = run / NOTE
    return " ".join(path.read_text(encoding="utf-8").split()) if path.is_file() else ""
