"""Life cycle of a vLLM process started by this program: ends with its parent, writes to a log, and waits until its
model may be loaded.

Nothing heavy is imported here. vLLM's engine core imports the program that started it before it imports vLLM, which
takes seconds; `posttrain/__init__.py` calls `begin` at that point, and `worker` calls it in all of vLLM's processes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

CORE = "EngineCore"  # prefix of the names that vLLM gives its processes
LOG = "POSTTRAIN_ENGINE_LOG"  # path of the file that gets the process's output
PARENT = "POSTTRAIN_ENGINE_PARENT"  # process id of the program that starts the process
READY = "POSTTRAIN_ENGINE_READY"  # path of a file; the process loads its model once the file exists
DEVICES = "POSTTRAIN_ENGINE_DEVICES"  # CUDA_VISIBLE_DEVICES of an engine on several GPUs
PYTHON_SHARED_MEMORY = "/dev/shm/psm_"  # shared memory of multiprocessing.shared_memory
VLLM_SHARED_MEMORY = "/dev/shm/vllm"  # of vLLM's workers on a CPU, which have mapped it once they have started
IN_CHUNKS = "posttrain_in_chunks"  # extra argument of a request whose tokens `schedulers` may send in chunks
POLL_S = 0.2


def prepare_environment() -> None:
    """Set the environment variables that vLLM reads. The first two are always set; the others keep the user's
    values."""
    # AsyncLLM always runs its engine core in a process of its own. With 1, a CPU model gets another process below it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork of a process with threads may hang
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM's warnings are about its own choices
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is data
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer shares these threads
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; without it vLLM takes a share of the host's memory
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


@contextlib.contextmanager
def restore_environment(names: Iterable[str]) -> Iterator[None]:
    """Restore the environment variables with these names at the end of the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@functools.cache
def begin() -> None:
    """Redirect output to the log that the environment names, and watch the parent: this process ends soon after it. The
    second call does nothing."""
    if log := os.environ.get(LOG):
        number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream, place in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(number, place)
        os.close(number)
    known = multiprocessing.parent_process()  # None while a process is at its first imports
    parent = known.pid if known is not None else int(os.environ.get(PARENT, os.getppid()))
    assert parent is not None
    end_with(parent, lambda: os._exit(1))


def end_with(parent: int, end: Callable[[], object]) -> None:
    """Call `end` in a thread soon after `parent`, the process that started this one, has ended (also by kill -9).

    Linux then gives this process another parent. That may happen before this call, so `parent` is passed in:
    `os.getppid()` called here could return the new parent, whose end the thread would wait for. (PR_SET_PDEATHSIG is
    sent when the *thread* ends that started the process.)
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        end()

    threading.Thread(target=watch, daemon=True, name="posttrain-parent").start()


def leave_signals() -> None:
    """Ignore Ctrl-C and the signals that schedulers send to all processes (SIGTERM, SIGUSR1): the trainer handles them.
    It finishes its step with this process and then kills it."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def mapped_files(prefix: str, process: int | str = "self") -> set[str]:
    """Return the files that a process has mapped whose paths begin with `prefix`. Raises OSError if it has ended."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {path for line in lines if (path := line.split(maxsplit=5)[-1]).startswith(prefix)}


def unlink_memory(prefix: str) -> None:
    """Remove the names of this process's shared memory that begin with `prefix`, because a killed process does not.
    Processes that have mapped the memory keep it."""
    for path in mapped_files(prefix):
        with contextlib.suppress(FileNotFoundError):  # another process has removed the name
            os.unlink(path)
            if prefix == PYTHON_SHARED_MEMORY:
                resource_tracker.unregister(path.removeprefix("/dev/shm"), "shared_memory")


def clean_up() -> None:
    """Remove what a killed process leaves behind: named semaphores, shared memory and the like."""
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]  # multiprocessing's cleanup at process exit
    unlink_memory(PYTHON_SHARED_MEMORY)


def wait_until_ready() -> None:
    """Block until the file that the environment names exists; return immediately if the environment names none."""
    if name := os.environ.get(READY):
        while not Path(name).exists():
            time.sleep(POLL_S / 10)
