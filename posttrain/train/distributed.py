"""Communication between the ranks of a run: process group, collectives, failure propagation.

With one process every function here is a no-op. How ranks divide the work of a step: `data_parallel`.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # early: its default arguments bind the current group (`join_process_group`)
from numpy.typing import NDArray
from torch import Tensor

from posttrain.errors import Interrupted, PeerLost, PosttrainError, UserError
from posttrain.run import ranks
from posttrain.run.directory import RunDirectory
from posttrain.train import rank_failure_monitor
from posttrain.train.rank_failure_monitor import RankFailureMonitor
from posttrain.train.rank_rendezvous import agree_on_start

T = TypeVar("T")
TIMEOUT = datetime.timedelta(hours=6)  # of a collective: the slowest rank may load or save for long
JOIN_TIMEOUT = datetime.timedelta(minutes=30)  # for all ranks to start: imports and checks of the recipe
PEER_LOST_DELAY_S = 10.0  # before PeerLost is raised: the failed rank's own error should come first
PEER_MESSAGE_WAIT_S = 1.0  # wait for the message of the rank that broke a connection
_failure_monitor: RankFailureMonitor | None = None  # monitors the ranks of the process group
_store: Any = None  # TCPStore of the rendezvous
_thread = threading.local()  # .group: process group of this thread, see `use_group`
_DIRECTORY_KEY = "posttrain/directory"  # key in the store
_RAISED_BY_ALL = "posttrain_agreed"  # attribute set on errors, see `all_ranks_raise`
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this is rank 0, which writes to the run directory."""
    return rank() == 0


@contextlib.contextmanager
def join_process_group() -> Iterator[None]:
    """Join the process group named by the environment for the duration of the block.

    Objects and CPU tensors travel over gloo, GPU tensors over NCCL. Raises UserError if only some of the ranks have a
    GPU.
    """
    if ranks.world() == 1:
        yield
        return
    global _failure_monitor, _store
    try:
        name = _init_process_group()
        with _raise_peer_lost():
            _store = rank_failure_monitor.connect_store()
            _failure_monitor = RankFailureMonitor(dist.PrefixStore(f"posttrain/{name}/alarm", _store))
        with _failure_monitor, propagate_failures():
            have = gather(torch.cuda.is_available())
            if len(set(have)) > 1:
                raise UserError(
                    f"{len(have)} processes want a GPU each, but only {sum(have)} found one",
                    hint="start fewer processes",
                )
            yield
    except PeerLost:
        time.sleep(PEER_LOST_DELAY_S)
        raise
    if dist.is_initialized():  # closing an engine may have destroyed the group
        barrier()  # rank 0 hosts the store that other ranks still use
        dist.destroy_process_group()  # skipped after an error: it could wait for dead ranks


def _init_process_group() -> str:
    """Initialize torch.distributed and return the name of this start (`rank_rendezvous`).

    Raises PeerLost if a rank does not join: it was not started, or failed earlier.
    """
    try:
        store, number, count = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))
        name = agree_on_start(store, number, count, timeout_s=JOIN_TIMEOUT.total_seconds())
    except RuntimeError as cause:
        raise PeerLost(
            f"the {ranks.world()} processes of this run did not meet: {_first_sentence(cause)}",
            hint="start all of them with the same MASTER_ADDR and MASTER_PORT; a process that failed prints its error",
        ) from cause
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with _raise_peer_lost():
        store.set_timeout(TIMEOUT)
        prefixed = dist.PrefixStore(f"posttrain/{name}", store)
        dist.init_process_group(backend, store=prefixed, rank=number, world_size=count, timeout=TIMEOUT)
    return name


@contextlib.contextmanager
def propagate_failures() -> Iterator[None]:
    """Report an error raised in the block to all other ranks, wherever they wait.

    Wraps what ranks do together. An error caused by another rank's failure is raised as PeerLost with that rank's
    message.
    """
    try:
        yield
    except BaseException as error:
        if _failure_monitor is None:
            raise
        _failure_monitor.mark_exiting()
        if isinstance(error, PeerLost | Interrupted) or getattr(error, _RAISED_BY_ALL, False):
            raise
        # a broken connection to another rank, e.g. in a collective of FSDP
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
            raise _peer_lost_error(error) from error
        _failure_monitor.report_failure(_full_message(error))
        raise


