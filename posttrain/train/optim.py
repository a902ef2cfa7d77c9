"""Optimizer, learning-rate schedule and gradient clipping, shared by all training stages."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from posttrain.errors import MissingExtra, ModelError, RecipeError
from posttrain.models.adapters import parameters_by_adapter
from posttrain.models.load import LoadedModel
from posttrain.models.precision import HALF
from posttrain.recipe.training_sections import PAGED, Optim
from posttrain.train.optimizers import (
    LocalAdamW,
    MasterAdamW,
    MuonAdamW,
    OffloadedAdamW,
    OffloadedMasterAdamW,
    layer_matrices,
)

OUTSIDE = "outside_adapters"  # metric name of trained weights outside of several adapters


def check(section: Optim, device: torch.device) -> None:
    """Raise MissingExtra or RecipeError, before a model is loaded, if the optimizer cannot run here."""
    if not section.in_eight_bits:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra("bitsandbytes", f"optim.use: {section.use}", "quant")
    if section.use == PAGED and device.type != "cuda":
        raise RecipeError(
            f"optim.use: {PAGED} needs a GPU: there is no GPU memory to page out",
            hint="write `optim.use: adamw_8bit`",
        )


def build(model: nn.Module, section: Optim, critic: nn.Module | None = None, critic_lr: float = 0.0) -> Optimizer:
    """Build the recipe's optimizer over the trainable parameters, without weight decay on vectors (norms and biases).

    A critic has its own learning rate, which follows the same schedule, and no weight decay. Raises ModelError if all
    weights are frozen.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ModelError("no weight of the model is trained: all are frozen", hint="see model.lora.targets")
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": section.weight_decay}]
    if section.in_eight_bits:
        groups = _separate_embeddings(groups[0], model)
    groups.append({"params": vectors, "weight_decay": 0.0})
    if critic is not None:
        scale = critic_lr / section.lr
        groups.append({"params": list(critic.parameters()), "weight_decay": 0.0, "scale": scale})
    beta1, beta2 = section.betas
    settings: dict[str, Any] = {"lr": section.lr, "betas": (beta1, beta2), "eps": section.eps}
    groups = [g for g in groups if g["params"]]
    if section.in_eight_bits:
        return _eight_bit_adamw(paged=section.use == PAGED)(groups, **settings)
    settings["fused"] = trained[0].device.type == "cuda" or None  # avoids a temporary copy of all second moments
    if section.use == "muon":
        return _muon(model, section, groups, settings)
    plain = LocalAdamW if any(isinstance(p, DTensor) for p in trained) else AdamW
    kinds = (OffloadedAdamW, OffloadedMasterAdamW) if section.offload else (plain, MasterAdamW)
    kind = kinds[any(p.dtype in HALF for p in trained)]
    return kind(groups, **settings)


def _muon(model: nn.Module, section: Optim, groups: list[dict[str, Any]], settings: dict[str, Any]) -> Optimizer:
    """Build Muon over the matrices of the layers, which are removed from the AdamW groups."""
    matrices = layer_matrices(model)
    taken = {id(p) for p in matrices}
    others = [{**group, "params": [p for p in group["params"] if id(p) not in taken]} for group in groups]
    with_muon = [{"params": matrices, "weight_decay": section.weight_decay}]
    return MuonAdamW(with_muon, [group for group in others if group["params"]], momentum=section.momentum, **settings)


