"""Validation losses of sft and dpo on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.models.load import LoadedModel
from posttrain.rollout.hf import eval_mode
from posttrain.train import data_parallel, distributed
from posttrain.train.image_batches import image_inputs

IGNORED = -100
Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]
Sums = dict[str, float]


def batches_of(lengths: Sequence[int], micro: int) -> list[list[int]]:
    """Divide row numbers into forward passes of at most `micro` rows, longest rows first."""
    order = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
    return [order[at : at + micro] for at in range(0, len(order), micro)]


def sum_over_rows(
    loaded: LoadedModel, rows: Any, batches: Sequence[Sequence[int]], collate: Collate, sums: Callable[[Any], Sums]
) -> Sums:
    """Sum numbers over all rows, without gradients or dropout. Each rank runs a share of the batches.

    rows: indexed by number. sums: returns the sums of one collated batch, whose tensors are on the model's device.
    """
    found: list[Sums] = []
    with torch.no_grad(), eval_mode(loaded.model), loaded.autocast():
        for number in data_parallel.my_pass_shard(len(batches)):
            batch = collate([rows[n] for n in batches[number]])
            found.append(sums({k: v.to(loaded.device) if isinstance(v, Tensor) else v for k, v in batch.items()}))
    every = [part for share in distributed.gather(found)[:: data_parallel.model_parallel_size()] for part in share]
    return {name: sum(part[name] for part in every) for name in (every[0] if every else {})}


def token_sums(loaded: LoadedModel) -> Callable[[Any], Sums]:
    """Return a function that sums an sft batch's negative log-probs, correct greedy predictions, and trained tokens."""

    def sums(batch: dict[str, Any]) -> Sums:
        labels = batch["labels"][..., 1:]
        mask = labels != IGNORED
        inputs = image_inputs(loaded.model, {name: value for name, value in batch.items() if name != "labels"})
        logits = loaded.model(**inputs, use_cache=False).logits[:, :-1][mask].float()
        targets = labels[mask]
        return {
            "loss": float(functional.cross_entropy(logits, targets, reduction="sum")),
            "right": float((logits.argmax(-1) == targets).sum()),
            "tokens": float(mask.sum()),
        }

    return sums
