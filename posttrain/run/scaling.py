"""Scaling fit: a sigmoid of RL returns over steps, rollouts or data, fitted to measured points.

The form is the usual one of RL scaling fits; the paper on content moderation (arXiv 2512.20061) gives none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from posttrain.errors import UserError

FEWEST = 5  # minimum number of points for a fit
RESAMPLES = 200


class Fit(NamedTuple):
    """Fitted asymptote A, slope and midpoint of `scaling_curve`; interval: 95 % of A, by resampling residuals; rmse."""

    start: float
    asymptote: float
    slope: float
    midpoint: float
    interval: tuple[float, float]
    rmse: float


def scaling_curve(
    x: Sequence[float], *, r0: float = 0.0, asymptote: float = 1.0, slope: float = 1.0, midpoint: float = 1.0
) -> list[float]:
    """Return r0 + (asymptote - r0) / (1 + (midpoint / x)^slope) at each x > 0; half of the rise is reached at the
    midpoint."""
    return [r0 + (asymptote - r0) / (1 + (midpoint / value) ** slope) for value in x]


def fit_scaling(x: Sequence[float], y: Sequence[float], r0: float, *, top: float = 1.0, seed: int = 0) -> Fit:
    """Fit the curve to points (x > 0, y) by least squares, with r0 < asymptote <= top, slope and midpoint above 0.

    For a given slope and midpoint the asymptote is linear: a grid over the two is refined around its best point. Raises
    UserError for fewer than 5 points, and for x that are not above 0.
    """
    if len(x) < FEWEST or min(x) <= 0:
        raise UserError(f"a scaling fit needs {FEWEST} points with x above 0", allowed=f"there are {len(x)}")
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    asymptote, slope, midpoint = _best(xs, ys, r0, top)
    curve = np.asarray(scaling_curve(x, r0=r0, asymptote=asymptote, slope=slope, midpoint=midpoint))
    residuals, draw = ys - curve, np.random.default_rng(seed)
    midpoints = [_best(xs, curve + draw.choice(residuals, len(residuals)), r0, top)[0] for _ in range(RESAMPLES)]
    low, high = (float(q) for q in np.quantile(midpoints, [0.025, 0.975]))
    return Fit(r0, asymptote, slope, midpoint, (low, high), float(np.sqrt(np.mean(residuals**2))))


def _best(x: np.ndarray, y: np.ndarray, r0: float, top: float) -> tuple[float, float, float]:
    """Return (asymptote, slope, midpoint) with the least squared error."""
    middles = np.log(x.min()), np.log(x.max()) + np.log(10)
    slopes = np.log(0.1), np.log(10.0)
    best = (r0, 1.0, 1.0)
    for _ in range(6):  # each round refines the grid around the best point so far
        slope, midpoint = np.exp(np.linspace(*slopes, 17)), np.exp(np.linspace(*middles, 17))
        g = 1 / (1 + (midpoint[None, :, None] / x) ** slope[:, None, None])  # [slopes, midpoints, points]
        rise = np.clip((g * (y - r0)).sum(-1) / (g * g).sum(-1), 1e-12, max(top - r0, 1e-12))
        errors = ((y - r0 - rise[..., None] * g) ** 2).sum(-1)
        i, j = np.unravel_index(int(errors.argmin()), errors.shape)
        best = (r0 + float(rise[i, j]), float(slope[i]), float(midpoint[j]))
        slopes, middles = _closer(slopes, np.log(slope[i])), _closer(middles, np.log(midpoint[j]))
    return best


def _closer(bounds: tuple[float, float], at: float) -> tuple[float, float]:
    """Return a third of the range around a point in it."""
    half = (bounds[1] - bounds[0]) / 6
    return float(at - half), float(at + half)
