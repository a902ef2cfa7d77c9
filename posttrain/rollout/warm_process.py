"""Processes that import vLLM while the trainer imports torch and reads its data, and later become vLLM's engine cores.

vLLM starts its engine core by multiprocessing's `spawn`, once everything about the engine is known. The new process
then imports torch and vLLM, which takes most of a start. A warm process is spawned early: it imports both, and waits at
a pipe for the process object that it is to run. Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import context, process, reduction, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from posttrain.garbage_collection import pause_collection
from posttrain.rollout import engine_process

ENGINE = ("vllm.v1.engine.core", "torch._inductor.compile_fx")
_SPAWN = multiprocessing.get_context("spawn")
_waiting: dict[Any, Connection] = {}  # warm processes, and the pipe that each reads


def start(count: int) -> None:
    """Start warm processes until `count` of them wait. No-op if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return
    engine_process.prepare_environment()
    resource_tracker.ensure_running()  # starting the tracker unblocks signals, so it must run before SIGINT is blocked
    while len(_waiting) < count:
        theirs, ours = _SPAWN.Pipe(duplex=False)
        waiting = _SPAWN.Process(target=main, args=(theirs,), name="WarmProcess", daemon=True)
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the new process ignores SIGINT
        try:
            waiting.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        theirs.close()
        _waiting[waiting] = ours


@contextlib.contextmanager
def use() -> Iterator[None]:
    """Let engine cores started inside the block run in warm processes, as long as there are any; end unused ones
    afterwards."""
    kind: Any = context.SpawnProcess
    usual = kind._Popen

    def popen(core: Any) -> Any:
        return (core.name.startswith(engine_process.CORE) and _hand_over(core)) or usual(core)

    kind._Popen = staticmethod(popen)
    try:
        yield
    finally:
        kind._Popen = staticmethod(usual)
        close()


def count_waiting() -> int:
    """Return how many warm processes wait for an engine core."""
    return len(_waiting)


def close() -> None:
    """End the warm processes that still wait."""
    while _waiting:
        _end(*_waiting.popitem())


def _end(waiting: Any, pipe: Connection) -> None:
    waiting.kill()
    waiting.join()
    pipe.close()


def _hand_over(core: Any) -> Any:
    """Give `core` to a warm process to run, and return multiprocessing's handle of it; None if no warm process can run
    it."""
    while _waiting:
        waiting, pipe = _waiting.popitem()
        if waiting.is_alive():
            with contextlib.suppress(AttributeError, BrokenPipeError):  # open files are only inherited at the start
                pipe.send(dict(os.environ))
                pipe.send_bytes(_dump(core))
                pipe.close()
                process._children.discard(waiting)  # type: ignore[attr-defined]
                return waiting._popen
        _end(waiting, pipe)
    return None


def _dump(core: Any) -> bytes:
    """Return a process object as `spawn` sends it. Raises AttributeError if it needs files that this process
    has open."""
    state = io.BytesIO()
    context.set_spawning_popen(object())  # type: ignore[arg-type]  # a placeholder that cannot pass on open files
    try:
        reduction.dump(core, state)
    finally:
        context.set_spawning_popen(None)
    return state.getvalue()


def main(pipe: Connection) -> None:
    """Body of a warm process: import vLLM, wait for a process object, run it. Ends when the trainer ends."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None and trainer.pid is not None
    engine_process.end_with(trainer.pid, lambda: os._exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C, and this process ends with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    before = set(os.environ)
    # an error is reported by the engine, which imports the module again
    with pause_collection(freeze=True), _silence(), contextlib.suppress(Exception):
        for name in ENGINE:
            importlib.import_module(name)
        from vllm.platforms import current_platform

        importlib.import_module(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
    try:
        environment = pipe.recv()
    except EOFError:  # no engine core is to be run
        os._exit(0)
    for name in before - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)
    engine_process.begin()
    core = pipe.recv()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    current: Any = multiprocessing.current_process()
    current._name, current._config = core._name, core._config
    core.run()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard everything written to stdout and stderr inside the block."""
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
