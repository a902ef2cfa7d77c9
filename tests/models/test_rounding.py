"""Differences that count as rounding."""

from __future__ import annotations

import pytest
import torch

from posttrain.models.rounding_bounds import logp_tolerance, relative_gap


def test_gap_is_relative_to_the_expected_values() -> None:
    """Differences (0, 1) over (3, 4), whose norm is 5; over (3, 5) it would be 1 / sqrt 34."""
    assert relative_gap(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)


def test_gap_of_incomparable_values_is_infinite() -> None:
    table = torch.ones(2, 3)
    assert relative_gap(table[:, :2], table) == float("inf")
    assert relative_gap(table * float("nan"), table) == float("inf")
    assert relative_gap(torch.zeros(2), torch.zeros(2)) == 0.0


def test_larger_tolerance_for_another_implementation_applies_only_to_float32() -> None:
    own, other = (
        {d: logp_tolerance(d, other_kernels=k) for d in (torch.float32, torch.float16)} for k in (False, True)
    )
    assert own[torch.float32] < other[torch.float32] and own[torch.float16] == other[torch.float16]
    assert logp_tolerance(torch.float64) == own[torch.float32]
