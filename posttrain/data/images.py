"""Images of rows: collected into a column `images` with placeholders in the texts, then expanded to image tokens.

A row with images has `images`, a list of absolute paths or data URLs in the order of their appearance in the
conversation, and `<image>` at each position where an image appears. Supported inputs: columns `images` and `image`
(paths relative to the row's file, data URLs, Hugging Face's {bytes, path}, Pillow images), and parts of OpenAI
messages. If no text has a placeholder, all images are placed before the first user text.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from posttrain import source_locations
from posttrain.data.turns import Piece, Text
from posttrain.errors import DataError, Problem, count_noun
from posttrain.images import MARK, PLACEHOLDER, Image, data_url, png_url
from posttrain.recipe.sections import Data, ImageLimits

FETCH_SECONDS, FETCH_BYTES = 30, 50 << 20
_COLUMNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
_IMAGE_PART_TYPES = ("image", "image_url", "input_image")
_UNSUPPORTED_COLUMNS = ("audio", "audios", "video", "videos")
_FORMS = "a path, a data URL, {bytes, path}, or a Pillow image"
Row = dict[str, Any]


class Reader(Protocol):
    """Image processor of a model (`models.images.ImageReader`)."""

    placeholder: str

    def read(self, image: Image) -> Any: ...


def collect_images(row: Row, where: str, folder: Path, limits: ImageLimits) -> Row:
    """Return the record with its images in the column `images` and PLACE for image parts of messages.

    folder: base of relative paths. A record without images is returned unchanged. Raises DataError.
    """
    _refuse_audio_video(row, where)
    listed = [name for name in ("images", "image") if row.get(name) is not None]
    parted = [name for name in _COLUMNS if _has_image_parts(row.get(name))]
    if not listed and not parted:
        return row
    if len(listed) > 1:
        raise DataError("`image` and `images` both have values", where=where, hint="put them into one list, `images`")
    given = row[listed[0]] if listed else []
    values = [*given] if isinstance(given, list | tuple) else [given]
    own: list[Any] = []  # values of image parts that name their image
    columns = {key: value for key, value in row.items() if key not in ("image", "images")}
    for name in parted:
        columns[name] = [_replace_image_parts(message, own) for message in row[name]]
    if own and values:
        raise DataError(
            f"images are given both in the messages and in `{listed[0]}`", where=where, hint="name each of them once"
        )
    sources = [_resolve_source(value, f"image {n + 1}", where, folder, limits) for n, value in enumerate(own or values)]
    return {**columns, "images": sources} if sources else columns


def _refuse_audio_video(row: Row, where: str) -> None:
    """Raise DataError for a record with an audio or video column."""
    if name := next((name for name in _UNSUPPORTED_COLUMNS if row.get(name)), None):
        raise DataError(
            f"the row has a column `{name}`: sound and video are not read",
            where=where,
            hint=f"to train on the texts alone, rename the column: `data.columns: {{recording: {name}}}`",
        )


def _has_image_parts(value: Any) -> bool:
    """Return whether any message in the column has an image part."""
    return isinstance(value, list | tuple) and any(
        isinstance(message, Mapping) and any(map(_is_image, _content_parts(message))) for message in value
    )


def _content_parts(message: Mapping[str, Any]) -> Sequence[Any]:
    """Return the parts of a message's content, or () if the content is no list."""
    content = message.get("content", message.get("value"))
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    """Return whether a content part is an image."""
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_PART_TYPES


def _replace_image_parts(message: Any, into: list[Any]) -> Any:
    """Return the message with PLACE for each image part; append the values of named images to `into`."""
    parts = _content_parts(message) if isinstance(message, Mapping) else ()
    if not any(map(_is_image, parts)):
        return message
    shown = []
    for part in parts:
        if _is_image(part):
            named = [part[key] for key in ("image_url", "image", "url", "path", "base64") if part.get(key) is not None]
            value = named[0] if named else None
            if isinstance(value, Mapping) and "url" in value:
                value = value["url"]
            if value is not None:
                into.append(f"data:image/*;base64,{value}" if "base64" in part and value == part["base64"] else value)
        shown.append({"type": "text", "text": PLACEHOLDER} if _is_image(part) else part)
    key = "content" if "content" in message else "value"
    return {**message, key: shown}


