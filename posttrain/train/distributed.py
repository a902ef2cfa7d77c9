"""Several processes that train one model, each with a GPU of its own. With one process everything here does nothing.

Every rank holds the whole model and knows the whole step: rollouts are gathered, so advantages, filters, denominators
and metrics are computed over all ranks by all of them, without a formula that knows of ranks. What is divided is the
work: sampling and scoring by prompt, forward and backward passes by row. Gradients are added up once an update, which
needs no wrapper around the model and lets ranks have different numbers of micro-batches.
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
import torch.distributed.nn.functional  # its default arguments keep the group of now: see `join_process_group`
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.errors import Interrupted, PeerLost, PosttrainError, UserError
from posttrain.run import ranks
from posttrain.run.directory import RunDirectory
from posttrain.seeds import derive
from posttrain.train import rank_failure_monitor
from posttrain.train.load_balancing import partition, split_rows
from posttrain.train.rank_failure_monitor import RankFailureMonitor
from posttrain.train.rank_rendezvous import agree_on_start
from posttrain.train.tensor_split import has_whole_gradient

T = TypeVar("T")
TIMEOUT = datetime.timedelta(hours=6)  # ranks wait for the slowest, which may load or save for long
JOIN_TIMEOUT = datetime.timedelta(minutes=30)  # for all ranks to come: imports and checks of the recipe
PEER_LOST_DELAY_S = 10.0  # before a rank tells that another failed: that one's own error comes first, and ends all
BUCKET_NUMEL = 1 << 26  # numbers that are added up in one call
PEER_MESSAGE_WAIT_S = 1.0  # for the word of the rank that broke a connection
_model_parallel = 1  # ranks that run the same rows: neighbours, see `set_model_parallel_size`
_tensor_parallel = 1  # of them, that run the same tokens: neighbours
_failure_monitor: RankFailureMonitor | None = None  # of the process group
_store: Any = None  # at which its ranks have met
_thread = threading.local()  # .group: over which this thread talks, see `use_group`
_DIRECTORY_KEY = "posttrain/directory"  # in the store
_RAISED_BY_ALL = "posttrain_agreed"  # an attribute of errors, see `all_ranks_raise`
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """The rank that writes to the run directory."""
    return rank() == 0


@contextlib.contextmanager
def join_process_group() -> Iterator[None]:
    """The process group that the environment names, from here to the end of the block.

    Objects and CPU tensors travel over gloo, GPU tensors over NCCL. Raises UserError where some ranks have a GPU and
    others do not.
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
    if dist.is_initialized():  # an engine that closes may have ended it
        barrier()  # rank 0 holds the store that the others still talk to
        dist.destroy_process_group()  # not after an error: it could wait for ranks that are gone


def _init_process_group() -> str:
    """Make the process group; returns the name of this start (`rank_rendezvous`). Raises PeerLost where one does not
    come: it was not started, or has failed before."""
    try:
        store, number, count = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))
        name = agree_on_start(store, number, count, timeout_s=JOIN_TIMEOUT.total_seconds())
    except RuntimeError as cause:
        raise PeerLost(
            f"the {ranks.world()} processes of this run did not meet: {_first_sentence(cause)}",
            hint="start all of them, with the same MASTER_ADDR and MASTER_PORT; one that has failed says why",
        ) from cause
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with _raise_peer_lost():
        store.set_timeout(TIMEOUT)
        own = dist.PrefixStore(f"posttrain/{name}", store)
        dist.init_process_group(backend, store=own, rank=number, world_size=count, timeout=TIMEOUT)
    return name


@contextlib.contextmanager
def propagate_failures() -> Iterator[None]:
    """Around what ranks do together. An error of this one alone is told to the others, wherever they wait; one that
    comes of another's end is raised as PeerLost, which says what the other said."""
    try:
        yield
    except BaseException as error:
        if _failure_monitor is None:
            raise
        _failure_monitor.mark_exiting()
        if isinstance(error, PeerLost | Interrupted) or getattr(error, _RAISED_BY_ALL, False):
            raise
        if _is_connection_error(error):
            raise _peer_lost_error(error) from error
        _failure_monitor.report_failure(_full_message(error))
        raise


