"""Checks that a run's steps have trained anything, and the notes and errors if they have not.

An update counts if neither its gradient nor its learning rate is 0. Until the first update that counts, the weights
themselves are compared: a learning rate below the rounding of every weight changes none. (Such a rate does change
weights that are 0, as those of a new adapter, so weights that are nearly 0 are treated as 0.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from posttrain.errors import GivenUp, NothingTrained, count_noun
from posttrain.models.quantize import find_quant_states
from posttrain.recipe.training_sections import Optim
from posttrain.train.checkpoint import State
from posttrain.train.collectives import local
from posttrain.train.ranks import Ranks

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtype by element size in bytes
NEARLY_ZERO = 1e-12
TINY_GRADIENT = 0.01  # share of optim.eps: a smaller gradient moves a weight by less than 1% of the learning rate
TINY_RATE = 1e-9  # below this the learning rate itself explains why no weight changes
CHUNK = 1 << 24  # weights that are copied together


def fingerprint(optimizer: Optimizer) -> int:
    """Return a number that changes with the bits of the trained weights; for a divided model, of this rank's part."""
    weights = (local(p.detach()) for group in optimizer.param_groups for p in group["params"])
    parts = (part for weight in weights for part in weight.flatten().split(CHUNK))
    bits = (part.where(part.abs() > NEARLY_ZERO, 0.0).view(_INTEGERS[part.element_size()]) for part in parts)
    return sum(int(part.sum(dtype=torch.int64)) for part in bits)


def weights_moved(before: int, optimizer: Optimizer, ranks: Ranks) -> bool:
    """Return whether the weights of any rank differ from fingerprint `before`. All ranks must call this."""
    return any(ranks.gather(fingerprint(optimizer) != before))


def update_note(values: Mapping[str, Any], section: Optim, model: nn.Module, why: str | None = None) -> str | None:
    """Return a sentence if a step has made no update, or one that changes almost nothing; else None.

    values: metrics of the step. why: the cause of no update, if known.
    """
    if values["updates"]:
        return tiny_gradient_note(values, section, count_weights(model)[0])
    return f"no update in this step: {why or _cause(values)}"


def count_weights(model: nn.Module) -> tuple[int, int]:
    """Return (trained weights, all weights) of a model. 4-bit weights, packed in bytes, count by unpacked shape."""
    packed = find_quant_states(model)
    sizes = [
        (p.requires_grad, math.prod(packed[id(p)].shape) if id(p) in packed else p.numel()) for p in model.parameters()
    ]
    return sum(size for trained, size in sizes if trained), sum(size for _, size in sizes)


def _cause(values: Mapping[str, Any]) -> str:
    if values.get("updates_skipped"):
        return "gradients overflowed float16, and the scale of the loss was lowered"
    if not values["trained_ratio"]:
        return "no token was left to train on; look at the masks, filters and selections of the recipe"
    if not values["grad_norm"]:
        return "the gradient of every trained weight is 0; look at the weights and coefficients of the loss"
    if values["lr"] < TINY_RATE:
        return f"the learning rate {values['lr']:.3g} changes no weight"
    return "its change is lost in the rounding of every weight: look at optim.lr, optim.max_grad_norm and optim.eps"


def tiny_gradient_note(values: Mapping[str, Any], section: Optim, weights: int) -> str | None:
    """Return a sentence if a step's gradient is so small that Adam's eps takes nearly all of each update; else None.

    Adam divides a gradient by its magnitude plus eps, so a gradient far below eps gives updates far below the learning
    rate. values: metrics of the step. weights: number of trained weights.
    """
    norm = min(values["grad_norm"], section.max_grad_norm or math.inf)
    if section.use == "muon":  # Muon's updates do not shrink with the gradient
        return None
    if not norm or not weights or norm / math.sqrt(weights) >= TINY_GRADIENT * section.eps:
        return None
    return (
        f"the gradient is so small that optim.eps ({section.eps:g}) takes more than 99% of each update: almost nothing"
        " is trained; look at the weights and coefficients of the loss, and at optim.max_grad_norm"
    )


def check_patience(state: State, limit: int | None) -> GivenUp | None:
    """Return the error that ends a run whose last `limit` steps made no update, else None (limit None: no limit)."""
    if limit is None or state.idle < limit:
        return None
    return GivenUp(
        f"no update in the last {count_noun(state.idle, 'step')}, {count_noun(state.updates, 'update')} before",
        allowed=f"stopped and saved after step {state.step}: run.max_idle_steps is {limit}",
        hint="the notes above say why each step made none; run.max_idle_steps=null with --resume continues",
    )


def check_end(state: State) -> None:
    """Raise NothingTrained at the end of a run that made no update at all: its model equals the starting model."""
    if state.step and not state.updates:
        raise NothingTrained(
            f"nothing was trained: none of {count_noun(state.step, 'step')} made an update",
            allowed="no final model was saved, since it would equal the start model",
            hint="the notes above say why; metrics.jsonl has `updates`, `grad_norm` and `trained_ratio`",
        )


def summary(state: State) -> dict[str, Any]:
    """Return the entries of a run's summary about its updates."""
    return {
        "updates": state.updates,
        "steps_without_update": state.idle_steps,
        "trained_ratio": state.trained / state.seen if state.seen else None,
    }
