"""Forward pass of the backbone over rows packed one after another in one line, with their images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from posttrain.batch import concatenate_ranges, to_device
from posttrain.images import Image
from posttrain.models.adapters import backbone
from posttrain.models.images import ImageReader
from posttrain.train.attention import Packed
from posttrain.train.collate import Sequences, pad_right
from posttrain.train.prompt_sharing import Prompts, build_shared_line


def borders_of(
    sequences: Sequences, prompts: Prompts | None, fill: int, device: torch.device
) -> tuple[Packed, list[int]]:
    """Return the layout of a line of all rows, and the position in the line at which each row's first token would be.

    prompts: set if rows of one prompt share its pass. The line is filled up to a multiple of `fill` with one more row
    of token 0, whose states are not read.
    """
    lengths = sequences.lengths
    skipped = [0] * len(lengths) if prompts is None else prompts.shared_token_counts(range(len(lengths)))
    own = [length - skip for length, skip in zip(lengths, skipped, strict=True)]
    filling = -sum(own) % fill
    starts = [start - skip for start, skip in zip(accumulate(own, initial=0), skipped, strict=False)]
    if prompts is None:
        return Packed.of([*own, *([filling] if filling else [])], device), starts
    return build_shared_line(prompts, filling, device), starts


def prompts_end_in_text(sequences: Sequences, reader: ImageReader | None) -> bool:
    """Return whether no prompt's last token belongs to an image.

    With a shared prompt, every row after the first begins with that token.
    """
    if sequences.images is None or reader is None:
        return True
    ends = (row[length - 1] for row, length in zip(sequences.ids, sequences.prompt_lengths, strict=True) if length)
    return all(int(token) not in reader.token_ids for token in ends)


def image_inputs(
    causal: Any, images: Sequence[Sequence[Image]], ids: Tensor, reader: ImageReader | None
) -> dict[str, Any]:
    """Return the model inputs for the images of rows; ids holds their image tokens in the same order."""
    assert reader is not None, "a model that reads no images was given some"
    return reader.inputs(backbone(causal), images, ids)


def run_packed(
    causal: Any, sequences: Sequences, borders: Packed, options: Mapping[str, Any], reader: ImageReader | None
) -> Any:
    """Run the backbone on all rows in one line and return its output (hidden states [1,tokens,H]).

    Positions start at 0 in each row. options: further keyword arguments of the backbone.
    """
    device = borders.borders.device
    whole = borders.lengths if borders.keys is None else borders.keys.lengths
    skipped = [length - own for length, own in zip(whole, borders.lengths, strict=True)]
    filling = sum(borders.lengths[len(sequences) :])
    rows = [row[skip:] for row, skip in zip(sequences.ids, skipped, strict=False)]
    ids = to_device(functional.pad(torch.from_numpy(np.concatenate(rows)), (0, filling)), device)[None]
    positions = to_device(concatenate_ranges(borders.lengths, skipped), device)[None]
    image_kwargs: dict[str, Any] = {}
    if sequences.images is not None:
        assert reader is not None, "a model that reads no images was given some"
        # A row that skips its prompt skips the prompt's images as well, so they pass through the vision tower once.
        images = [row[sequences.shown_in_prompt(n) if skipped[n] else 0 :] for n, row in enumerate(sequences.images)]
        image_kwargs = image_inputs(causal, images, ids, reader)
        by_grid = _grid_positions(causal, sequences, skipped, reader, device)
        if by_grid is not None:
            of_filling = torch.arange(filling, device=device).expand(3, -1)
            positions = torch.cat([by_grid, of_filling], 1)[:, None]
    return backbone(causal)(
        input_ids=ids, position_ids=positions, packed=borders, use_cache=False, **image_kwargs, **options
    )


def _grid_positions(
    causal: Any, sequences: Sequences, skipped: Sequence[int], reader: ImageReader, device: torch.device
) -> Tensor | None:
    """Return positions [3,tokens] (time, height, width) of rows without their first `skipped` tokens; None if not used.

    Only some models index image tokens by time, height and width.
    """
    assert sequences.images is not None
    ids, mask = pad_right(sequences, device)
    found = reader.positions(backbone(causal), sequences.images, ids, mask)
    if found is None:
        return None
    first = to_device(list(skipped[: len(sequences)]), device)[:, None]
    return found[:, mask.bool() & (torch.arange(ids.shape[1], device=device) >= first)]
