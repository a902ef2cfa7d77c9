"""Controllers of a KL coefficient: hand-computed values."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.control.safe import Safe, classify_phase
from posttrain.control.schedules import GrpoD, RemixConvex


def test_grpo_d_coefficient_falls_and_rises() -> None:
    """low 0, high 0.02, turn at 30 of 100: 0.01 at 0, 0.005 at 15, 0 at 30, 0.01 half way up, 0.02 at the end and
    after."""
    controller = GrpoD(total_steps=100)
    state = controller.start(0.5)
    found = [controller.value(state, step) for step in (0, 15, 30, 65, 100, 130)]
    assert found == pytest.approx([0.01, 0.005, 0.0, 0.01, 0.02, 0.02])


def test_grpo_d_without_exploration_only_rises_and_with_nothing_else_only_falls() -> None:
    rises, falls = GrpoD(total_steps=10, explore_frac=0.0), GrpoD(total_steps=10, explore_frac=1.0)
    assert [rises.value({}, step) for step in (0, 5, 10)] == pytest.approx([0.0, 0.01, 0.02])
    assert [falls.value({}, step) for step in (0, 10)] == pytest.approx([0.01, 0.0])


def test_remix_coefficient_moves_linearly_between_its_limits() -> None:
    to_reference, to_old = RemixConvex(), RemixConvex(complement=True)
    states = to_reference.start(0.1), to_old.start(0.1)
    steps = (0, 50, 51, 61, 95, 500)
    assert [to_reference.value(states[0], s) for s in steps] == pytest.approx([0.1, 0.1, 0.09, 0.08, 0.05, 0.05])
    assert [to_old.value(states[1], s) for s in steps] == pytest.approx([0.0, 0.0, 0.01, 0.02, 0.05, 0.05])


def after(controller: Safe, metrics: list[dict[str, float]]) -> dict[str, Any]:
    state = controller.start(0.0)
    for step, values in enumerate(metrics):
        state = controller.update(state, values, step)
    return state


def test_safe_coefficient_is_the_derivative_of_its_penalty() -> None:
    """KL 10 -> kl_short 1; threshold min(0.3 * 1.5, 0.6) = 0.45; entropy 0.4 -> pressure 2 / 0.5 = 4.
    penalty 0.1 * 0.55^2 * 4, coefficient 0.2 * 0.55 * 4."""
    state = after(Safe(), [{"kl": 10.0, "entropy": 0.4, "reward": 0.1}])
    assert (state["kl_short"], state["threshold"]) == pytest.approx((1.0, 0.45))
    assert (state["penalty"], state["coef"]) == pytest.approx((0.1 * 0.55**2 * 4, 0.2 * 0.55 * 4))
    assert Safe().value(state, 1) == state["coef"]


def test_safe_is_zero_below_the_threshold_and_stays_in_range() -> None:
    calm = after(Safe(), [{"kl": 0.1, "entropy": 1.0, "reward": 0.0}] * 3)
    assert (calm["coef"], calm["penalty"]) == (0.0, 0.0)
    for reward in (-100.0, 100.0):
        state = after(Safe(), [{"kl": 0.1, "entropy": 1.0, "reward": r} for r in (0.0, reward, reward)])
        assert 0.1 <= state["threshold"] <= 0.6


def test_safe_follows_the_velocity_of_the_reward() -> None:
    """Rewards 0, 1: ema 0 -> 0.05; err 0.049; integral 0.049; adj = 0.3 * 0.049 + 0.01 * 0.049 + 0.05 * 0.049."""
    state = after(Safe(base=0.1), [{"kl": 0.0, "entropy": 1.0, "reward": r} for r in (0.0, 1.0)])
    assert state["threshold"] == pytest.approx((0.1 + 0.36 * 0.049) * 1.5)


def test_step_without_metrics_changes_nothing() -> None:
    controller = Safe()
    state = after(controller, [{"kl": 10.0, "entropy": 0.4, "reward": 0.1}])
    assert controller.update(state, {"kl": 1.0, "entropy": float("nan"), "reward": 0.0}, 1) == state
    assert controller.update(state, {}, 1) == state


@pytest.mark.parametrize(
    ("rewards", "phase"),
    [
        ([0.5] * 49, "WARMUP"),
        ([0.5] * 50, "PLATEAU"),
        ([0.8] * 50, "CONVERGED"),
        ([0.5] * 50 + [0.52] * 50, "CLIMBING"),
        ([0.8] * 50 + [0.805] * 50, "CONVERGED"),
    ],
)
def test_phases_change_at_their_steps(rewards: list[float], phase: str) -> None:
    assert classify_phase(rewards) == phase
