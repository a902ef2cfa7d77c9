"""Pool of worker processes for reward calls: a call that exceeds its time limit fails only its own row.

Workers are fresh interpreters: no fork of a process that holds a GPU, no re-import of the parent's main module. Each
worker leads its own session, so Ctrl-C does not reach the worker, and the processes that a script starts are killed
together with the worker. A worker exits when its connection closes, so also when the parent is killed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from posttrain import thoughts
from posttrain.errors import RewardError, RunError
from posttrain.verify.captured_output import OutputLog, OutputReader, StderrOutput
from posttrain.verify.load import LoadedReward
from posttrain.verify.trl_form import FOR_ALL
from posttrain.verify.worker import CONCURRENT, IDLE, SLOT, SLOT_BYTES, Call, Result, Target

CHUNK_SECONDS = 0.05  # target work per chunk of calls
CONCURRENT_CALLS = 32  # maximum number of coroutines that one worker runs together
LOAD_SECONDS = 120.0  # time limit for importing a script and running its setup()
DRAIN_SECONDS = 0.2  # time to read an ended worker's output while a child process holds the pipe open
MAX_START_FAILURES = 3  # RunError after this many deaths per worker slot outside a call, with no result in between

_ENTRY = "import sys; sys.path.append({root!r}); from posttrain.verify.worker import start; start({fds})"


class Worker:
    """Worker process with its connection and the calls it has not answered yet."""

    def __init__(
        self, targets: Sequence[Target], memory_mb: int | None = None, output_log: OutputLog | None = None
    ) -> None:
        ours, theirs = Pipe()
        self._output, self._on_stderr = OutputReader(output_log or StderrOutput()), output_log is None
        self._limits = [target.limit for target in targets]
        with tempfile.TemporaryFile() as page, theirs:
            page.truncate(SLOT_BYTES)
            self.slot = mmap.mmap(page.fileno(), SLOT_BYTES)
            SLOT.pack_into(self.slot, 8, IDLE)
            fds = (theirs.fileno(), page.fileno())
            entry = _ENTRY.format(root=str(Path(__file__).resolve().parents[2]), fds=f"{fds[0]}, {fds[1]}")
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", entry],  # -P: the working directory stays off sys.path
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=self._output.fd,  # stdout of a script is log output, not results
                stderr=self._output.fd,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
            )
        self._output.close_write_end()
        self.connection: Connection = ours
        self.connection.send(([p or os.getcwd() for p in sys.path], list(targets), memory_mb, thoughts.list_declared()))
        self.idle = False  # True once the script is loaded and every call is answered
        self.unanswered: dict[int, Call] = {}
        self.since = time.monotonic()

    def send_chunk(self, chunk: Sequence[Call]) -> None:
        """Send a chunk of calls to an idle worker.

        An idle worker reads immediately, so the send cannot block on a hung call.
        """
        try:
            data = pickle.dumps(list(chunk), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as cause:
            raise RewardError(f"a data column that a reward reads cannot be sent to its worker: {cause}") from cause
        self.since = time.monotonic()
        self.unanswered, self.idle = {call.number: call for call in chunk}, False
        with contextlib.suppress(OSError):  # the worker has just died; detected when the connection is read
            self.connection.send_bytes(data)

    def current_call(self) -> tuple[int | None, float]:
        """Return (number of the running call, its deadline).

        The number is CONCURRENT while coroutines run together, and None between calls.
        """
        start, number = SLOT.unpack_from(self.slot, 0)[0], SLOT.unpack_from(self.slot, 8)[0]
        if number == CONCURRENT:  # the worker's own event loop cancels coroutines first
            limits = [self._limits[call.target] for call in self.unanswered.values()]
            return int(number), start + 1.0 + max(limits, default=0.0)
        if (call := self.unanswered.get(int(number))) is not None:
            return call.number, start + self._limits[call.target]
        return None, self.since + LOAD_SECONDS

    @property
    def has_exited(self) -> bool:
        """Whether the process has exited.

        Uses waitid with WNOWAIT where available, so the process is not reaped and its id is not reused.
        """
        if not hasattr(os, "waitid"):
            return self.process.poll() is not None
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.process.returncode is not None or os.waitid(os.P_PID, self.process.pid, flags) is not None

    def kill(self, patience: float = 0.0) -> int:
        """Kill the process and everything it started; return its exit code.

        Output of the process is in the log when this returns, and messages it sent before can still be read.

        patience: seconds to wait for a process that is already exiting, so that the exit code is the process's own.
        """
        give_up = time.monotonic() + patience
        while not self.has_exited and time.monotonic() < give_up:
            time.sleep(0.002)
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self._output.last(DRAIN_SECONDS)
        return code

    @property
    def last_output(self) -> str:
        """Last output of the ended process for an error message; empty if it went to stderr."""
        text = "" if self._on_stderr else self._output.last()
        return f"; it printed last:\n{text}" if text else ""


class Pool:
    """Pool of `workers` processes that load `targets`, each limited to memory_mb of data.

    Workers start on `start` or on the first `run` and are reused until `close`. output_log: receives the output of the
    workers; None writes it to stderr.
    """

    def __init__(
        self, targets: Sequence[Target], workers: int, memory_mb: int | None = None, output_log: OutputLog | None = None
    ) -> None:
        self.targets, self.size, self.memory_mb, self.output_log = list(targets), workers, memory_mb, output_log
        self.workers: list[Worker] = []
        self.call_seconds = CHUNK_SECONDS / 4  # moving average, sets the chunk size
        self.start_failures = 0
        self.abandoned = False

    def start(self) -> None:
        """Start missing workers and replace idle workers that have died. Does not wait until the workers are ready."""
        for worker in [w for w in self.workers if w.idle and w.has_exited]:
            worker.kill()
            worker.connection.close()
            self.workers.remove(worker)
        while len(self.workers) < self.size:
            self.workers.append(Worker(self.targets, self.memory_mb, self.output_log))

    def close(self) -> None:
        """Kill all workers. Safe to call twice."""
        for worker in self.workers:
            worker.kill()
            worker.connection.close()
        self.workers = []

    def abandon(self) -> None:
        """Make `run`, called in any thread, kill the workers and raise RunError until `abandoned` is reset."""
        self.abandoned = True
        for worker in list(self.workers):
            worker.process.kill()  # wakes up `run`, which waits for this worker

    def run(self, calls: Sequence[Call]) -> list[Result]:
        """Run the calls and return their results in order. Call numbers must be unique.

        Raises RewardError if a script fails to load, and RunError after `abandon` or if workers keep dying before their
        first call.
        """
        work = _Work(
            self.targets,
            single=deque(call for call in calls if not self.targets[call.target].is_async),
            concurrent=deque(call for call in calls if self.targets[call.target].is_async),
        )
        try:
            while len(work.results) < len(calls) and not self.abandoned:
                self.start()
                for worker in self.workers:
                    if worker.idle and (chunk := work.take(self.call_seconds, self.size)):
                        worker.send_chunk(chunk)
                # Wait at most until the next deadline.
                waiting = [worker for worker in self.workers if not worker.idle]
                limit = min((worker.current_call()[1] for worker in waiting), default=0.0) - time.monotonic()
                ready = wait([w.connection for w in waiting], timeout=min(max(limit, 0.0) + 0.002, 1.0))
                for worker in waiting:
                    if worker.connection in ready:
                        try:
                            message = worker.connection.recv()
                        except (EOFError, OSError):
                            self._replace(worker, work, overdue=False)
                        else:
                            self._handle_message(worker, work, *message)
                    elif worker.has_exited:  # a process started by the worker holds the connection open
                        self._replace(worker, work, overdue=False)
                for worker in [w for w in self.workers if not w.idle]:
                    if time.monotonic() >= worker.current_call()[1]:
                        self._replace(worker, work, overdue=True)
            if self.abandoned:
                raise RunError("calls of reward or tool functions were aborted")
        except BaseException:
            self.close()  # results of the running calls would never be read
            raise
        return [work.results[call.number] for call in calls]

    def _handle_message(self, worker: Worker, work: _Work, kind: str, content: Any) -> None:
        if kind == "failed":
            raise RewardError(f"a reward script cannot be loaded in its worker:\n{content}")
        if kind == "ready":
            worker.idle = True
            return
        self.start_failures = 0
        for result in map(Result._make, content):
            del worker.unanswered[result.number]
            work.results[result.number] = result
            self.call_seconds = 0.9 * self.call_seconds + 0.1 * result.seconds
        worker.idle = not worker.unanswered

    def _replace(self, worker: Worker, work: _Work, *, overdue: bool) -> None:
        """Replace a timed-out or crashed worker; its current call fails and its queued calls are resubmitted."""
        killed_at = time.monotonic()
        code = worker.kill(patience=0.0 if overdue else 2.0)
        self.workers.remove(worker)
        self._drain_messages(worker, work)
        number, deadline = worker.current_call()
        unanswered = worker.unanswered
        if number == CONCURRENT and len(unanswered) > 1:
            # Rerun each call in its own worker to find the one at fault.
            work.requeue(unanswered.values(), isolated=True)
            return
        if number == CONCURRENT:
            number = next(iter(unanswered), None)
        if number is None:
            self._count_start_failure(worker, code, not worker.idle)
        elif not overdue or killed_at >= deadline:  # otherwise the worker moved on to the next call in time
            call = unanswered.pop(number)
            late = overdue or code == -signal.SIGALRM
            cause = None if late else f"the worker process ended: {_cause(code)}{worker.last_output}"
            seconds = self.targets[call.target].limit if late else 0.0
            work.results[number] = Result(number, "timeout" if late else "error", cause, seconds)
        work.requeue(unanswered.values())

    def _drain_messages(self, worker: Worker, work: _Work) -> None:
        """Handle the messages that a killed worker sent before it died."""
        with contextlib.suppress(EOFError, OSError), worker.connection:
            while True:
                self._handle_message(worker, work, *worker.connection.recv())

    def _count_start_failure(self, worker: Worker, code: int, counts: bool) -> None:
        self.start_failures += counts
        if self.start_failures > MAX_START_FAILURES * self.size:
            raise RunError(f"reward workers end before they begin a call: {_cause(code)}{worker.last_output}")


@dataclass
class _Work:
    """Calls of one `run`, queued by how they are run, and the results so far."""

    targets: Sequence[Target]
    single: deque[Call]
    concurrent: deque[Call]
    isolated: deque[Call] = field(default_factory=deque)
    results: dict[int, Result] = field(default_factory=dict)

    def take(self, call_seconds: float, workers: int) -> list[Call]:
        """Remove and return the next chunk: about CHUNK_SECONDS of work, less near the end to balance the workers."""
        if self.isolated:
            return [self.isolated.popleft()]
        queue, count = self.concurrent, min(CONCURRENT_CALLS, math.ceil(len(self.concurrent) / workers))
        if not queue:
            share = math.ceil(len(self.single) / (2 * workers))
            queue, count = self.single, min(share, max(1, int(CHUNK_SECONDS / max(call_seconds, 1e-6))))
        return [queue.popleft() for _ in range(count)]

    def requeue(self, calls: Iterable[Call], *, isolated: bool = False) -> None:
        """Put unanswered calls back at the front of their queues."""
        for call in reversed(list(calls)):
            queue = self.concurrent if self.targets[call.target].is_async else self.single
            (self.isolated if isolated else queue).appendleft(call)


def make_target(reward: LoadedReward, limit: float) -> Target:
    """Return the worker's description of the reward. limit: seconds per call."""
    return Target(reward.target, reward.params, reward.batched, reward.is_async, limit, per_turn=reward.per_turn)


