"""The runs under a folder: what they are, how they stand, notes on them, and their removal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, did_you_mean
from posttrain.report.curves import Curves
from posttrain.run import status
from posttrain.run.atomic_io import explain_write_errors, read_json, write_text
from posttrain.run.directory import is_locked
from posttrain.run.resolved_recipe import flatten

NOTE = "note.txt"
HEADLINES = ("accuracy", "reward", "eval/accuracy", "loss")  # the first that a run has is its number in a list


@dataclass(frozen=True)
class RunRow:
    """A run as a list shows it. stage: `sweep of STAGE` for the runs of a sweep together. values: flat values of its
    recipe. when: its newest change, seconds since 1970."""

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


def find_runs(folder: Path, *, inner: bool = False) -> Iterator[Path]:
    """Run directories at and under `folder`, in the order of their names. inner: also the stages of pipelines."""
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
    """Whether a run directory is one of `posttrain sweep` or `merge --sweep`: it is no pipeline, has no steps of its
    own, and holds other runs."""
    values = read_json(run / "resolved.json")
    if values is None or "stages" in values or (run / "metrics.jsonl").exists():
        return False
    return any(one != run for one in find_runs(run, inner=True))


def describe(run: Path) -> RunRow:
    """What a list says of a run."""
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
        note=_note(run),
        values=flatten(values),
    )


def matches(row: RunRow, words: Sequence[str]) -> bool:
    """Whether all words fit. KEY=VALUE is a value of the recipe; others stand in path, stage, state, method or note."""
    text = " ".join((str(row.path), row.stage, row.state, str(row.values.get("algorithm") or ""), row.note)).lower()
    for word in words:
        key, equals, value = word.partition("=")
        if equals and str(row.values.get(key)).lower() != value.lower():
            return False
        if not equals and word.lower() not in text:
            return False
    return True


def unknown_filters(rows: Sequence[RunRow], words: Sequence[str]) -> list[str]:
    """What is told of each KEY=VALUE among the words whose key none of the runs has, with the nearest key."""
    known = {key for row in rows for key in row.values}
    typed = [key for key, equals, _ in (word.partition("=") for word in words) if equals and key not in known]
    return [f"--filter: no recipe of these runs has the key {key}. {did_you_mean(key, known)}".strip() for key in typed]


def write_note(run: Path, text: str) -> None:
    """Keep a note on a run; an empty text removes it. Raises UserError for what is no run directory."""
    _check_run(run)
    if text.strip():
        write_text(run / NOTE, text.strip() + "\n")
    else:
        (run / NOTE).unlink(missing_ok=True)


def check_removable(run: Path) -> None:
    """Raises UserError for what is no run directory, is a link, or is in use by a process."""
    _check_run(run)
    if run.is_symlink():
        raise UserError(f"{run} is a link; only run directories themselves are removed", hint=f"it is {run.resolve()}")
    for inner in find_runs(run, inner=True):
        if is_locked(inner):
            raise UserError(f"a process is working in {inner}", hint="stop it first")


def size_of(run: Path) -> int:
    """Bytes of all files under a run directory."""
    return sum((Path(folder) / name).lstat().st_size for folder, _, names in os.walk(run) for name in names)


def remove(run: Path) -> None:
    """Remove a run directory and all that it holds, after the checks of `check_removable`."""
    check_removable(run)
    with explain_write_errors(run):
        shutil.rmtree(run)


def _check_run(run: Path) -> None:
    if not (run / "resolved.json").is_file():
        raise UserError(
            f"{run} is no run directory: it has no resolved.json", hint="`posttrain runs` lists those under runs/"
        )


def _note(run: Path) -> str:
    path = run / NOTE
    return " ".join(path.read_text(encoding="utf-8").split()) if path.is_file() else ""
