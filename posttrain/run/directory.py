"""The run directory: readable with `tail` and `jq`, written before a model loads, never reused by accident.

recipe.yaml     the recipe as given            metrics.jsonl   one object a step
resolved.json   every value in force           samples.jsonl   some completions with their scores
env.json        versions, hardware, commit     checkpoints/    step-00000010, ...
inputs.json     hashes of the files it names   final/          the trained model
summary.json    the result, written at the end status.json     running, or how it ended
report.html     curves and samples, rewritten as the run goes on
logs/attempt_n  recipe, values and environment of each start
rollouts/       numbers of the newest rollouts, which `posttrain compare-methods` reads (rl)
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from posttrain import terminal
from posttrain.errors import RunError, UserError, nearest
from posttrain.redact import redacted_text, without_secrets
from posttrain.run import checkpoints, environment
from posttrain.run.atomic_io import explain_write_errors, read_json, to_text, write_text
from posttrain.run.fingerprint import Fact
from posttrain.run.lock import LOCK, take_lock
from posttrain.run.metrics import MetricsLog
from posttrain.run.resolved_recipe import (
    describe_differences,
    differing_values,
    refuse_other_inputs,
    refuse_other_recipe,
)
from posttrain.run.samples import SamplesLog

# Files that a start leaves if it dies before it writes resolved.json.
_EARLY_FILES = {LOCK, "recipe.yaml", "env.json", "inputs.json", "logs"}
OnRows = Callable[[Sequence[Mapping[str, Any]]], None]


class RunDirectory:
    """An open run directory, locked against other processes until `close`, the end of `with`, or the process's end.

    Of several processes of one run, the first opens it; the others `follow`: they know its path and write nothing.

    on_metrics, on_samples: functions that get the rows of metrics.jsonl and samples.jsonl right after they are written.
    They must not raise.
    """

    def __init__(self, path: Path, lock: IO[str] | None, attempt: int) -> None:
        self.path = path
        self.attempt = attempt  # 1 at the first start, incremented at every resume
        self.checkpoints = path / "checkpoints"
        self.final = path / "final"
        self.logs = path / "logs" / f"attempt_{attempt}"
        self.on_metrics: list[OnRows] = []
        self.on_samples: list[OnRows] = []
        self._lock = lock

    @classmethod
    def open(
        cls,
        output: Path | None,
        *,
        name: str,
        text: str,
        resolved: Mapping[str, Any],
        resume: bool = False,
        inputs: Mapping[str, Fact] | None = None,
        allow_changed: bool = False,
    ) -> RunDirectory:
        """Create or reopen a run directory, and write recipe, values, environment and inputs.

        output: its path; None = `runs/NAME/TIME-HASH`, with `resume` the newest run of that name. text: the recipe
        file. inputs: files that the recipe names, by key. On resume they must be unchanged, unless `allow_changed`
        (then a note lists the changed ones). Raises UserError for a directory that is not empty without `resume`, and
        for another recipe on resume; RunError for a directory that another process has open. `resume` with a directory
        that does not exist starts from the beginning, so that a job can be queued repeatedly, unless a run of this very
        recipe has a similar name (UserError).
        """
        text, resolved = redacted_text(text), without_secrets(resolved)
        path = output if output is not None else default_path(name, resolved, resume=resume)
        with _raise_user_error(path):
            refuse_unusable(path, resume)
            if resume:
                _refuse_misspelled(path, resolved)
            path.mkdir(parents=True, exist_ok=True)
            lock = take_lock(path)
            try:
                before = read_json(path / "resolved.json")
                if before is not None:
                    refuse_other_recipe(path, before, resolved, inputs=inputs)
                    _refuse_fewer_steps(path, resolved)
                    refuse_other_inputs(path, inputs, allow_changed)
                elif resume:
                    terminal.note(f"nothing to resume in {path}: starting from the beginning")
                    for line in _other_runs(path, resolved):
                        terminal.note(line)
                directory = cls(path, lock, _attempts(path) + 1)
                directory._write_origin(text, resolved, inputs)
            except BaseException:
                lock.close()
                raise
        return directory

    @classmethod
    def follow(cls, path: Path, attempt: int) -> RunDirectory:
        """Return the directory that another process of this run has open, for reading; its logs are discarded."""
        return cls(path, None, attempt)

    @property
    def follows(self) -> bool:
        return self._lock is None

    def _write_origin(self, text: str, resolved: Mapping[str, Any], inputs: Mapping[str, Fact] | None) -> None:
        """Write recipe.yaml, env.json, inputs.json and resolved.json of this attempt, at the top and in
        logs/attempt_n."""
        files = {"recipe.yaml": text, "env.json": to_text(environment.describe())}
        if inputs is not None:
            files["inputs.json"] = to_text({key: asdict(fact) for key, fact in sorted(inputs.items())})
        files["resolved.json"] = to_text(resolved)
        self.logs.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (self.logs / name).write_text(content, encoding="utf-8")
        for name, content in files.items():  # resolved.json is last: it marks a run as started
            write_text(self.path / name, content)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result of a finished run; None while the run is not finished."""
        found = read_json(self.path / "summary.json")
        return found if found is None else dict(found)

    def metrics(self, resume_after: int | None) -> MetricsLog:
        """Return the open metrics.jsonl, truncated to the step after which training resumes (None: to nothing)."""
        if self.follows:
            return MetricsLog.without_file()
        with explain_write_errors(self.path):
            return MetricsLog(self.path / "metrics.jsonl", resume_after, self.logs, self.on_metrics)

    def samples(self, resume_after: int | None) -> SamplesLog:
        """Return the open samples.jsonl, truncated like the metrics."""
        if self.follows:
            return SamplesLog.without_file()
        with explain_write_errors(self.path):
            return SamplesLog(self.path / "samples.jsonl", resume_after, self.logs, self.on_samples)

    def close(self) -> None:
        """Release the lock, so that other processes can open the directory."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def default_path(name: str, resolved: Mapping[str, Any], *, resume: bool) -> Path:
    """Return a new path `runs/NAME/TIME-HASH`; with `resume` the newest run of that name. Raises UserError if there is
    none."""
    home = Path("runs") / re.sub(r"[^\w.-]+", "-", name)
    if resume:
        runs = sorted(p.parent for p in home.glob("*/resolved.json"))
        if not runs:
            raise UserError(f"nothing to resume: no run in {home}", hint="name the run directory with --output")
        return runs[-1]
    digest = hashlib.sha256(json.dumps(without_secrets(resolved), sort_keys=True, default=str).encode()).hexdigest()[:6]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, number = home / f"{stamp}-{digest}", 1
    while path.exists():  # two starts within one second
        number += 1
        path = home / f"{stamp}-{digest}-{number}"
    return path


@contextlib.contextmanager
def _raise_user_error(path: Path) -> Iterator[None]:
    """Turn a RunError for a path where no run directory can be created into a UserError: it is not a failed run."""
    try:
        with explain_write_errors(path):
            yield
    except RunError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        first = error.problems[0]
        where = "" if first.where == str(path) else f" ({first.where})"
        raise UserError(
            f"no run can be written to {path}: {first.what}{where}", hint="name another --output"
        ) from error


def refuse_unusable(path: Path, resume: bool) -> None:
    """Raise UserError for a file, for a folder that is no run, and without `resume` for a directory with a run."""
    if path.exists() and not path.is_dir():
        raise UserError("the output is a file, not a directory", where=str(path), hint="name another --output")
    if path.is_symlink() and not path.exists():
        raise UserError(f"the output is a link that leads nowhere: {path.readlink()}", where=str(path))
    names = {p.name for p in path.iterdir()} if path.is_dir() else set()
    if not resume and LOCK in names:
        take_lock(path).close()  # a running run is neither resumed nor removed
    if not resume and "resolved.json" not in names and names - _EARLY_FILES:
        raise UserError(
            f"the output directory is not empty, and holds no run: {path}",
            allowed=f"it has {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}",
            hint="name another --output",
        )
    if not resume and names - {LOCK}:
        raise UserError(
            f"the output directory holds a run already: {path} ({_describe_last_end(path)})",
            allowed="go on with it: --resume; start elsewhere: --output NEW_NAME; "
            f"start anew: remove it first (rm -r {shlex.quote(str(path))})",
        )
    if resume and "resolved.json" not in names and names - _EARLY_FILES:
        raise UserError(f"not a run directory (it has no resolved.json): {path}", hint="give the directory of a run")


def _describe_last_end(path: Path) -> str:
    """Return how the run in a directory that no process works in has ended: `finished`, `failed: ...`, `killed`."""
    last = read_json(path / "status.json") or {}
    state, message = last.get("state", "ended"), last.get("message")
    if state == "running":
        return f"its process {last.get('process')} on {last.get('host')} was killed"
    return f"{state}: {message}" if message else state


def _refuse_fewer_steps(path: Path, resolved: Mapping[str, Any]) -> None:
    """Raise UserError if a run's newest checkpoint is beyond `run.steps`, before anything is written or loaded."""
    steps, newest = (resolved.get("run") or {}).get("steps"), checkpoints.latest(path / "checkpoints")
    if steps is not None and newest is not None:
        checkpoints.check_steps_left(checkpoints.step_of(newest), steps)


