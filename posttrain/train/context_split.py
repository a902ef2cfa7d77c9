"""Context parallelism: ranks of one group run the same packed line, each on its own part of the tokens.

A line is cut into twice as many chunks as there are ranks. Rank r gets chunk r from the front and chunk r from the
back, so that causal attention costs the same on each rank. In every layer the keys and values of the whole line are
gathered, and a rank's queries attend to those visible to their rows; after the last layer the hidden states are
gathered. Everything after the backbone (head, log-probs, losses) sees the whole line on each rank and needs no changes.

All ranks of a group compute the same loss from the same hidden states. Each backpropagates 1/n of the loss, where n is
the number of ranks, and gradients are summed over all: the backward pass of a gather sums the gradients of its readers.
Rows that are not packed are run in full by each rank, with the same result.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.models.adapters import backbone, causal_of
from posttrain.train.collectives import collective
from posttrain.train.packed_line import Packed

# Names in torch 2.13; the names of torch 2.11 still exist, but warn in every process.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_SPLIT = "posttrain_context_group"  # attribute of backbones whose packed lines are divided


def is_split(causal: Any) -> bool:
    """Return whether ranks divide the packed lines of this model among them."""
    return hasattr(backbone(causal), _SPLIT)


def split_lines(model: Any, group: Any) -> None:
    """Divide every packed line of the model over the ranks of `group` from now on.

    All ranks must run the same lines.
    """
    below = backbone(causal_of(model))
    setattr(below, _SPLIT, group)
    below.forward = _divide_line(below.forward, group)


def _divide_line(forward: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """Wrap the forward pass of a backbone: packed lines [1,T] are divided among ranks; other inputs run unchanged."""

    @wraps(forward)
    def run_divided(
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        packed: Packed | None = None,
        **more: Any,
    ) -> Any:
        if packed is None or input_ids is None or position_ids is None:
            inputs = {"input_ids": input_ids, "position_ids": position_ids, "packed": packed}
            return forward(**{name: value for name, value in inputs.items() if value is not None}, **more)
        mine, part, order = part_of_line(packed, dist.get_rank(group), dist.get_world_size(group))
        part.group = group
        out = forward(input_ids=input_ids[:, mine], position_ids=position_ids[:, mine], packed=part, **more)
        out.last_hidden_state = gather_line(out.last_hidden_state, 1, group)[:, order]
        if getattr(out, "router_logits", None) is not None:
            routed = (logits.reshape(1, len(mine), -1) for logits in out.router_logits)
            out.router_logits = tuple(gather_line(logits, 1, group)[0, order] for logits in routed)
        return out

    return run_divided


def part_of_line(packed: Packed, rank: int, count: int) -> tuple[Tensor, Packed, Tensor]:
    """Return (mine, part, order) of one of `count` ranks for a line of T tokens.

    mine [t]: indices of the tokens of the line that this rank runs, the same t on each rank; if the line is too short,
    the last token is repeated as a row of its own. part: row boundaries and visible keys of these tokens, among the
    concatenated tokens of all ranks. order [T]: the index of each token of the line in that concatenation.
    """
    device, total = packed.borders.device, sum(packed.lengths)
    size = -(-total // (2 * count))
    tokens = np.arange(total)
    chunk = tokens // size
    front = chunk < count
    order = np.where(front, chunk, 2 * count - 1 - chunk) * 2 * size + tokens % size + np.where(front, 0, size)
    starts = [0, *itertools.accumulate(packed.lengths)]
    seen = _keys_of_rows(packed, starts)
    mine, lengths, keys = list[Any](), list[int](), list[Any]()
    for half, number in enumerate((rank, 2 * count - 1 - rank)):
        begin, end = min(number * size, total), min((number + 1) * size, total)
        mine.append(tokens[begin:end])
        for row in range(bisect.bisect_right(starts, begin) - 1, len(packed.lengths)):
            first, last = max(begin, starts[row]), min(end, starts[row + 1])
            if first >= end:
                break
            if first < last:
                lengths.append(last - first)
                keys.append(order[seen[row][: len(seen[row]) - (starts[row + 1] - last)]])
        if fill := size - (end - begin):
            mine.append(np.full(fill, total - 1))
            lengths.append(fill)
            at = rank * 2 * size + half * size + (end - begin)
            keys.append(np.arange(at, at + fill))
    sources = torch.from_numpy(np.concatenate(keys))
    part = Packed.with_shared_keys(lengths, [len(row_keys) for row_keys in keys], sources, device)
    return torch.from_numpy(np.concatenate(mine)).to(device), part, torch.from_numpy(order).to(device)


def _keys_of_rows(packed: Packed, starts: Sequence[int]) -> list[Any]:
    """Return the tokens of the line that each row attends to; the last ones are the row's own."""
    if packed.keys is None:
        return [np.arange(start, start + length) for start, length in zip(starts, packed.lengths, strict=False)]
    return np.split(packed.keys.sources.cpu().numpy(), np.cumsum(packed.keys.lengths)[:-1])


def gather_line(part: Tensor, dim: int, group: Any) -> Tensor:
    """Concatenate the parts [1,...] of all ranks along `dim`; backward sums the gradients of all ranks."""
    count = dist.get_world_size(group)

    def gather(part: Tensor) -> Tensor:
        whole = part.new_empty((count * part.shape[0], *part.shape[1:]))
        _all_gather(whole, part, group=group)
        return whole

    def scatter(grad: Tensor) -> Tensor:
        part = grad.new_empty((grad.shape[0] // count, *grad.shape[1:]))
        _reduce_scatter(part, grad.contiguous(), group=group)
        return part

    return collective(part.movedim(dim, 0).contiguous(), gather, scatter).movedim(0, dim)
