"""Refilling of groups dropped by `keep`."""

from __future__ import annotations

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.errors import RunError
from posttrain.train.dynamic_sampling import HINTS, classify_group
from tests.preset_objectives import preset_objective


def batch(correct: list[float], groups: list[int]) -> RolloutBatch:
    metric = torch.tensor(correct, dtype=torch.float64)
    mask = torch.ones(len(groups), 1, dtype=torch.bool)
    return RolloutBatch(group_ids=torch.tensor(groups), mask=mask, rewards=metric, correct=metric)


def test_groups_are_collected_until_the_target() -> None:
    """Group 1 of the first batch and 2 of the second have mixed rewards; of 4 and 5 only the first is still needed."""
    buffer = preset_objective("dapo").sampling_buffer(3, 5)
    assert buffer.add(batch([1, 1, 0, 1], [0, 0, 1, 1])) == {1}
    assert not buffer.full
    assert buffer.add(batch([1, 0, 0, 0], [2, 2, 3, 3])) == {2}
    assert buffer.add(batch([1, 0, 0, 1], [4, 4, 5, 5])) == {4}
    assert (buffer.full, buffer.batches) == (True, 3)


def test_too_few_groups_raise_with_counts() -> None:
    buffer = preset_objective("dapo").sampling_buffer(2, 2)
    buffer.add(batch([1, 0, 0, 0], [0, 0, 1, 1]))
    with pytest.raises(RunError, match="only 1 of 2 groups passed `keep` in 2 generation batches") as told:
        buffer.add(batch([0, 0, 1, 1], [2, 2, 3, 3]))
    assert "of those that did not pass, 2 had no right answer, 1 had only right answers" in str(told.value)
    assert "hint: warm up with SFT" in str(told.value)


def test_too_few_prompts_of_a_sampler_raise_although_every_group_has_passed() -> None:
    buffer = preset_objective("dapo").sampling_buffer(3, 2)
    buffer.add(batch([1, 0], [0, 0]))
    with pytest.raises(RunError, match="only 2 of 3 groups passed `keep` in 2 generation batches") as told:
        buffer.add(batch([0, 1], [1, 1]))
    assert "all passed: the sampler named too few prompts" in str(told.value)
    assert "hint: use more prompts" in str(told.value)


@pytest.mark.parametrize(
    ("correct", "found"),
    [
        ([0.0, 0.0], "no right answer"),
        ([1.0, 1.0], "only right answers"),
        ([1.0, float("nan")], "only right answers"),
        ([0.0, 1.0], "right and wrong answers"),
        ([float("nan")] * 2, "answers that could not be scored"),
    ],
)
def test_reasons_of_dropped_groups_are_counted(correct: list[float], found: str) -> None:
    assert classify_group(batch([1.0, *correct], [0, 1, 1]), 1) == found and found in HINTS


@pytest.mark.parametrize(("name", "max_batches"), [("dapo", 1), ("grpo", 10)])
def test_one_batch_is_enough_without_refilling(name: str, max_batches: int) -> None:
    """All groups are taken; those that `keep` drops are dropped from the loss later."""
    buffer = preset_objective(name).sampling_buffer(2, max_batches)
    assert not buffer.full
    assert buffer.add(batch([1, 1, 0, 1], [7, 7, 4, 4])) == {7, 4}
    assert (buffer.full, buffer.batches) == (True, 1)
