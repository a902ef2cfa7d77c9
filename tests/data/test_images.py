"""Images of rows: input formats, conversion to tokens, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from posttrain.data.prepare import prepare_examples, prepare_prompts
from posttrain.data.rows import load_rows
from posttrain.errors import DataError
from posttrain.images import Image, data_url, open_image, png_url
from posttrain.models import load as models
from posttrain.recipe.sections import Data, Model

SECTION = Model(path="tiny-vision")
Write = Callable[..., Data]


@pytest.fixture(scope="module")
def seeing() -> tuple[Any, Any]:
    """(tokenizer, reader) of `tiny-vision`."""
    tokenizer = models.load_tokenizer(SECTION, Path())
    return tokenizer, models.load_image_reader(SECTION, Path(), tokenizer)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Factory of `data` sections on rows next to red.png (16 x 8) and blue.png; keyword arguments are its keys."""
    Pillow.new("RGB", (16, 8), "red").save(tmp_path / "red.png")
    Pillow.new("RGB", (8, 16), "blue").save(tmp_path / "blue.png")

    def make(*rows: dict[str, Any], **keys: Any) -> Data:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Data.model_validate({"source": str(tmp_path / "rows.jsonl"), **keys})

    return make


def encode_image(color: str = "green", kind: str = "PNG", mode: str = "RGB", **how: Any) -> bytes:
    stream = io.BytesIO()
    Pillow.new(mode, (12, 6), color).save(stream, format=kind, **how)
    return stream.getvalue()


def url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def part(source: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}}


TEXT = {"type": "text", "text": "What is it?"}
FORMS: dict[str, dict[str, Any]] = {
    "a path": {"prompt": "What is it?", "image": "red.png"},
    "a list with a place": {"prompt": "<image>What is it?", "images": ["red.png"]},
    "a data URL": {"prompt": "What is it?", "images": [url(encode_image())]},
    "stored bytes": {"prompt": "What is it?", "image": {"path": "red.png"}},
    "messages": {"messages": [{"role": "user", "content": "What is it?"}], "image": "red.png"},
    "parts": {"messages": [{"role": "user", "content": [part(url(encode_image())), TEXT]}]},
    "a part with a path": {"messages": [{"role": "user", "content": [{"type": "image", "image": "red.png"}, TEXT]}]},
    "a part with base64": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "base64": base64.b64encode(encode_image()).decode()}, TEXT]}
        ]
    },
    "an empty part and a column": {
        "messages": [{"role": "user", "content": [{"type": "image"}, TEXT]}],
        "images": ["red.png"],
    },
    "ShareGPT": {"conversations": [{"from": "human", "value": "<image>What is it?"}], "image": "red.png"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_image_format_gives_the_same_prompt(form: str, write: Write, seeing: Any, tmp_path: Path) -> None:
    """One placeholder in the text that vLLM gets, 64 tokens for the model's (64 / 8)^2 features."""
    tokenizer, reader = seeing
    prompt = prepare_prompts(write(FORMS[form]), tokenizer, tmp_path, reader=reader).items[0]
    assert prompt.text == "<bos><|user|><image>What is it?<|assistant|>"
    assert prompt.images is not None and len(prompt.images.shown) == 1
    assert tokenizer.decode(prompt.images.short_ids) == prompt.text
    assert len(prompt.ids) == len(prompt.images.short_ids) + 63
    assert prompt.ids.count(reader.feature_id) == 64


def test_images_in_several_turns_keep_their_order(write: Write, seeing: Any, tmp_path: Path) -> None:
    """Only the answers are trained on."""
    tokenizer, reader = seeing
    talk = [
        {"role": "user", "content": "<image> or <image>?"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "image"}]},
        {"role": "assistant", "content": "b"},
    ]
    data = write({"messages": talk, "images": ["red.png", "blue.png", "red.png"]}, train_on="assistant")
    (example,) = prepare_examples(data, tokenizer, tmp_path, reader=reader).items
    assert [Path(image.source).name for image in example.images] == ["red.png", "blue.png", "red.png"]
    assert example.ids.count(reader.feature_id) == 3 * 64
    trained = [i for i, on in zip(example.ids, example.trained, strict=True) if on]
    assert tokenizer.decode(trained) == "a<eos>b<eos>"


