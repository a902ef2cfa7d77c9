"""Per-task curriculum: number and maximum length of rollouts."""

from __future__ import annotations

import pytest

from posttrain.curriculum.by_task import ByTask, limit_by_success, rollouts_by_rate
from posttrain.curriculum.protocol import Group, Pool, Request
from posttrain.errors import UserError


@pytest.mark.parametrize(("rate", "count"), [(None, 8), (0.0, 8), (0.6, 8), (0.7, 6), (0.8, 4), (0.9, 2), (1.0, 2)])
def test_number_of_rollouts_falls_above_the_threshold(rate: float | None, count: int) -> None:
    """8 * (1 - rate) / 0.4 above 0.6: 6, 4, 2, and 0, which becomes `least`."""
    assert rollouts_by_rate(rate, 8, least=2, above=0.6) == count


@pytest.mark.parametrize(("longest", "limit"), [(None, 100), (10, 20), (21, 32), (90, 100)])
def test_longest_success_limits_later_rollouts(longest: int | None, limit: int) -> None:
    assert limit_by_success(longest, 100, slack=1.5, shortest=20) == limit


def test_task_state_has_newest_rollouts_and_longest_success() -> None:
    sampler = ByTask(window=3, above=0.5, least=1, slack=1.0, shortest=1)
    pool = Pool(["a", "b"], [{}, {}])
    state = sampler.start(pool)
    groups = [
        Group(0, "a", (1, 1, 0, 1), (0.0, 1.0, 1.0, 1.0), lengths=(9, 4, 7, 5)),
        Group(1, "b", (0, None), (0.0, None), lengths=(3, 2)),
    ]
    state = sampler.update(state, groups, pool, step=0, planned=1)
    assert state == {"recent": {"a": [1.0, 1.0, 1.0], "b": [0.0]}, "longest": {"a": 7}}
    plan = sampler.propose(state, Request(1, 9, 2, 4, [1, 0], 0, max_new_tokens=50), pool)
    assert (list(plan.rollouts), list(plan.limits)) == ([4, 1], [50, 7])
    assert sampler.metrics(state) == {"solved_tasks": 1, "success_tokens": 7.0}
    with pytest.raises(UserError, match=r"slack 0\.5"):
        ByTask(slack=0.5)
