"""AdamW for divided weights, with float32 master weights, and offloaded to host memory; Muon with AdamW.

`OffloadedAdamW` keeps moments, and master weights if any, in host memory. An update copies them to the GPU chunk by
chunk, computes there with AdamW's own kernel, and copies them back: while one chunk is computed, the next is copied in
and the previous one out, on separate streams. The results are bitwise those of AdamW, and the time is that of
transferring 8 bytes per weight in each direction (12 with master weights). An update on the CPU, as in DeepSpeed and
torchao, transfers only gradients and weights, which is half as much, but needs CPU cores, of which there are few per
GPU, and rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.adamw import adamw

from posttrain.errors import ModelError
from posttrain.models.host_memory import HostMemory
from posttrain.train.collectives import local
from posttrain.train.compiled import layers_of

CHUNK_NUMEL = 1 << 25  # elements of a tensor per chunk; three chunks of each kind are on the GPU
Update = Callable[[Sequence[Tensor]], None]
MOMENTS = ("exp_avg", "exp_avg_sq")


class LocalAdamW(AdamW):
    """AdamW that updates a rank's shards of divided weights and moments as ordinary tensors, with the same results.

    AdamW's kernel takes all weights in one call. For DTensors torch would derive how each is sharded, which takes
    seconds in the first step of a model with hundreds of weights, and tens of milliseconds in every other.
    """

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *tensors)  # type: ignore[misc]
        for some in tensors:  # weights, gradients and state: `group` keeps the DTensors
            some[:] = map(local, some)
        return has_complex


class MasterAdamW(AdamW):
    """AdamW for half-precision weights: updates float32 master weights, then rounds them into the model.

    Its parameters are the float32 masters. Gradients are those of the model's weights, also in float32 (`grad_dtype`).
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        weights = [p for group in groups for p in group["params"]]
        masters = [nn.Parameter(self.copy_master(p.detach())) for p in weights]
        self.weight_of = {id(master): weight for master, weight in zip(masters, weights, strict=True)}
        rest = iter(masters)
        super().__init__([{**group, "params": [next(rest) for _ in group["params"]]} for group in groups], **settings)
        self.register_step_hooks()

    def register_step_hooks(self) -> None:
        """Register hooks that take the model's gradients before each step and round the weights after it."""
        self.register_step_pre_hook(MasterAdamW.take_gradients)
        self.register_step_post_hook(MasterAdamW.round_weights)

    def copy_master(self, weight: Tensor) -> Tensor:
        """Return a float32 copy of a half-precision weight."""
        return weight.float().clone()

    def pairs(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Yield each float32 master weight with the model's weight."""
        for group in self.param_groups:
            yield from ((master, self.weight_of[id(master)]) for master in group["params"])

    def take_gradients(self, *_: Any) -> None:
        """Point the gradients of the masters to those of the model's weights, before a step."""
        for master, weight in self.pairs():
            master.grad = weight.grad

    @torch.no_grad()
    def round_weights(self, *_: Any) -> None:
        """Copy the masters, rounded, into the model's weights, after a step."""
        for master, weight in self.pairs():
            master.grad = None
            weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, weight in self.pairs():
            if not set_to_none and weight.grad is not None:
                weight.grad.zero_()
            else:
                weight.grad = None


@dataclass(frozen=True)
class Chunk:
    """Part of one parameter.

    host: its moments and, if any, master weights. compute: updates such tensors in place.
    """

    host: tuple[Tensor, ...]
    compute: Update


class OffloadedAdamW(AdamW):
    """AdamW for float32 weights on the GPU. Its checkpoints are interchangeable with those of AdamW."""

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        self.device = groups[0]["params"][0].device
        self.memory = HostMemory(pinned=self.device.type == "cuda")
        super().__init__(groups, **settings)
        self._step_supports_amp_scaling = False  # a loss scaler checks for overflows before it calls `step`

    def weight_for(self, parameter: Tensor) -> Tensor:
        """Return the model's weight, which has the gradient."""
        return parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        update_in_chunks(self._chunks(), self.device)

    def _chunks(self) -> Iterator[Chunk]:
        for group in self.param_groups:
            for parameter in group["params"]:
                weight = self.weight_for(parameter)
                if weight.grad is None:
                    continue
                state = self._get_state(parameter)
                host = [state[name].view(-1) for name in MOMENTS]
                host += [] if parameter is weight else [parameter.view(-1)]
                flat, grad = weight.view(-1), weight.grad.reshape(-1)
                for start in range(0, len(flat), CHUNK_NUMEL):
                    part = slice(start, start + CHUNK_NUMEL)
                    compute = _make_update(flat[part], grad[part], float(state["step"]), group)
                    yield Chunk(tuple(tensor[part] for tensor in host), compute)
                state["step"] += 1

    def _get_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = self.memory.take(parameter.shape, parameter.dtype).zero_()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments into host memory; torch's own method would move them to the GPU."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if stored := state_dict["state"].get(number):
                state = self._get_state(parameter)
                for name, value in state.items():
                    value.copy_(stored[name])


class OffloadedMasterAdamW(OffloadedAdamW, MasterAdamW):
    """OffloadedAdamW for half-precision weights; the float32 master weights are offloaded as well."""

    def copy_master(self, weight: Tensor) -> Tensor:
        return self.memory.take(weight.shape, torch.float32).copy_(weight)

    def weight_for(self, parameter: Tensor) -> Tensor:
        return self.weight_of[id(parameter)]

    def register_step_hooks(self) -> None:
        """Do nothing: a step reads the gradients directly, and rounds each chunk once it is computed."""


def _make_update(weight: Tensor, grad: Tensor, step: float, group: dict[str, Any]) -> Update:
    """Return a function that makes AdamW's update number `step` + 1 of a chunk.

    The function takes the chunk's moments and, if any, its master weights.
    """
    beta1, beta2 = group["betas"]

    def compute(state: Sequence[Tensor]) -> None:
        average, square, *masters = state
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


def update_in_chunks(chunks: Iterator[Chunk], device: torch.device) -> None:
    """Copy each chunk's tensors to the device, compute, and copy them back; returns once all are on the host again."""
    if device.type != "cuda":
        for chunk in chunks:
            chunk.compute(chunk.host)
        return
    compute, copy_in, copy_out = torch.cuda.current_stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)
    slots: list[_Slot] = []
    for number, chunk in enumerate(chunks):
        if len(slots) < 3:
            slots.append(_Slot([torch.empty(CHUNK_NUMEL, device=device) for _ in chunk.host]))
            copy_in.wait_stream(compute)  # earlier kernels may still use this memory
        slot = slots[number % len(slots)]
        on_gpu = [buffer[: len(tensor)] for buffer, tensor in zip(slot.buffers, chunk.host, strict=True)]
        with torch.cuda.stream(copy_in):
            copy_in.wait_event(slot.copied_out)
            for buffer, tensor in zip(on_gpu, chunk.host, strict=True):
                buffer.copy_(tensor, non_blocking=True)
            slot.copied_in.record(copy_in)
        compute.wait_event(slot.copied_in)
        chunk.compute(on_gpu)
        slot.computed.record(compute)
        with torch.cuda.stream(copy_out):
            copy_out.wait_event(slot.computed)
            for buffer, tensor in zip(on_gpu, chunk.host, strict=True):
                tensor.copy_(buffer, non_blocking=True)
            slot.copied_out.record(copy_out)
    copy_out.synchronize()