def _full_message(error: BaseException) -> str:
    """All that people are told of it: the rank that failed may be ended before it comes to that."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, PosttrainError) else f"{type(error).__name__}: {_one_line(error)}"


def _is_connection_error(error: BaseException) -> bool:
    """Where a library talks to other ranks by itself, as in the passes of a divided model."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def open_directory(open_it: Callable[[], RunDirectory]) -> RunDirectory:
    """The run directory: rank 0 opens it, the others follow."""
    directory = open_it() if is_main() else None
    if directory is not None and _store is not None:
        _store.set(_DIRECTORY_KEY, str(directory.path.absolute()))
    path, attempt = broadcast_from_rank0((str(directory.path), directory.attempt) if directory else ("", 0))
    return directory or RunDirectory.follow(Path(path), attempt)


def directory_before_restart() -> Path | None:
    """The run directory that an earlier start of these processes by the same torchrun has opened; None if none has."""
    if _store is None or not _store.check([_DIRECTORY_KEY]):
        return None
    return Path(_store.get(_DIRECTORY_KEY).decode())


# --- talking ---


@contextlib.contextmanager
def _raise_peer_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as cause:
        raise _peer_lost_error(cause) from cause


def _peer_lost_error(cause: BaseException) -> PeerLost:
    if _failure_monitor is not None and (said := _failure_monitor.wait_for_failure(PEER_MESSAGE_WAIT_S)):
        return PeerLost(said.splitlines()[0], hint="its own message says more")
    return PeerLost(
        f"rank {ranks.rank()} lost the others: {_first_sentence(cause)}",
        hint="the first message of another rank says why",
    )