def _refuse_misspelled(path: Path, resolved: Mapping[str, Any]) -> None:
    """Raise UserError if the run to be resumed does not exist and a run of the same recipe has a similar name."""
    if path.exists():
        return
    word, runs = _runs_beside(path)
    while near := nearest(word, runs, alike=0.7):
        found = runs.pop(near)
        if _differing_value(found, resolved) is None:
            raise UserError(
                f"nothing to resume in {path}, and {found} holds a run of this recipe",
                allowed=f"go on with that one: --output {found} --resume; begin another: leave out --resume",
            )


def _other_runs(path: Path, resolved: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes about other runs if `path`, to be resumed, holds none: unfinished runs of this recipe, and a run with
    a similar name and one value that differs."""
    word, runs = _runs_beside(path)
    runs = {name: run for name, run in runs.items() if run != path}
    differs = {name: _differing_value(run, resolved) for name, run in runs.items()}
    unfinished = [
        runs[name] for name, key in differs.items() if key is None and not (runs[name] / "summary.json").exists()
    ]
    if unfinished:
        named = ", ".join(map(str, unfinished))
        yield f"unfinished runs of this recipe: {named}; to go on with one: Ctrl-C, then --output DIR --resume"
    near = nearest(word, [name for name, key in differs.items() if key], alike=0.7)
    if near:
        yield f"{runs[near]} has a similar name and another recipe: {differs[near]}"


def _runs_beside(path: Path) -> tuple[str, dict[str, Path]]:
    """Return the part of a path that may be misspelled, and the runs beside it by the same part of their paths."""
    home = path.parent
    if home.is_dir():
        return path.name, {file.parent.name: file.parent for file in sorted(home.glob("*/resolved.json"))}
    files = sorted(home.parent.glob(f"*/{path.name}/resolved.json"))
    return home.name, {file.parent.parent.name: file.parent for file in files}


def _differing_value(run: Path, now: Mapping[str, Any]) -> str | None:
    """Return the first value of a run's recipe that differs now and may not change; None if it is the same recipe."""
    differ = differing_values(read_json(run / "resolved.json") or {}, now)
    return next(iter(describe_differences(differ)), None)


def _attempts(path: Path) -> int:
    names = [p.name.removeprefix("attempt_") for p in (path / "logs").glob("attempt_*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)