def _resolve_source(value: Any, name: str, where: str, folder: Path, limits: ImageLimits) -> str:
    """Return an absolute path or a data URL. Raises DataError for a value that is neither a file nor image bytes."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, bytes | bytearray):
        return data_url(bytes(value))
    if hasattr(value, "save") and hasattr(value, "size"):
        return png_url(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{name} is {type(value).__name__} ({str(value)[:40]})", where=where, allowed=_FORMS)
    if value.startswith("data:"):
        return value
    if value.startswith(("http://", "https://")):
        if not limits.fetch:
            raise DataError(
                f"{name} is on the network: {value[:80]}",
                where=where,
                hint="download it, or write `data.image: {fetch: true}`",
            )
        return _fetch(value, name, where)
    path = (folder / Path(value.removeprefix("file://")).expanduser()).resolve()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise DataError(f"{name}: {path} {what}", where=where, hint=f"paths are relative to {folder}")
    return str(path)


def _fetch(url: str, name: str, where: str) -> str:
    """Download an image (at most FETCH_BYTES) and return it as a data URL."""
    try:
        with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer:
            content = answer.read(FETCH_BYTES + 1)
    except OSError as cause:
        raise DataError(f"{name}: {url[:80]} cannot be fetched: {cause}", where=where) from cause
    if len(content) > FETCH_BYTES:
        raise DataError(f"{name}: {url[:80]} has more than {FETCH_BYTES >> 20} MB", where=where)
    return data_url(content)


def insert_placeholders(row: Row, where: str) -> Row:
    """Return a normalized row whose texts have one PLACE per image. Raises DataError."""
    if not row.get("images"):
        return row
    wrong = [
        name
        for name in ("completion", "chosen", "rejected", "answer")
        if any(PLACEHOLDER in t for t in _texts(row.get(name)))
    ]
    wrong += [
        "an assistant message"
        for m in row.get("messages") or ()
        if m["role"] == "assistant" and PLACEHOLDER in str(m.get("content"))
    ]
    if wrong:
        raise DataError(
            f"{wrong[0]} has an image", where=where, allowed="images in what the model is given, not in what it writes"
        )
    asked = "messages" if row.get("messages") is not None else "prompt"
    if row.get(asked) is None:
        raise DataError("a row of plain `text` has images", where=where, hint="write it as `messages`")
    count, placeholders = len(row["images"]), sum(text.count(PLACEHOLDER) for text in _texts(row[asked]))
    if placeholders == 0:
        return {**row, asked: _prepend_placeholders(row[asked], PLACEHOLDER * count, where)}
    if placeholders != count:
        found = count_noun(placeholders, f"place `{PLACEHOLDER}`", f"places `{PLACEHOLDER}`")
        raise DataError(
            f"{count_noun(count, 'image')} and {found}",
            where=where,
            hint=f"write {PLACEHOLDER} once for each image, or nowhere: "
            "they are then placed before the first text of the user",
        )
    return row


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a column: the text itself, or the contents of its messages."""
    if isinstance(value, str):
        yield value
    for message in value if isinstance(value, list) else ():
        yield str(message.get("content") or "")


def _prepend_placeholders(value: Any, placeholders: str, where: str) -> Any:
    """Return the prompt or messages with `placeholders` before the first user text."""
    if isinstance(value, str):
        return placeholders + value
    number = next((n for n, message in enumerate(value) if message["role"] == "user"), None)
    if number is None:
        raise DataError("the row has images, and no user message to show them in", where=where)
    changed = {**value[number], "content": placeholders + value[number]["content"]}
    return [*value[:number], changed, *value[number + 1 :]]


