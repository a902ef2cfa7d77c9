"""reasoning-gym rows: seeded, and different for neighbouring seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.rows import load_rows
from posttrain.errors import DataError
from posttrain.recipe.sections import Data


def rows(**keys: object) -> list[dict[str, object]]:
    return load_rows(Data(**{"source": "gym:basic_arithmetic", "size": 20, **keys}), Path.cwd())  # type: ignore[arg-type]


def test_row_contains_the_whole_entry_for_its_verifier() -> None:
    row = rows(size=1)[0]
    entry = json.loads(str(row["gym_entry"]))
    assert (row["prompt"], row["answer"], row["gym_task"]) == (entry["question"], entry["answer"], "basic_arithmetic")


def test_equal_seeds_give_equal_rows_and_adjacent_seeds_share_none() -> None:
    """reasoning-gym itself generates item i from seed + i: its seeds 0 and 1 share all items but one."""
    assert rows(seed=3) == rows(seed=3)
    first, second = ({r["prompt"] for r in rows(seed=s)} for s in (0, 1))
    assert len(first & second) <= 1


def test_skip_drops_the_first_rows_of_the_same_stream() -> None:
    assert [r["uid"] for r in rows(size=5, skip=15)] == [r["uid"] for r in rows(size=20)][15:]


def test_params_reach_the_task_and_unknown_ones_are_reported() -> None:
    found = rows(params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert max(len(str(r["prompt"])) for r in found) < 40
    with pytest.raises(DataError, match="has no parameter max_term") as error:
        rows(params={"max_term": 2})
    assert "did you mean `max_terms`?" in str(error.value)
    with pytest.raises(DataError, match="refuses its parameters"):
        rows(params={"min_terms": -1})


def test_unknown_task_gets_a_suggestion() -> None:
    with pytest.raises(DataError, match="no task basic_arithmetics") as error:
        rows(source="gym:basic_arithmetics")
    assert "did you mean `gym:basic_arithmetic`?" in str(error.value)
    with pytest.raises(DataError, match="give `size`"):
        rows(size=None)


def test_mixture_of_tasks() -> None:
    with pytest.raises(DataError, match="mixture of tasks"):
        load_rows(Data(source="gym:composite", size=2), Path.cwd())  # type: ignore[arg-type]


def test_levels_come_from_the_curriculum_of_the_task() -> None:
    found = rows(source="gym:chain_sum", size=30, params={"levels": [0, 3], "shares": [2, 1]})
    assert [row["level"] for row in found].count(0) == 20
    assert {row["task"] for row in found} == {"gym:chain_sum"}
    terms: dict[Any, set[int]] = {0: set(), 3: set()}
    for row in found:
        terms[row["level"]].add(str(row["prompt"]).count(" + ") + str(row["prompt"]).count(" - "))
    assert terms[0] == {1}
    assert max(terms[3]) == 4
    assert {row["gym_params"] for row in found if row["level"] == 3} == {
        '{"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 4}'
    }
    assert len({row["prompt"] for row in found}) > 25


def test_levels_missing_from_a_curriculum_are_reported() -> None:
    with pytest.raises(DataError, match="no level 11"):
        rows(source="gym:chain_sum", params={"levels": [11]})
    with pytest.raises(DataError, match="no curriculum"):
        rows(source="gym:list_functions", params={"levels": [0]})
    with pytest.raises(DataError, match="min_terms is set by `levels`"):
        rows(source="gym:chain_sum", params={"levels": [0], "min_terms": 2})


def test_every_curriculum_of_reasoning_gym_has_valid_levels() -> None:
    """A level that the task itself refuses is reported; every curriculum can be used."""
    from reasoning_gym.factory import CURRICULA

    from posttrain.data import gym

    refused: dict[str, list[int]] = {}
    for task in CURRICULA:
        for level in range(3):
            try:
                gym.check(task, {"levels": [level]})
            except DataError as error:
                assert "refuses its parameters" in str(error) or "has no level" in str(error)
                refused.setdefault(task, []).append(level)
    assert len(CURRICULA) > 90
    broken = [task for task, levels in refused.items() if len(levels) == 3]
    assert set(broken) <= {"knight_swap"}  # whose curriculum begins with 4 nodes although its task needs 6