def _full_message(error: BaseException) -> str:
    """Return the full user-facing message of an error; the failing rank may be killed before printing the message."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, PosttrainError) else f"{type(error).__name__}: {_one_line(error)}"


def open_directory(open_it: Callable[[], RunDirectory]) -> RunDirectory:
    """Open the run directory on rank 0 and return it on every rank."""
    directory = open_it() if is_main() else None
    if directory is not None and _store is not None:
        _store.set(_DIRECTORY_KEY, str(directory.path.absolute()))
    path, attempt = broadcast_from_rank0((str(directory.path), directory.attempt) if directory else ("", 0))
    return directory or RunDirectory.follow(Path(path), attempt)


def directory_before_restart() -> Path | None:
    """Return the run directory opened by an earlier start under the same torchrun; None if there was none."""
    if _store is None or not _store.check([_DIRECTORY_KEY]):
        return None
    return Path(_store.get(_DIRECTORY_KEY).decode())


# --- communication of objects and bytes ---


@contextlib.contextmanager
def _raise_peer_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as cause:
        raise _peer_lost_error(cause) from cause


def _peer_lost_error(cause: BaseException) -> PeerLost:
    if _failure_monitor is not None and (failure := _failure_monitor.wait_for_failure(PEER_MESSAGE_WAIT_S)):
        return PeerLost(failure.splitlines()[0], hint="see the error of that rank")
    return PeerLost(
        f"rank {ranks.rank()} lost the connection to other ranks: {_first_sentence(cause)}",
        hint="see the first error of another rank",
    )


def _first_sentence(cause: BaseException) -> str:
    """Return the first sentence of a library's error message, without its source location prefix."""
    first = (str(cause).splitlines() or [type(cause).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).split(". ")[0]


def gather(value: T) -> list[T]:
    """Return the value of every rank, ordered by rank."""
    if world() == 1:
        return [value]
    found: list[Any] = [None] * world()
    with _raise_peer_lost():
        dist.all_gather_object(found, value, group=_group())
    return found


def gather_bytes(mine: Tensor, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Gather byte tensors of different lengths from all ranks, ordered by rank.

    mine: uint8 tensor of this rank on the CPU. sizes: number of bytes of each rank.
    """
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = mine
    gathered = [torch.empty_like(padded) for _ in sizes]
    with _raise_peer_lost():
        dist.all_gather(gathered, padded, group=_group())
    return [data[:size].numpy() for data, size in zip(gathered, sizes, strict=True)]


def exchange_bytes(parts: Sequence[Sequence[memoryview]]) -> list[list[NDArray[np.uint8]]]:
    """Send `parts[r]` to each rank r; return the parts received from each rank, ordered by rank (all-to-all)."""
    sizes = gather([[len(part) for part in part_list] for part_list in parts])
    to, from_ = [sum(part_list) for part_list in sizes[rank()]], [theirs[rank()] for theirs in sizes]
    flat = [np.frombuffer(part, np.uint8) for part_list in parts for part in part_list]
    sent = torch.from_numpy(np.concatenate(flat) if flat else np.empty(0, np.uint8))
    found = torch.empty(sum(map(sum, from_)), dtype=torch.uint8)
    with _raise_peer_lost():
        dist.all_to_all_single(found, sent, list(map(sum, from_)), to, group=_group())
    ends = np.cumsum([0, *(size for part_list in from_ for size in part_list)])
    chunks = iter([found[start:end].numpy() for start, end in itertools.pairwise(ends.tolist())])
    return [[next(chunks) for _ in part_list] for part_list in from_]


def gather_one_by_one(value: T) -> Iterator[T]:
    """Yield every rank's value on rank 0, one at a time and ordered by rank; yield nothing on other ranks.

    Only one value of another rank is in memory at a time. All ranks must iterate to the end.
    """
    if is_main():
        yield value
    for number in range(1, world()):
        box: list[Any] = [value]
        with _raise_peer_lost():
            if rank() == number:
                dist.send_object_list(box, dst=0, group=_group())
            elif is_main():
                dist.recv_object_list(box, src=number, group=_group())
        if is_main():
            yield box[0]


def broadcast_from_rank0(value: T) -> T:
    """Return rank 0's value on all ranks."""
    if world() == 1:
        return value
    box = [value]
    with _raise_peer_lost():
        dist.broadcast_object_list(box, src=0, group=_group())
    return box[0]


def run_on_rank0(function: Callable[..., T], *args: Any) -> T:
    """Call `function` on rank 0 alone and return its value on all ranks. Raises on all ranks if the call fails."""
    mine: Captured[Any] = capture(function, *args) if is_main() else Captured(None)
    value, failure = broadcast_from_rank0((mine.value, mine.failure))
    _raise_on_all_ranks(mine, [failure])
    return value


@dataclass(frozen=True)
class Captured(Generic[T]):
    """Result of a function call: its return value, or the exception it raised."""

    value: T
    error: Exception | None = None

    @property
    def message(self) -> str:
        """First line of the error message, never empty if there is an error; an empty string otherwise."""
        return "" if self.error is None else _one_line(self.error)

    @property
    def failure(self) -> str:
        """Error as reported to other ranks, e.g. `rank 1 failed: ...`; empty without an error.

        A PeerLost is reported by its own message, which already names the rank that failed first.
        """
        if self.error is None or isinstance(self.error, PeerLost):
            return self.message
        return f"rank {rank()} failed: {self.message}"


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def capture(function: Callable[..., T], *args: Any) -> Captured[T]:
    """Call `function` and capture an exception, so that `gather_or_raise` can raise it on all ranks."""
    try:
        return Captured(function(*args))
    except Exception as error:
        return Captured(cast(T, None), error)


def gather_or_raise(mine: Captured[T]) -> list[T]:
    """Gather the value of every rank, or raise on all ranks if any rank captured an error.

    A rank with an error of its own raises that error, the other ranks PeerLost; both are marked for `all_ranks_raise`.
    """
    found = gather((mine.value, mine.failure))
    _raise_on_all_ranks(mine, [failure for _, failure in found])
    return [value for value, _ in found]


def run_all_or_raise(function: Callable[..., T], *args: Any) -> T:
    """Call `function` on every rank and return this rank's value; raise on all ranks if any call fails."""
    return value_or_raise(capture(function, *args))


def value_or_raise(mine: Captured[T]) -> T:
    """Return this rank's value, or raise on all ranks if any rank captured an error, as `gather_or_raise` does."""
    gather_or_raise(Captured(None, mine.error))
    return mine.value


def _raise_on_all_ranks(mine: Captured[Any], failures: Sequence[str]) -> None:
    """Raise this rank's own error, or PeerLost with the first rank's failure, if any rank has failed.

    failures: `Captured.failure` of each rank. PeerLost names the first rank whose failure is its own, not another's
    PeerLost.
    """
    if not any(failures):
        return
    own_failures = (line for number, line in enumerate(failures) if line.startswith(f"rank {number} failed"))
    error = mine.error or PeerLost(next(own_failures, next(filter(None, failures))), hint="see the error of that rank")
    setattr(error, _RAISED_BY_ALL, True)
    raise error


def all_ranks_raise(error: BaseException) -> bool:
    """Return whether every rank raises at the same point as this error does, so that collectives are still possible."""
    return world() == 1 or getattr(error, _RAISED_BY_ALL, False)


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is true on any rank."""
    return any(gather(flag))


def all_reduce_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    """Sum numbers over ranks by name; a rank that lacks a name adds nothing."""
    return sum_by_name(gather(dict(numbers)))


def sum_by_name(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum the numbers of several ranks by name."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, number in part.items():
            sums[name] = sums.get(name, 0) + number
    return sums


def barrier() -> None:
    """Wait until all ranks reach this call."""
    gather(None)


def rank_path(path: Path) -> Path:
    """Return a path for files of this rank: `path` on rank 0, with `-RANK` appended on other ranks."""
    return path if is_main() else path.with_name(f"{path.name}-{rank()}")


def new_group() -> Any:
    """Create another process group of all ranks, for a second thread that communicates. All ranks must call this."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT) if world() > 1 else None


@contextlib.contextmanager
def use_group(group: Any) -> Iterator[None]:
    """Use `group` for all communication of this thread inside the block.

    Two threads that share a group would receive each other's messages.
    """
    _thread.group = group
    try:
        yield
    finally:
        _thread.group = None


def _group() -> Any:
    return getattr(_thread, "group", None)


# --- communication of tensors ---


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over ranks in place; a bool tensor becomes true where any rank has true."""
    if world() == 1:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.copy_(all_reduce_sum(tensor.to(torch.int32)) > 0)
    with _raise_peer_lost():
        dist.all_reduce(tensor)
    return tensor


def broadcast_tensor(tensor: Tensor) -> None:
    """Copy rank 0's tensor into that of every other rank, in place."""
    with _raise_peer_lost():
        dist.broadcast(tensor, src=0)


@contextlib.contextmanager
def hide_process_group() -> Iterator[None]:
    """Hide the ranks' environment variables in the block.

    Otherwise accelerate would shard the batches and wrap the model again.
    """
    hidden = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
