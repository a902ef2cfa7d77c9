"""Images of vision models: their tokens within a text, and the tensors that the vision tower reads.

A row holds one token per image feature (as transformers' processors write it), so lengths are those that the model
computes. All tensors come from the model's own processor, one image at a time.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from posttrain.errors import DataError
from posttrain.images import Image, open_image, png_url
from posttrain.models.tower import PassImages, image_arguments

CACHE_BYTES = 1 << 30  # of tensors that are reused in each epoch and in each pass of a step
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # files of a folder with an image processor
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments that tell a model which tokens are images


@dataclass(frozen=True)
class ProcessedImage:
    """An image as the model reads it.

    text: its tokens, which replace the single placeholder that a chat template writes. size: width and height in
    pixels, as given to the processor.
    """

    text: str
    tensors: Mapping[str, Tensor]
    size: tuple[int, int]


class ImageCache:
    """LRU cache of processed images, of at most CACHE_BYTES."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Image, ProcessedImage] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()  # tool results are read by other threads than training rows

    def get(self, image: Image, read: Callable[[Image], ProcessedImage]) -> ProcessedImage:
        """Return the cached image, or read it."""
        with self._lock:
            if image in self._kept:
                self._kept.move_to_end(image)
                return self._kept[image]
        found = read(image)
        with self._lock:
            if image not in self._kept:
                self._kept[image] = found
                self._bytes += _count_bytes(found)
            while self._bytes > CACHE_BYTES and len(self._kept) > 1:
                self._bytes -= _count_bytes(self._kept.popitem(last=False)[1])
        return found


@functools.lru_cache(maxsize=2)
def shared_cache(settings: str) -> ImageCache:
    """Return the cache shared by all readers with these settings in this process: those of a run's data and of its
    model.
    """
    del settings
    return ImageCache()


class ImageReader:
    """A model's processor, for images.

    placeholder: what the chat template writes for an image. token_ids: tokens at whose positions the model inserts
    features; no text may contain one, and none is sampled. shares: use the cache of all readers with the same settings.
    """

    def __init__(self, processor: Any, config: Any, *, shares: bool = False) -> None:
        self.processor = processor
        self.placeholder: str = processor.image_token
        own = getattr(config, "image_token_id", None)
        self.feature_id = int(processor.image_token_id if own is None else own)
        named = [*(getattr(processor, "image_token_ids", None) or ()), processor.image_token_id, self.feature_id]
        others = (getattr(config, name, None) for name in ("video_token_id", "audio_token_id"))
        self.token_ids = frozenset(int(i) for i in (*named, *others) if i is not None)
        settings = f"{type(processor).__name__} {self.feature_id} {processor.to_json_string()}"
        self._seen = shared_cache(settings) if shares else ImageCache()

    def read(self, image: Image) -> ProcessedImage:
        """Return the image as the model reads it. Raises DataError if it cannot be read."""
        return self._seen.get(image, self._process)

    def shorten(self, ids: tuple[int, ...], images: Sequence[Image]) -> tuple[int, ...] | None:
        """Return the token ids with one token per image instead of one per feature; None if they contain no image
        tokens.

        The ids must show exactly these images, in this order. Raises DataError if they show any others.
        """
        if not self.token_ids.intersection(ids):
            return None
        short, at = list[int](), 0
        own = self.processor.tokenizer
        (place,) = own(self.placeholder, add_special_tokens=False)["input_ids"]
        for image in images:
            shown = tuple(own(self.read(image).text, add_special_tokens=False)["input_ids"])
            start = next((n for n in range(at, len(ids)) if ids[n : n + len(shown)] == shown), None)
            if start is None:
                break
            short += [*ids[at:start], place]
            at = start + len(shown)
        else:
            if not self.token_ids.intersection(ids[at:]):
                return (*short, *ids[at:])
        raise DataError(
            f"a prompt shows other images than the {len(images)} of the row, or in another order",
            hint="write `<image>` in its text once per image of the row, or not at all",
        )

    def _process(self, image: Image) -> ProcessedImage:
        """Run the processor on one image."""
        picture = open_image(image)
        try:
            out = self.processor(
                text=[self.placeholder], images=[[picture]], return_tensors="pt", return_text_replacement_offsets=True
            )
        except ValueError as cause:
            raise DataError(f"{type(self.processor).__name__} cannot process {image.name}: {cause}") from cause
        text = out["text_replacement_offsets"][0][0]["replacement"]
        own = ("input_ids", "attention_mask", "text_replacement_offsets", *TOKEN_TYPES)
        tensors = {name: value for name, value in out.items() if name not in own and isinstance(value, Tensor)}
        return ProcessedImage(text, tensors, picture.size)

    def reads_like(self, other: ImageReader) -> bool:
        """Return whether another model's reader gives the same tokens and tensors for an image."""
        own, theirs = (reader.read(probe_image()) for reader in (self, other))
        return (
            self.feature_id == other.feature_id
            and own.text == theirs.text
            and own.tensors.keys() == theirs.tensors.keys()
            and all(torch.equal(own.tensors[name], theirs.tensors[name]) for name in own.tensors)
        )

    def picture(self, image: Image) -> Any:
        """Return the image as a Pillow image, for an engine with its own processor."""
        return open_image(image)

    def plain_inputs(self, model: Any, images: Sequence[Image], ids: Tensor) -> dict[str, Tensor]:
        """Return the forward arguments besides ids [1,T] as transformers' own code gives them: the images' tensors."""
        takes = inspect.signature(model.forward).parameters
        given = join_tensors([self.read(image).tensors for image in images])
        given |= {name: (ids == self.feature_id).long() for name in TOKEN_TYPES if name in takes}
        return {name: value.to(ids.device) for name, value in given.items()}

    def inputs(self, model: Any, rows: Sequence[Sequence[Image]], ids: Tensor) -> dict[str, Any]:
        """Return the forward arguments besides ids [N,L] for the images in each row, on the device of ids.

        An image in several rows goes through the vision tower once, with the summed gradient of all rows. model: the
        model below the head, without adapters around it.
        """
        takes = inspect.signature(model.forward).parameters
        given: dict[str, Any] = {
            name: (ids == self.feature_id).long() for name in TOKEN_TYPES if name in takes and any(rows)
        }
        images = [image for row in rows for image in row]
        if not images:
            return given
        distinct = {image: n for n, image in enumerate(dict.fromkeys(images))}
        seen = [self.read(image) for image in distinct]
        tensors = {
            name: value.to(ids.device) for name, value in join_tensors([encoded.tensors for encoded in seen]).items()
        }
        token = self.processor.tokenizer.convert_ids_to_tokens(self.feature_id)
        counts = [encoded.text.count(token) for encoded in seen]
        order = [distinct[image] for image in images]
        if "image_grid_thw" in tensors:
            given["image_grid_thw"] = tensors["image_grid_thw"][torch.tensor(order, device=ids.device)]
        return {**given, **image_arguments(model, PassImages(tensors, counts, order))}

    def positions(self, model: Any, rows: Sequence[Sequence[Image]], ids: Tensor, mask: Tensor) -> Tensor | None:
        """Return positions [3,N,L] of rows ids [N,L] with these images, see `rope_positions`. mask: attention mask."""
        images = [image for row in rows for image in row]
        if not images or not hasattr(model, "get_rope_index"):
            return None
        tensors = [self.read(image).tensors for image in images]
        if "image_grid_thw" not in tensors[0]:
            return None
        grids = torch.cat([inputs["image_grid_thw"] for inputs in tensors]).to(ids.device)
        kinds = (ids == self.feature_id).long()
        return rope_positions(model, ids, mask, {"image_grid_thw": grids, "mm_token_type_ids": kinds})

    def bind(
        self, model: Any, rows: Sequence[Sequence[Image]]
    ) -> Callable[[Tensor, Tensor], tuple[dict[str, Any], Tensor | None]]:
        """Return a function from ids and mask [N,L] to the image arguments of a pass over these rows and their
        positions [3,N,L].

        Positions are None for models without multi-dimensional positions.
        """

        def see(ids: Tensor, mask: Tensor) -> tuple[dict[str, Any], Tensor | None]:
            given = self.inputs(model, rows, ids)
            return given, rope_positions(model, ids, mask, given)

        return see


