"""Exchange of rollouts between ranks.

Per-row numbers go to all ranks. Token ids and per-token numbers, as packed arrays, and the text go to the rank that
trains on the row, or to all ranks if something reads all of them (`TrainContext.keeps_tokens_apart`).

A token takes 4 bytes for its id, 4 for its log-prob (8 if float32 cannot hold it exactly) and 4 for its version if the
tokens of a rollout differ in version; pickled tuples of Python numbers take half as much again, and ten times as long.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from posttrain.batch import RemoteTokens, Rollout, Segment
from posttrain.train import distributed
from posttrain.train.distributed import Captured

T = TypeVar("T")


def gather_rollouts(own: Captured[T], *, by_row: bool = False) -> list[T]:
    """Gather values that hold rollouts from all ranks (`distributed.gather_or_raise`).

    This rank's value is returned as the same object. by_row: rollouts of other ranks come without tokens and text
    (`RemoteTokens`).
    """
    packed = distributed.capture(pack, own.value, by_row) if own.error is None else Captured[Any](None, own.error)
    lengths = distributed.gather_or_raise(Captured(list(map(len, packed.value or ())), packed.error))
    flat = torch.from_numpy(np.concatenate([np.frombuffer(part, np.uint8) for part in packed.value]))
    gathered = distributed.gather_bytes(flat, [sum(sizes) for sizes in lengths])
    values = []
    for rank, (data, sizes) in enumerate(zip(gathered, lengths, strict=True)):
        ends = np.cumsum(sizes).tolist()
        parts = [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        values.append(own.value if rank == distributed.rank() else unpack(parts))
    return values


def send_tokens(rollouts: Sequence[Rollout], owners: Sequence[int], model_parallel_size: int = 1) -> None:
    """Move tokens and text of each rollout from the rank that has them to the ranks that train on it, in place.

    No other rank keeps them. owners: for each rollout, the index of its group of `model_parallel_size` ranks.
    """
    here = [n for n, rollout in enumerate(rollouts) if rollout.is_local]
    own_group, packed = distributed.rank() // model_parallel_size, dict[int, list[memoryview]]()
    for group in range(distributed.world() // model_parallel_size):
        sent = [(n, rollouts[n].segments, rollouts[n].text) for n in here if owners[n] == group]
        packed[group] = pack(sent) if sent else []
    parts = [
        packed[rank // model_parallel_size] if rank != distributed.rank() else [] for rank in range(distributed.world())
    ]
    for n in here:
        if owners[n] != own_group:
            rollouts[n].segments, rollouts[n].text = tuple(map(without_tokens, rollouts[n].segments)), ""
    for part in distributed.exchange_bytes(parts):
        for n, segments, text in unpack(part) if part else ():
            rollouts[n].segments, rollouts[n].text = segments, text


def without_tokens(segment: Segment) -> Segment:
    """Return the segment as ranks that do not hold its tokens see it."""
    return Segment(segment.kind, cast(Any, RemoteTokens(len(segment.ids))))


def pack(value: Any, by_row: bool = False) -> list[memoryview]:
    """Serialize a value that holds rollouts: a pickle, then the arrays of its segments in the order of the pickle.

    by_row: without tokens and text.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=buffers.append)
    reduced: dict[type, Any] = {Rollout: _reduce_to_row} if by_row else {Segment: _reduce}
    pickler.dispatch_table = copyreg.dispatch_table | reduced  # type: ignore[assignment]
    pickler.dump(value)
    return [file.getbuffer(), *(buffer.raw() for buffer in buffers)]


def unpack(parts: Sequence[Any]) -> Any:
    """Restore a value from the bytes of `pack`, in the same order."""
    return pickle.loads(parts[0], buffers=parts[1:])


def _reduce_to_row(rollout: Rollout) -> tuple[Any, ...]:
    """Pickle a rollout for ranks that do not train on it."""
    return _rollout, ({**vars(rollout), "text": "", "segments": tuple(map(without_tokens, rollout.segments))},)


def _rollout(fields: dict[str, Any]) -> Rollout:
    return Rollout(**fields)


def _reduce(segment: Segment) -> tuple[Any, ...]:
    """Pickle a segment with arrays in place of tuples."""
    logps = None if segment.logps is None else as_array(segment.logps)
    versions = None if segment.versions is None else np.array(segment.versions, np.int32)
    return _segment, (segment.kind, np.array(segment.ids, np.int32), logps, versions, segment.images)


def _segment(
    kind: Any,
    ids: NDArray[np.int32],
    logps: NDArray[np.floating[Any]] | None,
    versions: NDArray[np.int32] | None,
    images: Any,
) -> Segment:
    return Segment(
        kind,
        as_tuple(ids),
        None if logps is None else tuple(logps.tolist()),
        None if versions is None else as_tuple(versions),
        images,
    )


def as_array(numbers: Sequence[float]) -> NDArray[np.floating[Any]]:
    """Return the numbers as float32 if that holds each of them exactly, else as float64."""
    exact = np.array(numbers, np.float64)
    with np.errstate(over="ignore"):
        short = exact.astype(np.float32)
    return short if np.array_equal(short.astype(np.float64), exact, equal_nan=True) else exact


def as_tuple(numbers: NDArray[np.int32]) -> tuple[int, ...]:
    """Return integers as Python ints, equal ones as one shared object: a separate int per token would take 32 bytes."""
    if not len(numbers):
        return ()
    if numbers.min() < 0:
        return tuple(numbers.tolist())
    return tuple(_integers(1 << int(numbers.max()).bit_length()).take(numbers).tolist())


@functools.lru_cache(maxsize=32)
def _integers(count: int) -> NDArray[np.object_]:
    """Return an object array of the ints 0, 1, ... count - 1."""
    integers = np.empty(count, object)
    integers[:] = range(count)
    return integers
