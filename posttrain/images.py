"""Images as rows name them, and as pixels: RGB, upright, within the recipe's sizes."""

from __future__ import annotations

import base64
import binascii
import io
import math
import random
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import DataError

PLACE = "<image>"  # where an image stands, in the texts of rows and in what a tool returned
MARK = "<\ufffc>"  # where an image stands in the text of a message, on its way to the chat template
LARGEST = 100_000_000  # pixels of an image that is decoded at all
SHOWN = 160  # pixels of the longer side on a page
NARROWEST = 100  # the longer side by the shorter one, at most

Taken = Literal["mask", "blur", "blank"]  # how a part of an image is taken away


@dataclass(frozen=True)
class Image:
    """An image of a row. source: an absolute path, or a data URL. It is shown with at least `min_pixels` and at most
    `max_pixels`; None = as the model's processor has it."""

    source: str
    min_pixels: int | None = None
    max_pixels: int | None = None

    @property
    def name(self) -> str:
        """What an error calls it."""
        return "an image within the row" if self.source.startswith("data:") else self.source


def open_image(image: Image) -> Any:
    """The image as Pillow has it, in RGB. It is turned as its EXIF says, and transparent parts become white.

    Raises DataError for a file that is missing, is no image, is truncated, has several frames, or is larger than
    LARGEST or narrower than NARROWEST.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps

    stream = io.BytesIO(_read_bytes(image))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)  # LARGEST is told below
            opened = Pillow.open(stream)
            _check_size(image.name, *opened.size)
            frames = getattr(opened, "n_frames", 1)
            if frames > 1 and opened.format != "MPO":  # a photo with a preview beside it
                raise DataError(f"{image.name} has {frames} frames", allowed="one", hint="save the one that is meant")
            opened.load()
            upright = ImageOps.exif_transpose(opened)
    except DataError:
        raise
    except Pillow.UnidentifiedImageError as cause:
        raise DataError(f"{image.name} is no image that Pillow can read ({len(stream.getvalue())} bytes)") from cause
    except Pillow.DecompressionBombError as cause:
        raise DataError(f"{image.name}: {cause}", allowed=f"up to {LARGEST:,} pixels") from cause
    except (OSError, ValueError, SyntaxError, EOFError, OverflowError) as cause:
        raise DataError(f"{image.name} is broken: {cause}") from cause
    return _fit_limits(_as_rgb(upright), image)


def _read_bytes(image: Image) -> bytes:
    if image.source.startswith("data:"):
        head, comma, text = image.source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(f"a data URL begins with {head[:40]!r}", allowed="data:image/png;base64,...")
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as cause:
            raise DataError(f"the data URL of an image is no base64: {cause}") from cause
    try:
        return Path(image.source).read_bytes()
    except OSError as cause:
        raise DataError(f"{image.source}: {cause.strerror}") from cause


def _check_size(name: str, width: int, height: int) -> None:
    if width * height > LARGEST:
        raise DataError(
            f"{name} has {width} x {height} pixels", allowed=f"up to {LARGEST:,}", hint="make it smaller before"
        )
    if min(width, height) == 0 or max(width, height) > NARROWEST * min(width, height):
        raise DataError(
            f"{name} has {width} x {height} pixels",
            allowed=f"the longer side at most {NARROWEST} times the other",
        )


def _as_rgb(picture: Any) -> Any:
    """Grey, CMYK, palettes and 16 bits as RGB, transparent parts on white."""
    from PIL import Image as Pillow

    if picture.mode in ("I;16", "I;16B", "I;16L", "I"):  # `convert` would cut these off at 255
        return picture.point(lambda value: value / 256).convert("L").convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        over = picture.convert("RGBA")
        return Pillow.alpha_composite(Pillow.new("RGBA", over.size, (255, 255, 255, 255)), over).convert("RGB")
    return picture.convert("RGB")


def _fit_limits(picture: Any, image: Image) -> Any:
    """The picture within the image's limits, its shape kept as nearly as whole pixels allow."""
    from PIL import Image as Pillow

    width, height = picture.size
    pixels = width * height
    if image.max_pixels is not None and pixels > image.max_pixels:
        scale = math.sqrt(image.max_pixels / pixels)
        size = math.floor(width * scale), math.floor(height * scale)
    elif image.min_pixels is not None and pixels < image.min_pixels:
        scale = math.sqrt(image.min_pixels / pixels)
        size = math.ceil(width * scale), math.ceil(height * scale)
    else:
        return picture
    size = max(1, size[0]), max(1, size[1])
    size = (
        min(size[0], NARROWEST * size[1]),
        min(size[1], NARROWEST * size[0]),
    )  # whole pixels may be further
    return picture.resize(size, Pillow.Resampling.BICUBIC)