def probe_image() -> Image:
    """Return a test image: a frame in three colors."""
    from PIL import Image as Pillow

    picture = Pillow.new("RGB", (56, 40), (200, 60, 20))
    picture.paste((10, 90, 220), (8, 8, 40, 24))
    picture.paste((250, 250, 240), (20, 24, 56, 40))
    return Image(png_url(picture))


def _count_bytes(seen: ProcessedImage) -> int:
    return sum(tensor.nbytes for tensor in seen.tensors.values()) + len(seen.text)


def join_tensors(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the tensors of several images by name along the first dimension.

    If other dimensions differ (tiles of an image), smaller tensors are padded with zeros.
    """
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        own = [part[name] for part in parts if name in part]
        shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in own), strict=True)]
        joined[name] = torch.cat([_pad_to(tensor, shape) for tensor in own])
    return joined


def _pad_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad the dimensions after the first with zeros to `shape`."""
    if list(tensor.shape[1:]) == list(shape):
        return tensor
    filled = tensor.new_zeros((tensor.shape[0], *shape))
    filled[tuple(slice(size) for size in tensor.shape)] = tensor
    return filled


def rope_positions(model: Any, ids: Tensor, mask: Tensor | None, given: Mapping[str, Any]) -> Tensor | None:
    """Return positions [3,N,L] of rows ids [N,L] for models that number image tokens by time, height and width (Qwen's
    mrope).

    None for other models and for rows without images. given: the result of `ImageReader.inputs` for the rows.
    """
    if "image_grid_thw" not in given or not hasattr(model, "get_rope_index"):
        return None
    takes = inspect.signature(model.get_rope_index).parameters
    named = {name: given[name] for name in ("mm_token_type_ids", "image_grid_thw") if name in takes}
    positions: Tensor = model.get_rope_index(input_ids=ids, attention_mask=mask, **named)[0]
    return positions


def line_positions(model: Any, ids: Tensor, starts: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    """Return `rope_positions` [3,1,T] of rows packed one after another into one line ids [1,T].

    starts [1,T]: text positions, which begin at 0 in each row. A position that decreases within a row, after its
    images, begins another continuation of the row's prompt; the result decreases by the same amount.
    """
    if "image_grid_thw" not in given or not hasattr(model, "get_rope_index"):
        return None
    borders = [*(starts[0] == 0).nonzero()[:, 0].tolist(), starts.shape[1]]
    lengths = [end - start for start, end in itertools.pairwise(borders)]
    rows, kinds = (pad_sequence(x[0].split(lengths), batch_first=True) for x in (ids, given["mm_token_type_ids"]))
    mask = torch.arange(max(lengths), device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]
    found = rope_positions(model, rows, mask.long(), {**given, "mm_token_type_ids": kinds})
    if found is None:
        return None
    counted = torch.arange(mask.shape[1], device=ids.device).expand_as(mask)[mask]
    return (found[:, mask] + (starts[0] - counted))[:, None]
