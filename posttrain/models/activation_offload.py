"""Activation offloading: inputs of checkpointed layers are stored in host memory until the backward pass needs them.

A layer's input is copied to the host on a separate CUDA stream while the layer runs, and back to the GPU while the
backward pass of the next layer runs. If a layer takes longer than the copy of its input over the bus, offloading costs
no time. The copy is exact, so losses and gradients are unchanged.

TRL and torchtune offload every tensor that autograd saves. Here only the inputs of checkpointed layers are offloaded,
since checkpointing frees all other activations.
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

MIN_BYTES = 1 << 20  # smaller tensors stay on the GPU, as do parameters and non-floating-point tensors
MAX_IN_FLIGHT = 2  # inputs saved on the GPU while they are copied; the last layers' inputs are used from there


class ActivationOffload:
    """Runs a layer under a checkpoint function with its input offloaded to the host. One object serves all layers of a
    model.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint
        self.in_flight: deque[_Input] = deque()
        self.newest: weakref.ref[_Input] | None = None

    def __call__(self, layer: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack):  # inside the layer, the checkpoint's own hooks apply
            return self.checkpoint(layer, *args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffload:
        """Return a new object, since a copied model runs its own passes."""
        return ActivationOffload(self.checkpoint)

    def _pack(self, tensor: Tensor) -> Tensor | _Input:
        """Start the copy of a large layer input to the host; return other tensors unchanged."""
        if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.nbytes < MIN_BYTES:
            return tensor
        saved = _Input(tensor.detach(), self.newest)
        self.newest = weakref.ref(saved)
        self.in_flight.append(saved)
        if len(self.in_flight) > MAX_IN_FLIGHT:
            self.in_flight.popleft().release()
        return saved

    def _unpack(self, saved: Tensor | _Input) -> Tensor:
        """Return the tensor on the GPU, and start the copy of the input that is needed next."""
        if isinstance(saved, Tensor):
            return saved
        self.in_flight.clear()  # the backward pass has begun
        before = saved.before() if saved.before is not None else None
        found = saved.take()
        if before is not None:
            before.load()
        return found


class _Input:
    """A tensor, its copy on the host, and the CUDA event after which the last copy is complete."""

    def __init__(self, tensor: Tensor, before: weakref.ref[_Input] | None) -> None:
        self.before, self.device = before, tensor.device  # before: input saved just before this one, needed next
        self.tensor: Tensor | None = tensor
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.done = _copy(tensor, self.host, self.device)

    def release(self) -> None:
        """Release the tensor on the GPU; its memory may be reused by kernels queued after the copy."""
        if self.tensor is not None:
            self._wait()
            self.tensor = None

    def load(self) -> None:
        """Start copying the tensor back to the GPU."""
        if self.tensor is None:
            self.tensor = torch.empty_like(self.host, device=self.device)
            self.done = _copy(self.host, self.tensor, self.device)

    def take(self) -> Tensor:
        """Return the tensor on the GPU. A second backward pass through the same graph copies it back again."""
        self.load()
        self._wait()
        found, self.tensor = self.tensor, None
        assert found is not None
        return found

    def _wait(self) -> None:
        """Make the current stream wait for the last copy."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)


def _copy(source: Tensor, target: Tensor, device: torch.device) -> torch.cuda.Event | None:
    """Copy on the copy stream, after all kernels queued so far and concurrently with later ones.

    Returns the event of the copy's end; on a CPU copies synchronously and returns None.
    """
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
