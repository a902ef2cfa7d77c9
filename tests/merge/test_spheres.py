"""Rules that interpolate directions and lengths apart, on vectors whose angles are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posttrain.errors import MergeError
from posttrain.merge.spheres import karcher, multislerp, nuslerp

HALF = math.sqrt(0.5)


def t(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Tensor, *expected: object) -> bool:
    return found.shape == t(*expected).shape and torch.allclose(found, t(*expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1, 1], (HALF, HALF)),
        ([3, 1], (math.sin(math.radians(67.5)), math.sin(math.radians(22.5)))),  # t = 1/4 of a right angle
        ([0.3, 0.1], (math.sin(math.radians(67.5)), math.sin(math.radians(22.5)))),
        ([1, 0], (1, 0)),
        ([-1, 1], (HALF, HALF)),  # cancel: t = 1/2
    ],
)
def test_nuslerp_goes_along_the_circle_by_the_weights(weights: list[float], expected: tuple[float, float]) -> None:
    assert close(nuslerp([t(1, 0), t(0, 1)], None, weights), *expected)


def test_nuslerp_of_whole_tensors_rows_and_columns() -> None:
    """Rows: (1, 0) and (0, 1) at right angles, (2, 0) and (4, 0) parallel. Columns: (1, 2) and (0, 4); 0 and (1, 0)."""
    x, y = t([1, 0], [2, 0]), t([0, 1], [4, 0])
    assert close(nuslerp([x, y], None, [1, 1], nuslerp_flatten=False), [HALF, HALF], [3, 0])
    columns = nuslerp([x, y], None, [1, 1], nuslerp_flatten=False, nuslerp_row_wise=True)
    share = 0.5 / math.cos(math.acos(2 / math.sqrt(5)) / 2)  # sin(angle / 2) / sin(angle)
    assert close(columns, [share * 1, HALF], [share * 6, 0])
    share = 0.5 / math.cos(math.acos(8 / math.sqrt(5 * 17)) / 2)
    assert close(nuslerp([x, y], None, [1, 1]), [share * 1, share * 1], [share * 6, 0])


def test_nuslerp_from_a_base_interpolates_the_differences() -> None:
    assert close(nuslerp([t(6, 5), t(5, 7)], t(5, 5), [1, 1]), 5 + HALF, 5 + 2 * HALF)
    assert close(nuslerp([t(5, 5), t(5, 7)], t(5, 5), [1, 1]), 5, 5 + 2 * HALF)  # no difference is orthogonal to all


@pytest.mark.parametrize(
    ("weights", "direction"), [([1, 1], (HALF, HALF)), ([3, 1], (3 / math.sqrt(10), 1 / math.sqrt(10)))]
)
def test_multislerp_has_the_mean_direction_and_the_mean_length(
    weights: list[float], direction: tuple[float, float]
) -> None:
    """Lengths 2 and 4."""
    length = (2 * weights[0] + 4 * weights[1]) / sum(weights)
    assert close(multislerp([t(2, 0), t(0, 4)], None, weights), *(length * x for x in direction))
    assert close(multislerp([t(3, 1), t(1, 5)], t(1, 1), weights), *(1 + length * x for x in direction))


def test_multislerp_without_normalised_weights_and_of_vectors_that_cancel() -> None:
    assert close(multislerp([t(2, 0), t(4, 0)], None, [1, 1], normalize_weights=False), 6, 0)
    assert close(multislerp([t(2, 0), t(-4, 0)], None, [1, 1]), -1, 0)
    assert close(multislerp([t(2, 7)], None, [5]), 2, 7)
    assert close(multislerp([t(1, 1), t(1, 1), t(1, 1)], t(1, 1), [1, 1, 1]), 1, 1)
    with pytest.raises(MergeError, match="cancel"):
        multislerp([t(2, 0), t(-1, math.sqrt(3)), t(-1, -math.sqrt(3))], None, [1, 1, 1])


def test_karcher_is_the_mean_angle_at_the_mean_length() -> None:
    """Angles 0, 0 and 90 degrees: 30. Lengths 1, 1 and 4: 2."""
    assert close(karcher([t(1, 0), t(1, 0), t(0, 4)], None, []), 2 * math.cos(math.pi / 6), 1)
    started = karcher([t(1, 0), t(1, 0), t(0, 4)], None, [], tol=10.0)  # no direction is long enough
    assert close(started, 0, 0)
    assert close(karcher([t(3, 4)], None, []), 3, 4)
    assert close(karcher([t(0, 0), t(3, 4)], None, []), 1.5, 2)  # zeros have no direction, and count for the length


def test_karcher_steps_until_the_angles_cancel() -> None:
    """Three points on the sphere: at the mean the angles to all sum to 0."""
    points = [t(1, 0, 0), t(0, 1, 0), t(0.6, 0, 0.8)]
    mean = karcher(points, None, [], max_iter=50, tol=1e-12)
    angles = [math.acos(float(mean @ p)) for p in points]
    pull = sum(angle / math.sin(angle) * (p - math.cos(angle) * mean) for angle, p in zip(angles, points, strict=True))
    assert pull.abs().max() < 1e-9
    near = karcher(points, None, [], max_iter=1)
    assert 1e-6 < float((near - mean).norm()) < 0.05
