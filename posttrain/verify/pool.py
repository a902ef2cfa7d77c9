"""Worker processes for reward calls: a call over its limit costs its own row and nothing else.

Workers are fresh interpreters (no fork of a process that holds a GPU, no re-import of the parent's main module), each
the leader of its own session: Ctrl-C does not reach them and whatever a script starts ends with its worker. They end by
themselves when their connection closes, so also when the parent is killed.
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

from posttrain.errors import RewardError, RunError
from posttrain.verify.captured_output import Ear, Printed, Shown
from posttrain.verify.load import LoadedReward
from posttrain.verify.trl_form import FOR_ALL
from posttrain.verify.worker import CONCURRENT, IDLE, SLOT, SLOT_BYTES, Call, Result, Target

CHUNK_SECONDS = 0.05  # calls are sent in chunks of about this much work
CONCURRENT_CALLS = 32  # coroutines that one worker runs together
LOAD_SECONDS = 120.0  # for importing a script and its setup()
SHOWING_SECONDS = 0.2  # for what an ended worker has printed, if a process of its own keeps the pipe open
STARTLESS_DEATHS = 3  # times that every worker may die outside a call before one answers

_ENTRY = "import sys; sys.path.append({root!r}); from posttrain.verify.worker import start; start({fds})"


class Worker:
    """One process, its connection, and the calls that it has not yet answered."""

    def __init__(self, targets: Sequence[Target], memory_mb: int | None = None, printed: Printed | None = None) -> None:
        ours, theirs = Pipe()
        self._ear, self._shown = Ear(printed or Shown()), printed is None
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
                stdout=self._ear.fd,  # what a script prints is talk, not our data
                stderr=self._ear.fd,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
            )
        self._ear.close_write_end()
        self.connection: Connection = ours
        self.connection.send(([p or os.getcwd() for p in sys.path], list(targets), memory_mb))
        self.idle = False  # it is loaded and has answered everything
        self.unanswered: dict[int, Call] = {}
        self.since = time.monotonic()

    def give(self, chunk: Sequence[Call]) -> None:
        """Send a chunk. Only to an idle worker: it reads at once, so this never blocks on a hung call."""
        try:
            data = pickle.dumps(list(chunk), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as cause:
            raise RewardError(f"a data column that a reward reads cannot be sent to its worker: {cause}") from cause
        self.since = time.monotonic()
        self.unanswered, self.idle = {call.number: call for call in chunk}, False
        with contextlib.suppress(OSError):  # it has just died: found out when its end of the connection is read
            self.connection.send_bytes(data)

    def current(self) -> tuple[int | None, float]:
        """(call that runs, when it is overdue). The number is CONCURRENT for coroutines that run together, and None
        between calls."""
        start, number = SLOT.unpack_from(self.slot, 0)[0], SLOT.unpack_from(self.slot, 8)[0]
        if number == CONCURRENT:  # coroutines are first cancelled by their own loop
            limits = [self._limits[call.target] for call in self.unanswered.values()]
            return int(number), start + 1.0 + max(limits, default=0.0)
        if (call := self.unanswered.get(int(number))) is not None:
            return call.number, start + self._limits[call.target]
        return None, self.since + LOAD_SECONDS

    @property
    def exited(self) -> bool:
        """Whether the process has ended. It is not reaped where that can be avoided, so that its id stays its own."""
        if not hasattr(os, "waitid"):
            return self.process.poll() is not None
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.process.returncode is not None or os.waitid(os.P_PID, self.process.pid, flags) is not None

    def kill(self, patience: float = 0.0) -> int:
        """End the process and everything it started; returns its exit code.

        What it printed is in the log by then, and its last messages can still be read.

        patience: seconds that a process which is ending gets, so that the code is its own.
        """
        give_up = time.monotonic() + patience
        while not self.exited and time.monotonic() < give_up:
            time.sleep(0.002)
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self._ear.last(SHOWING_SECONDS)
        return code

    @property
    def last_words(self) -> str:
        """What the ended process printed last, as a part of a sentence; empty where people have seen it on stderr."""
        said = "" if self._shown else self._ear.last()
        return f"; it printed last:\n{said}" if said else ""


class Pool:
    """`workers` processes that know `targets`, each with at most memory_mb of data.

    Started by `start` or the first `run`, reused until `close`. printed: where what they print goes, else to stderr.
    """

    def __init__(
        self, targets: Sequence[Target], workers: int, memory_mb: int | None = None, printed: Printed | None = None
    ) -> None:
        self.targets, self.size, self.memory_mb, self.printed = list(targets), workers, memory_mb, printed
        self.workers: list[Worker] = []
        self.call_seconds = CHUNK_SECONDS / 4  # moving average, for the size of chunks
        self.startless_deaths = 0
        self.abandoned = False

    def start(self) -> None:
        """Start the missing workers, also for idle ones that have died; does not wait until they are ready."""
        for worker in [w for w in self.workers if w.idle and w.exited]:
            worker.kill()
            worker.connection.close()
            self.workers.remove(worker)
        while len(self.workers) < self.size:
            self.workers.append(Worker(self.targets, self.memory_mb, self.printed))

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        for worker in self.workers:
            worker.kill()
            worker.connection.close()
        self.workers = []

    def abandon(self) -> None:
        """Have `run`, in another thread, end the processes and raise RunError; also the next one, until `abandoned` is
        set back."""
        self.abandoned = True
        for worker in list(self.workers):
            worker.process.kill()  # wakes `run`, which waits for its answer

    def run(self, calls: Sequence[Call]) -> list[Result]:
        """The result of each call, in order; their numbers are unique. RewardError if a script fails to load."""
        together = [self.targets[call.target].is_async for call in calls]
        work = _Work(
            self.targets,
            single=deque(call for call, is_async in zip(calls, together, strict=True) if not is_async),
            concurrent=deque(call for call, is_async in zip(calls, together, strict=True) if is_async),
        )
        try:
            while len(work.results) < len(calls) and not self.abandoned:
                self.start()
                for worker in self.workers:
                    if worker.idle and (chunk := work.take(self.call_seconds, self.size)):
                        worker.give(chunk)
                # at most until the next limit could be passed
                waiting = [worker for worker in self.workers if not worker.idle]
                limit = min((worker.current()[1] for worker in waiting), default=0.0) - time.monotonic()
                heard = wait([w.connection for w in waiting], timeout=min(max(limit, 0.0) + 0.002, 1.0))
                for worker in waiting:
                    if worker.connection in heard:
                        try:
                            message = worker.connection.recv()
                        except (EOFError, OSError):
                            self._replace(worker, work, overdue=False)
                        else:
                            self._take_in(worker, work, *message)
                    elif worker.exited:  # its connection is held open by something it started
                        self._replace(worker, work, overdue=False)
                for worker in [w for w in self.workers if not w.idle]:
                    if time.monotonic() >= worker.current()[1]:
                        self._replace(worker, work, overdue=True)
            if self.abandoned:
                raise RunError("calls of a user's functions were given up")
        except BaseException:
            self.close()  # calls are under way whose answers nobody would read
            raise
        return [work.results[call.number] for call in calls]

    def _take_in(self, worker: Worker, work: _Work, kind: str, content: Any) -> None:
        if kind == "failed":
            raise RewardError(f"a reward script cannot be loaded in its worker:\n{content}")
        if kind == "ready":
            worker.idle = True
            return
        self.startless_deaths = 0
        for result in map(Result._make, content):
            del worker.unanswered[result.number]
            work.results[result.number] = result
            self.call_seconds = 0.9 * self.call_seconds + 0.1 * result.seconds
        worker.idle = not worker.unanswered

    def _replace(self, worker: Worker, work: _Work, *, overdue: bool) -> None:
        """Take out a worker that is late or dead. Its current call is a time-out or an error; the rest is redone."""
        killed_at = time.monotonic()
        code = worker.kill(patience=0.0 if overdue else 2.0)
        self.workers.remove(worker)
        self._read_rest(worker, work)
        number, deadline = worker.current()
        left = worker.unanswered
        if number == CONCURRENT and len(left) > 1:
            work.requeue(left.values(), alone=True)  # which of them it was shows when each has a worker for itself
            return
        if number == CONCURRENT:
            number = next(iter(left), None)
        if number is None:
            self._count_startless(worker, code, not worker.idle)
        elif not overdue or killed_at >= deadline:  # else it had gone on to the next call in time
            call = left.pop(number)
            late = overdue or code == -signal.SIGALRM
            cause = None if late else f"the worker process ended: {_cause(code)}{worker.last_words}"
            seconds = self.targets[call.target].limit if late else 0.0
            work.results[number] = Result(number, "timeout" if late else "error", cause, seconds)
        work.requeue(left.values())

    def _read_rest(self, worker: Worker, work: _Work) -> None:
        """What a killed worker had sent before."""
        with contextlib.suppress(EOFError, OSError), worker.connection:
            while True:
                self._take_in(worker, work, *worker.connection.recv())

    def _count_startless(self, worker: Worker, code: int, counts: bool) -> None:
        self.startless_deaths += counts
        if self.startless_deaths > STARTLESS_DEATHS * self.size:
            raise RunError(f"reward workers end before they begin a call: {_cause(code)}{worker.last_words}")


@dataclass
class _Work:
    """The calls of one `run`: those waiting, by the way they are run, and the results so far."""

    targets: Sequence[Target]
    single: deque[Call]
    concurrent: deque[Call]
    alone: deque[Call] = field(default_factory=deque)
    results: dict[int, Result] = field(default_factory=dict)

    def take(self, call_seconds: float, workers: int) -> list[Call]:
        """The next chunk: about CHUNK_SECONDS of work, less near the end so that all workers finish together."""
        if self.alone:
            return [self.alone.popleft()]
        queue, count = self.concurrent, min(CONCURRENT_CALLS, math.ceil(len(self.concurrent) / workers))
        if not queue:
            share = math.ceil(len(self.single) / (2 * workers))
            queue, count = self.single, min(share, max(1, int(CHUNK_SECONDS / max(call_seconds, 1e-6))))
        return [queue.popleft() for _ in range(count)]

    def requeue(self, calls: Iterable[Call], *, alone: bool = False) -> None:
        """Put calls that were not answered back in front."""
        for call in reversed(list(calls)):
            queue = self.concurrent if self.targets[call.target].is_async else self.single
            (self.alone if alone else queue).appendleft(call)


def target_of(reward: LoadedReward, limit: float) -> Target:
    """The reward as a worker calls it; limit: seconds a call."""
    return Target(reward.target, reward.params, reward.batched, reward.is_async, limit, per_turn=reward.per_turn)


def calls_of(
    reward: LoadedReward, target: int, first: int, completions: Sequence[Any], arguments: Sequence[Mapping[str, Any]]
) -> list[Call]:
    """The calls that score all rows; row k has the number first + k, a call that of its first row.

    An optional column that only some rows of a batch have is None in the others.
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


def rows_of(call: Call, result: Result) -> list[Result]:
    """What became of each row of a call. One that raised or was late did so for all; its time is shared."""
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
