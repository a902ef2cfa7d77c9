"""Layout of a packed line: rows one after another without padding, and which tokens attend to which.

Without a varlen kernel, short rows are computed together in padded blocks (`attend_in_blocks`): a separate call per row
costs one launch of every operation, which for short rows takes longer than the computation. Rows that attend to the
prompt of another row are in one block with it, so that no key is copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from posttrain.batch import concatenate_ranges, to_device
from posttrain.train.load_balancing import group_rows

MAX_WIDTH = 512  # tokens of a block's row: longer rows gain nothing from being batched
MAX_PADDING = 2.0  # upper limit of attention scores computed in a block, as a multiple of those needed


@dataclass(eq=False)  # not frozen: torch.compile (2.11) reads every field of a frozen one, and makes a graph for each
class Packed:
    """Layout of n rows in one packed line of tokens. Treated as immutable."""

    borders: Tensor  # [n+1] int32 on the model's device: 0, end of row 0, end of row 1, ...
    lengths: tuple[int, ...]
    longest: int
    keys: Keys | None = None  # None: each row attends to itself only
    group: Any = None  # process group of ranks that hold a part of the line each and gather keys; see `context_split`
    blocks: dict[int | None, list[Block] | None] = field(default_factory=dict)  # by window, for all layers of a pass

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Packed:
        """Build the packed line of rows of these lengths, each attending to itself only."""
        return cls(ends_of(lengths, device), tuple(lengths), max(lengths))

    @classmethod
    def with_shared_keys(cls, lengths: list[int], keys: list[int], sources: Tensor, device: torch.device) -> Packed:
        """Build the layout of rows that also attend to tokens of other rows before their own (`Keys`)."""
        found = Keys(ends_of(keys, device), tuple(keys), max(keys), sources.to(device))
        return cls(ends_of(lengths, device), tuple(lengths), max(lengths), found)


@dataclass(eq=False)
class Keys:
    """The keys of each of n rows: `lengths` tokens, the last of which are the row itself (attended to causally)."""

    borders: Tensor  # [n+1] int32
    lengths: tuple[int, ...]
    longest: int
    sources: Tensor  # [sum of lengths] position of each key in the line


def ends_of(lengths: list[int], device: torch.device) -> Tensor:
    """Return 0 and the cumulative lengths as int32 [n+1] on the device."""
    return to_device(list(itertools.accumulate(lengths, initial=0)), device, torch.int32)


class Block(NamedTuple):
    """A padded batch of U parts of a line, of at most L tokens each.

    indices [U,L]: position of each token in the line. filled [U,L]: which cells hold a token. mask [U,1,L,L]: attention
    mask, True where a token (dim 2) attends to another (dim 3).
    """

    indices: Tensor
    filled: Tensor
    mask: Tensor


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scaling: float | None
) -> Tensor:
    """Compute attention of a whole line block by block.

    query [1,heads,T,dim], key and value [1,kv_heads,T,dim] -> [1,T,heads,dim].
    """
    grouped = query.shape[1] != key.shape[1]
    lines = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T,heads,dim]
    outputs = []
    for indices, filled, mask in blocks:
        q, k, v = (x.index_select(0, indices.flatten()).unflatten(0, indices.shape).transpose(1, 2) for x in lines)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2)[filled])
    order = torch.cat([indices[filled] for indices, filled, _ in blocks])
    return torch.cat(outputs).index_select(0, order.argsort())[None]


def blocks_of(packed: Packed, window: int | None) -> list[Block] | None:
    """Build the blocks of a line whose rows attend to at most `window` tokens, including themselves (None: no limit).

    Returns None for a single row, if a part is longer than MAX_WIDTH, and if a row attends to anything other than the
    beginning of another row and itself.
    """
    if len(packed.lengths) == 1:
        return None
    if packed.keys is not None and int(packed.keys.sources.max()) >= sum(packed.lengths):
        return None  # keys of other ranks
    parts = _parts_of(packed)
    sizes = [sum(packed.lengths[row] for row in part) for part in parts]
    starts = packed.borders[:-1].long().cpu()
    seen = packed.lengths if packed.keys is None else packed.keys.lengths
    skipped = torch.tensor(seen) - torch.tensor(packed.lengths)  # by row: tokens seen of the first row of its part
    firsts = torch.zeros(len(starts), dtype=torch.long)
    for part in parts:
        firsts[part] = part[0]
    if max(sizes) > MAX_WIDTH or not _sees_firsts(packed, starts, skipped, firsts):
        return None
    rows = torch.arange(len(starts)).repeat_interleave(torch.tensor(packed.lengths))
    # position of each token among the tokens that its row attends to
    positions = concatenate_ranges(packed.lengths, skipped.tolist())
    blocks = []
    for chosen in _group_alike(sizes):
        spans = [([packed.lengths[row] for row in parts[n]], starts[parts[n]].tolist()) for n in chosen]
        tokens = [concatenate_ranges(lengths, begins) for lengths, begins in spans]
        indices = pad_sequence(tokens, batch_first=True)
        width = indices.shape[1]
        filled = torch.arange(width) < torch.tensor([len(own) for own in tokens])[:, None]
        row, at = rows[indices], positions[indices]
        prompt = (row[:, None] == firsts[row][:, :, None]) & (at[:, None] < skipped[row][:, :, None])
        mask = ((row[:, :, None] == row[:, None]) | prompt) & (at[:, None] <= at[:, :, None]) & filled[:, None]
        if window is not None:
            mask &= at[:, :, None] - at[:, None] < window
        mask |= torch.eye(width, dtype=torch.bool)  # an empty cell attends to itself: a fully masked row would give NaN
        blocks.append(Block(*(x.to(packed.borders.device) for x in (indices, filled, mask[:, None]))))
    return blocks


def _sees_firsts(packed: Packed, starts: Tensor, skipped: Tensor, firsts: Tensor) -> bool:
    """Return whether each row attends to exactly itself and the first `skipped` tokens of the first row of its part."""
    if packed.keys is None:
        return True
    spans = torch.stack([skipped, torch.tensor(packed.lengths)], 1).flatten().tolist()
    expected = concatenate_ranges(spans, torch.stack([starts[firsts], starts], 1).flatten().tolist())
    return torch.equal(packed.keys.sources.cpu(), expected)


def _parts_of(packed: Packed) -> list[list[int]]:
    """Group rows that attend to tokens of one another; the row that the others attend to comes first."""
    if packed.keys is None:
        return [[row] for row in range(len(packed.lengths))]
    owners = torch.arange(len(packed.lengths)).repeat_interleave(torch.tensor(packed.lengths))
    first_keys = packed.keys.sources[packed.keys.borders[:-1].long()].cpu()
    return group_rows(owners[first_keys].tolist())


def _group_alike(sizes: Sequence[int]) -> list[list[int]]:
    """Group parts of similar size into blocks; padding multiplies the scores of a block by at most MAX_PADDING."""
    groups: list[list[int]] = []
    scores = 0
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        scores += sizes[n] ** 2
        if groups and (len(groups[-1]) + 1) * sizes[groups[-1][0]] ** 2 <= MAX_PADDING * scores:
            groups[-1].append(n)
        else:
            groups.append([n])
            scores = sizes[n] ** 2
    return groups
