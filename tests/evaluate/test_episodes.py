"""The search of an agent in an environment: environment copies, the search order, and the recorded paths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.batch import Segment
from posttrain.errors import RecipeError
from posttrain.recipe.load import load_dict
from posttrain.shapes.episodes import episodes
from posttrain.shapes.protocol import Asked, Grade, Row, Sampled


class Digits:
    """Each turn is a digit; the episode ends after three turns or a 0; the score is the sum / 27."""

    open = 0

    def reset(self, row: Any) -> None:
        assert row == {}
        self.taken: list[int] = []

    def __deepcopy__(self, _: Any) -> Digits:
        other = Digits()
        other.taken = list(self.taken)
        return other

    def step(self, text: str) -> tuple[str, bool]:
        self.taken.append(int(text))
        return f"{sum(self.taken)}", text == "0" or len(self.taken) == 3

    def score(self) -> float:
        return sum(self.taken) / 27

    def close(self) -> None:
        Digits.open += 1


def search(writes: Callable[[tuple[int, ...], int], int], limit: int = 60, **keys: Any) -> list[Row]:
    """Return the paths after the prompt (50,); writes: (tokens so far, sample number) -> the digit of the next turn.

    A turn is its digit and the end token 99; an observation is the digits of the sum + 100.
    """

    async def draw(prompts: Sequence[tuple[int, ...]], limits: Sequence[int], *, greedy: bool = False) -> list[Sampled]:
        assert not greedy
        ids = [(writes(prompt, n), 99) for n, prompt in enumerate(prompts)]
        return [
            Sampled(Segment("model", one[:most], (-1.0,) * min(most, 2)), "stop" if most > 1 else "length")
            for one, most in zip(ids, limits, strict=True)
        ]

    async def grade(_: Sequence[Row]) -> list[Grade]:
        raise AssertionError

    def text(ids: Sequence[int]) -> str:
        return "".join(str(i) for i in ids if i < 10)

    asked = Asked(
        (50,), {}, limit, 100, 0, draw, grade, lambda _: (), text, text,
        world=Digits, reply=lambda _, shown, most: tuple(100 + int(c) for c in shown[:most]),
    )  # fmt: skip
    return asyncio.run(episodes(asked, **keys))


def test_search_plays_in_copies_and_follows_high_scores() -> None:
    """Two turns are tried at each node: 9 and 1; after a single turn follows 2.

    The first path is 9, 2, 2 (13/27); then the unvisited turn 1: 1, then the first of 9 and 1, then 2 (12/27). Now
    V/N is 13/27 against 12/27 with one visit each: the search continues below 9, where only 2 follows and the
    episode ends in one more turn. Scores contain only the turns of the copies.
    """
    Digits.open = 0
    rows = search(lambda prompt, n: (9, 1)[n] if sum(i < 10 for i in prompt) == 0 else 2, width=2, paths=4, c=0.0)
    taken = [[int(t.text) for t in row.turns] for row in rows]
    assert taken[0] == [9, 2, 2] and taken[1] == [1, 2, 2]
    assert [row.world_score for row in rows] == pytest.approx([sum(path) / 27 for path in taken])
    first = rows[0]
    assert [s.kind for s in first.segments] == ["model", "tool", "model", "tool", "model"]
    assert [t.reply for t in first.turns] == ["9", "11", None] and first.segments[3].ids == (101, 101)
    assert [node.number for node in first.nodes] == [1, 1, 3, 3, 4] and first.nodes[0].visits >= 1
    best = max(row.world_score or 0 for row in rows)
    assert best == pytest.approx(13 / 27) and first.nodes[0].value > rows[1].nodes[0].value
    numbers = {node.number for row in rows for node in row.nodes}
    assert Digits.open >= len(numbers) + 1, "every copy is closed"


def test_path_ends_with_the_environment_at_the_turn_or_token_limit() -> None:
    assert [len(r.turns) for r in search(lambda *_: 0, width=2, paths=5)] == [1, 1], "all has ended"
    assert [len(r.turns) for r in search(lambda *_: 5, width=1, paths=3, max_turns=2)] == [2]
    assert [len(r.turns) for r in search(lambda *_: 5, width=1, paths=3, limit=3)] == [1], "a reply has no room"
    (cut,) = search(lambda *_: 5, width=1, paths=3, turn_tokens=1)
    assert cut.turns[0].text == "5" and cut.world_score == 0.0, "a turn that was cut is not acted on"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "write `environment`"),
        ({"environment": {"use": "gym"}, "tree": {"shape": {"use": "mcts"}}}, "a tree has no tools and no environment"),
    ],
)
def test_environment_that_cannot_be_searched_is_refused(changes: Any, told: str, tmp_path: Path) -> None:
    tree = {"shape": {"use": "episodes"}, **changes.get("tree", {}), "rewards": [{"use": "environment.score"}]}
    values = {"stage": "generate", "model": {"path": "tiny"}, "data": {"source": "r.jsonl"}, **changes, "tree": tree}
    with pytest.raises(RecipeError, match=told):
        load_dict(values, base_dir=tmp_path, where="test")


def test_rl_has_no_tree_of_turns(tmp_path: Path) -> None:
    values = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "r.jsonl"},
        "rollout": {"shape": "episodes"},
        "rewards": [{"use": "math.accuracy"}],
    }
    with pytest.raises(RecipeError, match="plays in an environment, whose turns rl samples"):
        load_dict(values, base_dir=tmp_path, where="test")
