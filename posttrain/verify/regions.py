"""Parser of boxes and points in the text formats that vision-language models use. Pure functions.

A point is (x, y), a box (x1, y1, x2, y2), measured from the left and the top. Accepted formats:
`{"bbox_2d": [x1, y1, x2, y2], "label": "cat"}`, `{"point_2d": [x, y]}` and other JSON (Qwen2.5-VL, Qwen3-VL);
`<ref>cat</ref><box>(x1,y1),(x2,y2)</box>`, also as `<|box_start|>..<|box_end|>` (Qwen-VL, Qwen2-VL), and
`<box>[[x1, y1, x2, y2]]</box>` (InternVL); `[x1, y1, x2, y2]` in a sentence (LLaVA, Shikra); `{"box_2d": [y1, x1, y2,
x2]}` (Gemini, Gemma); `<point x="1" y="2">` (Molmo), `<point>1 2</point>` and `<bbox>1 2 3 4</bbox>` (UI-TARS);
`click(1, 2)`, `click(x=1, y=2)`, `{"x": 1, "y": 2}`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from posttrain.verify.extract import after_think, last_tag
from posttrain.verify.text import golds_of

Coordinates = Literal["pixels", "0-1000", "0-100", "0-1"]
Numbers = tuple[float, ...]

MAX_REGIONS = 500  # per answer; an answer with more is not read
SCALES = {"0-1000": 1000.0, "0-100": 100.0, "0-1": 1.0}

_N = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_A = rf"(?:[xy]\d?\s*=\s*)?({_N})"  # an argument may have a name
_COMMA = r"\s*,\s*"
_PAIR = rf"\(\s*{_A}{_COMMA}{_A}\s*\)"
_REGION = re.compile(
    "|".join(
        (
            rf"{_PAIR}{_COMMA}{_PAIR}",
            rf"[\[(]\s*{_A}{_COMMA}{_A}{_COMMA}{_A}{_COMMA}{_A}\s*[\])]",
            rf"[\[(]\s*{_A}{_COMMA}{_A}\s*[\])]",
            rf"<(?:point|bbox|box)>\s*({_N})\s+({_N})(?:\s+({_N})\s+({_N}))?\s*</",
            rf"<point\s+x=[\"']?({_N})[\"']?\s+y=[\"']?({_N})",
            rf"[\"']x[\"']\s*:\s*({_N}){_COMMA}[\"']y[\"']\s*:\s*({_N})",
        )
    )
)
_Y_FIRST = re.compile(r"[\"']box_2d[\"']\s*:\s*\[?\s*$")
_REFERENCE = re.compile(
    r"<ref>((?:[^<]|<(?!/?ref>))*+)</ref>"
    r"|<\|object_ref_start\|>((?:[^<]|<(?!\|object_ref_))*+)<\|object_ref_end\|>"
)
_LABEL = re.compile(r"[\"']label[\"']\s*:\s*(?:\"([^\"]*)\"|'([^']*)')")
_NOTHING = re.compile(r"(?:```(?:json)?)?\s*(?:\[\s*\]|\(?no(?:ne| objects?)\)?)\s*\.?\s*(?:```)?", re.IGNORECASE)
_MAX_ENTRY_CHARS = 300  # characters around a box that are searched for its label


class Region(NamedTuple):
    """A point (2 numbers) or a box (4 numbers) with its label in the text."""

    numbers: Numbers
    label: str | None = None

    @property
    def is_box(self) -> bool:
        return len(self.numbers) == 4

    @property
    def center(self) -> Numbers:
        """The point itself, or the center of the box."""
        return center_of(self.numbers)


def center_of(numbers: Numbers) -> Numbers:
    """Return the center of a box, or the point itself."""
    return ((numbers[0] + numbers[2]) / 2, (numbers[1] + numbers[3]) / 2) if len(numbers) == 4 else numbers


def answer_part(completion: str) -> str:
    """Return the text after the thought, or its last `<answer>` block if there is one."""
    text = after_think(completion)
    block = last_tag(text, "answer")
    return text if block is None else block


def read_regions(text: str) -> list[Region] | None:
    """Parse all boxes and points of the text, in order; [] if it says that there are none (`[]`, `None`, `No objects`).

    Returns None if nothing can be parsed, or more than 500 regions. Four numbers in one bracket are a box, two a point;
    two pairs in round brackets separated by a comma are the corners of a box. Regions with non-finite numbers are
    skipped.
    """
    if _NOTHING.fullmatch(text.strip()):
        return []
    regions: list[Region] = []
    references = [(match.end(), match[1] or match[2]) for match in _REFERENCE.finditer(text)]
    for match in _REGION.finditer(text):
        numbers = tuple(float(group) for group in match.groups() if group is not None)
        if not all(map(math.isfinite, numbers)):
            continue
        if _Y_FIRST.search(text, max(0, match.start() - 30), match.start()):
            numbers = tuple(numbers[i] for i in ((1, 0, 3, 2) if len(numbers) == 4 else (1, 0)))
        regions.append(Region(numbers, _label_of(text, match.start(), match.end(), references)))
    return regions if 0 < len(regions) <= MAX_REGIONS else None


def _label_of(text: str, start: int, end: int, references: Sequence[tuple[int, str]]) -> str | None:
    """Return the last reference before the region, else the label of the JSON object that contains it."""
    if named := [label for position, label in references if position <= start]:
        return named[-1].strip()
    opening = text.rfind("{", max(0, start - _MAX_ENTRY_CHARS), start)
    closing = text.find("}", end, end + _MAX_ENTRY_CHARS)
    if opening < 0 or closing < 0 or "}" in text[opening:start]:
        return None
    label = _LABEL.search(text, opening, closing)
    return (label[1] or label[2] or "").strip() if label else None


def gold_regions(answer: Any, column: str = "answer") -> list[Region] | None:
    """Parse the boxes and points of a gold column.

    It may be a list of numbers, a list of such lists or of JSON objects, or the text of one.

    Returns None for null and NaN, also as text. Raises ValueError for anything else, and for a list with an invalid
    entry.
    """
    if answer is None or (isinstance(answer, str | float) and not golds_of(answer)):
        return None
    text = answer if isinstance(answer, str) else json.dumps(_plain(answer))
    found = read_regions(text)
    if found is None or (_entries(text) not in (None, len(found))):
        raise ValueError(
            f"`{column}` must be a list of numbers, [x1, y1, x2, y2] or [x, y], a list of such lists, or objects with "
            f"bbox_2d or point_2d, not {answer!r:.80}"
        )
    return found


def _plain(answer: Any) -> Any:
    """Convert numpy arrays to lists, so that they can be serialized as JSON."""
    if hasattr(answer, "tolist"):
        return _plain(answer.tolist())
    if isinstance(answer, list | tuple):
        return [_plain(entry) for entry in answer]
    return answer


def _entries(text: str) -> int | None:
    """Return the number of regions a JSON text should hold; None if it is not a list of entries."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return len(held) if isinstance(held, list) and not all(isinstance(n, int | float) for n in held) else None


