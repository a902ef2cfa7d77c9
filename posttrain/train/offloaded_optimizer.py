"""AdamW whose moments, and float32 master weights where it has some, wait in the host's memory between updates.

An update brings them to the GPU piece by piece, computes there with the kernel that AdamW uses anyway, and takes them
back: while one piece is computed the next one comes and the last one goes, on streams of their own. So the numbers are
those of AdamW, bit for bit, and the time is that of 8 bytes a weight over the bus in each direction (12 with master
weights). An update on the host's processors, as DeepSpeed and torchao make it, sends gradients down and weights up,
which is half of it, but takes the host's cores, of which a GPU has few, and rounds in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from posttrain.models.host_memory import HostMemory
from posttrain.train.master_weights import MasterAdamW

PIECE = 1 << 25  # numbers of a tensor that are on the GPU at once; three pieces of each kind are on their way
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """A part of one parameter. host: its moments and, if any, master weights; `compute` changes what it is given."""

    host: tuple[Tensor, ...]
    compute: Callable[[Sequence[Tensor]], None]


class OffloadedAdamW(AdamW):
    """AdamW for float32 weights on the GPU. A checkpoint is that of AdamW, and either goes on with the other's."""

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        self.device = groups[0]["params"][0].device
        self.memory = HostMemory(pinned=self.device.type == "cuda")
        super().__init__(groups, **settings)
        self._step_supports_amp_scaling = False  # a loss scaler looks for overflows before it asks for a step

    def weight_for(self, parameter: Tensor) -> Tensor:
        """The model's weight, which has the gradient."""
        return parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        assert closure is None
        compute_in_pieces(self._pieces(), self.device)

    def _pieces(self) -> Iterator[Piece]:
        for group in self.param_groups:
            for parameter in group["params"]:
                weight = self.weight_for(parameter)
                if weight.grad is None:
                    continue
                state = self._state_of(parameter)
                host = [state[name].view(-1) for name in MOMENTS]
                host += [] if parameter is weight else [parameter.view(-1)]
                flat, grad = weight.view(-1), weight.grad.reshape(-1)
                for start in range(0, len(flat), PIECE):
                    part = slice(start, start + PIECE)
                    compute = _update_of(flat[part], grad[part], float(state["step"]), group)
                    yield Piece(tuple(tensor[part] for tensor in host), compute)
                state["step"] += 1

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = self.memory.take(parameter.shape, parameter.dtype).zero_()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over moments, which torch's own would bring to the GPU."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if stored := state_dict["state"].get(number):
                state = self._state_of(parameter)
                for name, value in state.items():
                    value.copy_(stored[name])


class OffloadedMasterAdamW(OffloadedAdamW, MasterAdamW):
    """The same for weights in half precision: their float32 master weights are on the host as well."""

    def copy_master(self, weight: Tensor) -> Tensor:
        return self.memory.take(weight.shape, torch.float32).copy_(weight)

    def weight_for(self, parameter: Tensor) -> Tensor:
        return self.weight_of[id(parameter)]

    def surround_steps(self) -> None:
        """Nothing to do: a step reads gradients where they are, and rounds each piece when it is computed."""


def _update_of(weight: Tensor, grad: Tensor, step: float, group: dict[str, Any]) -> Callable[[Sequence[Tensor]], None]:
    """AdamW's update number `step` + 1 of a part of a weight, given its moments and, if any, its master weights."""
    beta1, beta2 = group["betas"]

    def compute(given: Sequence[Tensor]) -> None:
        average, square, *masters = given
        updated = masters[0] if masters else weight
        count = torch.full((), step, device=weight.device)
        adamw(
            [updated], [grad], [average], [square], [], [count], foreach=False, fused=weight.is_cuda, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            maximize=False,
        )  # fmt: skip
        if masters:
            weight.copy_(updated)

    return compute


def compute_in_pieces(pieces: Iterator[Piece], device: torch.device) -> None:
    """Bring each piece's tensors to the device, compute, and take them back; returns when all are on the host again."""
    if device.type != "cuda":
        for piece in pieces:
            piece.compute(piece.host)
        return
    compute, coming, going = torch.cuda.current_stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)
    slots: list[_Slot] = []
    for number, piece in enumerate(pieces):
        if len(slots) < 3:
            slots.append(_Slot([torch.empty(PIECE, device=device) for _ in piece.host]))
            coming.wait_stream(compute)  # this memory was another's until now
        slot = slots[number % len(slots)]
        here = [buffer[: len(tensor)] for buffer, tensor in zip(slot.buffers, piece.host, strict=True)]
        with torch.cuda.stream(coming):
            coming.wait_event(slot.gone)
            for buffer, tensor in zip(here, piece.host, strict=True):
                buffer.copy_(tensor, non_blocking=True)
            slot.come.record(coming)
        compute.wait_event(slot.come)
        piece.compute(here)
        slot.computed.record(compute)
        with torch.cuda.stream(going):
            going.wait_event(slot.computed)
            for buffer, tensor in zip(here, piece.host, strict=True):
                tensor.copy_(buffer, non_blocking=True)
            slot.gone.record(going)
    going.synchronize()


class _Slot:
    """Memory on the GPU for one piece, and the events of its use."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self.come, self.computed, self.gone = (torch.cuda.Event() for _ in range(3))
