"""State of a run: status.json, and the lock of its directory.

A killed process cannot write its end, so its status stays `running`; the lock, which ended with the process, shows that
it is not.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import Interrupted, PosttrainError
from posttrain.run.atomic_io import write_json
from posttrain.run.directory import RunDirectory
from posttrain.run.lock import is_locked

STATUS = "status.json"
State = Literal["running", "finished", "stopped", "failed", "killed"]


@dataclass(frozen=True)
class Status:
    """State of a run. state: `stopped` by a signal that it handled (Ctrl-C), `failed` with an error, `killed` without a
    message."""

    state: State
    message: str = ""  # reason of a stop or failure
    attempt: int = 1
    process: int = 0
    host: str = ""
    started: float | None = None  # start of this attempt, seconds since 1970
    ended: float | None = None
    steps: int | None = None  # planned number of steps; of a recipe in epochs known once its rows are read


def begin(run: Path, attempt: int) -> None:
    """Record that this process has begun to work in the run directory."""
    status = Status("running", "", attempt, os.getpid(), socket.gethostname(), time.time())
    write_json(run / STATUS, asdict(status))


def note_steps(directory: RunDirectory, steps: int) -> None:
    """Record the planned number of steps. Of several processes, only the one that has the directory open writes."""
    if not directory.follows and (before := _read_status(directory.path)) is not None:
        write_json(directory.path / STATUS, {**before, "steps": steps})


def end(run: Path, error: BaseException | None = None) -> None:
    """Record how this attempt ended. error: the exception that ended it; None for a finished run."""
    before = _read_status(run) or {}
    state: State = "finished"
    if error is not None:
        state = "stopped" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
    values = {**before, "state": state, "message": _message(error, run), "ended": time.time()}
    write_json(run / STATUS, values)


def read(run: Path) -> Status:
    """Return the state of the run in this directory. Without status.json (older versions) it is derived from lock and
    summary."""
    stored = _read_status(run)
    if stored is None:
        if is_locked(run):
            return Status("running")
        done = (run / "summary.json").exists()
        return Status("finished") if done else Status("stopped", "it has no summary")
    status = Status(**{name: value for name, value in stored.items() if name in Status.__dataclass_fields__})
    if status.state == "running" and not is_locked(run):
        status = Status(**{**asdict(status), **_ended_without_status(run, status)})
    return status


def _ended_without_status(run: Path, status: Status) -> dict[str, Any]:
    """Return state and message of a run whose process has ended without writing a status: ended by the watchdog, or
    killed."""
    for path in sorted((run / "logs" / f"attempt_{status.attempt}").glob("hang-rank*.txt")):
        with path.open(encoding="utf-8", errors="replace") as file:
            return {"state": "failed", "message": f"{file.readline().strip()} (stacks: {path})"}
    return {"state": "killed", "message": f"process {status.process} on {status.host} ended without a message"}


def _message(error: BaseException | None, run: Path) -> str:
    if isinstance(error, PosttrainError):
        first = error.problems[0]
        elsewhere = first.where and first.where not in first.what and Path(first.where) != run
        return f"{first.where}  {first.what}" if elsewhere else first.what
    if error is None or isinstance(error, KeyboardInterrupt):
        return "" if error is None else "interrupted"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _read_status(run: Path) -> dict[str, Any] | None:
    """Return the content of status.json; None if it cannot be read."""
    try:
        found = json.loads((run / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "state" in found else None
