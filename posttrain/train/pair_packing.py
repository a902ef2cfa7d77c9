"""Pairs for a model in one line without padding, each prompt once.

A pair is laid out as `prompt chosen last rejected`, where `last` is the prompt's last token once more, which predicts
the first rejected token. The rejected tokens attend to the prompt before the chosen ones and skip those, so both sides
see exactly what they would see alone, at positions of their own: a prompt costs one pass instead of two. Images stand
in prompts, before their last token, so they are in the line once as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.batch import on_device, ranges
from posttrain.data.render import Pair
from posttrain.models.adapters import causal_of
from posttrain.models.images import probe_image
from posttrain.models.load import LoadedModel
from posttrain.train.attention import Packed, short_windows, use_packed_attention
from posttrain.train.image_batches import IMAGES, RowImages, image_inputs

IGNORED = -100  # label of a token that is not scored
PROBE = 16  # tokens of a prompt and of each side
Rows = Sequence[Mapping[str, Any]]


def make_packing_collator(device: torch.device) -> Callable[[Rows], dict[str, Any]]:
    """A collator of P pairs (`prompt_ids`, `chosen_ids`, `rejected_ids`) into what `summed_logps` reads.

    `input_ids`, `position_ids`, `labels` [1,T]; `packed`: who attends to whom; `cells` [M]: where each scored token
    stands in a table [2P,width] of completions, chosen rows first; `lengths` [2P]: scored tokens of each completion;
    `row_tokens` [2P]: tokens of prompt and completion, as if each row stood alone.
    """

    def collate(pairs: Rows) -> dict[str, Any]:
        sides = [(pair["prompt_ids"], pair[f"{side}_ids"]) for pair in pairs for side in ("chosen", "rejected")]
        shared = [0 if n % 2 == 0 else max(len(prompt) - 1, 0) for n, (prompt, _) in enumerate(sides)]
        whole = [len(prompt) + len(side) for prompt, side in sides]
        own = [count - skipped for count, skipped in zip(whole, shared, strict=True)]
        starts = [0, *accumulate(own)]
        line = (part for (prompt, side), skip in zip(sides, shared, strict=True) for part in (prompt[skip:], side))
        ids = on_device(list(chain.from_iterable(line)))
        # The first token of a row has no predecessor, so it is never scored.
        scored = [count - max(len(prompt), 1) for count, (prompt, _) in zip(whole, sides, strict=True)]
        labels = ids.clone()
        for start, count, wanted in zip(starts, own, scored, strict=False):
            labels[start : start + count - wanted] = IGNORED
        spans: list[tuple[int, int]] = []  # (start, length) of what is attended to: the shared prompt, and the row
        for row, (start, count) in enumerate(zip(starts, own, strict=False)):
            spans += [(starts[row - 1], shared[row]), (start, count)] if shared[row] else [(start, count)]
        order = [*range(0, len(sides), 2), *range(1, len(sides), 2)]  # chosen rows, then rejected ones
        return {
            "input_ids": ids[None],
            "position_ids": ranges(own, shared)[None],
            "labels": labels[None],
            "cells": _cells(scored, order),
            "lengths": torch.tensor([scored[row] for row in order]),
            "row_tokens": torch.tensor([whole[row] for row in order]),
            "packed": Packed.with_shared_keys(own, whole, ranges([n for _, n in spans], [a for a, _ in spans]), device),
        }

    return collate


def _cells(scored: Sequence[int], order: Sequence[int]) -> Tensor:
    """Cell of each scored token of the line in a flat table whose n-th row is row `order[n]` of the line."""
    place = {row: n for n, row in enumerate(order)}
    width = max(scored)
    return ranges(scored, [place[row] * width for row in range(len(scored))])


def summed_logps(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Log-probs of the completions [2P], chosen rows first, summed over their tokens in float32."""
    names = ("input_ids", "position_ids", "labels", "packed", IMAGES)
    given = image_inputs(model, {name: inputs[name] for name in names if name in inputs})
    outputs = model(**given, use_cache=False, fused_lm_head=True)
    found = outputs.log_probs[inputs["labels"][:, 1:] != IGNORED].float()
    rows, width = len(inputs["lengths"]), int(inputs["lengths"].max())
    return found.new_zeros(rows * width).index_put((inputs["cells"],), found).view(rows, width).sum(1)


