"""What vLLM's worker processes do for us under tensor parallelism: each holds a part of every weight.

vLLM adds these methods to its workers (`worker_extension_cls`). It calls them on all ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import EngineError
from posttrain.rollout import shared_memory, wire

EXTENSION = "posttrain.rollout.rank.Rank"


class Rank:
    """Mixed into vLLM's Worker, whose names it uses."""

    reload_weights: Any
    get_model: Any
    device: Any

    def posttrain_seed(self, seed: int) -> None:
        """All ranks draw alike: each samples the same tokens."""
        torch.manual_seed(seed)

    def posttrain_load(self, places: Sequence[str]) -> list[float]:
        """Take this rank's part of all weights, which lie in shared memory. What was read, as `fingerprint` says."""
        from posttrain.rollout.worker import repack

        read = Fingerprint()
        self.reload_weights(weights_iterator=read.of(_weights(places)))
        if self.device.type == "cpu":
            repack(self.get_model())
        return read.values


def _weights(places: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for place in places:
        yield from wire.unpack(shared_memory.mapped(place))


class Fingerprint:
    """How many tensors and numbers went by, and the sum of each tensor's first 256: ranks that read alike agree."""

    def __init__(self) -> None:
        self.values = [0.0, 0.0, 0.0]

    def of(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            first = float(tensor.flatten()[:256].double().sum())
            self.values = [self.values[0] + 1, self.values[1] + tensor.numel(), self.values[2] + first]
            yield name, tensor


def load(rpc: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Have all ranks take these weights. They lie in the host's memory once, until every rank has taken its part.

    rpc: vLLM's collective_rpc. Raises EngineError if a rank read something else.
    """
    sent, memories = Fingerprint(), list[shared_memory.Memory]()
    try:
        for bucket in wire.buckets(sent.of(named), None, wire.BUCKET_BYTES):
            memories.append(shared_memory.Memory(wire.pack(bucket)))
        found = rpc("posttrain_load", args=([memory.place for memory in memories],))
    finally:
        for memory in memories:
            memory.close()
    for rank, values in enumerate(found):
        if values != sent.values:
            raise EngineError(f"stale engine: rank {rank} read other weights than were sent: {values}, {sent.values}")
