"""Worker process that runs reward functions; started by `pool.py`.

Imports nothing heavy beyond what the scripts import; asyncio, a third of the start-up time, is imported only for
coroutines.

The worker receives chunks of calls over a connection and sends results back. Before each call it writes the call's
number and start time into a memory page shared with the parent, which kills the worker when the call exceeds its limit:
a timer inside this process could not stop a C loop that holds the interpreter.
"""

from __future__ import annotations

import copy
import inspect
import mmap
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain.verify.contract import BrokenContract, ExplainedFailure, check_score, checked_batch, checked_turns
from posttrain.verify.reward_classes import make_callable

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

SLOT = struct.Struct("<d")
SLOT_BYTES = 16  # start time (monotonic seconds), then the number of the running call
IDLE, CONCURRENT = -1.0, -2.0  # special call numbers: idle, or several coroutines
FLUSH_SECONDS = 0.01
ORPHAN_SECONDS = 2.0  # a call this far over its limit means that the parent has died
TRACEBACK_CHARS = 8000


class Target(NamedTuple):
    """Reward function, as the worker loads and calls it."""

    use: str  # absolute/file.py:name or module:name
    params: dict[str, Any]
    batched: bool
    is_async: bool
    limit: float  # seconds per call
    text: bool = False  # returns text (a tool), not a score
    per_turn: bool = False  # returns one number for each entry of the argument `parts`


class Call(NamedTuple):
    """One call: its number, the index of its target, the completion and the other arguments by name.

    For a batched target, `completion` is a list of completions and each argument a list of the same length.
    """

    number: int
    target: int
    completion: str | list[str]
    arguments: dict[str, Any]


class Result(NamedTuple):
    """Result of one call.

    kind: value (a number, None or ByTurn; for a batch a list of scores) | error (value: traceback) | timeout | broken
    (value: how the contract was violated).
    """

    number: int
    kind: str
    value: Any
    seconds: float


def main(connection_fd: int, slot_fd: int) -> None:
    """Serve calls until the parent closes the connection."""
    for number in (signal.SIGINT, signal.SIGUSR1):  # the parent handles Ctrl-C and the scheduler's warning signal
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # keep the output of a process that dies
    connection = Connection(connection_fd)
    slot = mmap.mmap(slot_fd, SLOT_BYTES)
    try:
        sys_path, targets, memory_mb, marks = connection.recv()
        if memory_mb is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
        sys.path.extend(p for p in sys_path if p not in sys.path)
        if marks:
            from posttrain import thoughts

            for opening, closing in marks:
                thoughts.add_format(opening, closing)
        try:
            loaded = [make_callable(_load(target), target.params) for target in targets]
        except BaseException:
            connection.send(("failed", traceback.format_exc()))
            return
        connection.send(("ready", None))
        targets = [target._replace(params=rest) for target, (_, rest) in zip(targets, loaded, strict=True)]
        runner = Runner(connection, slot, targets, [function for function, _ in loaded])
        while True:
            runner.run(connection.recv())
    except (EOFError, ConnectionError, BrokenPipeError):
        return  # the parent has closed the connection or died


def _load(target: Target) -> Callable[..., Any]:
    """Load the function after running the `setup()` of its script, if any."""
    from posttrain.registry import load_function, load_module

    file = target.use.rpartition(":")[0]
    if file.endswith(".py") and callable(setup := getattr(load_module(Path(file)), "setup", None)):
        setup()
    return load_function(target.use, None, what="reward")


