"""Demonstrations and controls over the tasks whose problems are pictures (`task:count_shapes`, `task:find_square`).

The demonstrator looks at the picture and is often a little wrong: a count one off, a box half a width off.
The skill is in the data and so is the habit, and imitation cannot tell them apart; a reward that checks the answer can.

Pictures whose text has a CRC-32 divisible by 10 are held out: they are in no training set.
"""

import json
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.data.tasks import make

Rows = list[dict[str, Any]]


def problems(size: int, seed: int, *, task: str, params: Mapping[str, Any]) -> Rows:
    """`size` rows to solve. No picture comes twice."""
    return _draw_rows(size, seed, task, params, False)


def held_out(size: int, seed: int, *, task: str, params: Mapping[str, Any]) -> Rows:
    """The same from pictures that are in no training set."""
    return _draw_rows(size, seed, task, params, True)


def demonstrations(size: int, seed: int, *, task: str, params: Mapping[str, Any], wrong: float = 0.5) -> Rows:
    """`size` rows to imitate: prompt, picture and completion. A share `wrong` of them is a little wrong."""
    draw = random.Random(f"demonstrations {seed}")
    rows = _draw_rows(size, seed + 1_000_003, task, params, False)
    answers = [slip(row["answer"], draw) if draw.random() < wrong else row["answer"] for row in rows]
    return [
        {"prompt": row["prompt"], "images": row["images"], "completion": f"<answer>{answer}</answer>"}
        for row, answer in zip(rows, answers, strict=True)
    ]


def shuffled(size: int, seed: int, *, task: str, params: Mapping[str, Any]) -> Rows:
    """The rows of `problems` with their pictures dealt out anew: what a row shows says nothing about its answer."""
    rows = problems(size, seed, task=task, params=params)
    pictures = [row["images"] for row in rows]
    random.Random(f"shuffled {seed}").shuffle(pictures)
    return [{**row, "images": picture} for row, picture in zip(rows, pictures, strict=True)]


def slip(answer: str, draw: random.Random) -> str:
    """A count that is one off, or a box that is shifted by half of its width or height."""
    if not answer.startswith("["):
        return str(abs(int(answer) + draw.choice((-1, 1))))
    box = json.loads(answer)
    axis = draw.choice((0, 1))
    half = (box[axis + 2] - box[axis]) // 2 * draw.choice((-1, 1))
    return str([n + half if place % 2 == axis else n for place, n in enumerate(box)])


def _draw_rows(size: int, seed: int, task: str, params: Mapping[str, Any], held_out: bool) -> Rows:
    """`size` rows, all held out or none; about one in ten pictures is."""
    drawn = make.rows(task, size * (20 if held_out else 2), seed, params, Path(__file__).parent)
    return [row for row in drawn if (zlib.crc32(row["images"][0].encode()) % 10 == 0) == held_out][:size]
