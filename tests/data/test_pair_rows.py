"""Preference rows from graded completions."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.data.pair_rows import pair_rows
from posttrain.errors import DataError

SOURCES = {"1": {"uid": "1", "prompt": "1+1", "answer": "2"}, "2": {"uid": "2", "prompt": "2+2", "answer": "4"}}


def record(uid: str, completion: str, reward: float | None, **changes: Any) -> dict[str, Any]:
    graded = {"reward": reward, "correct": None if reward is None else reward > 0}
    return {"uid": uid, "completion": completion, "finish": "stop", "tokens": len(completion), **graded, **changes}


GRADED = [record("1", "2", 1), record("1", "two", 1), record("1", "3", 0), record("1", "?", None), record("2", "4", 1)]


def test_right_over_wrong_rows() -> None:
    """Two pairs of prompt 1, closest in length first; win rates among rewards 1, 1, 0: (1/2 + 1/2 + s(1)) / 3."""
    found = pair_rows(SOURCES, GRADED)
    assert [(r["prompt"], r["chosen"], r["rejected"]) for r in found.rows] == [("1+1", "2", "3"), ("1+1", "two", "3")]
    first = found.rows[0]
    assert (first["answer"], first["chosen_score"], first["rejected_score"]) == ("2", 1, 0)
    assert first["chosen_win"] == pytest.approx((1 + 0.7310585786) / 3)
    assert "uid" not in first
    assert found.dropped == {"prompts: no wrong answer": ["2"]}
    assert found.longer_chosen == 0.5


def test_rows_of_other_builders() -> None:
    assert [(r["chosen"], r["rejected"]) for r in pair_rows(SOURCES, GRADED, "short_long").rows] == [("2", "two")]
    rows = [*GRADED, record("2", "44", 0.5), record("2", "444", -1, finish="length")]
    found = pair_rows(SOURCES, rows, "best_worst").rows
    assert [(r["chosen"], r["rejected"]) for r in found] == [("2", "3"), ("4", "44")]


def test_pair_rules() -> None:
    """A repeated completion gives no second pair; earlier rounds count; lengths are balanced."""
    rows = [*GRADED, record("1", "3 ", 0)]
    again = pair_rows(SOURCES, rows)
    assert [(r["chosen"], r["rejected"]) for r in again.rows] == [("2", "3"), ("two", "3")]
    assert "pairs: repeated" not in again.dropped
    earlier = [{"prompt": "1+1", "chosen": "2", "rejected": "3"}]
    later = pair_rows(SOURCES, GRADED, earlier=earlier)
    assert [r["chosen"] for r in later.rows] == ["two"] and later.dropped["pairs: repeated"] == ["1"]
    balanced = pair_rows(SOURCES, GRADED, balance_lengths=True)
    assert [r["chosen"] for r in balanced.rows] == ["2"]
    assert balanced.dropped["pairs: left out to balance lengths"] == ["1"]


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (GRADED[4:], r"no pair is left: prompts: no wrong answer: 1 \(row 2\)"),
        ([{"uid": "1", "completion": "2", "finish": "stop", "tokens": 1}], "needs `correct`"),
        ([record("9", "2", 1)], "no row `9`"),
    ],
)
def test_completions_that_give_no_pairs(records: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        pair_rows(SOURCES, records)