def take_away(image: Image, how: Taken, *, ratio: float, patch: int, seed: int) -> Image:
    """The image with a part of what it shows taken away, in the same size, so that it has as many tokens.

    mask: a share `ratio` of its squares of `patch` pixels is black, drawn by the seed. blur: by `patch` pixels. blank:
    all of it is grey.
    """
    from PIL import Image as Pillow
    from PIL import ImageDraw, ImageFilter

    picture = open_image(image)
    width, height = picture.size
    if how == "blank":
        picture = Pillow.new("RGB", picture.size, (127, 127, 127))
    elif how == "blur":
        picture = picture.filter(ImageFilter.GaussianBlur(patch))
    else:
        squares = [(x, y) for y in range(0, height, patch) for x in range(0, width, patch)]
        pencil = ImageDraw.Draw(picture)
        for x, y in random.Random(seed).sample(squares, round(ratio * len(squares))):
            pencil.rectangle((x, y, x + patch - 1, y + patch - 1), fill=(0, 0, 0))
    return Image(png_url(picture), image.min_pixels, image.max_pixels)


def add_noise(image: Image, *, noise: float, seed: int) -> Image:
    """The image with Gaussian noise as a diffusion adds it, in the same size: sqrt(1 - noise) times the pixels, from -1
    to 1, plus sqrt(noise) times the noise."""
    import numpy as np
    from PIL import Image as Pillow

    pixels = np.asarray(open_image(image), np.float32) / 127.5 - 1
    drawn = np.random.default_rng(seed).standard_normal(pixels.shape, np.float32)
    noisy = math.sqrt(1 - noise) * pixels + math.sqrt(noise) * drawn
    picture = Pillow.fromarray(((noisy + 1) * 127.5).round().clip(0, 255).astype(np.uint8))
    return Image(png_url(picture), image.min_pixels, image.max_pixels)


def is_picture(value: Any) -> bool:
    """Whether a value is a Pillow image. Pillow is not imported for the question."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def split_pictures(value: Any, max_pixels: int) -> list[Any]:
    """What a tool or an environment returned, as its parts in order: a Pillow image as an `Image`, made smaller if it
    has more than `max_pixels`, everything else as it is. A value without images is its only part.

    Raises DataError for an image that no model can be shown.
    """
    parts = list(value) if isinstance(value, list | tuple) and any(map(is_picture, value)) else [value]
    return [_keep_picture(part, max_pixels) if is_picture(part) else part for part in parts]


def _keep_picture(picture: Any, max_pixels: int) -> Image:
    image = Image("data:", max_pixels=max_pixels)
    _check_size("an image that was returned", *picture.size)
    return Image(png_url(_fit_limits(_as_rgb(picture), image)))


def join_parts(parts: Sequence[str | Image]) -> tuple[str, tuple[Image, ...]]:
    """Texts and images as one text with PLACE for each image, and the images. A PLACE in a text is broken up."""
    texts = [PLACE if isinstance(part, Image) else break_places(part) for part in parts]
    return "\n".join(filter(None, texts)), tuple(part for part in parts if isinstance(part, Image))


def break_places(text: str) -> str:
    """A text of a model or a tool, which shows no image: PLACE in it is written with a space."""
    return text.replace(PLACE, f"< {PLACE[1:]}")


def data_url(content: bytes) -> str:
    """An image file's bytes as a text that a row, a JSON file and a page can hold."""
    return f"data:image/*;base64,{base64.b64encode(content).decode()}"


def png_url(picture: Any) -> str:
    """A Pillow image as such a text."""
    stream = io.BytesIO()
    picture.save(stream, format="PNG")
    return data_url(stream.getvalue())


def thumbnail_url(image: Image) -> str:
    """The image as a small JPEG in a data URL, for a page."""
    picture = open_image(image)
    picture.thumbnail((SHOWN, SHOWN))
    stream = io.BytesIO()
    picture.save(stream, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