def make_calls(
    reward: LoadedReward, target: int, first: int, completions: Sequence[Any], arguments: Sequence[Mapping[str, Any]]
) -> list[Call]:
    """Return the calls that score all rows.

    Row k has the number first + k; a batched call has the number of its first row.

    An optional column that only some rows of a batch have is None for the other rows.
    """
    if not reward.batched:
        return [
            Call(first + k, target, completion, dict(given))
            for k, (completion, given) in enumerate(zip(completions, arguments, strict=True))
        ]
    size = reward.batch_size or max(1, len(completions))
    calls = []
    for start in range(0, len(completions), size):
        rows = arguments[start : start + size]
        names = dict.fromkeys(name for row in rows for name in row)
        listed = {name: [row.get(name) for row in rows] for name in names}
        listed |= {name: rows[0][name] for name in FOR_ALL if reward.trl_form and name in reward.built_ins}
        calls.append(Call(first + start, target, list(completions[start : start + size]), listed))
    return calls


def split_result(call: Call, result: Result) -> list[Result]:
    """Split the result of a call into one result per row.

    An error or a timeout applies to every row; the time is divided equally.
    """
    if not isinstance(call.completion, list):
        return [result]
    seconds = result.seconds / len(call.completion)
    values = result.value if result.kind == "value" else [result.value] * len(call.completion)
    return [Result(call.number + k, result.kind, value, seconds) for k, value in enumerate(values)]


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name} (out of memory?)" if name == "SIGKILL" else name
