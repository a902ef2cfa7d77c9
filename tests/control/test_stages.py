"""Step-dependent numbers, and DECS's share of solved prompts."""

from __future__ import annotations

import pytest

from posttrain.control.stages import Cosine, Redundancy, Stages
from posttrain.errors import UserError


def test_stages_end_before_their_step() -> None:
    stages = Stages(values=(4096, 8192, 16384), until=(100, 200))
    state = stages.start(512)
    assert [stages.value(state, step) for step in (0, 99, 100, 199, 200, 10**6)] == [4096] * 2 + [8192] * 2 + [
        16384
    ] * 2
    assert stages.update(state, {}, 0) == state


@pytest.mark.parametrize(("values", "until"), [((1.0,), (5,)), ((1.0, 2.0, 3.0), (5, 5)), ((1.0, 2.0, 3.0), (9, 5))])
def test_overlapping_stages_are_refused(values: tuple[float, ...], until: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="stages with"):
        Stages(values=values, until=until).start(0.0)


def test_cosine_schedule() -> None:
    cosine = Cosine(total_steps=4, high=3.0, low=1.0)
    assert [cosine.value({}, step) for step in (0, 2, 4, 9)] == pytest.approx([3, 2, 1, 1])
    assert Cosine(total_steps=1).value(cosine.start(0.0), 0) == 1.0


def test_kappa_follows_the_change_of_the_ratio() -> None:
    """beta 1/2: no change at the first step; 0.4 -> 0.6 adds 0.1; a step without a right answer changes nothing; 0.6 ->
    0.9 would give 0.25 and is limited to the share of solved prompts, 0.2; a fall cannot go below 0."""
    redundancy = Redundancy(beta=0.5, necessary="r", solved="s")
    state = redundancy.start(0.0)
    seen = []
    for ratio in (None, 0.4, 0.6, None, 0.9, 0.1):
        state = redundancy.update(state, {"r": ratio, "s": 0.2}, 0)
        seen.append(redundancy.value(state, 0))
    assert seen == pytest.approx([0, 0, 0.1, 0.1, 0.2, 0])