def weight_of(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """Return the model's weight of an optimizer parameter: itself, or the weight of which it is the float32 master."""
    return optimizer.weight_of[id(parameter)] if isinstance(optimizer, MasterAdamW) else parameter


def state_dict_with_masters(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor] | None:
    """Return the model's state_dict with the optimizer's float32 masters in place of weights; None without masters."""
    if not isinstance(optimizer, MasterAdamW):
        return None
    master_of = {id(weight): master.detach() for master, weight in optimizer.pairs()}
    return {name: master_of.get(id(value), value.detach()) for name, value in model.state_dict(keep_vars=True).items()}


@torch.no_grad()
def load_masters(optimizer: Optimizer, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the float32 weights of a checkpoint, by model names, into the optimizer's masters; no-op without masters."""
    if not isinstance(optimizer, MasterAdamW):
        return
    names = {id(weight): name for name, weight in model.named_parameters()}
    for master, weight in optimizer.pairs():
        if (name := names.get(id(weight))) is not None:  # a critic's weights are loaded separately
            master.copy_(weights[name])
        else:
            master.copy_(weight)


def _separate_embeddings(matrices: dict[str, Any], model: nn.Module) -> list[dict[str, Any]]:
    """Split off embeddings into a group with float32 moments, as bitsandbytes advises.

    Most embedding rows have no gradient in a step, and blockwise quantized moments lose the little that rare rows have.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    dense = [p for p in matrices["params"] if id(p) not in embeddings]
    sparse = [p for p in matrices["params"] if id(p) in embeddings]
    return [{**matrices, "params": dense}, {**matrices, "params": sparse, "optim_bits": 32}]


def _eight_bit_adamw(*, paged: bool) -> Any:
    """Return bitsandbytes' AdamW with two 8-bit moments, in blocks of 256 with one scale each (2110.02861).

    Tensors under 4096 elements keep float32. paged: large moments are in memory that the driver can move to the host
    when GPU memory is short.
    """
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    class EightBit(PagedAdamW8bit if paged else AdamW8bit):  # type: ignore[misc]
        """AdamW8bit with `optim_bits` per parameter group, and paged moments after loading.

        bitsandbytes reads `optim_bits` for the whole optimizer only (embeddings keep 32-bit moments), and its
        `load_state_dict` would leave loaded moments in ordinary GPU memory.
        """

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config(gindex, pindex, group)
            return config | {"optim_bits": group.get("optim_bits", config["optim_bits"])}

        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            super().load_state_dict(state_dict, move_to_device=move_to_device)
            if self.is_paged:
                for parameter, state in self.state.items():
                    for name in state.keys() & {"state1", "state2"}:
                        buffer = self.get_state_buffer(parameter, dtype=state[name].dtype)
                        state[name] = buffer.copy_(state[name])

    return EightBit


def loss_scaler(loaded: LoadedModel) -> GradScaler:
    """Return the loss scaler for float16 matmuls; a disabled one for other dtypes.

    It scales the loss up before the backward pass and gradients down afterwards, so that small gradients do not
    underflow, and halves the scale when a gradient overflows.
    """
    return GradScaler(loaded.device.type, enabled=loaded.half == torch.float16)


@contextlib.contextmanager
def count_updates(*optimizers: Optimizer | None) -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many updates the optimizers have begun since the block was entered."""
    updates = list[None]()
    watched = [optimizer for optimizer in optimizers if optimizer is not None]
    hooks = [optimizer.register_step_pre_hook(lambda *_: updates.append(None)) for optimizer in watched]
    try:
        yield lambda: len(updates)
    finally:
        for hook in hooks:
            hook.remove()


def set_lr(optimizer: Optimizer, section: Optim, update: int, total_updates: int) -> float:
    """Set and return the learning rate of update 0, 1, ...; a pure function of the update, without state to resume."""
    lr = section.lr * lr_factor(update, section, total_updates)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
    return lr


def changed_lr_note(section: Optim, update: int, planned: int | None, total: int, last: float | None) -> str | None:
    """Return a note if a resumed run's learning rate jumps because its length has changed; None otherwise.

    update: the next one, from 0. planned, total: updates of the whole run, before and now. last: the latest rate.
    """
    if planned is None or planned == total:
        return None
    before, now = (section.lr * lr_factor(update, section, updates) for updates in (planned, total))
    if last is not None and update >= planned:
        before = last
    if abs(now - before) <= 0.01 * max(now, before):
        return None
    return (
        f"the run now has {total} updates instead of {planned}: the learning rate continues at {now:.3g}, from the"
        f" {section.schedule} schedule of the new length; it was {before:.3g}"
    )


def lr_factor(update: int, section: Optim, total_updates: int) -> float:
    """Return the learning rate of update 0, 1, ... as a fraction of the peak: linear warm-up, then the schedule.

    Every schedule has the same warm-up and extends to the end of the run. The first update has a rate above 0, the
    first after the warm-up has the peak.
    """
    warmup = section.warmup_steps if section.warmup_steps >= 1 else math.ceil(section.warmup_steps * total_updates)
    if update < warmup:
        return (update + 1) / (warmup + 1)
    progress = (update - warmup) / max(1, total_updates - warmup)
    progress = min(progress, 1.0)
    match section.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "stable_decay":
            decay = max(1, total_updates // 10) if section.decay_steps is None else section.decay_steps
            least = section.lr / 10 if section.min_lr is None else section.min_lr
            stable = max(0, total_updates - decay)
            return (
                stable_decay(update, stable_steps=stable, decay_steps=decay, lr=section.lr, min_lr=least) / section.lr
            )


def stable_decay(
    step: int,
    *,
    stable_steps: int,
    decay_steps: int,
    lr: float = 2e-5,
    min_lr: float = 2e-6,
    warmup_steps: int = 0,
    shape: Literal["cosine", "linear"] = "cosine",
) -> float:
    """Return the learning rate of update 0, 1, ...: warm-up, constant until stable_steps, then decay to min_lr.

    OctoThinker's stable-then-decay schedule (2506.20512); the shape of the decay and the final learning rate are ours.
    The decay takes decay_steps; with 0 the rate drops to min_lr immediately. The warm-up here, whose last update has
    the peak, is the paper's; recipes use the warm-up of `lr_factor`.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if step < stable_steps:
        return lr
    if step >= stable_steps + decay_steps:
        return min_lr
    progress = (step - stable_steps) / decay_steps
    factor = 0.5 * (1.0 + math.cos(math.pi * progress)) if shape == "cosine" else 1.0 - progress
    return min_lr + (lr - min_lr) * factor


def clip_adapters(model: nn.Module, max_norm: float | None) -> dict[str, float]:
    """Clip the gradients of each of several adapters to `max_norm`, and those of all other weights together.

    Returns the norms before clipping; {} for a model with fewer than two adapters. An adapter without rows in the step
    has no gradients and is left out.
    """
    groups = parameters_by_adapter(model)
    if not groups:
        return {}
    inside = {id(p) for parameters in groups.values() for p in parameters}
    groups |= {OUTSIDE: [p for p in model.parameters() if id(p) not in inside]}
    updated = {name: parameters for name, parameters in groups.items() if any(p.grad is not None for p in parameters)}
    return {name: float(clip_gradients(model, max_norm, parameters)) for name, parameters in updated.items()}


def clip_gradients(model: nn.Module, max_norm: float | None, parameters: Iterable[Tensor] | None = None) -> Tensor:
    """Clip gradients to `max_norm` in place (None: only compute) and return the norm before clipping, a 0-d tensor.

    Every gradient element counts once, however many ranks hold it. A non-finite norm leaves gradients unchanged, so
    that an error can name the parameter. parameters: only these; default: all of the model.
    """
    by_mesh: dict[Any, list[Tensor]] = {}  # by the device mesh that they are sharded over
    for gradient in (p.grad for p in parameters or model.parameters() if p.grad is not None):
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [nn.utils.get_total_norm(gradients) for gradients in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0] if norms else torch.zeros(())
    if max_norm is not None and norms:
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0).where(total.isfinite(), 1.0)
        shards = [g.to_local() if isinstance(g, DTensor) else g for g in itertools.chain(*by_mesh.values())]
        torch._foreach_mul_(shards, scale.to(shards[0].device))
    return total
