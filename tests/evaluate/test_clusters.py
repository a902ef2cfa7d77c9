"""k-means by hand."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.evaluate.clusters import k_means, run_lloyd


def test_two_clusters() -> None:
    """0, 2 and 10, 14 on a line: centers 1 and 12, squared distances 1, 1, 4, 4."""
    points = np.array([[0.0], [2.0], [10.0], [14.0]])
    for seed in range(5):
        found = k_means(points, 2, seed=seed)
        assert sorted(found.centers[:, 0]) == [1.0, 12.0] and found.spread == 2.5
        assert found.labels[0] == found.labels[1] != found.labels[2] == found.labels[3]
    assert k_means(points, 1).centers.tolist() == [[6.5]]


def test_lloyd_iterations_by_hand() -> None:
    """From the centers 0 and 2: the second takes 2, 10, 14 and moves to 26/3; then 2 moves to the first (0 + 2) / 2."""
    points = np.array([[0.0], [2.0], [10.0], [14.0]])
    assert run_lloyd(points, points[:2], 1).centers[:, 0].tolist() == pytest.approx([0.0, 26 / 3])
    assert run_lloyd(points, points[:2], 9).centers[:, 0].tolist() == [1.0, 12.0]


def test_fewer_points_than_clusters() -> None:
    found = k_means(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), 5)
    assert len(found.centers) == 2 and found.spread == 0.0
    with pytest.raises(ValueError, match="0 points"):
        k_means(np.zeros((0, 2)), 2)
