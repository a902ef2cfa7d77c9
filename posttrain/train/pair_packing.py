"""Packing of preference pairs into one line without padding, with each prompt computed once.

A pair is laid out as `prompt chosen last rejected`, where `last` repeats the prompt's last token, which predicts the
first rejected token. The rejected tokens attend to the prompt and skip the chosen tokens, with their usual positions,
so both sides see exactly what they would see alone: a prompt costs one pass instead of two. Images are in prompts,
before the last token, so they are in the line once as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from posttrain.batch import concatenate_ranges, to_device
from posttrain.data.render import Pair
from posttrain.models.adapters import causal_of
from posttrain.models.images import probe_image
from posttrain.models.load import LoadedModel
from posttrain.rollout.hf import eval_mode
from posttrain.train.attention import Packed, short_windows, use_packed_attention
from posttrain.train.collate import IGNORED
from posttrain.train.image_batches import IMAGES, RowImages, image_inputs

PROBE = 16  # tokens of a prompt and of each side in the check of `packs_exactly`
Rows = Sequence[Mapping[str, Any]]


def make_packing_collator(device: torch.device) -> Callable[[Rows], dict[str, Any]]:
    """Return a collator of P pairs (`prompt_ids`, `chosen_ids`, `rejected_ids`) into the inputs of `summed_logps`.

    `input_ids`, `position_ids`, `labels` [1,T]; `packed`: layout of the line; `cells` [M]: index of each scored token
    in a flat table [2P,width] of completions, chosen rows first; `lengths` [2P]: scored tokens of each completion;
    `row_tokens` [2P]: tokens of prompt and completion, as if each row were separate.
    """

    def collate(pairs: Rows) -> dict[str, Any]:
        sides = [(pair["prompt_ids"], pair[f"{side}_ids"]) for pair in pairs for side in ("chosen", "rejected")]
        shared = [0 if n % 2 == 0 else max(len(prompt) - 1, 0) for n, (prompt, _) in enumerate(sides)]
        whole = [len(prompt) + len(side) for prompt, side in sides]
        own = [count - skipped for count, skipped in zip(whole, shared, strict=True)]
        starts = [0, *accumulate(own)]
        line = (part for (prompt, side), skip in zip(sides, shared, strict=True) for part in (prompt[skip:], side))
        ids = to_device(list(chain.from_iterable(line)))
        # The first token of a row has no predecessor, so it is never scored.
        scored = [count - max(len(prompt), 1) for count, (prompt, _) in zip(whole, sides, strict=True)]
        labels = ids.clone()
        for start, count, scored_count in zip(starts, own, scored, strict=False):
            labels[start : start + count - scored_count] = IGNORED
        spans: list[tuple[int, int]] = []  # (start, length) of the attended tokens: the shared prompt, then the row
        for row, (start, count) in enumerate(zip(starts, own, strict=False)):
            spans += [(starts[row - 1], shared[row]), (start, count)] if shared[row] else [(start, count)]
        order = [*range(0, len(sides), 2), *range(1, len(sides), 2)]  # chosen rows, then rejected ones
        return {
            "input_ids": ids[None],
            "position_ids": concatenate_ranges(own, shared)[None],
            "labels": labels[None],
            "cells": _cells(scored, order),
            "lengths": torch.tensor([scored[row] for row in order]),
            "row_tokens": torch.tensor([whole[row] for row in order]),
            "packed": Packed.with_shared_keys(
                own, whole, concatenate_ranges([n for _, n in spans], [a for a, _ in spans]), device
            ),
        }

    return collate


def _cells(scored: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return the index of each scored token of the line in a flat table whose row n is row `order[n]` of the line."""
    table_row = {row: n for n, row in enumerate(order)}
    width = max(scored)
    return concatenate_ranges(scored, [table_row[row] * width for row in range(len(scored))])


