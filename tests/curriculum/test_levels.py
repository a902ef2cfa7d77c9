"""Samplers whose levels follow the policy: when a level ends, and how an environment's difficulty moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from posttrain.curriculum.levels import NextLevel, Scaler, estimate_pass_at_k
from posttrain.curriculum.protocol import Group, Pool, Request
from posttrain.errors import UserError


def pool(levels: int = 3, each: int = 10, tasks: Sequence[str] = ("sat",)) -> Pool:
    rows = [{"task": task, "level": level} for task in tasks for level in range(levels) for _ in range(each)]
    return Pool([str(n) for n in range(len(rows))], rows)


def request(prompts: int = 4, step: int = 0, taken: Sequence[int] = ()) -> Request:
    return Request(step=step, total_steps=9, prompts=prompts, group_size=2, stream=[], seed=step, taken=taken)


def group(prompt: int, *correct: float) -> Group:
    return Group(prompt=prompt, uid=str(prompt), rewards=correct, correct=correct)


def levels(plan: Any, of: Pool) -> Counter[int]:
    return Counter(of.rows[n]["level"] for n in plan.prompts)


def test_pass_at_k_is_unbiased() -> None:
    assert estimate_pass_at_k(group(0, 1, 0, 0, 0), 1) == 0.25
    assert estimate_pass_at_k(group(0, 1, 0, 0, 0), 3) == 0.75
    assert estimate_pass_at_k(group(0, 1, 0), 3) == 1.0  # two rollouts: pass@2
    assert estimate_pass_at_k(Group(prompt=0, uid="0", rewards=(1.0,), correct=(None,)), 1) is None


def test_level_ends_when_enough_of_its_newest_problems_are_solved() -> None:
    sampler, of = NextLevel(threshold=0.75, window=4, earlier=0.25), pool()
    state = sampler.start(of)
    assert levels(sampler.propose(state, request(), of), of) == {0: 4}
    state = sampler.update(state, [group(n, 1, 1) for n in range(3)], of, step=0, planned=1)
    assert (state["stage"], len(state["seen"])) == (0, 3)  # not enough results
    state = sampler.update(state, [group(3, 0, 0), group(4, 1, 0)], of, step=1, planned=2)
    assert state["stage"] == 0  # 1, 1, 0, 1/2: below the threshold
    state = sampler.update(state, [group(n, 1, 1) for n in range(4)], of, step=2, planned=3)
    assert (state["stage"], state["seen"]) == (1, [])
    plan = sampler.propose(state, request(step=3), of)
    assert levels(plan, of) == {1: 3, 0: 1}  # a quarter of earlier levels
    before = state
    state = sampler.update(state, [group(0, 1, 1)] * 9, of, step=3, planned=4)
    assert state == before  # problems of another level do not count
    for step in range(4, 7):
        state = sampler.update(state, [group(20 if state["stage"] == 2 else 10, 1, 1)] * 4, of, step=step, planned=9)
    assert state["stage"] == 2  # the last level stays


def test_step_samples_each_problem_once() -> None:
    sampler, of = NextLevel(), pool(each=6)
    plan = sampler.propose(sampler.start(of), request(prompts=4, taken=[0, 1]), of)
    assert len(set(plan.prompts)) == 4
    assert set(plan.prompts) == {2, 3, 4, 5}
    assert sampler.propose(sampler.start(of), request(prompts=4, taken=[0, 1]), of) == plan


def test_difficulty_rises_above_the_target_and_falls_below_it() -> None:
    sampler, of = Scaler(gain=1.0), pool(tasks=("maze", "sat"))
    state = sampler.start(of)
    plan = sampler.propose(state, request(prompts=4), of)
    assert Counter(of.rows[n]["task"] for n in plan.prompts) == {"maze": 2, "sat": 2}
    assert levels(plan, of) == {0: 4}
    sat, maze = [n for n in range(60) if of.rows[n]["task"] == "sat"], list(range(30))
    state = sampler.update(state, [group(sat[0], 1, 1), group(maze[0], 0, 0)], of, step=0, planned=1)
    assert state["d"] == {"maze": 0.0, "sat": 0.5}
    plan = sampler.propose(state, request(prompts=8, step=1), of)
    assert Counter((of.rows[n]["task"], of.rows[n]["level"]) for n in plan.prompts) == {
        ("maze", 0): 4,
        ("sat", 0): 2,
        ("sat", 1): 2,
    }
    # at d 0.5: level 0 all right, level 1 half right -> accuracy 0.75, up by 0.25
    state = sampler.update(state, [group(sat[0], 1, 1), group(sat[10], 1, 0)], of, step=1, planned=2)
    assert state["d"]["sat"] == 0.75
    assert state["history"]["sat"] == [[0.0, 1.0], [0.5, 0.75]]
    assert sampler.metrics(state)["difficulty"] == 0.375


def test_environment_without_success_is_replaced() -> None:
    names = ("a", "b", "c")
    sampler, of = Scaler(active=1, zero_limit=2, history_len=5), pool(tasks=names)
    state = sampler.start(of)
    (first,) = state["active"]
    place = names.index(first) * 30
    state = sampler.update(state, [group(place, 0, 0)], of, step=0, planned=1)
    assert state["active"] == [first]
    state = sampler.update(state, [group(place, 0, 0)], of, step=1, planned=2)
    assert state["active"] != [first]
    assert (state["retired"], state["history"][first]) == (1, [])
    assert sampler.metrics(state)["retired"] == 1.0
    alone = Scaler(active=3, zero_limit=1)
    state = alone.start(of)
    state = alone.update(state, [group(0, 0, 0)], of, step=0, planned=1)
    assert state["active"] == ["a", "b", "c"]  # no environment is waiting


def test_pick_by_weight_samples_waiting_environments() -> None:
    sampler, of = Scaler(pick="weight", active=1, alpha=0.0, beta=1.0, age_scale=10), pool(tasks=("a", "b"))
    state = {**sampler.start(of), "last": {"a": 4}}
    drawn = Counter(
        of.rows[n]["task"]
        for step in range(5, 205)
        for n in sampler.propose({**state, "last": {"a": step - 1}}, request(prompts=1, step=step), of).prompts
    )
    assert drawn["b"] > 150  # weight 1 against 1/10


def test_rows_without_a_level_raise() -> None:
    of = Pool(["0"], [{"prompt": "x"}])
    for sampler in (NextLevel(), Scaler()):
        with pytest.raises(UserError, match="a row has no"):
            sampler.start(of)
    with pytest.raises(UserError, match="threshold"):
        NextLevel(threshold=0).start(pool())
