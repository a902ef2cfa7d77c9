"""A forward pass of the backbone over rows that are packed one after another in one line, with the images in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from posttrain.batch import on_device, ranges
from posttrain.images import Image
from posttrain.models.adapters import backbone
from posttrain.models.images import ImageReader
from posttrain.train.attention import Packed
from posttrain.train.collate import Sequences, pad_right
from posttrain.train.prompt_sharing import Prompts, build_shared_line


def borders_of(
    sequences: Sequences, prompts: Prompts | None, fill: int, device: torch.device
) -> tuple[Packed, list[int]]:
    """Who attends to what in a line of all rows, and where in it the first token of each row would stand. prompts:
    where rows of one share its pass.

    What fills the line up to a multiple of `fill` is one more row, of token 0, whose states nobody reads.
    """
    lengths = sequences.lengths
    skipped = [0] * len(lengths) if prompts is None else prompts.shared_token_counts(range(len(lengths)))
    own = [length - skip for length, skip in zip(lengths, skipped, strict=True)]
    rest = -sum(own) % fill
    starts = [start - skip for start, skip in zip(accumulate(own, initial=0), skipped, strict=False)]
    if prompts is None:
        return Packed.of([*own, *([rest] if rest else [])], device), starts
    return build_shared_line(prompts, rest, device), starts


def prompts_end_in_text(sequences: Sequences, reader: ImageReader | None) -> bool:
    """Whether the last token of every prompt, with which each row of the prompt begins, belongs to no image."""
    if sequences.images is None or reader is None:
        return True
    ends = (row[length - 1] for row, length in zip(sequences.ids, sequences.prompt_lengths, strict=True) if length)
    return all(int(token) not in reader.token_ids for token in ends)


def image_inputs(
    causal: Any, images: Sequence[Sequence[Image]], ids: Tensor, reader: ImageReader | None
) -> dict[str, Any]:
    """What the model is given of the images of rows, whose tokens stand in ids in their order."""
    assert reader is not None, "a model that reads no images was given some"
    return reader.inputs(backbone(causal), images, ids)


def run_packed(
    causal: Any, sequences: Sequences, borders: Packed, asked: Mapping[str, Any], reader: ImageReader | None
) -> Any:
    """The backbone's output, hidden states [1,tokens,H], for all rows in one line; positions start at 0 in each row."""
    device = borders.borders.device
    whole = borders.lengths if borders.keys is None else borders.keys.lengths
    skipped = [length - own for length, own in zip(whole, borders.lengths, strict=True)]
    rest = sum(borders.lengths[len(sequences) :])
    rows = [row[skip:] for row, skip in zip(sequences.ids, skipped, strict=False)]
    ids = on_device(functional.pad(torch.from_numpy(np.concatenate(rows)), (0, rest)), device)[None]
    positions = on_device(ranges(borders.lengths, skipped), device)[None]
    seen: dict[str, Any] = {}
    if sequences.images is not None:
        assert reader is not None, "a model that reads no images was given some"
        # a row that skips its prompt skips the prompt's images, too, which so go through the tower once
        standing = [row[sequences.shown_in_prompt(n) if skipped[n] else 0 :] for n, row in enumerate(sequences.images)]
        seen = image_inputs(causal, standing, ids, reader)
        by_grid = _grid_positions(causal, sequences, skipped, reader, device)
        if by_grid is not None:
            filling = torch.arange(rest, device=device).expand(3, -1)
            positions = torch.cat([by_grid, filling], 1)[:, None]
    return backbone(causal)(input_ids=ids, position_ids=positions, packed=borders, use_cache=False, **seen, **asked)


def _grid_positions(
    causal: Any, sequences: Sequences, skipped: Sequence[int], reader: ImageReader, device: torch.device
) -> Tensor | None:
    """Positions [3,tokens] of rows one after another, each without its first `skipped` tokens, for a model that counts
    image tokens by time, height and width; None for another."""
    assert sequences.images is not None
    ids, mask = pad_right(sequences, device)
    found = reader.positions(backbone(causal), sequences.images, ids, mask)
    if found is None:
        return None
    first = on_device(list(skipped[: len(sequences)]), device)[:, None]
    return found[:, mask.bool() & (torch.arange(ids.shape[1], device=device) >= first)]
