"""Tracker process: sends a run's rows to its trackers during the run and flushes them after its end.

Started as `posttrain track RUN`. It reads metrics.jsonl and samples.jsonl of the run directory. The newest sent steps
are stored in track/NAME.json, so that a resumed run does not send a step twice. A tracker that raises is disabled: this
is reported once, in track.log of this start, and the other trackers continue.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import count_noun
from posttrain.redact import without_secrets
from posttrain.run import status
from posttrain.run.atomic_io import read_json, write_json
from posttrain.run.lock import is_locked
from posttrain.track.backends import TRACKERS, VIEW_COMMANDS, Target, Tracker

POLL_S = 1.0
Note = Callable[[str], None]  # prints a line for the user


class Rows:
    """Incremental reader of a JSON lines file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0  # bytes read so far

    def new(self) -> list[dict[str, Any]]:
        """Return complete rows appended since the last call. A truncated file is read again from the start."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return []
        if size < self._read:
            self._read = 0
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        rows = []
        for line in whole.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # reported when the run is resumed
            if isinstance(row, dict) and type(row.get("step")) is int:
                rows.append(row)
        return rows


class Sender:
    """Connection of one run to one tracker.

    sent: newest steps whose metrics and samples were sent. Rows that earlier starts have sent are skipped.
    """

    def __init__(self, run: Path, settings: Mapping[str, Any], config: Mapping[str, Any], note: Note) -> None:
        self._running = status.read(run).state == "running"
        self.name = str(settings["use"])
        self._file = run / "track" / f"{self.name}.json"
        self._note = note
        self.sent: dict[str, int] = {"metrics": -1, "samples": -1, **(read_json(self._file) or {})}
        self._before = dict(self.sent)
        self._tracker: Tracker | None = None
        self.counts = {"metrics": 0, "samples": 0}  # rows sent by this start
        self._target = target = Target(
            project=settings.get("project") or "posttrain",
            name=settings.get("name") or run.resolve().name,
            key=run_key(run),
            folder=run / "track" / self.name,
            offline=bool(settings.get("offline")),
            config=config,
            resumed=max(self.sent.values()) >= 0,
        )
        self._try(lambda: TRACKERS[self.name](target), starts=True)

    def describe(self) -> str:
        """Return what was sent, and the command or address to view it."""
        rows = f"{count_noun(self.counts['metrics'], 'row')} of metrics, {count_noun(self.counts['samples'], 'sample')}"
        again = ", in addition to those sent before" if max(self._before.values()) >= 0 else ""
        return f"{self.name}: sent {rows}{again}; view it with: {VIEW_COMMANDS[self.name](self._target)}"

    @property
    def works(self) -> bool:
        return self._tracker is not None

    def send(self, metrics: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]) -> None:
        """Send new rows of both files, in order; rows sent by earlier starts are skipped."""
        for row in metrics:
            if row["step"] > self._before["metrics"]:
                self._call("log", row["step"], finite_numbers(row))
                self.sent["metrics"] = row["step"]
                self.counts["metrics"] += 1
        fresh = [row for row in samples if row["step"] > self._before["samples"]]
        if fresh:
            last = fresh[-1]["step"]
            self._call("samples", max(last, self.sent["metrics"], 0), [to_table_row(row) for row in fresh])
            self.sent["samples"] = last
            self.counts["samples"] += len(fresh)
        if (metrics or fresh) and self.works:
            write_json(self._file, self.sent)

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """Send the numbers of the summary as summary/NAME, and close the tracker."""
        numbers = {f"summary/{name}": value for name, value in finite_numbers(summary).items()}
        if numbers:
            self._call("log", max(self.sent["metrics"], 0), numbers)
        self._call("finish", state)

    def _call(self, method: str, *args: Any) -> None:
        tracker = self._tracker
        if tracker is not None:
            self._try(lambda: getattr(tracker, method)(*args))

    def _try(self, do: Callable[[], Any], *, starts: bool = False) -> None:
        """Call a function of the tracker; if it raises, disable the tracker and report the error once."""
        try:
            found = do()
            self._tracker = found if starts else self._tracker
        except (Exception, SystemExit) as error:
            self._tracker = None
            first = (str(error).strip().splitlines() or [""])[0]
            going_on = ", the run continues" if self._running else ""
            self._note(f"tracker {self.name} is disabled{going_on}: {type(error).__name__}: {first}")


def follow(
    run: Path, trackers: Sequence[Mapping[str, Any]], note: Note, *, attempt: int = 0, poll_s: float = POLL_S
) -> list[Sender]:
    """Send a run's rows to trackers until the run has ended and all rows are sent.

    trackers: sections of the recipe's `track`. attempt: number of the start to follow; the end of an earlier start is
    ignored. Returns the senders; a sender that no longer `works` was disabled.
    """
    config = without_secrets(read_json(run / "resolved.json") or {})
    (run / "track").mkdir(exist_ok=True)
    senders = [Sender(run, settings, config, note) for settings in trackers]
    metrics, samples = Rows(run / "metrics.jsonl"), Rows(run / "samples.jsonl")
    while True:
        now = status.read(run)  # before reading rows, so that rows written before the end are not missed
        ended = now.state != "running" and (now.attempt >= attempt or not is_locked(run))
        found = metrics.new(), samples.new()
        for sender in senders:
            sender.send(*found)
        if ended or not any(sender.works for sender in senders):
            break
        time.sleep(poll_s)
    for sender in senders:
        sender.finish(now.state, read_json(run / "summary.json") or {})
    return senders


def run_key(run: Path) -> str:
    """Return an id of the run for trackers, the same for every start."""
    origin = run / "logs" / "attempt_1" / "env.json"
    began = origin.read_bytes() if origin.is_file() else b""
    return hashlib.sha256(str(run.resolve()).encode() + began).hexdigest()[:12]


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row, except its step."""
    numbers = {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def to_table_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of samples.jsonl with the columns of a tracker's table."""
    scores = record.get("scores") or record.get("components")
    texts = {key: str(record.get(key) or "") for key in ("prompt", "completion", "finish")}
    return {
        **texts,
        "step": record["step"],
        "eval": bool(record.get("eval")),
        "reward": record.get("reward"),
        "correct": record.get("correct"),
        "tokens": record.get("tokens"),
        "scores": json.dumps(scores, ensure_ascii=False) if scores else "",
    }
