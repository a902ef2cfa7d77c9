"""The life of an engine's process: it ends when its stdin does, whose other end whoever started it holds.

Nothing heavy is imported here. The stdin is watched from the first line of the process on, so that also a server that
still imports torch and vLLM, which takes seconds to a minute, ends as soon as it is asked to.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable

from posttrain.rollout import named_memory

_last_acts: list[Callable[[], None]] = []


def watch() -> None:
    """From now on, leave when stdin ends."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        leave()

    threading.Thread(target=wait, daemon=True).start()


def before_leaving(act: Callable[[], None]) -> None:
    """Have something done when stdin has ended, before the process does."""
    _last_acts.append(act)


def leave() -> None:
    """End this process at once, with vLLM's own (one a GPU under tensor parallelism), which would outlive it."""
    for act in _last_acts:
        act()
    children = multiprocessing.active_children()
    segments = named_memory.mapped([os.getpid(), *(child.pid for child in children if child.pid)]) if children else ()
    for child in children:
        child.kill()
    named_memory.remove(segments)
    os._exit(0)
