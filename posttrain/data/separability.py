"""Test whether chosen and rejected answers differ in style alone, as a warning before training on such pairs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

FEWEST_PAIRS = 3
STYLES = 64  # hash buckets for letter trigrams


class Separability(NamedTuple):
    """Accuracy of a linear probe on its training rows and on left-out pairs, and its Fisher ratio.

    The Fisher ratio is the variance between the classes divided by the variance within them, along the probe.
    """

    train_accuracy: float
    loo_accuracy: float
    fisher_ratio: float


def separability(
    chosen_features: Sequence[Sequence[float]], rejected_features: Sequence[Sequence[float]], *, ridge: float = 1e-2
) -> Separability | None:
    """Fit a ridge regression of +1 (chosen) and -1 (rejected) on features [P][D]; the intercept is not penalized.

    Leave-one-out removes both rows of a pair. A score of exactly 0 counts as a miss. Returns None with fewer than 3
    pairs. The idea is from arXiv 2504.02193; the probe is this project's own.
    """
    import numpy as np

    chosen, rejected = np.asarray(chosen_features, dtype=float), np.asarray(rejected_features, dtype=float)
    if len(chosen) < FEWEST_PAIRS:
        return None
    x = np.concatenate([chosen, rejected])
    y = np.repeat([1.0, -1.0], len(chosen))
    z = np.concatenate([np.ones((len(x), 1)), x], 1)
    normal = z.T @ z + ridge * np.diag([0.0, *[1.0] * x.shape[1]])
    # Summing differences keeps the contribution of a pair with equal sides at exactly 0.
    weights = np.linalg.solve(normal, np.concatenate([[0.0], (chosen - rejected).sum(0)]))
    scores = z @ weights
    ours, theirs = chosen @ weights[1:], rejected @ weights[1:]  # projected scores
    return Separability(
        float((scores * y > 0).mean()),
        _leave_one_out_accuracy(z, y, scores, np.linalg.solve(normal, z.T)),
        float((ours.mean() - theirs.mean()) ** 2 / (ours.var() + theirs.var() + 1e-12)),
    )


def style_features(text: str) -> list[float]:
    """Return the shares of a text's letter trigrams in 64 hash buckets: they reflect style more than content."""
    cells = [0.0] * STYLES
    for start in range(len(text) - 2):
        cells[zlib.crc32(text[start : start + 3].encode()) % STYLES] += 1
    return [count / max(len(text) - 2, 1) for count in cells]


def _leave_one_out_accuracy(z, y, scores, solved) -> float:  # type: ignore[no-untyped-def]  # arrays
    """Return the accuracy on each pair of a probe fitted without it.

    The left-out prediction is y - (I - H)^-1 (y - scores) over the pair's two rows, H their block of the hat matrix;
    this equals refitting.
    """
    import numpy as np

    pairs = len(y) // 2
    hits = 0
    for pair in range(pairs):
        rows = [pair, pair + pairs]
        hat = z[rows] @ solved[:, rows]
        left_out = y[rows] - np.linalg.solve(np.eye(2) - hat, y[rows] - scores[rows])
        hits += int((left_out * y[rows] > 1e-12).sum())  # rounding of an exact 0
    return hits / (2 * pairs)
