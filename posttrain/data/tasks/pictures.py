"""Generated picture problems: count the red circles, locate the square, find the direction of lines. Seeded."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import DataError, MissingExtra
from posttrain.images import png_url
from posttrain.registry import register

SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 70),
    "blue": (50, 90, 220),
    "yellow": (235, 200, 40),
    "black": (20, 20, 20),
}
LINES = ("across", "down", "checked")
FADE = 12  # width in pixels of the border of a card in which its lines fade in
BACKGROUND = (255, 255, 255)
Kind = tuple[str, str]  # colour, shape
Box = tuple[int, int, int, int]  # x1, y1, x2, y2; the last two are the first pixels outside

MAX_SIDE = 1024  # pixels per side of a picture


@register("task", "count_shapes")
def count_shapes(
    level: int,
    draw: random.Random,
    *,
    size: int = 64,
    cell: int = 16,
    others: int = 4,
    asked: str | None = None,
    colours: tuple[str, ...] = ("red", "green", "blue"),
    shapes: tuple[str, ...] = SHAPES,
    template: str = "How many {asked}s are there?",
) -> dict[str, Any]:
    """Generate a picture of 0 to level + 1 shapes of one kind and up to `others` of other kinds.

    Score it with `numeric.count`. size: pixels per side; cell: pixels of the grid cells, each of which holds at most
    one shape. asked: the kind, such as `red circle`; by default each row asks about a random one of `colours` and
    `shapes`. template: the prompt, with {asked}. Columns: images, answer, asked, shapes (total number), image_size.
    """
    kinds = _list_kinds(colours, shapes)
    wanted = draw.choice(kinds) if asked is None else _read_kind(asked, kinds)
    corners = _cells("count_shapes", size, cell)
    if level + 1 + others > len(corners):
        raise DataError(
            f"task:count_shapes: {level + 1} + {others} shapes in {len(corners)} cells of {cell} pixels",
            hint="take a larger `size`, smaller cells, fewer `others`, or lower levels",
        )
    count = draw.randint(0, level + 1)
    rest = [kind for kind in kinds if kind != wanted]
    shown = [wanted] * count + [draw.choice(rest) for _ in range(draw.randint(0, others) if rest else 0)]
    boxes = [_random_box(corner, cell, draw) for corner in draw.sample(corners, len(shown))]
    name = " ".join(wanted)
    return {
        "prompt": template.format(asked=name),
        "images": [draw_shapes(size, list(zip(shown, boxes, strict=True)))],
        "answer": str(count),
        "asked": name,
        "shapes": len(shown),
        "image_size": [size, size],
    }


@register("task", "find_square")
def find_square(
    level: int,
    draw: random.Random,
    *,
    size: int = 64,
    step: int = 16,
    largest: int = 2,
    colour: str = "red",
    template: str = "Where is the {colour} square? Answer with [x1, y1, x2, y2] in pixels.",
) -> dict[str, Any]:
    """Generate a picture with one square and `level` other shapes. Score it with `boxes.iou`.

    size: pixels per side; step: the square's corners lie at multiples of it. largest: maximum side of the square in
    steps. Other shapes are circles and triangles of any colour outside the square. template: the prompt, with {colour}.
    Columns: images, answer ([x1, y1, x2, y2] in pixels, as JSON text), image_size.
    """
    if colour not in COLOURS:
        raise DataError(f"task:find_square: no colour {colour}", allowed=", ".join(COLOURS))
    cells = _cells("find_square", size, step)
    across = size // step
    if not 1 <= largest <= across:
        raise DataError(f"task:find_square: largest {largest}", allowed=f"1 to {across}, the steps in `size`")
    side = draw.randint(1, largest)
    x, y = (draw.randint(0, across - side) * step for _ in "xy")
    square = (x, y, x + side * step, y + side * step)
    free = [(a, b) for a, b in cells if not (x <= a < square[2] and y <= b < square[3])]
    if level > len(free):
        raise DataError(
            f"task:find_square: {level} other shapes beside the square in {len(cells)} cells of {step} pixels",
            hint="take a larger `size`, a smaller `step`, or lower levels",
        )
    kinds = [kind for kind in _list_kinds(tuple(COLOURS), SHAPES) if kind[1] != "square"]
    others = [(draw.choice(kinds), _random_box(corner, step, draw)) for corner in draw.sample(free, level)]
    return {
        "prompt": template.format(colour=colour),
        "images": [draw_shapes(size, [*others, ((colour, "square"), square)])],
        "answer": str(list(square)),
        "image_size": [size, size],
    }


@register("task", "fine_lines")
def fine_lines(
    level: int,
    draw: random.Random,
    *,
    size: int = 128,
    cell: int = 64,
    asked: str | None = None,
    colours: tuple[str, ...] = ("red", "green", "blue", "black"),
    template: str = "How do the lines of the {colour} card run?",
) -> dict[str, Any]:
    """Generate up to `level` + 1 cards with one-pixel lines, one per colour: `across`, `down` or `checked`?

    Half of a card's pixels are white for every direction, so a picture scaled to half the size shows cards of one pale
    colour: the answer is only visible in a crop at full size (`tools: [{use: crop}]`). size: pixels per side; cell:
    pixels of a card. asked: the colour, one of `colours`; by default each row asks about a random one. template: the
    prompt, with {colour}. Columns: images, answer, box (of the card, in 0-1000), image_size.
    """
    _list_kinds(colours, SHAPES)
    corners = _cells("fine_lines", size, cell)
    most = min(len(corners), len(colours))
    if not 0 <= level < most:
        raise DataError(f"task:fine_lines: level {level}", allowed=f"0 to {most - 1}: no two cards have one colour")
    if asked is not None and asked not in colours:
        raise DataError(f"task:fine_lines: asked {asked!r}", allowed=f"one of {', '.join(colours)}")
    count = draw.randint(1, level + 1)
    first = [] if asked is None else [asked]
    shown = [*first, *draw.sample([colour for colour in colours if colour != asked], count - len(first))]
    cards = [
        (colour, draw.choice(LINES), corner) for colour, corner in zip(shown, draw.sample(corners, count), strict=True)
    ]
    colour, answer, (x, y) = cards[0]
    box = [n * 1000 // size for n in (x, y, x + cell, y + cell)]
    return {
        "prompt": template.format(colour=colour),
        "images": [draw_cards(size, cell, cards)],
        "answer": answer,
        "box": str(box),
        "image_size": [size, size],
    }


def _list_kinds(colours: Sequence[str], shapes: Sequence[str]) -> list[Kind]:
    """Return every colour with every shape. Raises DataError for unknown ones."""
    for name, given, known in (("colours", colours, tuple(COLOURS)), ("shapes", shapes, SHAPES)):
        if not given or any(kind not in known for kind in given):
            raise DataError(f"task:count_shapes: {name} {list(given)}", allowed=f"of {', '.join(known)}")
    return [(colour, shape) for colour in colours for shape in shapes]


def _read_kind(asked: str, kinds: Sequence[Kind]) -> Kind:
    """Return the kind named `colour shape`. Raises DataError if it is not among `kinds`."""
    colour, _, shape = asked.partition(" ")
    if (colour, shape) not in kinds:
        raise DataError(
            f"task:count_shapes: asked {asked!r}", allowed=f"one of {', '.join(' '.join(kind) for kind in kinds)}"
        )
    return colour, shape


def _cells(task: str, size: int, cell: int) -> list[tuple[int, int]]:
    """Return the upper left corners of the cells of a square picture. Raises DataError for sizes that do not fit."""
    if not 8 <= cell <= size <= MAX_SIDE or size % cell:
        raise DataError(
            f"task:{task}: {size} pixels in steps of {cell}",
            allowed=f"steps from 8 pixels on that divide the size, which is at most {MAX_SIDE}",
        )
    return [(x, y) for y in range(0, size, cell) for x in range(0, size, cell)]


def _random_box(corner: tuple[int, int], cell: int, draw: random.Random) -> Box:
    """Return a random box within a cell, between half and almost all of its size."""
    side = draw.randint(cell // 2, cell - 2)
    x, y = (at + draw.randint(1, cell - 1 - side) for at in corner)
    return x, y, x + side, y + side


def draw_shapes(size: int, shapes: Sequence[tuple[Kind, Box]]) -> str:
    """Draw shapes on a white square picture, in their order, and return the data URL of a PNG."""
    picture, pencil = blank_picture(size, size)
    for (colour, shape), (x1, y1, x2, y2) in shapes:
        fill, corners = COLOURS[colour], (x1, y1, x2 - 1, y2 - 1)
        if shape == "circle":
            pencil.ellipse(corners, fill=fill)
        elif shape == "square":
            pencil.rectangle(corners, fill=fill)
        else:
            pencil.polygon([((x1 + x2 - 1) // 2, y1), (x1, y2 - 1), (x2 - 1, y2 - 1)], fill=fill)
    return png_url(picture)


def draw_cards(size: int, cell: int, cards: Sequence[tuple[str, str, tuple[int, int]]]) -> str:
    """Draw cards (colour, line direction, upper left corner) on a square picture and return a data URL."""
    picture, _ = blank_picture(size, size)
    for colour, lines, (left, top) in cards:
        picture.paste(COLOURS[colour], (left + 2, top + 2), _line_mask(lines, cell - 4))
    return png_url(picture)


@functools.cache
def _line_mask(lines: str, side: int) -> Any:
    """Return the opacity of a card's pixels, 0 to 255.

    Lines fade towards the edges; otherwise a line along an edge would be visible in a small picture.
    """
    from PIL import Image

    def pixel(x: int, y: int) -> int:
        along = {"across": y, "down": x, "checked": x + y}[lines]
        strength = min(1.0, min(x, y, side - 1 - x, side - 1 - y) / FADE)
        return round(127.5 + (127.5 if along % 2 else -127.5) * strength)

    mask = Image.new("L", (side, side))
    mask.putdata([pixel(x, y) for y in range(side) for x in range(side)])
    return mask


def draw_maze(
    open_sides: Mapping[tuple[int, int], Sequence[str]],
    width: int,
    height: int,
    origin: tuple[int, int],
    target: tuple[int, int],
    cell: int,
) -> str:
    """Draw a maze as walls between square cells, with a blue origin and a red target, and return the data URL of a PNG.

    open_sides: (column, row) -> sides without a wall. cell: pixels.
    """
    picture, pencil = blank_picture(width * cell + 1, height * cell + 1)
    for place, name in ((origin, "blue"), (target, "red")):
        x, y = (at * cell for at in place)
        pencil.ellipse((x + 2, y + 2, x + cell - 2, y + cell - 2), fill=COLOURS[name])
    for (column, row), sides in open_sides.items():
        left, top, right, bottom = column * cell, row * cell, (column + 1) * cell, (row + 1) * cell
        walls = {
            "up": (left, top, right, top),
            "down": (left, bottom, right, bottom),
            "left": (left, top, left, bottom),
            "right": (right, top, right, bottom),
        }
        for side, line in walls.items():
            if side not in sides:
                pencil.line(line, fill=COLOURS["black"])
    return png_url(picture)


def blank_picture(width: int, height: int) -> tuple[Any, Any]:
    """Return a white picture and its drawing context. Raises MissingExtra without Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ModuleNotFoundError as cause:
        raise MissingExtra("pillow", "a task of pictures", "train") from cause
    picture = Image.new("RGB", (width, height), BACKGROUND)
    return picture, ImageDraw.Draw(picture)


EXAMPLES = {
    "fine_lines": [
        (0, {}, {"image_size": [128, 128]}),
        (3, {"size": 64, "cell": 32}, {"image_size": [64, 64]}),
    ],
    "count_shapes": [
        (0, {"others": 0, "asked": "red circle"}, {"answer": "1", "shapes": 1, "image_size": [64, 64]}),
        (2, {}, {"answer": "3", "asked": "blue circle", "shapes": 3}),
    ],
    "find_square": [
        (0, {"largest": 1}, {"answer": "[48, 0, 64, 16]"}),
        (0, {"size": 16, "step": 16, "largest": 1}, {"answer": "[0, 0, 16, 16]"}),
    ],
}
