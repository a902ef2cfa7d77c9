"""Images of the rows that sft and dpo train on: from a data set's column to arguments of the model."""

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

IMAGES = "row_images"  # the column of a data set, and the key of a batch; TRL has its own use for `images`
Collate = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class RowImages:
    """The images that stand in each row of a batch, and what makes tensors of them."""

    reader: ImageReader
    rows: tuple[tuple[Image, ...], ...]

    def inputs(self, model: Any, ids: Tensor) -> dict[str, Any]:
        """Arguments of the model's forward pass beside ids, in which the rows stand in their order."""
        return self.reader.inputs(backbone(causal_of(model)), self.rows, ids)

    def select(self, rows: Sequence[int]) -> RowImages:
        return RowImages(self.reader, tuple(self.rows[row] for row in rows))


def image_column(rows: Sequence[Sequence[Image]]) -> dict[str, list[list[dict[str, Any]]]]:
    """The column of a data set for the images of its rows; no column if none has any."""
    if not any(rows):
        return {}
    return {IMAGES: [[dataclasses.asdict(image) for image in row] for row in rows]}


def with_images(collate: Collate, reader: ImageReader, copies: int = 1) -> Collate:
    """A collator whose batches also hold the images of their rows. copies: how often each row's images come, all rows
    once and then again (the sides of a pair)."""

    def add(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collate([{key: value for key, value in row.items() if key != IMAGES} for row in rows])
        shown = tuple(tuple(Image(**image) for image in row.get(IMAGES) or ()) for row in rows)
        return {**batch, IMAGES: RowImages(reader, shown * copies)} if any(shown) else batch

    return add


def image_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as the model is given it: features of its images in place of the images, with their positions in a packed
    line. A batch without images stays as it is."""
    given = dict(inputs)
    shown: RowImages | None = given.pop(IMAGES, None)
    if shown is None:
        return given
    ids = given["input_ids"]
    seen = shown.inputs(model, ids)
    if (starts := given.get("position_ids")) is not None:
        by_grid = line_positions(backbone(causal_of(model)), ids, starts, seen)
        if by_grid is not None:  # without borders, transformers keeps rows apart by the positions of texts
            given["position_ids"] = by_grid if "packed" in given else torch.cat([starts[None], by_grid])
    return {**given, **seen}
