"""Images of rows: references, decoding and pixels (RGB, upright, within the recipe's size limits)."""

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

PLACEHOLDER = "<image>"  # position of an image in the texts of rows and in tool results
MARK = "<\ufffc>"  # position of an image in the text of a message passed to the chat template
MAX_IMAGE_PIXELS = 100_000_000  # maximum number of pixels of a decoded image
THUMBNAIL_PIXELS = 160  # pixels of a thumbnail's longer side
MAX_ASPECT_RATIO = 100  # maximum ratio of the longer side to the shorter one

Degradation = Literal["mask", "blur", "blank"]  # how an image is degraded


@dataclass(frozen=True)
class Image:
    """An image of a row.

    source: an absolute path or a data URL. The image is resized to at least `min_pixels` and at most `max_pixels`; None
    leaves the limit to the model's processor.
    """

    source: str
    min_pixels: int | None = None
    max_pixels: int | None = None

    @property
    def name(self) -> str:
        """Name of the image in error messages."""
        return "an image within the row" if self.source.startswith("data:") else self.source


def open_image(image: Image) -> Any:
    """Return the image as an RGB Pillow image, rotated by its EXIF orientation, with transparency on white.

    Raises DataError for a file that is missing, not an image, truncated, has several frames, or is larger than LARGEST
    or narrower than NARROWEST.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps

    stream = io.BytesIO(_read_bytes(image))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)  # checked against LARGEST below
            opened = Pillow.open(stream)
            _check_size(image.name, *opened.size)
            frames = getattr(opened, "n_frames", 1)
            if frames > 1 and opened.format != "MPO":  # a photo with an embedded preview
                raise DataError(f"{image.name} has {frames} frames", allowed="one", hint="save the one that is meant")
            opened.load()
            upright = ImageOps.exif_transpose(opened)
    except DataError:
        raise
    except Pillow.UnidentifiedImageError as cause:
        raise DataError(
            f"{image.name} is not an image that Pillow can read ({len(stream.getvalue())} bytes)"
        ) from cause
    except Pillow.DecompressionBombError as cause:
        raise DataError(f"{image.name}: {cause}", allowed=f"up to {MAX_IMAGE_PIXELS:,} pixels") from cause
    except (OSError, ValueError, SyntaxError, EOFError, OverflowError) as cause:
        raise DataError(f"{image.name} is broken: {cause}") from cause
    return _fit_limits(_as_rgb(upright), image)


def _read_bytes(image: Image) -> bytes:
    """Return the encoded bytes of an image. Raises DataError for an invalid data URL or an unreadable file."""
    if image.source.startswith("data:"):
        head, comma, text = image.source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(f"a data URL begins with {head[:40]!r}", allowed="data:image/png;base64,...")
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as cause:
            raise DataError(f"the data URL of an image is not base64: {cause}") from cause
    try:
        return Path(image.source).read_bytes()
    except OSError as cause:
        raise DataError(f"{image.source}: {cause.strerror}") from cause


def _check_size(name: str, width: int, height: int) -> None:
    """Raise DataError for an image that is too large, empty or too narrow."""
    if width * height > MAX_IMAGE_PIXELS:
        raise DataError(
            f"{name} has {width} x {height} pixels",
            allowed=f"up to {MAX_IMAGE_PIXELS:,}",
            hint="make it smaller before",
        )
    if min(width, height) == 0 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise DataError(
            f"{name} has {width} x {height} pixels",
            allowed=f"the longer side at most {MAX_ASPECT_RATIO} times the other",
        )


def _as_rgb(picture: Any) -> Any:
    """Convert gray, CMYK, palette and 16-bit images to RGB, with transparency on white."""
    from PIL import Image as Pillow

    if picture.mode in ("I;16", "I;16B", "I;16L", "I"):  # `convert` would clip these at 255
        return picture.point(lambda value: value / 256).convert("L").convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        over = picture.convert("RGBA")
        return Pillow.alpha_composite(Pillow.new("RGBA", over.size, (255, 255, 255, 255)), over).convert("RGB")
    return picture.convert("RGB")


def _fit_limits(picture: Any, image: Image) -> Any:
    """Resize a picture to the image's limits, preserving the aspect ratio up to rounding to whole pixels."""
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
    # rounding to whole pixels may exceed the ratio
    size = min(size[0], MAX_ASPECT_RATIO * size[1]), min(size[1], MAX_ASPECT_RATIO * size[0])
    return picture.resize(size, Pillow.Resampling.BICUBIC)


def degrade(image: Image, how: Degradation, *, ratio: float, patch: int, seed: int) -> Image:
    """Return a degraded image of the same size, so that it has the same number of tokens.

    mask: a share `ratio` of its squares of `patch` pixels, sampled with the seed, is black. blur: Gaussian blur with
    radius `patch` pixels. blank: all pixels are gray.
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
    """Return the image with diffusion noise: sqrt(1 - noise) * pixels in [-1, 1] + sqrt(noise) * Gaussian noise."""
    import numpy as np
    from PIL import Image as Pillow

    pixels = np.asarray(open_image(image), np.float32) / 127.5 - 1
    drawn = np.random.default_rng(seed).standard_normal(pixels.shape, np.float32)
    noisy = math.sqrt(1 - noise) * pixels + math.sqrt(noise) * drawn
    picture = Pillow.fromarray(((noisy + 1) * 127.5).round().clip(0, 255).astype(np.uint8))
    return Image(png_url(picture), image.min_pixels, image.max_pixels)


def is_picture(value: Any) -> bool:
    """Return whether a value is a Pillow image, without importing Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def split_pictures(value: Any, max_pixels: int) -> list[Any]:
    """Split a result of a tool or environment into its parts, in order.

    A Pillow image becomes an `Image` of at most `max_pixels` pixels, other parts are unchanged. A value without images
    is its only part. Raises DataError for an image that cannot be shown to a model.
    """
    parts = list(value) if isinstance(value, list | tuple) and any(map(is_picture, value)) else [value]
    return [_encode_picture(part, max_pixels) if is_picture(part) else part for part in parts]


def _encode_picture(picture: Any, max_pixels: int) -> Image:
    image = Image("data:", max_pixels=max_pixels)
    _check_size("an image that was returned", *picture.size)
    return Image(png_url(_fit_limits(_as_rgb(picture), image)))


def join_parts(parts: Sequence[str | Image]) -> tuple[str, tuple[Image, ...]]:
    """Join texts and images into one text with PLACE for each image; return it with the images.

    A PLACE that occurs in a text is escaped.
    """
    texts = [PLACEHOLDER if isinstance(part, Image) else escape_placeholders(part) for part in parts]
    return "\n".join(filter(None, texts)), tuple(part for part in parts if isinstance(part, Image))


def escape_placeholders(text: str) -> str:
    """Escape PLACE in a text of a model or tool, which contains no image, by inserting a space."""
    return text.replace(PLACEHOLDER, f"< {PLACEHOLDER[1:]}")


def data_url(content: bytes) -> str:
    """Return the bytes of an image file as a data URL for rows, JSON files and pages."""
    return f"data:image/*;base64,{base64.b64encode(content).decode()}"


def png_url(picture: Any) -> str:
    """Return a Pillow image as a PNG data URL."""
    stream = io.BytesIO()
    picture.save(stream, format="PNG")
    return data_url(stream.getvalue())


def thumbnail_url(image: Image) -> str:
    """Return the image as a small JPEG data URL for a page."""
    picture = open_image(image)
    picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    stream = io.BytesIO()
    picture.save(stream, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
