"""Running several commands in parallel: progress lines shown compactly, output logged, all stopped when one fails."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.text import Text

from posttrain import terminal
from posttrain.errors import Interrupted, RunError, UserError
from posttrain.run.interrupt import GracefulStop

GRACE_S = 120.0  # time for a child to finish its step and save after a stop request
PLAIN_EVERY_S = 15.0  # without a terminal: minimum interval between progress lines of a child
MILESTONE = "✓ "  # prefix of lines that stay on the screen
ERROR = "error: "  # the last line with this prefix begins a child's error message


@dataclass(frozen=True)
class Child:
    """One command. Its output (stdout and stderr together) is written to `log`; `env` is added to our environment."""

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Running:
    child: Child
    process: subprocess.Popen[str]
    reader: threading.Thread
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=60))


def run_children(
    children: Sequence[Child], parallel: int, *, keep_going: bool = False, after_each: Callable[[], None] | None = None
) -> dict[str, str]:
    """Run all commands in order, at most `parallel` at a time.

    The first that fails stops the others and is raised as UserError (exit code 2) or RunError with its last lines. With
    keep_going the others continue, and {name: last lines} of the failed ones is returned. after_each: called whenever a
    command has ended. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP are forwarded once, as SIGTERM, so that each child can save;
    then Interrupted is raised. A child whose parent dies sees the end of its stdin (`interrupt.stop_with_parent`).
    """
    waiting, running, failed = list(children), list[_Running](), list[_Running]()
    lines: queue.Queue[tuple[Child, str]] = queue.Queue()
    asked_at: float | None = None
    with GracefulStop() as stop, _Display() as display:
        try:
            while running or (waiting and not (_stops_all(failed, keep_going) or stop.requested)):
                while waiting and len(running) < parallel and not (_stops_all(failed, keep_going) or stop.requested):
                    running.append(_start(waiting.pop(0), lines))
                _show(lines, running, display)
                for ended in [r for r in running if r.process.poll() is not None]:
                    running.remove(ended)
                    ended.reader.join(timeout=5)  # a grandchild may keep the pipe open
                    _show(lines, [ended], display)
                    display.remove(ended.child)
                    if ended.process.returncode and not stop.requested:
                        failed.append(ended)
                    if after_each is not None:
                        after_each()
                if (_stops_all(failed, keep_going) or stop.requested) and asked_at is None:
                    asked_at = time.monotonic()
                    _signal(running, signal.SIGTERM)
                if asked_at is not None and time.monotonic() - asked_at > GRACE_S:
                    _signal(running, signal.SIGKILL)
        finally:
            _signal(running, signal.SIGKILL)
    if failed and not keep_going:
        raise _error(failed[0])
    if stop.requested:
        raise Interrupted("stopped; every child saved what it had", number=stop.number)
    return {r.child.name: str(_error(r)) for r in failed}


def _stops_all(failed: Sequence[_Running], keep_going: bool) -> bool:
    """Return whether a failure stops the other commands."""
    return bool(failed) and not keep_going


def _start(child: Child, lines: queue.Queue[tuple[Child, str]]) -> _Running:
    """Start a command in its own process group, so that Ctrl-C reaches only this process, which forwards it once."""
    process = subprocess.Popen(
        child.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **child.env},
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, child, lines), daemon=True)
    reader.start()
    return _Running(child, process, reader)


def _read(stream: TextIO, child: Child, lines: queue.Queue[tuple[Child, str]]) -> None:
    with child.log.open("a", encoding="utf-8") as log:
        for line in stream:
            log.write(line)
            log.flush()
            lines.put((child, line.rstrip()))


def _show(lines: queue.Queue[tuple[Child, str]], running: Sequence[_Running], display: _Display) -> None:
    """Show all lines that have arrived, waiting up to 0.2 s for the first."""
    wait = 0.2
    while True:
        try:
            child, line = lines.get(timeout=wait) if wait else lines.get_nowait()
        except queue.Empty:
            return
        wait = 0.0
        for entry in running:
            if entry.child is child:
                entry.tail.append(line)
        if line:
            display.line(child, line)


def _signal(running: Sequence[_Running], number: signal.Signals) -> None:
    for entry in running:
        if entry.process.poll() is None and number == signal.SIGKILL:
            os.killpg(entry.process.pid, number)  # including its workers
        elif entry.process.poll() is None:
            entry.process.send_signal(number)


def _error(failed: _Running) -> UserError | RunError:
    tail = list(failed.tail)
    starts = [i for i, line in enumerate(tail) if line.startswith(ERROR)]
    message = "\n".join(tail[starts[-1] :] if starts else tail[-15:]).removeprefix(ERROR)
    kind = UserError if failed.process.returncode == UserError.exit_code else RunError
    code = failed.process.returncode
    ended = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    return kind(f"{failed.child.name} {ended}: {message}", hint=f"its whole output is in {failed.child.log}")


class _Display:
    """Shows the newest line of each child: live on a terminal; otherwise milestones and a line at intervals."""

    def __init__(self) -> None:
        self._console = terminal.console(stderr=True)
        self._newest: dict[str, str] = {}
        self._printed: dict[str, float] = {}
        self._live: Live | None = None

    def __enter__(self) -> _Display:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, child: Child, line: str) -> None:
        now = time.monotonic()
        if line.startswith(MILESTONE):
            self._print(child, line)
        elif self._live is not None:
            self._newest[child.name] = line
            self._redraw()
        elif now - self._printed.get(child.name, now - PLAIN_EVERY_S) >= PLAIN_EVERY_S:
            self._printed[child.name] = now
            self._print(child, line)

    def remove(self, child: Child) -> None:
        self._newest.pop(child.name, None)
        self._redraw()

    def _print(self, child: Child, line: str) -> None:
        self._console.print(Text.assemble((f"{child.name}  ", "bold"), line), soft_wrap=True, highlight=False)

    def _redraw(self) -> None:
        if self._live is not None:
            rows = [Text.assemble((f"{n}  ", "bold"), (t, "dim")) for n, t in sorted(self._newest.items())]
            self._live.update(Group(*rows))