def test_text_rows_are_mixed_with_image_rows(write: Write, seeing: Any, tmp_path: Path) -> None:
    tokenizer, reader = seeing
    rows = [{"prompt": "a", "image": "red.png"}, {"prompt": "b", "image": None}, {"prompt": "c", "images": []}]
    prompts = prepare_prompts(write(*rows), tokenizer, tmp_path, reader=reader).items
    assert [prompt.images is not None for prompt in prompts] == [True, False, False]
    plain = prepare_prompts(write({"prompt": "b"}), tokenizer, tmp_path).items[0]
    assert prompts[1].ids == plain.ids


def test_train_on_all_excludes_image_tokens(write: Write, seeing: Any, tmp_path: Path) -> None:
    tokenizer, reader = seeing
    data = write({"prompt": "x", "completion": "y", "image": "red.png"}, train_on="all")
    (example,) = prepare_examples(data, tokenizer, tmp_path, reader=reader).items
    untrained = [i for i, on in zip(example.ids, example.trained, strict=True) if not on]
    assert untrained == [reader.feature_id] * 64


def test_text_and_image_after_the_last_answer_are_dropped(write: Write, seeing: Any, tmp_path: Path) -> None:
    tokenizer, reader = seeing
    talk = [
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "<image>"},
    ]
    data = write({"messages": talk, "images": ["red.png", "blue.png"]})
    (example,) = prepare_examples(data, tokenizer, tmp_path, reader=reader).items
    assert [Path(image.source).name for image in example.images] == ["red.png"]


def test_long_prompt_with_images_is_dropped_not_truncated(write: Write, seeing: Any, tmp_path: Path) -> None:
    tokenizer, reader = seeing
    rows = [{"prompt": "a" * 60, "image": "red.png"}, {"prompt": "b" * 60}]
    data = write(*rows, max_length=40, overlong="truncate_prompt")
    prepared = prepare_prompts(data, tokenizer, tmp_path, reader=reader)
    assert len(prepared.items) == 1 and len(prepared.items[0].ids) == 40
    assert list(prepared.dropped) == ["longer than max_length, and a prompt with images is not cut"]


def test_row_ids_do_not_depend_on_the_file_location(write: Write, tmp_path: Path) -> None:
    """A row's id is computed from its content, so a project can be moved."""
    (row,) = load_rows(write({"prompt": "a", "image": "red.png"}), tmp_path)
    assert row["images"] == [str(tmp_path / "red.png")]
    (again,) = load_rows(write({"prompt": "a", "image": "red.png"}), tmp_path / "elsewhere")
    assert again["uid"] == row["uid"]


def test_images_from_parquet_and_functions(tmp_path: Path) -> None:
    """Hugging Face's Image feature stores bytes; a user's function can return Pillow images."""
    import datasets

    stored = datasets.Dataset.from_dict({"prompt": ["a"], "image": [{"bytes": encode_image(), "path": None}]})
    stored = stored.cast_column("image", datasets.Image())
    stored.to_parquet(tmp_path / "rows.parquet")
    stored.save_to_disk(tmp_path / "saved")
    (tmp_path / "made.py").write_text(
        "from PIL import Image\n"
        "def rows(size, seed):\n    return [{'prompt': 'a', 'image': Image.new('RGB', (12, 6))}]\n"
    )
    for source, keys in (("rows.parquet", {}), ("./saved", {}), ("made.py:rows", {"size": 1})):
        data = Data.model_validate({"source": source, **keys})
        (row,) = load_rows(data, tmp_path)
        assert open_image(Image(row["images"][0])).size == (12, 6), source
        assert load_rows(data, tmp_path)[0]["uid"] == row["uid"]


# --- pixels


def test_exif_orientation_rotates_a_photo(tmp_path: Path) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees
    Pillow.new("RGB", (20, 10)).save(tmp_path / "photo.jpg", exif=exif)
    assert open_image(Image(str(tmp_path / "photo.jpg"))).size == (10, 20)


