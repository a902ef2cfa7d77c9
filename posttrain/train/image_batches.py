"""Images of the rows that sft, dpo and reward models train on: from a data set's column to arguments of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from posttrain.images import Image
from posttrain.models.adapters import backbone, causal_of
from posttrain.models.images import line_positions
from posttrain.models.load import LoadedModel

IMAGES = "row_images"  # the column of a data set, and the key of a batch; TRL has its own use for `images`
Collate = Callable[[Any], dict[str, Any]]


def image_column(rows: Sequence[Sequence[Image]]) -> dict[str, list[list[dict[str, Any]]]]:
    """The column of a data set for the images of its rows; no column if none has any."""
    if not any(rows):
        return {}
    return {IMAGES: [[dataclasses.asdict(image) for image in row] for row in rows]}


def with_images(collate: Collate) -> Collate:
    """A collator whose batches also hold the images of their rows, in order."""

    def add(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = collate([{key: value for key, value in row.items() if key != IMAGES} for row in rows])
        shown = tuple(tuple(Image(**image) for image in row.get(IMAGES) or ()) for row in rows)
        return {**batch, IMAGES: shown} if any(shown) else batch

    return add


def image_inputs(loaded: LoadedModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as the model is given it: features of its images in place of the images, with their positions in a packed
    line. A batch without images stays as it is."""
    given = dict(inputs)
    if (rows := given.pop(IMAGES, None)) is None:
        return given
    assert loaded.images is not None, "a model that reads no images was given some"
    below = backbone(causal_of(loaded.model))
    ids = given["input_ids"]
    seen = loaded.images.inputs(below, rows, ids)
    if (starts := given.get("position_ids")) is not None:
        by_grid = line_positions(below, ids, starts, seen)
        if by_grid is not None:  # without borders, transformers keeps rows apart by the positions of texts
            given["position_ids"] = by_grid if "packed" in given else torch.cat([starts[None], by_grid])
    return {**given, **seen}
