"""Rank failure monitor: broadcasts a rank's failure through the TCPStore and aborts ranks that would wait for it.

Ranks meet in collectives. An error that only one rank raises leaves the other ranks waiting in a collective: until the
failing process has ended if they communicate over sockets (gloo), or for hours if a kernel waits on the GPU (NCCL). So
the first rank that fails writes its number and the cause into the store of the rendezvous, and every rank polls that
store from a thread. A rank that first sees a broken connection reports the failure found in the store instead of the
library's message. A rank that is still waiting EXIT_GRACE_S later is aborted, after any checkpoint that it is writing.

`torch.distributed.monitored_barrier` finds a missing rank, but only with gloo and only if all ranks call it. The error
files of torchelastic are written by a process as it exits, and no waiting rank reads them.
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

EXIT_GRACE_S = 10.0  # time for a rank to exit normally after another rank's failure; it may save finished steps
POLL_S = 0.25
STORE_TIMEOUT_S = 30.0  # for one request to the store
ACK_TIMEOUT_S = 2.0  # how long rank 0, whose process may host the store, waits until all ranks have read its failure
FAILURE_KEY, FAILURE_COUNT_KEY, ACK_COUNT_KEY = "failed", "failures", "acknowledged"


def connect_store() -> Any:
    """Connect to the store at MASTER_ADDR:MASTER_PORT over a separate connection.

    torchrun's store outlives a restart of the ranks; with `launch` the store is hosted by rank 0's process.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=False, timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S))


class RankFailureMonitor:
    """Context manager that reports this rank's failure to the other ranks and watches for theirs in a thread.

    store: shared by all ranks. stop: ends this process; called if the rank still waits EXIT_GRACE_S after a failure.
    failure: the failed rank and the cause; empty until a failure is known.
    """

    def __init__(self, store: Any, *, stop: Callable[[], None] = lambda: os._exit(1)) -> None:
        self.store, self.stop, self.failure = store, stop, ""
        self._exiting = threading.Event()  # this rank exits normally: do not abort it
        self._failure_known = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="rank failure monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exiting.set()
        self._thread.join(EXIT_GRACE_S)

    def mark_exiting(self) -> None:
        """Declare that this rank is exiting, so that it is not aborted whatever other ranks report."""
        self._exiting.set()

    def report_failure(self, cause: str) -> None:
        """Publish this rank's failure to all ranks and mark it as exiting; the first failure reported is kept."""
        self.mark_exiting()
        try:
            if self.store.add(FAILURE_COUNT_KEY, 1) > 1:
                return
            self.store.set(FAILURE_KEY, f"rank {ranks.rank()} failed: {cause}")
            deadline = time.monotonic() + ACK_TIMEOUT_S
            others = ranks.world() - 1
            while ranks.is_main() and self.store.add(ACK_COUNT_KEY, 0) < others and time.monotonic() < deadline:
                time.sleep(POLL_S / 5)
        except RuntimeError:  # the store is gone, and rank 0 with it
            return

    def wait_for_failure(self, seconds: float) -> str:
        """Return `failure`, waiting up to `seconds` for it: a rank may see a broken connection before the report."""
        self._failure_known.wait(seconds)
        return self.failure

    def _poll(self) -> None:
        while not self.failure:
            try:
                if self.store.check([FAILURE_KEY]):
                    self.failure = self.store.get(FAILURE_KEY).decode()
                    self.store.add(ACK_COUNT_KEY, 1)
            except RuntimeError:
                self.failure = self.failure or "rank 0 is gone"
            if not self.failure and self._exiting.wait(POLL_S):
                return
        self._failure_known.set()
        if self._exiting.wait(EXIT_GRACE_S):
            return
        while ranks.is_writing():
            if self._exiting.wait(POLL_S):
                return
        terminal.note(
            f"{self.failure}\nrank {ranks.rank()} was waiting for it and is stopped;"
            " continue with the same command and --resume"
        )
        self.stop()
