"""Replay buffer of added rows: which rows are sampled and which are stored."""

from __future__ import annotations

import pytest

from posttrain.errors import UserError
from posttrain.replay.buffer import Recent, SelectiveSampleBuffer
from posttrain.replay.protocol import Request, Row


def row(advantage: float, step: int = 0) -> Row:
    return Row("a", step, 0, 0.0, None, 3, advantage)


def at(step: int, seed: int = 0) -> Request:
    return Request(step, 10, seed)


def test_number_of_replayed_rows_equals_rows_without_advantage() -> None:
    """Two of four rows have no advantage, three stored rows have one and are young: two of those, never others."""
    stored = [row(1.0), row(0.0), row(-2.0), row(0.5), row(3.0, step=-2)]
    fresh = [row(0.0, 1), row(1.0, 1), row(-1.0, 1), row(0.0, 1)]
    drawn = [tuple(SelectiveSampleBuffer().add(fresh, stored, at(1, seed))) for seed in range(300)]
    assert set(drawn) == {(0, 2), (0, 3), (2, 3)}
    assert drawn.count((0, 2)) > drawn.count((2, 3)) > drawn.count((0, 3))  # 1 and 2 weigh more than 0.5
    assert SelectiveSampleBuffer(fraction=0.25).add(fresh, stored, at(1)) in ([0], [2], [3])
    assert SelectiveSampleBuffer().add(fresh[1:3], stored, at(1)) == []
    assert SelectiveSampleBuffer().add(fresh, [row(0.0)], at(1)) == []


def test_youngest_rows_with_largest_advantages_are_kept() -> None:
    kept = SelectiveSampleBuffer(capacity=2).store([row(0.1, 1), row(0.0, 1)], [row(5.0), row(6.0)], at(1))
    assert (list(kept.stay), list(kept.join)) == ([1], [0])
    kept = SelectiveSampleBuffer(max_age=1).store([], [row(5.0), row(6.0, 1)], at(2))
    assert list(kept.stay) == [1]


def test_replayed_rows_make_up_their_share() -> None:
    """0.4 of 10 rows are 4 with 6 fresh rows."""
    stored = [*(row(1.0, 0) for _ in range(6)), *(row(1.0, 1) for _ in range(6)), *(row(0.0, 2) for _ in range(6))]
    fresh = [row(1.0, 3)] * 6
    drawn = [Recent().add(fresh, stored, at(3, seed)) for seed in range(50)]
    assert all(len(set(places)) == 4 for places in drawn) and {n for places in drawn for n in places} == {*range(6, 18)}
    assert Recent().add(fresh, [], at(0)) == []
    kept = Recent().store(fresh, stored, at(3))
    assert list(kept.stay) == [*range(12, 18)] and list(kept.join) == [*range(6)]


def test_replay_ends_at_until() -> None:
    """until 3: steps 1 and 2 (0 and 1 from 0) replay, and nothing is stored for step 3."""
    kind, rows = Recent(until=3), [row(1.0)] * 6
    assert kind.add(rows, rows, at(1)) and not kind.add(rows, rows, at(2))
    assert list(kind.store(rows, [], at(0)).join) and not list(kind.store(rows, rows, at(1)).join)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (SelectiveSampleBuffer, {"max_age": 0}),
        (SelectiveSampleBuffer, {"capacity": 0}),
        (SelectiveSampleBuffer, {"fraction": 1.5}),
        (Recent, {"fraction": 1.0}),
        (Recent, {"window": 0}),
        (Recent, {"until": 0}),
    ],
)
def test_invalid_bounds_raise(kind: type, wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        kind(**wrong)


def test_fraction_of_a_step_is_exact() -> None:
    """0.7 * 90 is 62.99999999999999 in floating point."""
    drawn = SelectiveSampleBuffer(fraction=0.7).add([row(0.0, 1)] * 90, [row(1.0)] * 90, at(1))
    assert len(drawn) == 63
