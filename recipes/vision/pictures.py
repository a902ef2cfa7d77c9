"""Demonstrations and controls over the tasks whose problems are pictures (`task:count_shapes`, `task:screen` ..).

The demonstrator looks at the picture and is often a little wrong: a count one off, a box half a width off.
The skill is in the data and so is the habit, and imitation cannot tell them apart; a reward that checks the answer can.

Pictures whose text has a CRC-32 divisible by 10 are held out: they are in no training set.
"""

import json
import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.data.tasks import make
from posttrain.data.tasks.pictures import LINES
from posttrain.data.tasks.screens import FIELD, Screen
from posttrain.images import Image, png_url
from posttrain.path_resolution import shipped_folder
from posttrain.registry import load_module

Rows = list[dict[str, Any]]
TURNS = ((0, 1), (1, 0), (0, 0))  # 0 where left or top of a box moves by half of the picture


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


def crop_traces(
    size: int, seed: int, *, task: str, params: Mapping[str, Any], guesses: float = 0.3, misses: float = 0.3
) -> Rows:
    """Conversations about `task:fine_lines` with the tool `crop` (`tool_format: pythonic`): the card is cut out and its
    lines are named. A share `guesses` names some without looking, a share `misses` cuts out another place first, and
    guesses then."""
    draw = random.Random(f"crop traces {seed}")
    crop = load_module(shipped_folder("tools") / "crop.py").crop
    found = []
    for row in _draw_rows(size, seed + 1_000_003, task, params, False):
        kind, box, answer = draw.random(), json.loads(row["box"]), row["answer"]
        if kind < guesses + misses:
            answer = draw.choice(LINES)
        if guesses <= kind < guesses + misses:
            moved = [(n + 500) % 1000 if axis == 0 else n for n, axis in zip(box[:2], draw.choice(TURNS), strict=True)]
            box = [*moved, moved[0] + box[2] - box[0], moved[1] + box[3] - box[1]]
        looks = []
        if kind >= guesses:
            looks = [
                {"role": "assistant", "content": f"[crop(bbox_2d={box})]"},
                {"role": "tool", "content": "<image>"},
            ]
        shown = [png_url(crop(box, images=[Image(row["images"][0])], min_pixels=1))] if looks else []
        asked = {"role": "user", "content": f"<image>{row['prompt']}"}
        last = {"role": "assistant", "content": f"<answer>{answer}</answer>"}
        found.append({"messages": [asked, *looks, last], "images": [*row["images"], *shown]})
    return found


def screen_traces(
    size: int,
    seed: int,
    *,
    task: str,
    params: Mapping[str, Any],
    wrong: float = 0.5,
    step: tuple[int, int] = (1, 1),
) -> Rows:
    """Conversations in which a screen of `task:screen` is clicked and typed into. A share `wrong` of them clicks
    another button in the place of one that is asked for, and goes on. Clicks are at multiples of `step` pixels,
    across and down."""
    draw = random.Random(f"screen traces {seed}")
    world = load_module(shipped_folder("tools") / "environments" / "screen.py").Environment()
    found = []
    for row in _draw_rows(size, seed + 1_000_003, task, params, False):
        goal, names = json.loads(row["goal"]), list(Screen.read(row["screen"]).places)
        if draw.random() < wrong:
            place = draw.choice([n for n, (kind, name) in enumerate(goal) if kind == "click" and name != FIELD])
            goal[place][1] = draw.choice([name for name in names if name not in (goal[place][1], FIELD)])
        messages, images = [{"role": "user", "content": f"<image>{row['prompt']}"}], [*row["images"]]
        world.reset(row)
        for turn in (text for kind, name in goal for text in _write_turns(world, kind, name, step)):
            messages.append({"role": "assistant", "content": turn})
            shown, over, _ = world.step(turn)
            if not over:
                messages.append({"role": "user", "content": "<image>"})
                images.append(png_url(shown))
        found.append({"messages": messages, "images": images})
    return found


def _write_turns(world: Any, kind: str, name: str, step: tuple[int, int]) -> Iterator[str]:
    """The turns of one step of a goal: a text to type, or a click near the middle of a place, behind a scroll to it."""
    if kind == "type":
        yield f"type(content='{name}')"
        return
    left, top, right, bottom = world.screen.places[name]
    if not world.top <= top < world.top + world.screen.size[1]:
        yield f"scroll(direction='{'down' if top > world.top else 'up'}')"
    middle = (left + right) / 2, (top + bottom) / 2 - world.top
    x, y = (pixels * round(at / pixels) for at, pixels in zip(middle, step, strict=True))
    yield f"click({x}, {y})"


def shuffle_pictures(size: int, seed: int, *, task: str, params: Mapping[str, Any]) -> Rows:
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
    """`size` rows, all held out or none; about one in ten pictures is. Too few are drawn again with others after
    them; of a task with few different pictures there are fewer."""
    count, found = size, list[dict[str, Any]]()
    while len(found) < size and count < 100 * size + 1000:
        count = round(count * 1.2) + 10 if not held_out or found else size * 11
        drawn = make.rows(task, count, seed, params, Path(__file__).parent)
        found = [row for row in drawn if (zlib.crc32(row["images"][0].encode()) % 10 == 0) == held_out]
    return found[:size]
