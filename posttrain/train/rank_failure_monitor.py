"""A rank that fails alone says so where all look, so that none waits for it.

Ranks meet in collectives. An error of one that the others do not expect leaves them there: until its process has ended,
where they talk over connections (gloo), or for hours, where a kernel waits on the GPU (NCCL). So the first that fails
writes who it is, and why, into the store at which the ranks have met. Each looks there from a thread of its own. A rank
that hears of it by itself, by a connection that broke, tells what the store says in place of the library's words; one
that still waits PATIENCE_S later is ended, but for a checkpoint that it is writing.

`torch.distributed.monitored_barrier` finds a rank that is missing, but with gloo alone and where all call it; the error
files of torchelastic are written by a process that ends, and no rank that waits reads them.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from posttrain import terminal
from posttrain.run import ranks

PATIENCE_S = 10.0  # for a rank that hears of another's failure to end by itself, which may save what is done
POLL_S = 0.25
ASK_S = 30.0  # the store's limit for one answer
LINGER_S = 2.0  # that rank 0, in whose process the store may be, waits for the others to hear of its failure
FAILED, COUNT, HEARD = "failed", "failures", "heard"


def connect() -> Any:
    """The store that torchrun's environment names, over a connection of its own. torchrun keeps it when it starts the
    ranks anew; with `launch` it is one of rank 0's process."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*place, is_master=False, timeout=datetime.timedelta(seconds=ASK_S))


class Alarm:
    """While entered, this rank hears of the others' failures, and they of its own.

    said: the rank, and all that it can say of the cause; empty as long as nothing is known.
    """

    def __init__(self, store: Any, *, stop: Callable[[], None] = lambda: os._exit(1)) -> None:
        self.store, self.stop, self.said = store, stop, ""
        self._ending = threading.Event()  # this rank ends by itself
        self._heard = threading.Event()
        self._thread = threading.Thread(target=self._look, name="alarm", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join(PATIENCE_S)

    def ends(self) -> None:
        """This rank ends by itself, whatever the others say."""
        self._ending.set()

    def ring(self, cause: str) -> None:
        """Tell all that this rank has failed, and end by oneself. Another's failure that was there before stays."""
        self.ends()
        try:
            if self.store.add(COUNT, 1) > 1:
                return
            self.store.set(FAILED, f"rank {ranks.rank()} failed: {cause}")
            until = time.monotonic() + LINGER_S
            while ranks.is_main() and self.store.add(HEARD, 0) < ranks.world() - 1 and time.monotonic() < until:
                time.sleep(POLL_S / 5)
        except RuntimeError:  # the store is gone, and with it rank 0
            return

    def hear(self, seconds: float) -> str:
        """`said`, waited for so long: a connection breaks after the word of the one that broke it."""
        self._heard.wait(seconds)
        return self.said

    def _look(self) -> None:
        while not self.said:
            try:
                if self.store.check([FAILED]):
                    self.said = self.store.get(FAILED).decode()
                    self.store.add(HEARD, 1)
            except RuntimeError:
                self.said = self.said or "rank 0 is gone"
            if not self.said and self._ending.wait(POLL_S):
                return
        self._heard.set()
        if self._ending.wait(PATIENCE_S):
            return
        while ranks.is_writing():
            if self._ending.wait(POLL_S):
                return
        terminal.note(
            f"{self.said}\nrank {ranks.rank()} waited for it and is ended; go on with the same command and --resume"
        )
        self.stop()