def exact(loaded: LoadedModel, pairs: Sequence[Pair]) -> bool:
    """Switch the model to packed attention; whether each side of a packed pair then computes what it computes alone.

    Two pairs are tried, cut short, and one with an image if some have one. Architectures with a state that runs along
    the line, or with attention of their own, say no; the switched model also takes padded rows.
    """
    if not use_packed_attention(loaded.model) or any(_ends_in_image(loaded, pair) for pair in pairs):
        return False
    tried = [_cut_short(pair) for pair in (pairs[0], pairs[-1]) if not pair.images]
    if any(pair.images for pair in pairs):
        tried += _pairs_with_image(loaded)
    batch = make_packing_collator(loaded.device)([dataclasses.asdict(pair) for pair in tried])
    given = {name: batch[name] for name in ("input_ids", "position_ids", "packed")}
    if loaded.images is not None and any(pair.images for pair in tried):
        given[IMAGES] = RowImages(loaded.images, tuple(pair.images for pair in tried))
    training = loaded.model.training
    loaded.model.eval()
    with torch.no_grad(), loaded.autocast(), short_windows(causal_of(loaded.model)):
        inputs = image_inputs(
            loaded.model, {k: v.to(loaded.device) if isinstance(v, Tensor) else v for k, v in given.items()}
        )
        line = loaded.model(**inputs, use_cache=False).logits[0].float()
        ends = line.split(list(batch["packed"].lengths))
        alone = [_logits_alone(loaded, pair, side) for pair in tried for side in (pair.chosen_ids, pair.rejected_ids)]
    loaded.model.train(training)
    gap = max(float((a[-len(e) :] - e).abs().max() / a.abs().max()) for a, e in zip(alone, ends, strict=True))
    half = loaded.half is not None or loaded.model.dtype != torch.float32
    return gap < (3e-2 if half else 1e-3)


def _cut_short(pair: Pair) -> Pair:
    return Pair(pair.uid, pair.prompt_ids[-PROBE:], pair.chosen_ids[-PROBE:], pair.rejected_ids[-PROBE:])


def _pairs_with_image(loaded: LoadedModel) -> list[Pair]:
    """Two pairs about an image, with sides of other lengths."""
    assert loaded.images is not None
    image = probe_image()
    prompt = loaded.tokenizer(f"a{loaded.images.read(image).text}bc", add_special_tokens=False)["input_ids"]
    return [Pair(str(n), tuple(prompt), (11, 12, 13)[: n + 1], (14, 15), (image,)) for n in (0, 2)]


def _ends_in_image(loaded: LoadedModel, pair: Pair) -> bool:
    """Whether the token that would stand in the line twice is an image's."""
    return bool(pair.images) and loaded.images is not None and pair.prompt_ids[-1] in loaded.images.token_ids


def _logits_alone(loaded: LoadedModel, pair: Pair, side: Sequence[int]) -> Tensor:
    """[T,V] of one side behind its prompt, as transformers' own code computes them. With a mask, without which image
    tokens that attend to each other both ways would not in a switched model."""
    row = torch.tensor([[*pair.prompt_ids, *side]], device=loaded.device)
    shown = loaded.images.plain_inputs(loaded.model, pair.images, row) if loaded.images and pair.images else {}
    logits: Tensor = loaded.model(input_ids=row, attention_mask=torch.ones_like(row), **shown, use_cache=False).logits[
        0
    ]
    return logits.float()
