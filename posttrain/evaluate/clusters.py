"""k-means clustering with k-means++ initialization."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]


class Clusters(NamedTuple):
    """Result of k-means.

    labels [n]: the cluster of each point. centers [k, d]: the cluster means. spread: mean squared distance of a point
    to its center.
    """

    labels: NDArray[np.int64]
    centers: Points
    spread: float


def k_means(points: Points, k: int, *, seed: int = 0, starts: int = 4, iterations: int = 100) -> Clusters:
    """Cluster points [n, d] and return the best of several starts (Lloyd 1982; Arthur and Vassilvitskii 2007).

    Returns as many clusters as there are distinct points, at most k. A start ends when no label changes, or after
    `iterations`. Raises ValueError without a point or with k below 1.
    """
    if not len(points) or k < 1:
        raise ValueError(f"k-means of {len(points)} points with k = {k}")
    points = np.asarray(points, dtype=np.float64)
    k = min(k, len(np.unique(points, axis=0)))
    rng = np.random.default_rng(seed)
    clusterings = [run_lloyd(points, choose_initial_centers(points, k, rng), iterations) for _ in range(starts)]
    return min(clusterings, key=lambda clustering: clustering.spread)


def choose_initial_centers(points: Points, k: int, rng: np.random.Generator) -> Points:
    """Choose k of the points as initial centers (k-means++).

    The first is random, each next one with probability proportional to its squared distance from the nearest chosen
    one.
    """
    chosen = [int(rng.integers(len(points)))]
    while len(chosen) < k:
        nearest = squared_distances(points, points[chosen]).min(axis=1)
        chosen.append(int(rng.choice(len(points), p=nearest / nearest.sum())))
    return points[chosen]


def run_lloyd(points: Points, centers: Points, iterations: int) -> Clusters:
    """Assign points to their nearest center and move centers to their means until no label changes (Lloyd's algorithm).

    A center that has lost all its points stays in place.
    """
    labels = squared_distances(points, centers).argmin(axis=1)
    for _ in range(iterations):
        means = [points[labels == c].mean(axis=0) if (labels == c).any() else centers[c] for c in range(len(centers))]
        centers = np.stack(means)
        moved = squared_distances(points, centers).argmin(axis=1)
        if (moved == labels).all():
            break
        labels = moved
    spread = float(squared_distances(points, centers)[np.arange(len(points)), labels].mean())
    return Clusters(labels, centers, spread)


def squared_distances(points: Points, centers: Points) -> Points:
    """Compute squared distances [n, k] between points [n, d] and centers [k, d]."""
    found: Points = ((points[:, None, :] - centers[None, :, :]) ** 2).sum(axis=2)
    return found
