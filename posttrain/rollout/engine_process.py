"""The life of a process of vLLM's that this program has started: it ends with it, and writes into a log.

Nothing heavy is imported here. vLLM's engine core imports the program that started it before it imports vLLM, which
takes it seconds; `posttrain/__init__.py` calls `begin` there. `worker` calls it in all of vLLM's processes.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
import time

LOG = "POSTTRAIN_ENGINE_LOG"  # names the file that what the process says goes to
POLL_S = 0.5


@functools.cache
def begin() -> None:
    """Write into the log that the environment names, and end soon after the process that started this one has gone,
    also by kill -9. The second call does nothing.

    Not PR_SET_PDEATHSIG: that is sent when the *thread* ends that started the process.
    """
    if log := os.environ.get(LOG):
        number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream, place in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(number, place)
        os.close(number)
    known = multiprocessing.parent_process()  # not yet known to a process that is at its first imports
    parent = os.getppid() if known is None else known.pid
    threading.Thread(target=_end_behind, args=(parent,), daemon=True, name="posttrain-parent").start()


def _end_behind(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)
