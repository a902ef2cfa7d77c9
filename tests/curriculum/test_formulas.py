"""Properties of prompt-sampler formulas; their values are in tests/vectors."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from posttrain.curriculum import allocation, difficulty, selection
from posttrain.curriculum.rollback import set_aside
from posttrain.errors import DataError

DRAW = random.Random(0)


@pytest.mark.parametrize(
    ("share", "freedom", "quantile"),
    [
        (0.975, 1, 12.7062047),
        (0.975, 2, 4.3026527),
        (0.975, 3, 3.1824463),
        (0.95, 7, 1.8945786),
        (0.995, 30, 2.7499957),
    ],
)
def test_quantiles_of_students_t(share: float, freedom: int, quantile: float) -> None:
    assert allocation.t_quantile(share, freedom) == pytest.approx(quantile, rel=1e-7)


@pytest.mark.parametrize("case", range(20))
def test_choice_of_arms_equals_brute_force(case: int) -> None:
    """The closest total, and of those the likeliest."""
    draw = random.Random(case)
    arms = list(range(2, 2 + draw.randint(2, 4)))
    counts = {str(b): draw.randint(1, 3) for b in range(draw.randint(1, 3))}
    likely = {b: allocation.arm_probabilities([draw.gauss(0, 1) for _ in arms]) for b in counts}
    budget = draw.randint(1, 30)

    def worth(choice: tuple[int, ...]) -> tuple[float, float]:
        total = sum(counts[b] * arm for b, arm in zip(counts, choice, strict=True))
        logs = sum(math.log(likely[b][arms.index(arm)]) for b, arm in zip(counts, choice, strict=True))
        return (-abs(total - budget), logs)

    best = max(itertools.product(arms, repeat=len(counts)), key=worth)
    assert allocation.choose_arms(arms, likely, counts, budget) == dict(zip(counts, best, strict=True))


@pytest.mark.parametrize("case", range(20))
def test_variance_allocation_equals_brute_force(case: int) -> None:
    draw = random.Random(case)
    rates = [draw.random() for _ in range(3)]
    budget = draw.randint(6, 15)
    found = allocation.allocate_by_variance(rates, budget=budget, least=2, most=6)

    def cost(counts: tuple[int, ...]) -> float:
        return sum(p * (1 - p) / n for p, n in zip(rates, counts, strict=True))

    choices = [c for c in itertools.product(range(2, 7), repeat=3) if sum(c) == min(budget, 18)]
    assert cost(tuple(found)) == pytest.approx(min(map(cost, choices)))
    assert sum(found) == budget
    with pytest.raises(ValueError, match="a budget of 5 rollouts"):
        allocation.allocate_by_variance(rates, budget=5)
    assert allocation.allocate_by_variance([0.0, 1.0, 0.0], budget=10, least=2, most=12) == [4, 3, 3], (
        "evenly where all is 0"
    )


def test_grants_go_to_the_widest_interval_up_to_the_cap() -> None:
    assert allocation.grant_rollouts([4, 4, 4], [0.1, 0.5, 0.3], budget=1, explore=0.0) == [0, 1, 0]
    given = allocation.grant_rollouts([4, 4], [0.5, 0.5], budget=100, most=6)
    assert given == [2, 2], "the rest of the budget is not spent"
    assert allocation.grant_rollouts([1, 4], [0.0, 0.9], budget=1) == [1, 0], "one rollout has no interval"
    assert allocation.grant_rollouts([4, 4], [0.5, 0.1], budget=5, at_once=3) == [3, 2]


def test_bin_changes_only_beyond_the_margin() -> None:
    edges = [0.4, 0.75]
    assert [difficulty.assign_bin(a, edges) for a in (0.0, 0.4, 0.74, 0.75, 1.0)] == [0, 1, 1, 2, 2]
    wobble = [0.42, 0.38, 0.41, 0.39] * 5
    previous = difficulty.assign_bin(wobble[0], edges)
    for estimate in wobble:
        previous = difficulty.assign_bin(estimate, edges, previous=previous, hysteresis=0.05)
    assert previous == 1
    assert difficulty.assign_bin(0.35, edges, previous=1, hysteresis=0.05) == 0
    assert difficulty.assign_bin(0.9, edges, previous=0, hysteresis=0.1) == 2, "by the first edge on the way"
    assert difficulty.assign_bin(1.0, edges, previous=0, exclude_extremes=True) == -1


@pytest.mark.parametrize("beta", [0.05, 0.5, 1.0, 10.0])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 1.0])
def test_divergence_of_the_tilted_policy(rate: float, beta: float) -> None:
    """log sum p0 exp(r/beta) - E[r]/beta, and its limit, the second-order term."""
    bound, exact = difficulty.learnability(rate, beta)
    assert bound == pytest.approx(rate * (1 - rate) / (2 * beta**2))
    assert exact >= -1e-12 and (exact == pytest.approx(bound, rel=0.05, abs=1e-9) if beta == 10 else True)


def test_stages_nest_and_sum_to_one() -> None:
    hardness = [DRAW.random() for _ in range(30)]
    stages = [selection.curriculum_stage(hardness, p, [0.3, 0.6, 1.0], temperature=0.1) for p in (0, 0.4, 0.99, 1)]
    assert [stage.number for stage in stages] == [0, 1, 2, 2]
    for stage, later in itertools.pairwise(stages):
        assert all(a <= b for a, b in zip(stage.allowed, later.allowed, strict=True))
    assert all(sum(stage.probabilities) == pytest.approx(1) for stage in stages)
    nothing = selection.curriculum_stage([0.9, 0.8], 0.0, [0.1, 1.0], temperature=1e-3)
    assert nothing.probabilities == [0.5, 0.5] and not any(nothing.allowed)


def test_sampling_without_replacement_follows_the_weights() -> None:
    draw = random.Random(1)
    first = [selection.draw_weighted([1, 0, 3], 1, draw.random)[0] for _ in range(4000)]
    assert set(first) == {0, 2} and first.count(2) / 4000 == pytest.approx(0.75, abs=0.03)
    assert sorted(selection.draw_weighted([1, 1, 0], 2, draw.random)) == [0, 1]
    assert sorted(selection.draw_weighted([1, 1, 0], 4, draw.random)) == [0, 0, 1, 1], "all are back"


def test_weights_of_bins_average_to_one_and_rise_with_the_loss() -> None:
    bins = [0, 0, 0, 1, 2, 2]
    found = selection.compute_bin_weights(bins, {"0": 0.5, "1": 0.1, "2": 2.0})
    assert sum(found.rows) / 6 == pytest.approx(1)
    assert found.rows[4] > found.rows[0] > found.rows[3]
    assert selection.compute_bin_weights(bins, {}).rows == pytest.approx([1] * 6)
    assert selection.compute_bin_weights([1, 1], {"1": 3.0}).rows == pytest.approx([1, 1])
    assert selection.update_bin_losses({"0": 1.0}, [1, 1], [0.5, 1.5]) == {"0": 1.0, "1": 1.0}


def test_set_aside_prompts_return_once() -> None:
    first = set_aside([0.9, 0.5], ["a", "b"], ["z", "a"], threshold=0.5, interval=3, step=1)
    assert first == ([False, True], ["z", "a"], [])
    back = set_aside([0.9], ["c"], first.buffer, threshold=0.5, interval=3, step=3)
    assert back == ([False], ["c"], ["z", "a"])
    assert set_aside([], [], ["z"], threshold=0.5, interval=3, step=0).reintroduced == []


def test_select_middle_falls_back_to_ranks_for_ties() -> None:
    assert difficulty.select_middle([1.0] * 4) == [False] * 4
    assert difficulty.select_middle([1.0] * 4, min_keep=1) == [True, True, True, False]


def test_lowest_pass_rates_are_selected_and_unknown_rates_raise() -> None:
    rates = {0: 0.5, 1: 0.0, 2: None, 3: 0.0}
    assert selection.select_lowest_pass_rates([0, 1, 3], rates.get, 2) == [1, 3]
    assert selection.select_lowest_pass_rates([0, 1], rates.get, 9) == [1, 0]
    with pytest.raises(DataError, match=r"prompts \[2\] of the pool have no pass rate"):
        selection.select_lowest_pass_rates([1, 2], rates.get, 1)


def test_split_is_a_partition() -> None:
    scores = [1, None, 3, 4.5, float("nan"), 2]
    for middle in ("sft", "rl", "drop"):
        split = selection.split_by_reasoning(scores, middle=middle)
        assert sorted([*split.sft, *split.rl, *split.dropped]) == list(range(6))
        assert {1, 4} <= set(split.dropped)
