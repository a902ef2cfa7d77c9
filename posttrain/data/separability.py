"""Whether chosen and rejected answers can be told apart by style alone: a warning before training on such pairs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

FEWEST_PAIRS = 3
STYLES = 64  # cells that letter triples are counted in


class Separability(NamedTuple):
    """Accuracy of a linear probe on its own rows and on left-out pairs, and the spread between the classes over that
    within them, along the probe."""

    train_accuracy: float
    loo_accuracy: float
    fisher_ratio: float


def separability(
    chosen_features: Sequence[Sequence[float]], rejected_features: Sequence[Sequence[float]], *, ridge: float = 1e-2
) -> Separability | None:
    """Ridge regression of +1 (chosen) and -1 (rejected) on features [P][D] and an intercept that is not penalised.

    Leaving one out takes both rows of a pair. A score of exactly 0 is no hit. None with fewer than 3 pairs. The idea is
    from arXiv 2504.02193; the probe is this project's own.
    """
    import numpy as np

    chosen, rejected = np.asarray(chosen_features, dtype=float), np.asarray(rejected_features, dtype=float)
    if len(chosen) < FEWEST_PAIRS:
        return None
    x = np.concatenate([chosen, rejected])
    y = np.repeat([1.0, -1.0], len(chosen))
    z = np.concatenate([np.ones((len(x), 1)), x], 1)
    normal = z.T @ z + ridge * np.diag([0.0, *[1.0] * x.shape[1]])
    # The same pair on both sides adds nothing to tell them apart by; sums of differences keep that exact.
    weights = np.linalg.solve(normal, np.concatenate([[0.0], (chosen - rejected).sum(0)]))
    scores = z @ weights
    return Separability(
        float((scores * y > 0).mean()),
        _left_out(z, y, scores, np.linalg.solve(normal, z.T)),
        _fisher(chosen @ weights[1:], rejected @ weights[1:]),
    )


def style(text: str) -> list[float]:
    """Shares of a text's letter triples [64], by a hash: how it is written, little of what it says."""
    cells = [0.0] * STYLES
    for start in range(len(text) - 2):
        cells[zlib.crc32(text[start : start + 3].encode()) % STYLES] += 1
    return [count / max(len(text) - 2, 1) for count in cells]


def _left_out(z, y, scores, solved) -> float:  # type: ignore[no-untyped-def]  # arrays
    """Accuracy on each pair of a probe fitted without it: y - (I - H)^-1 (y - scores) over its two rows, H their part
    of the hat matrix, which is what fitting again would give."""
    import numpy as np

    pairs = len(y) // 2
    hits = 0
    for pair in range(pairs):
        rows = [pair, pair + pairs]
        hat = z[rows] @ solved[:, rows]
        left_out = y[rows] - np.linalg.solve(np.eye(2) - hat, y[rows] - scores[rows])
        hits += int((left_out * y[rows] > 1e-12).sum())  # rounding of an exact 0
    return hits / (2 * pairs)


def _fisher(chosen, rejected) -> float:  # type: ignore[no-untyped-def]  # arrays
    spread = chosen.var() + rejected.var() + 1e-12
    return float((chosen.mean() - rejected.mean()) ** 2 / spread)
