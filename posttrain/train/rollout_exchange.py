"""Rollouts between ranks: numbers by row go to all, ids and numbers by token, as packed arrays, and the text to the
rank that trains on the row, or to all where something reads all of them (`TrainContext.keeps_tokens_apart`).

A token takes 4 bytes for its id, 4 for its log-prob (8 where float32 cannot hold it) and 4 for its version where tokens
of a rollout differ in it; pickled tuples of Python's numbers take half as much again, and ten times as long.
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

from posttrain.batch import Elsewhere, Rollout, Segment
from posttrain.train import distributed
from posttrain.train.distributed import Captured

T = TypeVar("T")


def gather_rollouts(mine: Captured[T], *, by_row: bool = False) -> list[T]:
    """`distributed.gather_or_raise` for what holds rollouts; this rank's value comes back as the object that it is.
    by_row: those of the others without tokens and text (`Elsewhere`)."""
    packed = distributed.capture(pack, mine.value, by_row) if mine.error is None else Captured[Any](None, mine.error)
    lengths = distributed.gather_or_raise(Captured(list(map(len, packed.value or ())), packed.error))
    flat = torch.from_numpy(np.concatenate([np.frombuffer(part, np.uint8) for part in packed.value]))
    found = distributed.gather_bytes(flat, [sum(sizes) for sizes in lengths])
    values = []
    for rank, (data, sizes) in enumerate(zip(found, lengths, strict=True)):
        ends = np.cumsum(sizes).tolist()
        parts = [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        values.append(mine.value if rank == distributed.rank() else unpack(parts))
    return values


def send_tokens(rollouts: Sequence[Rollout], owners: Sequence[int], same_rows: int = 1) -> None:
    """Bring tokens and text of each rollout from the rank that has them to those that train on it, in place; no other
    keeps them. owners: for each rollout, which group of `same_rows` ranks."""
    here = [n for n, rollout in enumerate(rollouts) if rollout.is_here]
    me, to = distributed.rank() // same_rows, dict[int, list[memoryview]]()
    for group in range(distributed.world() // same_rows):
        sent = [(n, rollouts[n].segments, rollouts[n].text) for n in here if owners[n] == group]
        to[group] = pack(sent) if sent else []
    parts = [to[rank // same_rows] if rank != distributed.rank() else [] for rank in range(distributed.world())]
    for n in here:
        if owners[n] != me:
            rollouts[n].segments, rollouts[n].text = tuple(map(without_tokens, rollouts[n].segments)), ""
    for part in distributed.exchange_bytes(parts):
        for n, segments, text in unpack(part) if part else ():
            rollouts[n].segments, rollouts[n].text = segments, text


def without_tokens(segment: Segment) -> Segment:
    """A segment as other ranks than its own see it."""
    return Segment(segment.kind, cast(Any, Elsewhere(len(segment.ids))))


def pack(value: Any, by_row: bool = False) -> list[memoryview]:
    """What holds rollouts as bytes: a pickle, then the arrays of their segments in the order in which it names them.
    by_row: without tokens and text."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=buffers.append)
    reduced: dict[type, Any] = {Rollout: _reduce_to_row} if by_row else {Segment: _reduce}
    pickler.dispatch_table = copyreg.dispatch_table | reduced  # type: ignore[assignment]
    pickler.dump(value)
    return [file.getbuffer(), *(buffer.raw() for buffer in buffers)]


def unpack(parts: Sequence[Any]) -> Any:
    """What was packed. parts: bytes of `pack`, in its order."""
    return pickle.loads(parts[0], buffers=parts[1:])


def _reduce_to_row(rollout: Rollout) -> tuple[Any, ...]:
    """How a rollout is pickled for ranks that do not train on it."""
    return _rollout, ({**vars(rollout), "text": "", "segments": tuple(map(without_tokens, rollout.segments))},)


def _rollout(fields: dict[str, Any]) -> Rollout:
    return Rollout(**fields)


def _reduce(segment: Segment) -> tuple[Any, ...]:
    """How a segment is pickled: with arrays in place of tuples."""
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
    """The numbers as float32 if it holds each of them to the last bit, else as float64."""
    exact = np.array(numbers, np.float64)
    with np.errstate(over="ignore"):
        short = exact.astype(np.float32)
    return short if np.array_equal(short.astype(np.float64), exact, equal_nan=True) else exact


def as_tuple(numbers: NDArray[np.int32]) -> tuple[int, ...]:
    """Whole numbers as Python's, equal ones as one object: an int of its own for each token takes 32 bytes."""
    if not len(numbers):
        return ()
    if numbers.min() < 0:
        return tuple(numbers.tolist())
    return tuple(_integers(1 << int(numbers.max()).bit_length()).take(numbers).tolist())


@functools.lru_cache(maxsize=32)
def _integers(count: int) -> NDArray[np.object_]:
    """0, 1, ... count - 1."""
    found = np.empty(count, object)
    found[:] = range(count)
    return found
