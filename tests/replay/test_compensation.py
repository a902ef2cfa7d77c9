"""Compensation batches of left-out rows: when a batch is full, and how likely it is trained on."""

from __future__ import annotations

import pytest

from posttrain.errors import UserError
from posttrain.replay.compensation import Compensation
from posttrain.replay.protocol import Request, Row


def row(left_out: float = 0.0, step: int = 0, advantage: float = 0.0) -> Row:
    return Row("a", step, 0, 0.0, None, 3, advantage, left_out)


def at(step: int, seed: int = 0) -> Request:
    return Request(step, 10, seed)


def test_left_out_rows_with_an_advantage_are_stored() -> None:
    fresh = [row(0.5), row(0.0), row(-1.0), row(advantage=2.0)]
    kept = Compensation().store(fresh, [row()] * 3, at(0))
    assert (list(kept.stay), list(kept.join)) == ([0, 1, 2], [0, 2])


def test_oldest_rows_leave_the_store_once_a_batch_is_full() -> None:
    """Of five stored rows the first four form a batch, as many as the step has fresh rows; they leave whether the batch
    was chosen for training or not."""
    kind, fresh, stored = Compensation(p_end=1.0), [row()] * 4, [row()] * 5
    assert kind.train_apart(fresh, stored[:3], at(1)) == []
    assert kind.train_apart(fresh, stored, at(1)) == [0, 1, 2, 3]
    assert list(kind.store(fresh, stored, at(1)).stay) == [4]
    assert list(kind.store(fresh, stored[:3], at(1)).stay) == [0, 1, 2]
    never = Compensation(p_start=0.0)
    assert never.train_apart(fresh, stored, at(1)) == [] and list(never.store(fresh, stored, at(1)).stay) == [4]
    assert Compensation(size=2, p_end=1.0).train_apart(fresh, stored, at(1)) == [0, 1]


def test_too_old_rows_are_in_no_batch() -> None:
    """max_age 2 in step 3: rows of steps 1 and 2 stay."""
    kind, stored = Compensation(size=2, max_age=2, p_end=1.0), [row(step=0), row(step=1), row(step=0), row(step=2)]
    assert kind.train_apart([], stored, at(3)) == [1, 3]
    assert list(Compensation(size=3, max_age=2).store([], stored, at(3)).stay) == [1, 3]


def test_probability_follows_a_cosine() -> None:
    """1 at step 0, 0.2 + 0.8 / 2 in the middle, 0.2 at the end; 600 samples at the middle."""
    kind = Compensation(size=1, p_start=1.0, p_end=0.2)
    assert [kind.probability(step, 10) for step in (0, 5, 10)] == pytest.approx([1.0, 0.6, 0.2])
    drawn = sum(bool(kind.train_apart([], [row()], at(5, seed))) for seed in range(600))
    assert drawn / 600 == pytest.approx(0.6, abs=0.07)


@pytest.mark.parametrize("wrong", [{"size": 0}, {"max_age": 0}, {"p_start": 1.1}, {"p_end": -0.1}])
def test_invalid_numbers_raise(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Compensation(**wrong)  # type: ignore[arg-type]