def to_unit(regions: Sequence[Region], coordinates: Coordinates, size: Sequence[float] | None) -> list[Region]:
    """Convert regions to fractions of the picture, 0 to 1 in both directions.

    size: (width, height) in pixels, for `pixels`. Raises ValueError if it is needed and missing.
    """
    if coordinates == "pixels":
        if size is None or len(size) != 2 or not all(n > 0 for n in size):
            raise ValueError(f"pixels need the column `image_size` = [width, height], which is {size!r}")
        width, height = float(size[0]), float(size[1])
    else:
        width = height = SCALES[coordinates]
    return [
        Region(tuple(n / (height if i % 2 else width) for i, n in enumerate(region.numbers)), region.label)
        for region in regions
    ]


def same_scale(
    found: Sequence[Region],
    gold: Sequence[Region],
    coordinates: Coordinates,
    gold_coordinates: Coordinates | None,
    size: Sequence[float] | None,
) -> tuple[list[Region], list[Region]]:
    """Return both lists in comparable coordinates: as fractions of the picture if theirs differ.

    gold_coordinates: None means those of the completion. Raises ValueError if pixels must be converted without a size.
    """
    if gold_coordinates in (None, coordinates):
        return list(found), list(gold)
    return to_unit(found, coordinates, size), to_unit(gold, gold_coordinates or coordinates, size)