@pytest.mark.parametrize(
    ("mode", "color", "kind", "pixel"),
    [
        ("L", 100, "PNG", (100, 100, 100)),
        ("LA", (100, 0), "PNG", (255, 255, 255)),
        ("RGBA", (0, 0, 0, 0), "PNG", (255, 255, 255)),
        ("RGBA", (10, 20, 30, 255), "PNG", (10, 20, 30)),
        ("P", 0, "PNG", (0, 0, 0)),
        ("1", 1, "PNG", (255, 255, 255)),
        ("CMYK", (0, 0, 0, 255), "TIFF", (0, 0, 0)),
        ("I;16", 0x8000, "PNG", (128, 128, 128)),
        ("RGB", (1, 2, 3), "WEBP", None),
        ("RGB", (1, 2, 3), "BMP", (1, 2, 3)),
    ],
)
def test_every_pixel_format_becomes_rgb(mode: str, color: Any, kind: str, pixel: Any) -> None:
    """Transparent parts become white; 16 bits are scaled, not truncated."""
    found = open_image(Image(data_url(encode_image(color, kind, mode))))
    assert found.mode == "RGB" and found.size == (12, 6)
    assert pixel is None or found.getpixel((0, 0)) == pixel


@pytest.mark.parametrize(
    ("limits", "size"),
    [((None, None), (40, 10)), ((None, 100), (20, 5)), ((1600, None), (80, 20)), ((100, 400), (40, 10))],
)
def test_image_sizes_are_bounded(limits: tuple[int | None, int | None], size: tuple[int, int]) -> None:
    """Both sides are scaled by the square root of the ratio to the pixel limit."""
    assert open_image(Image(png_url(Pillow.new("RGB", (40, 10))), *limits)).size == size


# --- unreadable images