class Runner:
    """Runs chunks of calls and sends their results, several per message while calls are fast."""

    def __init__(
        self, connection: Connection, slot: mmap.mmap, targets: list[Target], functions: list[Callable[..., Any]]
    ) -> None:
        self.connection, self.slot, self.targets, self.functions = connection, slot, targets, functions
        self.results: list[Result] = []
        self.sent_at = 0.0
        self.loop = _new_loop() if any(t.is_async for t in targets) else None

    def run(self, chunk: list[Call]) -> None:
        """Run all calls of a chunk: coroutines together, all other functions one after the other."""
        self.sent_at = time.monotonic()
        _copy_shared_arguments(chunk)
        if self.targets[chunk[0].target].is_async:
            self._mark_running(CONCURRENT, self.sent_at, max(self.targets[c.target].limit for c in chunk))
            assert self.loop is not None
            self.loop.run_until_complete(self._run_concurrently(chunk))
        else:
            for call in chunk:
                self.results.append(self._run_call(call))
                if time.monotonic() - self.sent_at > FLUSH_SECONDS:
                    self._send("results")
        signal.setitimer(signal.ITIMER_REAL, 0)
        SLOT.pack_into(self.slot, 8, IDLE)
        self._send("done")

    def _run_call(self, call: Call) -> Result:
        start = time.monotonic()
        self._mark_running(call.number, start, self.targets[call.target].limit)
        try:
            value = self._invoke(call)
            if inspect.isawaitable(value):
                import asyncio

                value = asyncio.run(_await(value))
            kind, value = "value", self._check_value(call, value)
        except BrokenContract as error:
            kind, value = "broken", str(error)
        except BaseException:  # includes sys.exit in a script; the worker continues
            kind, value = "error", _traceback()
        SLOT.pack_into(self.slot, 8, IDLE)  # a finished call must never look like a running call
        return Result(call.number, kind, value, time.monotonic() - start)

    async def _run_concurrently(self, chunk: list[Call]) -> None:
        import asyncio

        async def one(call: Call) -> None:
            self.results.append(await self._run_async_call(call))
            self._send("results")

        await asyncio.gather(*map(one, chunk))

    async def _run_async_call(self, call: Call) -> Result:
        import asyncio

        start, target = time.monotonic(), self.targets[call.target]
        try:
            value = await asyncio.wait_for(_await(self._invoke(call)), target.limit)
            kind, value = "value", self._check_value(call, value)
        except BrokenContract as error:
            kind, value = "broken", str(error)
        except TimeoutError:
            late = time.monotonic() - start >= target.limit
            kind, value = ("timeout", None) if late else ("error", _traceback())
        except BaseException:
            kind, value = "error", _traceback()
        return Result(call.number, kind, value, time.monotonic() - start)

    def _invoke(self, call: Call) -> Any:
        target, function = self.targets[call.target], self.functions[call.target]
        if target.batched:  # a private copy: its length is checked against the result
            return function(completions=list(call.completion), **call.arguments, **target.params)
        own = {"parts": list(call.arguments["parts"])} if target.per_turn else {}
        return function(call.completion, **{**call.arguments, **own}, **target.params)

    def _check_value(self, call: Call, value: Any) -> Any:
        if self.targets[call.target].text:
            return str(value)
        if self.targets[call.target].batched:
            return checked_batch(value, len(call.completion))
        if self.targets[call.target].per_turn:
            return checked_turns(value, len(call.arguments["parts"]))
        return check_score(value)

    def _mark_running(self, number: float, start: float, limit: float) -> None:
        # Write the start time first: a parent that reads between the two writes then sees the previous call as just
        # started.
        SLOT.pack_into(self.slot, 0, start)
        SLOT.pack_into(self.slot, 8, float(number))
        signal.setitimer(signal.ITIMER_REAL, limit + ORPHAN_SECONDS)

    def _send(self, kind: str) -> None:
        self.connection.send((kind, [tuple(r) for r in self.results]))
        self.results.clear()
        self.sent_at = time.monotonic()


def _copy_shared_arguments(chunk: Sequence[Call]) -> None:
    """Deep-copy lists and dicts that several calls share, such as a column of their row.

    A reward that mutates its arguments then does not affect other completions of the prompt.
    """
    given = Counter(id(value) for call in chunk for value in call.arguments.values())
    for call in chunk:
        for name, value in call.arguments.items():
            if given[id(value)] > 1 and isinstance(value, list | dict):
                call.arguments[name] = copy.deepcopy(value)


def _new_loop() -> AbstractEventLoop:
    import asyncio

    return asyncio.new_event_loop()


async def _await(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except SystemExit as error:  # would end the event loop and the concurrent calls with it
        raise RuntimeError(f"sys.exit({error.code!r}) in a reward") from error


def _traceback() -> str:
    """Return the current exception as text, truncated to TRACEBACK_CHARS: without this file's frames, and an
    ExplainedFailure as its message alone."""
    kind, error, trace = sys.exc_info()
    if isinstance(error, ExplainedFailure):
        return str(error)
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace))
    return text if len(text) <= TRACEBACK_CHARS else text[:2000] + "\n...\n" + text[-TRACEBACK_CHARS + 2000 :]


def start(connection_fd: int, slot_fd: int) -> None:
    """Entry point of the worker process."""
    main(connection_fd, slot_fd)
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads that a script started