def summed_logps(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Compute the log-probs of the completions [2P], chosen rows first, summed over their tokens in float32."""
    names = ("input_ids", "position_ids", "labels", "packed", IMAGES)
    kwargs = image_inputs(model, {name: inputs[name] for name in names if name in inputs})
    outputs = model(**kwargs, use_cache=False, fused_lm_head=True)
    found = outputs.log_probs[inputs["labels"][:, 1:] != IGNORED].float()
    rows, width = len(inputs["lengths"]), int(inputs["lengths"].max())
    return found.new_zeros(rows * width).index_put((inputs["cells"],), found).view(rows, width).sum(1)


def packs_exactly(loaded: LoadedModel, pairs: Sequence[Pair]) -> bool:
    """Switch the model to packed attention; return whether packed pairs then get the logits of separate rows.

    Two pairs are tried, cut short, and one with an image if some pairs have one. False for architectures with a state
    that runs along the line, or with attention code of their own. The switched model also takes padded rows.
    """
    if not use_packed_attention(loaded.model):
        return False
    image_tokens = loaded.images.token_ids if loaded.images is not None else frozenset[int]()
    # A packed line repeats the prompt's last token, which therefore may not belong to an image.
    if any(pair.images and pair.prompt_ids[-1] in image_tokens for pair in pairs):
        return False
    probes = [
        Pair(pair.uid, pair.prompt_ids[-PROBE:], pair.chosen_ids[-PROBE:], pair.rejected_ids[-PROBE:])
        for pair in (pairs[0], pairs[-1])
        if not pair.images
    ]
    if any(pair.images for pair in pairs):
        probes += _pairs_with_image(loaded)
    batch = make_packing_collator(loaded.device)([dataclasses.asdict(pair) for pair in probes])
    inputs_on_host = {name: batch[name] for name in ("input_ids", "position_ids", "packed")}
    if loaded.images is not None and any(pair.images for pair in probes):
        inputs_on_host[IMAGES] = RowImages(loaded.images, tuple(pair.images for pair in probes))
    with eval_mode(loaded.model), torch.no_grad(), loaded.autocast(), short_windows(causal_of(loaded.model)):
        inputs = image_inputs(loaded.model, send_to_device(inputs_on_host, loaded.device))
        line = loaded.model(**inputs, use_cache=False).logits[0].float()
        ends = line.split(list(batch["packed"].lengths))
        separate = [
            _logits_alone(loaded, pair, side) for pair in probes for side in (pair.chosen_ids, pair.rejected_ids)
        ]
    gap = max(float((a[-len(e) :] - e).abs().max() / a.abs().max()) for a, e in zip(separate, ends, strict=True))
    half = loaded.half is not None or loaded.model.dtype != torch.float32
    return gap < (3e-2 if half else 1e-3)


def _pairs_with_image(loaded: LoadedModel) -> list[Pair]:
    """Return two pairs about an image, with sides of different lengths."""
    assert loaded.images is not None
    image = probe_image()
    prompt = loaded.tokenizer(f"a{loaded.images.read(image).text}bc", add_special_tokens=False)["input_ids"]
    return [Pair(str(n), tuple(prompt), (11, 12, 13)[: n + 1], (14, 15), (image,)) for n in (0, 2)]


def _logits_alone(loaded: LoadedModel, pair: Pair, side: Sequence[int]) -> Tensor:
    """Compute the logits [T,V] of one side after its prompt with transformers' own code.

    An attention mask is passed because, in a switched model, image tokens attend to each other in both directions only
    with one.
    """
    row = torch.tensor([[*pair.prompt_ids, *side]], device=loaded.device)
    image_kwargs = loaded.images.plain_inputs(loaded.model, pair.images, row) if loaded.images and pair.images else {}
    logits: Tensor = loaded.model(
        input_ids=row, attention_mask=torch.ones_like(row), **image_kwargs, use_cache=False
    ).logits[0]
    return logits.float()
