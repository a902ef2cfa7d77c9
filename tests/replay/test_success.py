"""`success` replay: which groups get a stored success, and what is stored."""

from __future__ import annotations

import pytest

from posttrain.errors import UserError
from posttrain.replay.protocol import Request, Row
from posttrain.replay.success import Success, find_oldest, has_failed


def row(uid: str, reward: float | None, group: int = 0, step: int = 0) -> Row:
    return Row(uid, step, group, reward, None, 3)


def at(step: int, seed: int = 0) -> Request:
    return Request(step, 10, seed)


def test_group_fails_if_its_rewards_are_low_and_equal() -> None:
    """A constant 0.1 fails; a constant 0.3 is above the mean limit, and one success of four has a std of 0.43."""
    assert has_failed([0.1] * 4) and has_failed([0.0, None, 0.0])
    assert not has_failed([0.3] * 4) and not has_failed([0, 0, 0, 1]) and not has_failed([None, None])


def test_only_failed_groups_get_successes_of_their_prompt() -> None:
    fresh = [row("a", 0, 0), row("a", 0, 0), row("b", 0, 1), row("b", 1, 1), row("c", 0, 2), row("c", 0, 2)]
    stored = [row("b", 1), row("a", 1), row("d", 1)]
    assert Success().replace(fresh, stored, at(1)) == {0: 1}


def test_choice_of_success_is_uniform_and_seeded() -> None:
    """Each of four stored successes is chosen in a quarter of 400 steps, up to 5 standard deviations (43)."""
    fresh, stored = [row("a", 0), row("a", 0)], [row("a", 1)] * 4
    drawn = [Success().replace(fresh, stored, at(1, seed))[0] for seed in range(400)]
    assert all(abs(drawn.count(n) - 100) < 43 for n in range(4))
    assert drawn == [Success().replace(fresh, stored, at(1, seed))[0] for seed in range(400)]


def test_newest_successes_of_a_prompt_are_kept() -> None:
    stored = [row("a", 1), row("b", 1), row("a", 1)]
    fresh = [row("a", 1), row("a", 0.1), row("a", None), row("b", 0.5)]
    kept = Success(capacity=2).store(fresh, stored, at(1))
    assert (list(kept.stay), list(kept.join)) == ([1, 2], [0, 3])
    assert find_oldest(["a", "b", "a", "a"], 1) == {0, 2}


def test_old_successes_are_neither_sampled_nor_kept() -> None:
    stored, kind = [row("a", 1, step=0), row("a", 1, step=2)], Success(max_age=2)
    fresh = [row("a", 0), row("a", 0)]
    assert {kind.replace(fresh, stored, at(3, seed))[0] for seed in range(20)} == {1}
    assert list(kind.store([], stored, at(3)).stay) == [1]
    assert kind.replace(fresh, stored[:1], at(3)) == {}


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"max_age": 0}])
def test_invalid_bounds_raise(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Success(**wrong)
