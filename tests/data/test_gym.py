"""reasoning-gym rows: seeded, and different for neighbouring seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.data.rows import load_rows
from posttrain.errors import DataError
from posttrain.recipe.sections import Data


def rows(**keys: object) -> list[dict[str, object]]:
    return load_rows(Data(**{"source": "gym:basic_arithmetic", "size": 20, **keys}), Path.cwd())  # type: ignore[arg-type]


def test_a_row_carries_the_whole_entry_for_its_verifier() -> None:
    row = rows(size=1)[0]
    entry = json.loads(str(row["gym_entry"]))
    assert (row["prompt"], row["answer"], row["gym_task"]) == (entry["question"], entry["answer"], "basic_arithmetic")


def test_equal_seeds_are_equal_and_neighbouring_seeds_share_nothing() -> None:
    """reasoning-gym itself draws item i from seed + i: its seeds 0 and 1 share all items but one."""
    assert rows(seed=3) == rows(seed=3)
    first, second = ({r["prompt"] for r in rows(seed=s)} for s in (0, 1))
    assert len(first & second) <= 1


def test_skip_leaves_out_the_first_rows_of_the_same_stream() -> None:
    assert [r["uid"] for r in rows(size=5, skip=15)] == [r["uid"] for r in rows(size=20)][15:]


def test_params_reach_the_task_and_unknown_ones_are_told() -> None:
    found = rows(params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    assert max(len(str(r["prompt"])) for r in found) < 40
    with pytest.raises(DataError, match="has no parameter max_term") as error:
        rows(params={"max_term": 2})
    assert "did you mean `max_terms`?" in str(error.value)
    with pytest.raises(DataError, match="refuses its parameters"):
        rows(params={"min_terms": -1})


def test_an_unknown_task_suggests() -> None:
    with pytest.raises(DataError, match="no task basic_arithmetics") as error:
        rows(source="gym:basic_arithmetics")
    assert "did you mean `gym:basic_arithmetic`?" in str(error.value)
    with pytest.raises(DataError, match="give `size`"):
        rows(size=None)


def test_a_mixture_is_written_as_one() -> None:
    with pytest.raises(DataError, match="mixture of tasks"):
        load_rows(Data(source="gym:composite", size=2), Path.cwd())  # type: ignore[arg-type]