def header_only(width: int, height: int) -> bytes:
    """A PNG that declares its size and has no pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"IHDR" + head
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return start + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


def encode_animation() -> bytes:
    stream = io.BytesIO()
    frames = [Pillow.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
    frames[0].save(stream, format="GIF", save_all=True, append_images=frames[1:])
    return stream.getvalue()


FILES = {
    "empty.png": b"",
    "text.png": b"this is no image",
    "cut.png": encode_image()[:-20],
    "cut.jpg": encode_image("green", "JPEG")[:-100],
    "huge.png": header_only(12_000, 12_000),
    "bomb.png": header_only(60_000, 60_000),
    "narrow.png": header_only(2000, 10),
    "zero.png": header_only(0, 10),
    "moving.gif": encode_animation(),
    "page.html": b"<html><body>404</body></html>",
}
ASSISTANT = {"role": "assistant", "content": "x"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing file": ({"image": "none.png"}, "none.png is not there"),
    "sound": ({"audio": {"path": "a.wav"}}, "a column `audio`: sound and video are not read"),
    "a folder": ({"image": "."}, "is a folder"),
    "no file name": ({"image": "  "}, "image 1 is str"),
    "a number": ({"image": 7}, "image 1 is int (7)"),
    "null in a list": ({"images": ["red.png", None]}, "image 2 is NoneType"),
    "an empty struct": ({"image": {"bytes": None, "path": None}}, "image 1 is NoneType"),
    "both columns": ({"image": "red.png", "images": ["red.png"]}, "`image` and `images` both have values"),
    "on the network": ({"image": "https://example.com/a.png"}, "is on the network"),
    "empty file": ({"image": "empty.png"}, "is not an image that Pillow can read (0 bytes)"),
    "a text": ({"image": "text.png"}, "is not an image"),
    "a web page": ({"image": "page.html"}, "is not an image"),
    "truncated png": ({"image": "cut.png"}, "is broken"),
    "truncated jpeg": ({"image": "cut.jpg"}, "is broken"),
    "huge": ({"image": "huge.png"}, "has 12000 x 12000 pixels"),
    "a bomb": ({"image": "bomb.png"}, "up to 100,000,000 pixels"),
    "narrow": ({"image": "narrow.png"}, "has 2000 x 10 pixels"),
    "zero pixels": ({"image": "zero.png"}, "zero.png"),
    "animated": ({"image": "moving.gif"}, "has 3 frames"),
    "no base64": ({"image": "data:image/png;base64,!!!"}, "is not base64"),
    "another encoding": ({"image": "data:image/png,abc"}, "a data URL begins with"),
    "base64 of a text": ({"image": url(b"hello")}, "an image within the row is not an image"),
    "too few places": ({"prompt": "<image>", "images": ["red.png", "red.png"]}, "2 images and 1 place `<image>`"),
    "too many places": ({"prompt": "<image><image>", "image": "red.png"}, "1 image and 2 places `<image>`"),
    "in the answer": ({"completion": "<image>", "image": "red.png"}, "completion has an image"),
    "in an assistant turn": (
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<image>"}],
            "image": "red.png",
        },
        "an assistant message has an image",
    ),
    "no user turn": ({"messages": [{"role": "system", "content": "a"}, ASSISTANT], "image": "red.png"}, "no user"),
    "plain text": ({"text": "a", "image": "red.png"}, "a row of plain `text` has images"),
    "named twice": (
        {"messages": [{"role": "user", "content": [part("red.png")]}, ASSISTANT], "image": "red.png"},
        "images are given both in the messages and in `image`",
    ),
    "a part without an image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]}, ""),
    "another kind of part": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "data": ""}]}, ASSISTANT]},
        "a part that is no text",
    ),
    "the model's own token": ({"prompt": "what is <image>?"}, "where the model puts an image, and the row has none"),
    "broken among others": ({"images": ["red.png", "cut.png"]}, "cut.png is broken"),
}


@pytest.mark.parametrize("case", BAD)
def test_unreadable_images_are_reported_with_their_line(case: str, write: Write, seeing: Any, tmp_path: Path) -> None:
    row, said = BAD[case]
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    row = {**({} if "messages" in row or "text" in row else {"prompt": "a", "completion": "b"}), **row}
    good = {"prompt": "a", "completion": "b", "image": "red.png"}
    tokenizer, reader = seeing
    with pytest.raises(DataError) as found:
        prepare_examples(write(good, row), tokenizer, tmp_path, reader=reader)
    assert said in str(found.value)
    assert "rows.jsonl:2" in str(found.value)


def test_text_model_refuses_images(write: Write, tmp_path: Path) -> None:
    tokenizer = models.load_tokenizer(Model(path="tiny"), tmp_path)
    with pytest.raises(DataError, match="reads none"):
        prepare_prompts(write({"prompt": "a", "image": "red.png"}), tokenizer, tmp_path)


def test_image_placeholder_is_plain_text_for_text_models(write: Write, tmp_path: Path) -> None:
    """`<image>` is ordinary text if no row has an image."""
    tokenizer = models.load_tokenizer(Model(path="tiny"), tmp_path)
    (prompt,) = prepare_prompts(write({"prompt": "an <image> tag"}), tokenizer, tmp_path).items
    assert prompt.text == "<bos><|user|>an <image> tag<|assistant|>"


def test_plain_text_rows_cannot_have_images(write: Write, seeing: Any, tmp_path: Path) -> None:
    tokenizer, reader = seeing
    with pytest.raises(DataError, match="writes text only"):
        prepare_prompts(write({"prompt": "a", "image": "red.png"}, chat=False), tokenizer, tmp_path, reader=reader)


def test_template_without_images_is_reported(write: Write, seeing: Any, tmp_path: Path) -> None:
    tokenizer, reader = seeing
    (tmp_path / "texts.jinja").write_text(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    section = Model(path="tiny-vision", chat_template=str(tmp_path / "texts.jinja"))
    tokenizer = models.load_tokenizer(section, tmp_path)
    with pytest.raises(DataError, match="writes 0 places for 1 image"):
        prepare_prompts(write({"prompt": "a", "image": "red.png"}), tokenizer, tmp_path, reader=reader)


def test_urls_are_not_fetched_unless_allowed(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def open_url(address: str, timeout: float) -> Any:
        asked.append((address, timeout))
        return io.BytesIO(encode_image())

    monkeypatch.setattr("urllib.request.urlopen", open_url)
    row = {"prompt": "a", "image": "https://example.com/a.png"}
    with pytest.raises(DataError, match="fetch: true"):
        load_rows(write(row), tmp_path)
    assert asked == []
    (fetched,) = load_rows(write(row, image={"fetch": True}), tmp_path)
    assert fetched["images"] == [data_url(encode_image())] and asked == [("https://example.com/a.png", 30)]


def test_downscaled_image_keeps_the_allowed_aspect_ratio() -> None:
    """4,000 x 40 pixels within a limit of 300: 173 x 1, before the longer side is cropped to 100 times the other."""
    shown = open_image(Image(png_url(Pillow.new("RGB", (4000, 40))), max_pixels=300))
    assert shown.size == (100, 1)
