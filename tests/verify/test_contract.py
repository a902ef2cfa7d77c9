"""Allowed and refused return values of rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from posttrain.verify.contract import BrokenContract, check_score, checked_batch


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (None, None),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (torch.tensor(0.25), 0.25),
        ({"reward": 1, "part": None}, {"reward": 1.0, "part": None}),
        ({"reward": None}, {"reward": None}),
    ],
)
def test_allowed_return_values(value: Any, expected: Any) -> None:
    assert check_score(value) == expected


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1", "returned '1' \\(str\\)"),
        ([1.0], "returned \\[1.0\\] \\(list\\)"),
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        (1j, "complex"),
        (np.array([1.0]), "ndarray"),
        (b"1", "bytes"),
        ({}, "without the key `reward`"),
        ({"score": 1}, "without the key `reward`"),
        ({"reward": "1"}, "part `reward`: returned '1'"),
        ({"reward": 1, "length": float("nan")}, "part `length`: returned nan"),
        ({"reward": 1, 2: 1}, "not text"),
        (NoRepr(), "NoRepr"),
    ],
)
def test_refused_return_values(value: Any, message: str) -> None:
    with pytest.raises(BrokenContract, match=message):
        check_score(value)


def test_list_form_must_return_a_list_of_one() -> None:
    assert checked_batch([0.5], 1) == [0.5]
    assert checked_batch((None,), 1) == [None]
    for value in (0.5, [1.0, 2.0], [], "1"):
        with pytest.raises(BrokenContract, match="must return a list of one number"):
            checked_batch(value, 1)


def test_batch_must_return_one_score_per_completion() -> None:
    assert checked_batch([1, {"reward": 2, "part": None}, None], 3) == [1.0, {"reward": 2.0, "part": None}, None]
    for value, length in ((0.5, ""), ([1.0, 2.0], ", 2 scores,"), ([1.0] * 4, ", 4 scores,"), ("123", "")):
        with pytest.raises(BrokenContract, match=f"{length} for 3 completions, must return a list of 3"):
            checked_batch(value, 3)
    with pytest.raises(BrokenContract, match=r"must return a finite number or None \(entry 1 of the list\)"):
        checked_batch([1.0, float("nan")], 2)


@pytest.mark.parametrize("value", [1e39, -1e308, 10**400, {"reward": 1.0, "part": 1e39}])
def test_number_beyond_float32_is_refused(value: Any) -> None:
    """As an infinite reward it would make every advantage of its group NaN."""
    with pytest.raises(BrokenContract, match=r"must return a (finite number|number within)"):
        check_score(value)
    assert check_score(3e38) == 3e38


def test_long_value_is_truncated_in_the_message() -> None:
    with pytest.raises(BrokenContract) as caught:
        check_score("x" * 100_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("count", [1, 3])
def test_list_reward_without_a_return_is_reported(count: int) -> None:
    with pytest.raises(BrokenContract, match=r"returned None for .*a missing `return`\?"):
        checked_batch(None, count)
    with pytest.raises(BrokenContract) as other:
        checked_batch(1.0, count)
    assert "missing" not in str(other.value)
