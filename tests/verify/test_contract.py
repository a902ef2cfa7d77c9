"""What a reward may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from posttrain.verify.contract import BrokenContract, checked


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
        ({"reward": 1, "part": None}, {"reward": 1.0, "part": None}),
        ({"reward": None}, {"reward": None}),
    ],
)
def test_allowed(value: Any, expected: Any) -> None:
    assert checked(value) == expected


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
def test_refused(value: Any, message: str) -> None:
    with pytest.raises(BrokenContract, match=message):
        checked(value)


def test_a_list_form_must_return_a_list_of_one() -> None:
    assert checked([0.5], batched=True) == 0.5
    assert checked([None], batched=True) is None
    for value in (0.5, [1.0, 2.0], [], "1"):
        with pytest.raises(BrokenContract, match="must return a list of one number"):
            checked(value, batched=True)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(BrokenContract) as caught:
        checked("x" * 100_000)
    assert len(str(caught.value)) < 300
