"""Data of a run directory that a page shows: values, status, curves and some samples.

Reading stays cheap for long runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, nearest
from posttrain.report.curves import Curves
from posttrain.report.runs import find_runs, is_sweep
from posttrain.run import status
from posttrain.run.atomic_io import read_json

HEAD_BYTES, TAIL_BYTES = 1 << 18, 1 << 20  # bytes read at the start and end of a long samples.jsonl
MAX_NAMES = 6  # runs listed in a hint
MAX_STEPS = 8  # steps with samples on a page
SAMPLES_PER_STEP = 4  # samples shown per step
MAX_CHARACTERS = 6000  # characters shown per text


class RunView:
    """Data of one run directory for a page. `refresh` reads everything that may have changed.

    stages: the runs of a pipeline's stages, by `seed-N/STAGE`; empty for other runs. runs: the runs of a sweep, by
    relative folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().name
        self.resolved: dict[str, Any] = {}
        self.env: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.curves = Curves(path / "metrics.jsonl")
        self.samples: list[dict[str, Any]] = []
        self.stages: dict[str, RunView] = {}
        self.runs: dict[str, RunView] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read status, summary, new metric rows and samples again, also those of inner runs (stages, sweep runs)."""
        self.resolved = read_json(self.path / "resolved.json") or {}
        self.env = read_json(self.path / "env.json") or {}
        self.summary = read_json(self.path / "summary.json") or {}
        self.status = status.read(self.path)
        self.curves.read_more()
        self.samples = select_samples(read_ends(self.path / "samples.jsonl"))
        for place in sorted(self.path.glob("seed-*/*/resolved.json")):
            self._refresh_inner(place.parent, self.stages)
        if is_sweep(self.path):
            for run in find_runs(self.path, inner=True):
                if run != self.path:
                    self._refresh_inner(run, self.runs)

    def _refresh_inner(self, run: Path, views: dict[str, RunView]) -> None:
        """Read or refresh a run inside this run."""
        name = run.relative_to(self.path).as_posix()
        if name in views:
            views[name].refresh()
        else:
            views[name] = RunView(run)

    @property
    def stage(self) -> str:
        return str(self.resolved.get("stage", "run"))

    @property
    def steps(self) -> int | None:
        """Planned number of steps; None if unknown."""
        return self.status.steps or (self.resolved.get("run") or {}).get("steps")

    @property
    def last_step(self) -> int:
        """The newest step with metrics."""
        return int(self.curves.last.get("step", 0))

    @property
    def group_size(self) -> int | None:
        """Completions per prompt, in rl."""
        return (self.resolved.get("rollout") or {}).get("group_size")

    def commit(self) -> str:
        git = self.env.get("git") or {}
        return f"{git['commit'][:12]}{' with changes' if git.get('diff') else ''}" if git else ""


def open_runs(paths: Sequence[Path]) -> list[RunView]:
    """Open the runs in these directories. Raises UserError for a path that is not a run directory."""
    for path in paths:
        if not (path / "resolved.json").is_file():
            what = "is not a run directory: it has no resolved.json" if path.is_dir() else "is not a directory"
            above = next((parent for parent in path.parents if (parent / "resolved.json").is_file()), None)
            beside = [] if path.exists() else [file.parent.name for file in path.parent.glob("*/resolved.json")]
            near = above or ((name := nearest(path.name, beside)) and path.with_name(name))
            hint = f"did you mean {near}?" if near else "`posttrain runs` lists the runs under runs/"
            if beside and not near:
                more = ", ..." if len(beside) > MAX_NAMES else ""
                hint = f"{path.parent} has {', '.join(sorted(beside)[:MAX_NAMES])}{more}"
            raise UserError(f"{path} {what}", hint=hint)
    views = [RunView(path) for path in paths]
    names = [view.name for view in views]
    if len(set(names)) < len(names):  # e.g. the `rl` stages of two pipelines
        for view in views:
            view.name = str(view.path)
    return views


def read_ends(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file; of a long file, those at its start and end. Broken lines are skipped."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return []
    with path.open("rb") as file:
        if size <= HEAD_BYTES + TAIL_BYTES:
            lines = file.read().splitlines()
        else:
            head = file.read(HEAD_BYTES).splitlines()[:-1]
            file.seek(size - TAIL_BYTES)
            lines = head + file.read().splitlines()[1:]
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def select_samples(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Select samples of the first step, the last step and some steps between; long texts are shortened."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        by_step.setdefault(int(record.get("step") or 0), []).append(record)
    steps = sorted(by_step)
    last = len(steps) - 1
    picked = steps if len(steps) <= MAX_STEPS else [steps[round(i * last / (MAX_STEPS - 1))] for i in range(MAX_STEPS)]
    return [
        {**record, "step": step, **_shorten(record)} for step in picked for record in by_step[step][:SAMPLES_PER_STEP]
    ]


def _shorten(record: Mapping[str, Any]) -> dict[str, str]:
    """Return prompt and completion as text; long texts are cut to their start and end, where the answer is."""
    texts = {}
    for key in ("prompt", "completion"):
        text = str(record.get(key) or "")
        if len(text) > MAX_CHARACTERS:
            left = len(text) - MAX_CHARACTERS
            half = MAX_CHARACTERS // 2
            text = f"{text[:half]}\n[... {left} characters more in samples.jsonl ...]\n{text[-half:]}"
        texts[key] = text
    return texts