def _first_sentence(cause: BaseException) -> str:
    """The first sentence of a library's message, without the line of its source."""
    first = (str(cause).splitlines() or [type(cause).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first).split(". ")[0]


def gather(value: T) -> list[T]:
    """Everyone's value, by rank."""
    if world() == 1:
        return [value]
    found: list[Any] = [None] * world()
    with _raise_peer_lost():
        dist.all_gather_object(found, value, group=_group())
    return found


def gather_bytes(mine: Tensor, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Everyone's bytes, by rank. mine: this rank's, uint8 on the CPU; sizes: how many each rank has."""
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = mine
    found = [torch.empty_like(padded) for _ in sizes]
    with _raise_peer_lost():
        dist.all_gather(found, padded, group=_group())
    return [data[:size].numpy() for data, size in zip(found, sizes, strict=True)]


def exchange_bytes(parts: Sequence[Sequence[memoryview]]) -> list[list[NDArray[np.uint8]]]:
    """Send each rank the parts of its own, and return those that each has sent to this one, by rank."""
    sizes = gather([[len(part) for part in own] for own in parts])
    to, from_ = [sum(own) for own in sizes[rank()]], [theirs[rank()] for theirs in sizes]
    flat = [np.frombuffer(part, np.uint8) for own in parts for part in own]
    sent = torch.from_numpy(np.concatenate(flat) if flat else np.empty(0, np.uint8))
    found = torch.empty(sum(map(sum, from_)), dtype=torch.uint8)
    with _raise_peer_lost():
        dist.all_to_all_single(found, sent, list(map(sum, from_)), to, group=_group())
    ends = np.cumsum([0, *(size for own in from_ for size in own)])
    every = iter([found[start:end].numpy() for start, end in itertools.pairwise(ends.tolist())])
    return [[next(every) for _ in own] for own in from_]


def gather_one_by_one(value: T) -> Iterator[T]:
    """On rank 0 everyone's value, by rank, of which it receives one at a time; on the others nothing. All must iterate
    to the end."""
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
    """Rank 0's value."""
    if world() == 1:
        return value
    box = [value]
    with _raise_peer_lost():
        dist.broadcast_object_list(box, src=0, group=_group())
    return box[0]


def run_on_rank0(function: Callable[..., T], *args: Any) -> T:
    """Call `function` on rank 0 alone and return its value on all ranks. Raises on all of them if it fails."""
    mine: Captured[Any] = capture(function, *args) if is_main() else Captured(None)
    value, failure = broadcast_from_rank0((mine.value, mine.failure))
    _raise_on_all_ranks(mine, [failure])
    return value


@dataclass(frozen=True)
class Captured(Generic[T]):
    """What a function returned, or the error that it raised."""

    value: T
    error: Exception | None = None

    @property
    def message(self) -> str:
        """One line of the error, if there was one; never empty then."""
        return "" if self.error is None else _one_line(self.error)

    @property
    def failure(self) -> str:
        """The error as other ranks report it: `rank 1 failed: ...`, or the message of a PeerLost, which already names
        the rank that failed first; empty without an error."""
        if self.error is None or isinstance(self.error, PeerLost):
            return self.message
        return f"rank {rank()} failed: {self.message}"


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def capture(function: Callable[..., T], *args: Any) -> Captured[T]:
    """Call it and keep an error, for `gather_or_raise` to raise on all ranks: the others would wait for this one."""
    try:
        return Captured(function(*args))
    except Exception as error:
        return Captured(cast(T, None), error)


def gather_or_raise(mine: Captured[T]) -> list[T]:
    """Gather the value of every rank. If any rank has an error instead, all raise, marked for `all_ranks_raise`:
    a rank with an error of its own raises that, the others PeerLost."""
    found = gather((mine.value, mine.failure))
    _raise_on_all_ranks(mine, [failure for _, failure in found])
    return [value for value, _ in found]


def run_all_or_raise(function: Callable[..., T], *args: Any) -> T:
    """Call `function` on every rank and return this rank's value. If it fails on any, all raise (`gather_or_raise`)."""
    return value_or_raise(capture(function, *args))


def value_or_raise(mine: Captured[T]) -> T:
    """This rank's value. If any rank has an error instead, all raise as in `gather_or_raise`."""
    gather_or_raise(Captured(None, mine.error))
    return mine.value


def _raise_on_all_ranks(mine: Captured[Any], failures: Sequence[str]) -> None:
    """Raise if any rank has failed: this rank's own error if it has one, else PeerLost with the failure of the first
    rank that failed by itself. failures: `Captured.failure` of each rank."""
    if not any(failures):
        return
    by_itself = (line for number, line in enumerate(failures) if line.startswith(f"rank {number} failed"))
    error = mine.error or PeerLost(next(by_itself, next(filter(None, failures))), hint="its own message says more")
    setattr(error, _RAISED_BY_ALL, True)
    raise error


def all_ranks_raise(error: BaseException) -> bool:
    """Whether every rank raises with this one, at the same place: then they can still do something together."""
    return world() == 1 or getattr(error, _RAISED_BY_ALL, False)


def any_rank(flag: bool) -> bool:
    """Whether it is true on any rank."""
    return any(gather(flag))


def all_reduce_numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    """Sums over ranks by name; a rank that lacks a name adds nothing."""
    return sum_over_ranks(gather(dict(numbers)))


def sum_over_ranks(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name of what ranks have told."""
    sums: dict[str, float] = {}
    for found in parts:
        for name, number in found.items():
            sums[name] = sums.get(name, 0) + number
    return sums


def barrier() -> None:
    """Wait until all are here."""
    gather(None)


def rank_path(path: Path) -> Path:
    """A path for this rank's own files: the others' have their number after it."""
    return path if is_main() else path.with_name(f"{path.name}-{rank()}")


def rank_seed(seed: int) -> int:
    """A seed for draws that must differ between ranks, such as dropout; ranks that run the same tokens share it."""
    number = rank() // _tensor_parallel
    return derive(seed, "rank", number) if number else seed


def new_group() -> Any:
    """Another process group of all ranks, for a second thread that communicates. All ranks must call this."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT) if world() > 1 else None


@contextlib.contextmanager
def use_group(group: Any) -> Iterator[None]:
    """Inside, this thread communicates over `group`: threads that shared one would take each other's messages."""
    _thread.group = group
    try:
        yield
    finally:
        _thread.group = None


def _group() -> Any:
    return getattr(_thread, "group", None)


# --- tensors ---


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum over ranks, in place; for a bool, whether it is true anywhere."""
    if world() == 1:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.copy_(all_reduce_sum(tensor.to(torch.int32)) > 0)
    with _raise_peer_lost():
        dist.all_reduce(tensor)
    return tensor


def sum_gradients(*modules: nn.Module | None) -> None:
    """Add up the gradients of all ranks. A parameter that has one anywhere has one everywhere afterwards.

    Those of divided parameters were added up in the backward pass. Ranks that run the same tokens have a gradient twice
    unless it is that of a part (`tensor_split`).
    """
    if world() == 1:
        return
    parameters = [p for m in modules if m is not None for p in m.parameters()]
    trained = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if not trained:
        return
    found = torch.tensor([p.grad is not None for p in trained], device=trained[0].device)
    for parameter, anywhere in zip(trained, all_reduce_sum(found).tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        if _tensor_parallel > 1 and parameter.grad is not None and has_whole_gradient(parameter):
            parameter.grad /= _tensor_parallel
    for bucket in _buckets([p.grad for p in trained if p.grad is not None]):
        flat = all_reduce_sum(torch.cat([g.reshape(-1) for g in bucket]))
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, about BUCKET_NUMEL numbers together."""
    bucket, size = list[Tensor](), 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.numel() > BUCKET_NUMEL):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def broadcast_weights(*modules: nn.Module | None) -> None:
    """Give every rank the trained weights of rank 0: they must agree to the last bit, since they are never compared
    again. Divided ones are in one place each."""
    if world() == 1:
        return
    with _raise_peer_lost(), torch.no_grad():
        for module in modules:
            for parameter in module.parameters() if module is not None else ():
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    dist.broadcast(parameter.data, src=0)


# --- dividing work ---


def set_model_parallel_size(context: int, tensor: int = 1) -> None:
    """From now on each `context` * `tensor` neighbours run the same rows in passes of the model: each a part of every
    line (`context_split`), and each `tensor` of them the same part (`tensor_split`)."""
    global _model_parallel, _tensor_parallel
    _model_parallel, _tensor_parallel = context * tensor, tensor


def model_parallel_size() -> int:
    """How many ranks run the same rows as this one, itself included."""
    return _model_parallel


def loss_share() -> float:
    """What this rank multiplies the loss of its rows by: ranks of a context add up their gradients, those that run the
    same tokens have the same."""
    return _tensor_parallel / _model_parallel


def data_parallel_size() -> int:
    """Among how many the rows of a pass are divided: the ranks, or groups of them that run the same."""
    return world() // _model_parallel


def sum_of_passes(tensor: Tensor) -> Tensor:
    """The sum in place of what the rows of all ranks gave, each row counted once; for a bool, as `all_reduce_sum`."""
    summed = all_reduce_sum(tensor)
    return summed if _model_parallel == 1 or tensor.dtype == torch.bool else summed.div_(_model_parallel)


def my_pass_shard(count: int) -> range:
    """Numbers of the passes that this rank runs, of `count` whose costs are not known."""
    return range(rank() // _model_parallel, count, data_parallel_size())


def my_shard(count: int) -> range:
    """Numbers of the things that this rank works on, of `count` whose costs are not known."""
    return range(rank(), count, world())


def my_even_shard(costs: Sequence[float]) -> list[int]:
    """Numbers of the things that this rank works on, rising: about as costly together as those of every other rank, and
    as many, but for one."""
    room = [-(-len(costs) // data_parallel_size())] * data_parallel_size()
    return sorted(partition(costs, data_parallel_size(), room)[rank() // _model_parallel])


def my_rows(costs: Sequence[float], units: Sequence[int] | None = None) -> list[int]:
    """Numbers of the rows that this rank works on, rising; costs, units: see `split_rows`."""
    return split_rows(costs, data_parallel_size(), units)[rank() // _model_parallel]


@contextlib.contextmanager
def hide_process_group() -> Iterator[None]:
    """Inside, libraries see one process: accelerate would divide the batches, and wrap the model, once more."""
    hidden = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
