"""Inputs of checkpointed layers wait in the host's memory until the backward pass computes their layers again.

A layer's input is copied to the host on a CUDA stream of its own while the layer runs, and back to the GPU while the
backward pass of the next layer runs. Where a layer takes longer than the copy of its input over the bus, that costs no
time. A layer gets the same bits as before, so losses and gradients are the same numbers.

TRL and torchtune move everything that autograd keeps; here it is the inputs of checkpointed layers alone, for the rest
is gone by then.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 1 << 20  # bytes; smaller tensors stay, and so do parameters and numbers that are no floats
LEAVING = 2  # inputs that stay on the GPU while their copies are made; those of the last layers are used from there


class ActivationOffload:
    """Runs a layer under a checkpoint function, with its input kept on the host. One for all layers of a model."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint
        self.leaving: deque[_Input] = deque()
        self.newest: weakref.ref[_Input] | None = None

    def __call__(self, layer: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack):  # within the checkpoint its own hooks hold
            return self.checkpoint(layer, *args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffload:
        """A copied model runs passes of its own."""
        return ActivationOffload(self.checkpoint)

    def _pack(self, tensor: Tensor) -> Tensor | _Input:
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.nbytes < SMALLEST:
            return tensor
        kept = _Input(tensor.detach(), self.newest)
        self.newest = weakref.ref(kept)
        self.leaving.append(kept)
        if len(self.leaving) > LEAVING:
            self.leaving.popleft().release()
        return kept

    def _unpack(self, kept: Tensor | _Input) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self.leaving.clear()  # the backward pass has begun
        before = kept.before() if kept.before is not None else None
        found = kept.take()
        if before is not None:
            before.load()
        return found


class _Input:
    """A tensor, its copy on the host, and the events that say when either is complete."""

    def __init__(self, tensor: Tensor, before: weakref.ref[_Input] | None) -> None:
        self.before, self.device = before, tensor.device  # before: what was kept just before it, and is asked for next
        self.tensor: Tensor | None = tensor
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.done = _copy(tensor, self.host, self.device)

    def release(self) -> None:
        """Give up the tensor on the GPU: its memory is used again for what runs after the copy."""
        if self.tensor is not None:
            self._wait()
            self.tensor = None

    def load(self) -> None:
        """Begin to bring it back."""
        if self.tensor is None:
            self.tensor = torch.empty_like(self.host, device=self.device)
            self.done = _copy(self.host, self.tensor, self.device)

    def take(self) -> Tensor:
        """The tensor; a second backward pass through the same graph brings it back once more."""
        self.load()
        self._wait()
        found, self.tensor = self.tensor, None
        assert found is not None
        return found

    def _wait(self) -> None:
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)


def _copy(source: Tensor, target: Tensor, device: torch.device) -> torch.cuda.Event | None:
    """Copy on the copy stream: after all kernels that are queued so far, and at the same time as later ones. Returns
    the event of its end; on a CPU it copies at once and returns None."""
    if device.type != "cuda":
        target.copy_(source)
        return None
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return stream.record_event()


@functools.lru_cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