def use_template_marks(messages: list[Row], row: Mapping[str, Any]) -> list[Row]:
    """Return the messages as chat templates expect them: MARK in place of PLACE."""
    if not row.get("images"):
        return messages
    return [
        {**m, "content": m["content"].replace(PLACEHOLDER, MARK)} if isinstance(m.get("content"), str) else m
        for m in messages
    ]


def check_model(rows: Sequence[Mapping[str, Any]], reader: Reader | None) -> None:
    """Raise DataError for rows with images if there is no image reader."""
    if reader is None and (first := next((row for row in rows if row.get("images")), None)):
        raise DataError(
            "the row has images, and the model, or this command, reads none",
            where=source_locations.describe_row(first["uid"]),
            hint="use a vision model, or rename the column: `data.columns: {pictures: images}`",
        )


def expand_placeholders(
    rows: Sequence[Mapping[str, Any]], texts: Sequence[Text], section: Data, reader: Reader | None
) -> list[Text] | None:
    """Return the texts with their rows' `images`, each image placeholder replaced by the model's image tokens.

    texts: one per row. Returns None if no row has images. Raises DataError that names the rows whose images cannot be
    read.
    """
    if reader is None or not any(row.get("images") for row in rows):
        if reader is not None:
            for text in texts:  # raises for a text with a placeholder but no image
                _expand_text(text, (), {}, reader)
        return None
    if not section.chat:
        raise DataError("`data.chat: false` writes text only, and the rows have images", hint="remove `chat: false`")
    limits = section.image
    expanded: list[Text] = []
    wrong: list[Problem] = []
    for row, text in zip(rows, texts, strict=True):
        images = [Image(source, limits.min_pixels, limits.max_pixels) for source in row.get("images") or ()]
        try:
            expanded.append(_expand_text(text, images, row, reader))
        except DataError as error:
            wrong += error.at(source_locations.describe_row(row["uid"])).problems
    if wrong:
        raise DataError.of(wrong[:5])
    return expanded


def _expand_text(text: Text, images: Sequence[Image], row: Mapping[str, Any], reader: Reader) -> Text:
    """Replace each placeholder by the tokens of the next image. Raises DataError if their numbers differ."""
    whole = "".join(piece.text for piece in text.pieces)
    count = whole.count(reader.placeholder)
    if count and not images:
        raise DataError(
            f"the text has `{reader.placeholder}`, where the model puts an image, and the row has none",
            where=source_locations.describe_row(text.uid),
            hint="give the row a column `images`, or remove it from the text",
        )
    if count != len(images) and count not in _image_counts(row, len(images)):
        raise DataError(
            f"the chat template writes {count_noun(count, 'place')} for {count_noun(len(images), 'image')}",
            allowed=f"`{reader.placeholder}` once for each image",
            hint="check for a placeholder in the text itself, or a `model.chat_template` that writes no images",
        )
    used, pieces = iter(images[:count]), []
    for piece in text.pieces:
        first, *others = piece.text.split(reader.placeholder)
        pieces.append(Piece(first, piece.trained))
        for following in others:
            pieces += [Piece(reader.read(next(used)).text, False), Piece(following, piece.trained)]
    return replace(text, pieces=tuple(_merge_adjacent(pieces)), images=tuple(images[:count]))


def _image_counts(row: Mapping[str, Any], images: int) -> set[int]:
    """Return the possible image counts of a rendered conversation: the number of images up to each message.

    The text after the last trained turn is left out, so a rendering may end after any message. Empty if the
    placeholders do not match the number of images.
    """
    shown, counts = 0, set[int]()
    for text in _texts(row.get("messages")):
        shown += text.count(PLACEHOLDER)
        counts.add(shown)
    return counts if shown == images else set()


def _merge_adjacent(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the pieces with adjacent ones of the same `trained` value merged and empty ones removed."""
    before: Piece | None = None
    for piece in pieces:
        if before is not None and before.trained == piece.trained:
            before = Piece(before.text + piece.text, piece.trained)
            continue
        if before is not None and before.text:
            yield before
        before = piece
    if before is not None:
        yield before