class _Slot:
    """GPU buffers for one chunk, and the events of their use."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self.copied_in, self.computed, self.copied_out = (torch.cuda.Event() for _ in range(3))


class MuonAdamW(Optimizer):
    """torch's Muon (2502.16982) and AdamW as one optimizer, with one learning rate, one checkpoint and one step.

    Muon orthogonalizes the momentum of a matrix and scales it by 0.2 sqrt(the longer side): an update then has the same
    RMS as an AdamW update, so AdamW's learning rate and weight decay apply to both. matrices, others: parameter groups.
    """

    def __init__(
        self, matrices: list[dict[str, Any]], others: list[dict[str, Any]], *, lr: float, momentum: float, **adamw: Any
    ) -> None:
        self.muon = Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self.adamw = AdamW(others, lr=lr, **adamw)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one update with each optimizer."""
        assert closure is None
        count = len(self.muon.param_groups)  # loading a checkpoint replaces groups and state
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices of the layers: no embeddings, head, vectors, or experts in one 3-dimensional tensor.

    Raises ModelError if there are none.
    """
    layers = layers_of(model)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    candidates = {id(p): p for layer in layers for p in layer.parameters() if p.requires_grad and p.ndim == 2}
    matrices = [p for number, p in candidates.items() if number not in embeddings]
    if not matrices:
        raise ModelError("no matrix of a layer is trained", where="optim.use: muon", hint="write `optim.use: adamw`")
    return matrices
