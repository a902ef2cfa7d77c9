"""Processes that import vLLM while the trainer imports torch and reads its data, and become vLLM's engine cores later.

vLLM starts its engine core by multiprocessing's `spawn`, once everything about the engine is known. The new process
then imports torch and vLLM, which takes most of a start. A warm process is the same command, run early: it imports
them, and waits at the pipe through which `spawn` tells a process what to run. Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from typing import Any

from posttrain.rollout import engine_process

LENGTH = 8  # bytes that say how long the environment is
ENGINE = ("vllm.v1.engine.core", "torch._inductor.compile_fx")
_ENTRY = "import sys; sys.path[:0] = {path!r}; from posttrain.rollout.warm_process import main; main({parent}, {ends})"


@dataclass
class Warm:
    """A process that waits. pipe: takes what the process is to run; sentinel: closed when the process ends."""

    pid: int
    pipe: int
    sentinel: int
    ended: bool = False  # its number may be another process's by now

    def is_alive(self) -> bool:
        """Whether it still runs."""
        if not self.ended:
            try:
                self.ended = os.waitpid(self.pid, os.WNOHANG) != (0, 0)
            except ChildProcessError:
                self.ended = True
        return not self.ended

    def close(self) -> None:
        """End it."""
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.ended = True
        os.close(self.pipe)
        os.close(self.sentinel)


_waiting: list[Warm] = []


def start(count: int) -> None:
    """Start processes until `count` of them wait. Nothing happens where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return
    engine_process.prepare_environment()
    while len(_waiting) < count:
        _waiting.append(_start())


def _start() -> Warm:
    tracker = resource_tracker.getfd()
    sentinel, theirs = os.pipe()
    pipe, ours = os.pipe()
    code = _ENTRY.format(path=sys.path, parent=os.getpid(), ends=(tracker, pipe))
    executable = spawn.get_executable()
    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command: list[Any] = [os.fsencode(executable), *flags, "-c", code, "--multiprocessing-fork"]
    spawnv: Any = util.spawnv_passfds  # type: ignore[attr-defined]
    pid = spawnv(executable, command, [tracker, pipe, theirs])
    os.close(pipe)
    os.close(theirs)
    return Warm(pid, ours, sentinel)


@contextlib.contextmanager
def use() -> Iterator[None]:
    """Inside, engine cores that are started are the warm processes, as far as there are any; afterwards those that are
    left end."""
    kind: Any = context.SpawnProcess
    usual = kind._Popen
    kind._Popen = staticmethod(
        lambda process: (_Popen if process.name.startswith(engine_process.CORE) else usual)(process)
    )
    try:
        yield
    finally:
        kind._Popen = staticmethod(usual)
        close()


def close() -> None:
    """End the processes that wait still."""
    while _waiting:
        _waiting.pop().close()


class _Popen(popen_spawn_posix.Popen):
    """multiprocessing's start of a process, by one that is running already."""

    _fds: list[int]

    def _launch(self, process: Any) -> None:
        if (warm := _take()) is None:
            super()._launch(process)  # type: ignore[misc]
            return
        if not self._hand_over(process, warm):
            self._fds = []
            warm.close()
            super()._launch(process)  # type: ignore[misc]
            return
        self.pid, self.sentinel = warm.pid, warm.sentinel
        self.finalizer = util.Finalize(self, util.close_fds, (warm.sentinel, warm.pipe))  # type: ignore[attr-defined]

    def _hand_over(self, process: Any, warm: Warm) -> bool:
        """Write to the warm process what it is to run. False where it cannot run that, or has died meanwhile."""
        state = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), state)
            reduction.dump(process, state)
        finally:
            context.set_spawning_popen(None)
        if self._fds:  # of open files, which are inherited at the start alone
            return False
        environment = json.dumps(dict(os.environ)).encode()
        message = len(environment).to_bytes(LENGTH, "big") + environment + state.getvalue()
        try:
            while message:
                message = message[os.write(warm.pipe, message) :]
        except BrokenPipeError:
            return False
        return True


def _take() -> Warm | None:
    """One that still waits."""
    while _waiting:
        if (warm := _waiting.pop()).is_alive():
            return warm
        warm.close()
    return None


def main(parent: int, ends: tuple[int, int]) -> None:
    """What a warm process does. parent: the process that started it, with which it ends. ends: file descriptors of
    multiprocessing's resource tracker and of the pipe."""
    engine_process.end_with(parent, lambda: os._exit(1))
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, with which this ends
    tracker, pipe = ends
    before = set(os.environ)
    with _silence(), contextlib.suppress(Exception):  # what is wrong is said when the engine imports it
        for name in ENGINE:
            importlib.import_module(name)
        from vllm.platforms import current_platform

        importlib.import_module(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
    told = json.loads(_read(pipe, int.from_bytes(_read(pipe, LENGTH), "big")))
    for name in before - told.keys():
        os.environ.pop(name, None)
    os.environ.update(told)
    engine_process.begin()
    signal.signal(signal.SIGINT, on_interrupt)
    spawn.spawn_main(tracker_fd=tracker, pipe_handle=pipe)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Inside, what is written to stdout and stderr is dropped."""
    kept, nowhere = [os.dup(number) for number in (1, 2)], os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(nowhere)


def _read(pipe: int, size: int) -> bytes:
    """Exactly so many bytes. Ends the process where the pipe ends: nothing is to be run."""
    found = b""
    while len(found) < size:
        if not (more := os.read(pipe, size - len(found))):
            os._exit(0)
        found += more
    return found
