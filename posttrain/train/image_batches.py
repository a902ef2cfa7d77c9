"""Images in sft and dpo batches: from a data set column to arguments of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.images import Image
from posttrain.models.adapters import backbone, causal_of
from posttrain.models.images import ImageReader, line_positions

IMAGES = "row_images"  # data set column and batch key; TRL uses `images` itself
Collate = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class RowImages:
    """Images of each row of a batch, and the reader that converts them to tensors."""

    reader: ImageReader
    rows: tuple[tuple[Image, ...], ...]

    def inputs(self, model: Any, ids: Tensor) -> dict[str, Any]:
        """Return the image arguments of the model's forward pass; ids: the rows' tokens, in the order of the images."""
        return self.reader.inputs(backbone(causal_of(model)), self.rows, ids)

    def select(self, rows: Sequence[int]) -> RowImages:
        return RowImages(self.reader, tuple(self.rows[row] for row in rows))


def image_column(rows: Sequence[Sequence[Image]]) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the data set column with the images of each row; empty if no row has images."""
    if not any(rows):
        return {}
    return {IMAGES: [[dataclasses.asdict(image) for image in row] for row in rows]}


def with_images(collate: Collate, reader: ImageReader, copies: int = 1) -> Collate:
    """Wrap a collator so that its batches include the images of their rows.

    copies: how often the images are repeated, all rows first and then again (the sides of a pair).
    """

    def add(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collate([{key: value for key, value in row.items() if key != IMAGES} for row in rows])
        images = tuple(tuple(Image(**image) for image in row.get(IMAGES) or ()) for row in rows)
        return {**batch, IMAGES: RowImages(reader, images * copies)} if any(images) else batch

    return add


def image_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a batch's images by the model's image inputs, with their positions in a packed line.

    A batch without images is returned unchanged.
    """
    batch = dict(inputs)
    images: RowImages | None = batch.pop(IMAGES, None)
    if images is None:
        return batch
    ids = batch["input_ids"]
    image_kwargs = images.inputs(model, ids)
    if (starts := batch.get("position_ids")) is not None:
        by_grid = line_positions(backbone(causal_of(model)), ids, starts, image_kwargs)
        if by_grid is not None:  # without `packed`, transformers separates rows by text positions
            batch["position_ids"] = by_grid if "packed" in batch else torch.cat([starts[None], by_grid])
    return {**batch, **image_kwargs}
