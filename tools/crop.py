"""`tools: [{use: crop}]`: a part of an image of the conversation, magnified, so that the model sees its details.

It is cut from the image as the file has it, also where `data.image.max_pixels` shows the model a smaller one.
"""

import math
from pathlib import Path
from typing import Any

from PIL import Image as Pillow

from posttrain.images import Image, open_image
from posttrain.verify.regions import Coordinates, Region, to_unit


def crop(
    bbox_2d: list[float],
    image: int = 1,
    *,
    images: list[Image],
    coordinates: Coordinates = "0-1000",
    min_pixels: int = 50176,
) -> Any:
    """Look at a part of an image more closely.

    Args:
        bbox_2d: the part, as [left, top, right, bottom]
        image: its number in the conversation, from 1
    """
    if not 1 <= image <= len(images):
        raise ValueError(f"no image {image}; the conversation has {len(images)}")
    whole = open_image(Image(images[image - 1].source))
    size = open_image(images[image - 1]).size if coordinates == "pixels" else None
    left, top, right, bottom = _edges(bbox_2d, coordinates, size, whole.size)
    part = whole.crop((left, top, right, bottom))
    scale = math.sqrt(min_pixels / (part.width * part.height))
    if scale <= 1:
        return part
    return part.resize((math.ceil(part.width * scale), math.ceil(part.height * scale)), Pillow.Resampling.BICUBIC)


def _edges(
    box: list[float], coordinates: Coordinates, size: tuple[int, int] | None, whole: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Whole pixels around a box, as far as it lies in the picture. size: in pixels, as the model was shown it."""
    if len(box) != 4 or not all(map(math.isfinite, box)):
        raise ValueError(f"a box is [left, top, right, bottom], got {len(box)} numbers")
    if not (box[0] < box[2] and box[1] < box[3]):
        raise ValueError("a box has its left before its right edge and its top before its bottom")
    (unit,) = to_unit([Region(tuple(box))], coordinates, size)
    left, top, right, bottom = (share * whole[n % 2] for n, share in enumerate(unit.numbers))
    if right <= 0 or bottom <= 0 or left >= whole[0] or top >= whole[1]:
        raise ValueError(f"the box lies outside the image (coordinates are {coordinates})")
    return max(math.floor(left), 0), max(math.floor(top), 0), min(math.ceil(right), whole[0]), min(
        math.ceil(bottom), whole[1]
    )  # fmt: skip


def sample(folder: Path) -> dict:
    """A picture for the examples: 40 x 20 pixels."""
    Pillow.new("RGB", (40, 20), "red").save(folder / "red.png")
    return {"images": [Image(str(folder / "red.png"))]}


EXAMPLES = [
    ({"bbox_2d": [0, 0, 500, 500]}, "<image>"),
    ({"bbox_2d": [900, 900, 1200, 1200]}, "<image>"),
    ({"bbox_2d": [10, 5, 20, 10]}, "<image>", {"coordinates": "pixels"}),
    ({"bbox_2d": [0.1, 0.1, 0.2, 0.2]}, "<image>", {"coordinates": "0-1", "min_pixels": 100}),
    ({"bbox_2d": [0, 0, 500]}, ValueError),
    ({"bbox_2d": [500, 0, 100, 500]}, ValueError),
    ({"bbox_2d": [1001, 0, 1100, 500]}, ValueError),
    ({"bbox_2d": [0, 0, 500, 500], "image": 2}, ValueError),
]
