"""Picture tasks: the pixels of each picture agree with the answer."""

from __future__ import annotations

import base64
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.rows import load_rows
from posttrain.data.tasks.maze import MOVES
from posttrain.data.tasks.pictures import BACKGROUND, COLOURS
from posttrain.errors import DataError
from posttrain.images import Image, open_image
from posttrain.recipe.sections import Data
from rewards import boxes, numeric

Pixels = dict[tuple[int, int], tuple[int, int, int]]


def rows(name: str, count: int = 12, **params: Any) -> list[dict[str, Any]]:
    return load_rows(Data(source=name, size=count, params=params), Path.cwd())


def pixels(url: str) -> Pixels:
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    return {(x, y): picture.getpixel((x, y)) for x in range(picture.width) for y in range(picture.height)}


def patches(shown: Pixels) -> list[tuple[str, set[tuple[int, int]]]]:
    """(colour, pixels) of every connected patch that is not the background."""
    names = {value: name for name, value in COLOURS.items()}
    left, found = {place for place, value in shown.items() if value != BACKGROUND}, []
    while left:
        edge = [next(iter(left))]
        colour, patch = shown[edge[0]], set[tuple[int, int]]()
        while edge:
            x, y = edge.pop()
            if (x, y) in left and shown[x, y] == colour:
                left.remove((x, y))
                patch.add((x, y))
                edge += [(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)]
        found.append((names[colour], patch))
    return found


def shape_of(patch: set[tuple[int, int]]) -> str:
    """Return the shape by the filled share of its box: a square all, a circle pi / 4, a triangle a half."""
    width, height = (len({place[axis] for place in patch}) for axis in (0, 1))
    filled = len(patch) / (width * height)
    return "square" if filled > 0.95 else "circle" if filled > 0.66 else "triangle"


def test_line_direction_is_visible_only_at_full_resolution() -> None:
    """A card is constant along its lines and changes across them; at half size, cards of all directions look the
    same.
    """
    rows_ = rows("task:fine_lines", count=24, levels=[2])
    afar: dict[str, set[tuple[int, ...]]] = {}
    for row in rows_:
        picture, colour = pixels(row["images"][0]), row["prompt"].split()[-3]
        left, top = (n * 128 // 1000 for n in json.loads(row["box"])[:2])
        x, y = left + 30, top + 30
        assert {picture[x, y], picture[x + 1, y], picture[x, y + 1]} == {BACKGROUND, COLOURS[colour]}
        same = (picture[x, y] == picture[x + 1, y], picture[x, y] == picture[x, y + 1])
        assert row["answer"] == {(True, False): "across", (False, True): "down", (False, False): "checked"}[same]
        small = open_image(Image(row["images"][0], max_pixels=64 * 64))
        afar.setdefault(colour, set()).update(small.getpixel((x // 2 + n, y // 2)) for n in (0, 1))
    assert len({row["answer"] for row in rows_}) == 3
    for seen in afar.values():
        assert all(max(values) - min(values) <= 2 for values in zip(*seen, strict=True))


def test_card_of_the_requested_color_is_always_present() -> None:
    for row in rows("task:fine_lines", count=12, levels=[2], asked="black", template="{colour}?"):
        left, top = (n * 128 // 1000 for n in json.loads(row["box"])[:2])
        shown = pixels(row["images"][0])
        assert row["prompt"] == "<image>black?"
        assert COLOURS["black"] in {shown[left + 30, top + 30], shown[left + 31, top + 30], shown[left + 30, top + 31]}


def test_count_matches_the_picture() -> None:
    made = rows("task:count_shapes", count=30, levels=[0, 2, 5])
    for row in made:
        shown = [f"{colour} {shape_of(patch)}" for colour, patch in patches(pixels(row["images"][0]))]
        assert len(shown) == row["shapes"]
        assert shown.count(row["asked"]) == int(row["answer"]) <= row["level"] + 1
        assert row["asked"] in row["prompt"]
        assert numeric.count(f"<answer>{row['answer']}</answer>", row["answer"]) == {"reward": 1.0, "exact": 1.0}
    assert len({row["answer"] for row in made}) > 3


def test_square_is_at_the_position_of_the_answer() -> None:
    for row in rows("task:find_square", count=20, levels=[0, 3, 6]):
        found = patches(pixels(row["images"][0]))
        (square,) = [patch for colour, patch in found if colour == "red" and shape_of(patch) == "square"]
        (x1, y1), (x2, y2) = (tuple(f(place[axis] for place in square) for axis in (0, 1)) for f in (min, max))
        assert row["answer"] == f"[{x1}, {y1}, {x2 + 1}, {y2 + 1}]"
        assert len(found) == row["level"] + 1
        assert boxes.iou(row["answer"], row["answer"]) == 1.0


def test_maze_path_can_be_followed_in_the_picture() -> None:
    for row in rows("task:ariadne", count=8, levels=[1, 4], margin=1, picture=True, cell=10):
        shown = pixels(row["images"][0])
        ends = {}
        for name in ("blue", "red"):
            place = [p for p, value in shown.items() if value == COLOURS[name]]
            ends[name] = tuple(sum(p[axis] for p in place) // len(place) // 10 for axis in (0, 1))
        at = ends["blue"]
        for move in row["answer"].strip("<|>").split("|><|"):
            x, y = MOVES[move]
            for step in range(10):
                assert shown[at[0] * 10 + 5 + x * step, at[1] * 10 + 5 + y * step] != COLOURS["black"]
            at = at[0] + x, at[1] + y
        assert at == ends["red"]
        assert "(0,0)" not in row["prompt"], "the maze is not told in words"


def test_distinct_problems_differ_in_their_picture() -> None:
    """All prompts are equal; a problem is identified with its picture. A square of one step has 16 positions."""
    made = rows("task:find_square", count=16, largest=1)
    assert len({row["prompt"] for row in made}) == 1
    assert len({row["answer"] for row in made}) == len({row["images"][0] for row in made}) == 16
    with pytest.raises(DataError, match="too few problems"):
        rows("task:find_square", count=17, largest=1)


@pytest.mark.parametrize(
    ("task", "params", "wrong"),
    [
        ("count_shapes", {"asked": "red cats"}, "asked 'red cats'"),
        ("count_shapes", {"colours": ["pink"]}, "colours"),
        ("count_shapes", {"shapes": []}, "shapes"),
        ("count_shapes", {"size": 64, "cell": 10}, "64 pixels in steps of 10"),
        ("count_shapes", {"size": 1 << 20}, "steps of 16"),
        ("count_shapes", {"levels": [20]}, "21 \\+ 4 shapes in 16 cells"),
        ("find_square", {"colour": "pink"}, "no colour pink"),
        ("find_square", {"largest": 5}, "1 to 4"),
        ("find_square", {"levels": [16]}, "16 other shapes"),
        ("fine_lines", {"asked": "yellow"}, "one of red, green, blue, black"),
        ("ariadne", {"picture": True, "cell": 2}, "cells of 2 pixels"),
        ("ariadne", {"picture": True, "cell": 400, "levels": [9]}, "1024 a side"),
    ],
)
def test_pictures_that_cannot_be_drawn_are_refused(task: str, params: dict[str, Any], wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        rows(f"task:{task}", **params)


def test_single_kind_of_shape_has_no_other_shapes() -> None:
    made = rows("task:count_shapes", count=6, colours=["red"], shapes=["circle"], levels=[3])
    assert all(row["shapes"] == int(row["answer"]) for row in made)
    assert any(a["answer"] != b["answer"] for a, b in itertools.pairwise(made))
