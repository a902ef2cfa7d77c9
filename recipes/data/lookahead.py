"""ProAct: a search of the environment itself, told as a short look-ahead before each move. Episodes to imitate.

Used as `source: ../data/lookahead.py:lookahead`; `params` name the environment and what its episodes begin with. In
each state every legal move is tried on a copy: what follows, `depth` moves ahead, and behind that the mean return of
random plays. The best moves with what they lead to become the thought, the best one is played. The environment needs
`actions()`, rewards of its steps, and must be copied by `copy.deepcopy` (docs/tools.md). The thought is a template; the
paper has a model write it. `Coins` is a small game to try it on; used by recipes/proact_tiny.yaml.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.errors import DataError
from posttrain.registry import load_function
from posttrain.tools.simulate import mean_return

HERE = Path(__file__).parent


class Move(NamedTuple):
    """A legal move, what it is worth, and what is shown after it ("" if the episode is over)."""

    action: str
    value: float
    shown: str


def lookahead(
    size: int,
    seed: int = 0,
    *,
    environment: str = "lookahead.py:Coins",
    keys: Mapping[str, Any] | None = None,
    tasks: str = "lookahead.py:problems",
    depth: int = 2,
    plays: int = 8,
    horizon: int = 20,
    gamma: float = 0.9,
    compared: int = 2,
    turns: int = 20,
) -> Iterator[dict[str, Any]]:
    """`size` episodes {messages}: the task, then a look-ahead with its move, what the environment shows, and so on.

    environment, tasks: `FILE.py:NAME` of the class and of a function (size, seed) -> rows with `prompt`, which `reset`
    is given; files are looked for beside this one and in the working directory. keys: arguments of the class. compared:
    moves that a thought names (0: no thought). Raises DataError for an environment without moves to begin with.
    """
    made = load_function(environment, HERE, what="environment", error=DataError)
    rows = list(load_function(tasks, HERE, what="data function", error=DataError)(size, seed))
    for number, row in enumerate(rows):
        world = made(**(keys or {}))
        world.reset(row)
        draw = random.Random(f"lookahead/{seed}/{number}")
        messages = [{"role": "user", "content": str(row["prompt"])}]
        for _ in range(turns):
            moves = rank_moves(world, draw, depth=depth, plays=plays, horizon=horizon, gamma=gamma)
            if not moves:
                break
            messages.append({"role": "assistant", "content": tell(moves, compared)})
            shown, done, _ = world.step(moves[0].action)
            if done:
                break
            messages.append({"role": "user", "content": shown})
        world.close()
        if len(messages) == 1:
            raise DataError("an episode without a legal move to begin with", where=f"{tasks} row {number}")
        yield {"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]}


def rank_moves(world: Any, draw: random.Random, *, depth: int, plays: int, horizon: int, gamma: float) -> list[Move]:
    """The legal moves of a state, the best first: reward + gamma * the value of what follows, which is that of its best
    move down to `depth` moves, and then the mean return of random plays. Equal ones stay in order."""
    found: list[Move] = []
    for action in world.actions():
        after = copy.deepcopy(world)
        shown, done, reward = after.step(action)
        value = 0.0
        if not done and depth > 1:
            below = rank_moves(after, draw, depth=depth - 1, plays=plays, horizon=horizon, gamma=gamma)
            value = below[0].value if below else 0.0
        elif not done:
            value = mean_return(after, draw, plays=plays, horizon=horizon, gamma=gamma)
        found.append(Move(str(action), float(reward or 0.0) + gamma * value, "" if done else shown))
    return sorted(found, key=lambda move: -move.value)


def tell(moves: list[Move], compared: int) -> str:
    """The look-ahead as text: the best `compared` moves, and the best one on the last line."""
    seen = [f"{move.action}: {move.shown or 'the end'}, worth {move.value:.2f}" for move in moves[:compared]]
    return "\n".join([*seen, moves[0].action])


class Coins:
    """Coins in a row; a move takes the one on the left or on the right, and `takes` moves are all there are.

    Each coin pays its share of all coins. The last word of a turn is the move; another word ends the episode.
    """

    def __init__(self, *, takes: int = 3) -> None:
        self.takes = takes

    def reset(self, row: Mapping[str, Any]) -> None:
        self.coins, self.left = [int(coin) for coin in str(row["coins"]).split()], self.takes
        self.all, self.taken = sum(self.coins), 0

    def actions(self) -> list[str]:
        return ["left", "right"] if self.coins and self.left else []

    def action(self, text: str) -> str:
        """The move that a turn is."""
        return (text.split() or [""])[-1]

    def step(self, text: str) -> tuple[str, bool, float]:
        move = self.action(text)
        if move not in self.actions():
            return "", True, 0.0
        coin = self.coins.pop(0 if move == "left" else -1)
        self.left, self.taken = self.left - 1, self.taken + coin
        return " ".join(map(str, self.coins)), not self.actions(), coin / self.all

    def score(self) -> float:
        return self.taken / self.all

    def close(self) -> None:
        """Nothing is held."""


def problems(size: int, seed: int) -> list[dict[str, str]]:
    """`size` rows of five coins from 1 to 9."""
    draw = random.Random(f"coins/{seed}")
    rows = [" ".join(str(draw.randint(1, 9)) for _ in range(5)) for _ in range(size)]
    return [{"prompt": row, "coins": row} for row in rows]
