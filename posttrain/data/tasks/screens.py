"""Generated screens as problems: buttons to click in order, a field to type into, a page to scroll. Seeded."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.tasks.pictures import BACKGROUND, COLOURS, Box, blank_picture
from posttrain.errors import DataError
from posttrain.images import png_url
from posttrain.registry import register

FIELD = "field"
MAX_BUTTONS = 4


@dataclass(frozen=True)
class Screen:
    """A page, of which one part is visible at a time.

    size: width and height in pixels of the visible part. height: pixels of the page. places: boxes on the page, of
    buttons by colour and of the field.
    """

    size: tuple[int, int]
    height: int
    places: dict[str, Box]

    def find_place(self, x: float, y: float) -> str | None:
        """Return the name of the button or field at a point of the page, in pixels, or None."""
        return next((name for name, (a, b, c, d) in self.places.items() if a <= x < c and b <= y < d), None)

    def write(self) -> str:
        """Serialize the screen as the JSON text of a data column."""
        return json.dumps({"size": self.size, "height": self.height, "places": self.places})

    @classmethod
    def read(cls, text: str) -> Screen:
        """Parse the output of `write`."""
        held = json.loads(text)
        width, height = held["size"]
        places = {name: (a, b, c, d) for name, (a, b, c, d) in held["places"].items()}
        return cls((width, height), held["height"], places)


@register("task", "screen")
def screen(
    level: int,
    draw: random.Random,
    *,
    size: int = 64,
    types: bool = False,
    scrolls: bool = False,
    colours: tuple[str, ...] = ("red", "green", "blue", "yellow"),
    asked: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """Generate a screen with a button per colour, `level` + 1 of which are to be clicked in order.

    For `environment: {use: screen}`, scored by `environment.score`. size: pixels per side. asked: colours to click, in
    order, of which the first `level` + 1 are used; by default each row has random ones. types: adds a field at the
    bottom, which is to be clicked and typed into last. scrolls: the page is twice as high as the screen, and its lower
    half is visible only after a scroll. Columns: images (the initial screen), screen and goal (JSON texts), image_size.
    """
    if not 32 <= size <= 1024 or not 0 <= level < len(colours) <= MAX_BUTTONS or set(colours) - set(COLOURS):
        raise DataError(
            f"task:screen: level {level}, {size} pixels, colours {list(colours)}",
            allowed=f"levels from 0, fewer than the colours; 32 to 1024 pixels; up to four of {', '.join(COLOURS)}",
        )
    if asked is not None and (len(set(asked)) < len(asked) or set(asked) - set(colours) or level >= len(asked)):
        raise DataError(
            f"task:screen: level {level}, asked {list(asked)}",
            allowed=f"at least {level + 1} of {', '.join(colours)}, each once",
        )
    half, row = size // 2, size * 3 // 8  # width and height of a cell: two rows of two cells, the field below them
    tops = (0, size) if scrolls else (0,)
    corners = [(x, top + y) for top in tops for x in (0, half) for y in (0, row)]
    places = {
        colour: _button(corner, (half, row), draw)
        for colour, corner in zip(colours, draw.sample(corners, len(colours)), strict=True)
    }
    goal = [("click", colour) for colour in (asked or draw.sample(colours, level + 1))[: level + 1]]
    clicks = ", then ".join(colour for _, colour in goal)
    prompt = f"Click {clicks}."
    if types:
        edge = size // 16
        places[FIELD] = (edge, tops[-1] + 2 * row + edge // 2, size - edge, tops[-1] + size - edge // 2)
        word = str(draw.randint(10, 99))
        goal += [("click", FIELD), ("type", word)]
        prompt = f"Click {clicks}, then the field, and type {word}."
    made = Screen((size, size), size * len(tops), places)
    return {
        "prompt": prompt,
        "images": [png_url(draw_screen(made, ()))],
        "screen": made.write(),
        "goal": json.dumps(goal),
        "image_size": [size, size],
    }


def _button(corner: tuple[int, int], cell: tuple[int, int], draw: random.Random) -> Box:
    """Return a random box within a cell, between half and almost all of its size."""
    sides = [draw.randint(side // 2, side - 2) for side in cell]
    x, y = (at + draw.randint(1, side - 1 - own) for at, side, own in zip(corner, cell, sides, strict=True))
    return x, y, x + sides[0], y + sides[1]


def draw_screen(shown: Screen, done: Sequence[tuple[str, str]], top: int = 0) -> Any:
    """Return the part of the page from `top` as a Pillow image, after some clicks and typing.

    The element clicked last has a dark frame, and the field shows text typed after a click on it.
    """
    picture, pencil = blank_picture(*shown.size)
    clicked = [name for kind, name in done if kind == "click"]
    typed = "".join(text for n, (kind, text) in enumerate(done) if kind == "type" and ("click", FIELD) in done[:n])
    for name, (left, upper, right, lower) in shown.places.items():
        last = clicked[-1:] == [name]
        frame = COLOURS["black"] if last or name == FIELD else COLOURS[name]
        fill = BACKGROUND if name == FIELD else COLOURS[name]
        box = (left, upper - top, right - 1, lower - 1 - top)
        pencil.rectangle(box, fill=fill, outline=frame, width=3 if last else 1)
        if name == FIELD and typed:
            pencil.text((left + 3, upper - top + 1), typed, fill=COLOURS["black"])
    return picture


EXAMPLES = {
    "screen": [
        (0, {}, {"image_size": [64, 64]}),
        (1, {"types": True, "scrolls": True, "size": 128}, {"image_size": [128, 128]}),
    ]
}
