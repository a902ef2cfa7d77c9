"""Log-probs of both sides of preference pairs, under the policy in training and under its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor, nn

from posttrain.batch import PairBatch
from posttrain.models.load import LoadedModel
from posttrain.rollout.hf import eval_mode
from posttrain.run.progress import Progress
from posttrain.train import data_parallel, pair_columns, pair_packing, sharding
from posttrain.train.image_batches import IMAGES
from posttrain.train.reference_models import SIDES

FIELDS = {field for fields in (*pair_columns.GIVEN.values(), *pair_columns.ANCHORS.values()) for field in fields}


def pair_batch(model: nn.Module, inputs: Mapping[str, Tensor]) -> PairBatch:
    """Return the batch of P pairs with the policy's log-probs.

    inputs: collated, P chosen rows and then P rejected ones.
    """
    chosen, rejected = summed_logps(model, inputs).chunk(2)
    lengths = scored_lengths(inputs)
    return PairBatch(
        chosen_logp=chosen,
        rejected_logp=rejected,
        chosen_length=lengths[: len(chosen)],
        rejected_length=lengths[len(chosen) :],
        **{name: value for name, value in inputs.items() if name in FIELDS},
    )


def single_batch(model: nn.Module, inputs: Mapping[str, Tensor]) -> PairBatch:
    """Return the batch of P labeled answers with the policy's log-probs.

    Their rejected sides only serve the step's KL baseline and are not run here.
    """
    side = take_side(inputs, 0)
    chosen = summed_logps(model, side)
    return PairBatch(
        chosen_logp=chosen,
        rejected_logp=chosen.new_zeros(0),
        chosen_length=side["completion_mask"][:, 1:].sum(1),
        **{name: value for name, value in inputs.items() if name in FIELDS},
    )


def take_side(inputs: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the inputs of the chosen (0) or rejected (1) rows of collated pairs."""
    names = ("input_ids", "attention_mask", "completion_mask")
    side: dict[str, Any] = {name: inputs[name].chunk(2)[number] for name in names}
    if (images := inputs.get(IMAGES)) is not None:
        rows = len(side["input_ids"])
        side[IMAGES] = images.select(range(number * rows, (number + 1) * rows))
    return side


def scored_lengths(inputs: Mapping[str, Tensor]) -> Tensor:
    """Count the scored tokens of each completion [2P], chosen rows first. The first token of a row is not scored."""
    return inputs["lengths"] if "lengths" in inputs else inputs["completion_mask"][:, 1:].sum(1)


def summed_logps(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Compute the log-probs of the completions [2P], summed over their tokens in float32."""
    if "packed" in inputs:
        return pair_packing.summed_logps(model, inputs)
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    image_kwargs = inputs[IMAGES].inputs(model, inputs["input_ids"]) if IMAGES in inputs else {}
    outputs = model(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        labels=labels,
        use_cache=False,
        fused_lm_head=True,  # TRL's head: log-probs without the full logits
        **image_kwargs,
    )
    return outputs.log_probs.float().sum(1)


def reference_logps(
    loaded: LoadedModel, micro: int, rows: Dataset, collate: Callable[[list[Any]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Compute summed log-probs of all pairs: `chosen` and `rejected` [number of pairs], float32.

    Each forward pass takes `micro` pairs of similar length.
    """
    model = loaded.model
    longest = [len(r["prompt_ids"]) + max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in rows]
    order = sorted(range(len(rows)), key=lambda n: -longest[n])
    out = torch.zeros(2, len(rows))
    with eval_mode(model), Progress("reference", len(order), ()) as progress:
        parts = data_parallel.my_pass_shard(math.ceil(len(order) / micro))
        idle = sharding.idle_passes(len(parts), loaded.is_sharded)
        for part in parts:
            start = part * micro
            numbers = order[start : start + micro]
            batch = collate([rows[n] for n in numbers])
            with torch.no_grad(), loaded.autocast():
                sums = summed_logps(model, send_to_device(batch, loaded.device))
            out[:, numbers] = sums.cpu().view(2, -1)
            progress.update(start + len(numbers), {})
        for _ in range(idle):
            with torch.no_grad(), loaded.autocast():
                summed_logps(model, send_to_device(collate([rows[order[-1]]]), loaded.device))
    return dict(zip(SIDES, data_parallel.sum_of_passes(out).unbind(), strict=True))
