"""The life of a vLLM process that this program has started: it ends with it, writes into a log, and waits until its
model may be loaded.

Nothing heavy is imported here. vLLM's engine core imports the program that started it before it imports vLLM, which
takes it seconds; `posttrain/__init__.py` calls `begin` there. `worker` calls it in all of vLLM's processes.
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
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path

CORE = "EngineCore"  # what vLLM's names of its processes begin with
LOG = "POSTTRAIN_ENGINE_LOG"  # names the file that what the process says goes to
PARENT = "POSTTRAIN_ENGINE_PARENT"  # the process id of the program that starts it
READY = "POSTTRAIN_ENGINE_READY"  # names the file whose existence lets the process load its model
DEVICES = "POSTTRAIN_ENGINE_DEVICES"  # CUDA_VISIBLE_DEVICES of an engine on several GPUs
OF_PYTHON = "/dev/shm/psm_"  # of multiprocessing.shared_memory
OF_VLLM = "/dev/shm/vllm"  # of its workers on a CPU, which have mapped it when they have started
POLL_S = 0.2


def prepare_environment() -> None:
    """Settings that vLLM reads from the environment. Those that the user made stay, but for the first two."""
    # AsyncLLM's engine core has a process of its own in any case. With 1 the model gets another one behind it on a CPU.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork of a process with threads may hang
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about its own choices
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is data
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer shares these threads
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB; without it vLLM takes a share of the host's memory
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


@functools.cache
def begin() -> None:
    """Write into the log that the environment names, and end soon after the process that started this one has gone. The
    second call does nothing."""
    if log := os.environ.get(LOG):
        number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream, place in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(number, place)
        os.close(number)
    known = multiprocessing.parent_process()  # None in a process that is at its first imports
    parent = known.pid if known is not None else int(os.environ.get(PARENT, os.getppid()))
    assert parent is not None
    end_with(parent, lambda: os._exit(1))


def end_with(parent: int, end: Callable[[], object]) -> None:
    """Call `end` in a thread soon after the process `parent`, which started this one, has gone, also by kill -9.

    Linux then gives this process another parent, which may have happened before this call: a process that asks
    `os.getppid()` for `parent` only here would wait for the end of the new one. (PR_SET_PDEATHSIG is sent when the
    *thread* ends that started it.)
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        end()

    threading.Thread(target=watch, daemon=True, name="posttrain-parent").start()


def leave_signals() -> None:
    """From now on Ctrl-C, and what schedulers send to all (SIGTERM, SIGUSR1), are the trainer's, which finishes its
    step with this process and kills it."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def unlink_memory(prefix: str) -> None:
    """Remove the names that begin like that of memory which this process shares with others: it is gone when they are
    killed. Who has mapped it keeps it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith(prefix):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                os.unlink(path)
                if prefix == OF_PYTHON:
                    resource_tracker.unregister(path.removeprefix("/dev/shm"), "shared_memory")


def clean_up() -> None:
    """Remove what a process that is killed leaves behind: named semaphores, shared memory and the like."""
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]  # what it does at a process's end
    unlink_memory(OF_PYTHON)


def wait_until_ready() -> None:
    """Block until the file that the environment names is there; return at once where it names none."""
    if name := os.environ.get(READY):
        while not Path(name).exists():
            time.sleep(POLL_S / 10)
