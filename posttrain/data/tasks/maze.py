"""Ariadne (arXiv 2511.00710): mazes whose path has a given number of moves and turns, as text or as pictures."""

from __future__ import annotations

import itertools
import random
from typing import Any

from posttrain.data.tasks.pictures import MAX_SIDE, draw_maze
from posttrain.errors import DataError
from posttrain.registry import register

MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
Cell = tuple[int, int]

_PROMPT = (
    "A maze has {width} by {height} cells; (0,0) is at the top left, (column,row). Each line is a cell with the sides "
    "that are open.\n{cells}\nWrite the moves from the origin to the target as <|up|>, <|down|>, <|left|> and "
    "<|right|>, without anything between them."
)
_PICTURE_PROMPT = (
    "A maze of {width} by {height} cells. Write the moves from the blue origin to the red target as <|up|>, <|down|>, "
    "<|left|> and <|right|>, without anything between them."
)


MAX_MARGIN = 50  # cells around the path's bounding box
MAX_TRIES = 2000  # random paths tried for one problem


@register("task", "ariadne", paper="2511.00710", note="The design of the pictures is this project's choice.")
def ariadne(
    level: int,
    draw: random.Random,
    *,
    max_turns: int = 2,
    min_turns: int = 0,
    margin: int = 2,
    picture: bool = False,
    cell: int = 12,
    template: str | None = None,
) -> dict[str, Any]:
    """Generate a maze with one path from origin to target, of level + 1 moves. Score it with `maze.path`.

    max_turns, min_turns: how often the path changes direction, the second axis of difficulty. margin: cells around the
    path's bounding box, which hold dead ends. picture: draw the maze (column `images`) with cells of `cell` pixels
    instead of describing it in the prompt. template: the prompt, with {width}, {height} and, without a picture,
    {cells}. Columns: answer (the moves), steps, turns.
    """
    steps = level + 1
    most = min(max_turns, steps - 1)
    if not 0 <= min_turns <= most:
        raise DataError(
            f"task:ariadne: {min_turns} to {max_turns} turns in {steps} moves", allowed=f"0 to {steps - 1} turns"
        )
    if not 0 <= margin <= MAX_MARGIN:
        raise DataError(f"task:ariadne: margin {margin}", allowed=f"0 to {MAX_MARGIN}")
    path, moves = walk(steps, draw.randint(min_turns, most), draw)
    columns, lines = [x for x, _ in path], [y for _, y in path]
    left, top = min(columns) - margin, min(lines) - margin
    width, height = max(columns) - left + 1 + margin, max(lines) - top + 1 + margin
    path = [(x - left, y - top) for x, y in path]
    open_sides = carve(path, width, height, draw)
    listed = [
        f"({x},{y}) {' '.join(open_sides[x, y])}{_content((x, y), path)}" for y in range(height) for x in range(width)
    ]
    prompt = template or (_PICTURE_PROMPT if picture else _PROMPT)
    row = {
        "prompt": prompt.format(width=width, height=height, cells="\n".join(listed)),
        "answer": "".join(f"<|{move}|>" for move in moves),
        "steps": steps,
        "turns": count_turns(moves),
    }
    if not picture:
        return row
    if cell < 8 or cell * max(width, height) > MAX_SIDE:
        raise DataError(
            f"task:ariadne: {width} x {height} cells of {cell} pixels", allowed=f"8 and more, {MAX_SIDE} a side at most"
        )
    return {**row, "images": [draw_maze(open_sides, width, height, path[0], path[-1], cell)]}


def _content(cell: Cell, path: list[Cell]) -> str:
    """Return the label of a cell: origin, target or nothing."""
    return " origin" if cell == path[0] else " target" if cell == path[-1] else ""


def walk(steps: int, turns: int, draw: random.Random) -> tuple[list[Cell], list[str]]:
    """Return a random path without self-intersection with the given moves and turns: (cells, moves).

    Raises DataError if MAX_TRIES random paths all intersect themselves.
    """
    for _ in range(MAX_TRIES):
        bends = set(draw.sample(range(1, steps), turns))
        moves = [draw.choice(list(MOVES))]
        for position in range(1, steps):
            sideways = ("left", "right") if moves[-1] in ("up", "down") else ("up", "down")
            moves.append(draw.choice(sideways) if position in bends else moves[-1])
        path = [(0, 0)]
        for move in moves:
            path.append((path[-1][0] + MOVES[move][0], path[-1][1] + MOVES[move][1]))
        if len(set(path)) == len(path):
            return path, moves
    raise DataError(
        f"task:ariadne finds no path of {steps} moves with {turns} turns that does not meet itself",
        hint="take fewer turns (`max_turns`) or lower levels",
    )


def carve(path: list[Cell], width: int, height: int, draw: random.Random) -> dict[Cell, list[str]]:
    """Return the open sides of each cell of a loop-free maze in which `path` is the only way between its ends.

    The maze is a random tree that grows from the path.
    """
    joined = set(itertools.pairwise(path))
    reached = list(path)
    while len(reached) < width * height:
        cell = draw.choice(reached)
        free = [
            (cell[0] + x, cell[1] + y)
            for x, y in MOVES.values()
            if 0 <= cell[0] + x < width and 0 <= cell[1] + y < height and (cell[0] + x, cell[1] + y) not in reached
        ]
        if free:
            reached.append(draw.choice(free))
            joined.add((cell, reached[-1]))
    both = joined | {(b, a) for a, b in joined}
    return {
        cell: [name for name, (x, y) in MOVES.items() if (cell, (cell[0] + x, cell[1] + y)) in both] for cell in reached
    }


def count_turns(moves: list[str]) -> int:
    """Return how many moves have another direction than the move before."""
    return sum(a != b for a, b in itertools.pairwise(moves))


EXAMPLES = [
    (0, {}, {"steps": 1, "turns": 0}),
    (3, {"min_turns": 2}, {"steps": 4, "turns": 2}),
    (3, {"min_turns": 2, "picture": True}, {"steps": 4, "turns": 2}),
]
