"""Optimiser, learning-rate schedule and gradient clipping of the RL loop."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from posttrain.recipe.sections import Optim


def build(model: nn.Module, section: Optim, critic: nn.Module | None = None, critic_lr: float = 0.0) -> Optimizer:
    """AdamW over the trainable parameters, without weight decay on vectors (norms and biases).

    A critic has a learning rate of its own, which follows the same schedule, and no weight decay.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    if critic is not None:
        scale = critic_lr / section.lr
        groups.append({"params": list(critic.parameters()), "weight_decay": 0.0, "scale": scale})
    beta1, beta2 = section.betas
    return AdamW([g for g in groups if g["params"]], lr=section.lr, betas=(beta1, beta2), eps=section.eps)


def set_lr(optimizer: Optimizer, section: Optim, update: int, total_updates: int) -> float:
    """Set and return the learning rate of optimiser update 0, 1, ...; a pure function of it, so nothing to resume."""
    lr = section.lr * lr_factor(update, section, total_updates)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
    return lr


def lr_factor(update: int, section: Optim, total_updates: int) -> float:
    """Share of the peak learning rate at optimiser update 0, 1, ...: linear warm-up, then the schedule to the end."""
    if section.schedule == "stable_decay":
        decay = max(1, total_updates // 10) if section.decay_steps is None else section.decay_steps
        least = section.lr / 10 if section.min_lr is None else section.min_lr
        return (
            stable_decay(
                update,
                stable_steps=max(0, total_updates - decay),
                decay_steps=decay,
                lr=section.lr,
                min_lr=least,
                warmup_steps=section.warmup_steps,
            )
            / section.lr
        )
    if update < section.warmup_steps:
        return (update + 1) / (section.warmup_steps + 1)
    done = (update - section.warmup_steps) / max(1, total_updates - section.warmup_steps)
    done = min(done, 1.0)
    match section.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))


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
    """Learning rate of update 0, 1, ...: warm-up, constant until stable_steps, then down to min_lr in decay_steps.

    OctoThinker's stable-then-decay schedule (2506.20512); the shape of the decay and the last learning rate are ours.
    With decay_steps 0 it jumps to min_lr.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if step < stable_steps:
        return lr
    if step >= stable_steps + decay_steps:
        return min_lr
    done = (step - stable_steps) / decay_steps
    share = 0.5 * (1.0 + math.cos(math.pi * done)) if shape == "cosine" else 1.0 - done
    return min_lr + (lr - min_lr) * share


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Clip to `max_norm` in place (None: only measure) and return the norm before clipping, a 0-d tensor."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    return nn.utils.clip_grad_norm_(parameters, max_norm if max_norm is not None else torch.inf)
