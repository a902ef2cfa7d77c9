"""Pairs for a model in one line without padding, each prompt once.

A pair is laid out as `prompt chosen last rejected`, where `last` is the prompt's last token once more, which predicts
the first rejected token. The rejected tokens attend to the prompt before the chosen ones and skip those, so both sides
see exactly what they would see alone, at positions of their own: a prompt costs one pass instead of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.batch import on_device, ranges
from posttrain.data.render import Pair
from posttrain.models.adapters import causal_of
from posttrain.models.load import LoadedModel
from posttrain.train.attention import Packed, short_windows, use_packed_attention

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
    names = ("input_ids", "position_ids", "labels", "packed")
    outputs = model(**{name: inputs[name] for name in names}, use_cache=False, fused_lm_head=True)
    found = outputs.log_probs[inputs["labels"][:, 1:] != IGNORED].float()
    rows, width = len(inputs["lengths"]), int(inputs["lengths"].max())
    return found.new_zeros(rows * width).index_put((inputs["cells"],), found).view(rows, width).sum(1)


def exact(loaded: LoadedModel, pairs: Sequence[Pair]) -> bool:
    """Switch the model to packed attention; whether each side of a packed pair then computes what it computes alone.

    Two pairs are tried, cut short. Architectures with a state that runs along the line, or with attention of their own,
    say no; the switched model also takes padded rows.
    """
    if not use_packed_attention(loaded.model):
        return False
    tried = [{f"{name}_ids": list(getattr(pair, f"{name}_ids"))[-PROBE:] for name in ("prompt", "chosen", "rejected")}
             for pair in (pairs[0], pairs[-1])]  # fmt: skip
    batch = make_packing_collator(loaded.device)(tried)
    training = loaded.model.training
    loaded.model.eval()
    with torch.no_grad(), loaded.autocast(), short_windows(causal_of(loaded.model)):
        line = _logits(loaded, packed=batch["packed"], **{k: batch[k] for k in ("input_ids", "position_ids")})
        ends = line.split(list(batch["packed"].lengths))
        rows = [p["prompt_ids"] + p[f"{side}_ids"] for p in tried for side in ("chosen", "rejected")]
        alone = [_logits(loaded, input_ids=torch.tensor([row])) for row in rows]
    loaded.model.train(training)
    gap = max(float((a[-len(e) :] - e).abs().max() / a.abs().max()) for a, e in zip(alone, ends, strict=True))
    half = loaded.half is not None or loaded.model.dtype != torch.float32
    return gap < (3e-2 if half else 1e-3)


def _logits(loaded: LoadedModel, **inputs: Any) -> Tensor:
    """[T,V] of one line."""
    given = {k: v.to(loaded.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return loaded.model(**given, use_cache=False).logits[0].float()
