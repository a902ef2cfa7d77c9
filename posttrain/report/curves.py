"""Metric curves: read incrementally, thinned for a page, with confidence intervals if they can be computed."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

MAX_POINTS = 600  # per curve on a page
Z = 1.96  # standard deviations on each side of a 95% interval

Point = tuple[float, float]


class Curves:
    """The numbers of a metrics.jsonl by name, as points (step, value). `read_more` reads only appended rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points: dict[str, list[Point]] = {}
        self.last: dict[str, Any] = {}  # the newest row
        self._read = 0  # bytes read so far

    def read_more(self) -> bool:
        """Read appended rows and return whether there were any. A truncated file is read again from the start."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            size = 0
        if size < self._read:
            self.points, self.last, self._read = {}, {}, 0
        if size <= self._read:
            return False
        with self.path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text.rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            self._add(line)
        return bool(whole)

    def _add(self, line: bytes) -> None:
        """Add the numbers of one row; earlier points at or after its step are replaced."""
        try:
            row = json.loads(line)
        except ValueError:  # readers that need the exact rows report broken lines
            return
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            return
        self.last = row
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                points = self.points.setdefault(name, [])
                if points and points[-1][0] >= row["step"]:  # a resumed run wrote these steps again
                    self.points[name] = points = [point for point in points if point[0] < row["step"]]
                points.append((row["step"], float(value)))

    def recent(self, name: str, steps: int = 10) -> float | None:
        """Return the mean of the newest values of a metric, or None."""
        values = [y for _, y in self.points.get(name, [])[-steps:]]
        return sum(values) / len(values) if values else None


def is_interval_bound(name: str, known: Collection[str]) -> bool:
    """Return whether a metric is the low or high end of another metric's interval."""
    return name.endswith(("/low", "/high")) and name.rpartition("/")[0] in known


def curves_to_draw(curves: Curves, group_size: int | None = None) -> dict[str, dict[str, list[float | None]]]:
    """Return the curves of a page: name -> x and y, and low and high if an interval is known.

    An interval is known for a metric NAME with NAME/low and NAME/high, and for `correct`, the share of right
    completions of a step (`proportion_interval`). group_size: completions per prompt.
    """
    drawn: dict[str, dict[str, list[float | None]]] = {}
    for name, points in curves.points.items():
        if is_interval_bound(name, curves.points):
            continue
        shown = thin(points, MAX_POINTS)
        drawn[name] = {"x": [_round(x) for x, _ in shown], "y": [_round(y) for _, y in shown]}
        bounds = _bounds(curves, name, shown, group_size)
        if bounds:
            drawn[name]["low"], drawn[name]["high"] = ([_round(b) for b in side] for side in zip(*bounds, strict=True))
    return drawn


def _bounds(
    curves: Curves, name: str, shown: Sequence[Point], group_size: int | None
) -> list[tuple[float | None, float | None]]:
    """Return the interval of each point, or an empty list if no interval is known."""
    low, high = (dict(curves.points.get(f"{name}/{side}", ())) for side in ("low", "high"))
    if low and high and len(low) <= MAX_POINTS:
        return [(low.get(x), high.get(x)) for x, _ in shown]
    rows = curves.points.get("rollout/rows")
    if name != "correct" or not rows or not group_size:
        return []
    thinned = thin(rows, MAX_POINTS)
    if len(thinned) != len(shown):
        return []
    steps = len(rows) / len(thinned)  # per point
    counts = [count * steps / group_size for _, count in thinned]
    return [proportion_interval(y, count) for (_, y), count in zip(shown, counts, strict=True)]


def proportion_interval(share: float, prompts: float) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share of completions, counting one draw per prompt.

    Completions of one prompt are correlated, and the share does not show how much. One draw per prompt is the minimum
    effective sample size, so correlation never makes the interval too narrow.
    """
    if prompts <= 0:
        return 0.0, 1.0
    share = min(max(share, 0.0), 1.0)
    scale = 1 + Z**2 / prompts
    middle = (share + Z**2 / (2 * prompts)) / scale
    half = Z * math.sqrt(share * (1 - share) / prompts + Z**2 / (4 * prompts**2)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def _round(value: float | None) -> float | None:
    """Round to five digits, so that a page with many curves stays small; None for values without a JSON number."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` points, averages of equal intervals. The last point is unchanged."""
    if len(points) <= limit:
        return list(points)
    edges = [round(i * len(points) / limit) for i in range(limit + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(edges)]
    means = [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]
    return [*means[:-1], points[-1]]


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Return the mean of each value and the `window - 1` values before it."""
    values = [y for _, y in points]
    parts = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
    return [(x, sum(part) / len(part)) for (x, _), part in zip(points, parts, strict=True)]


def compute_ticks(low: float, high: float, count: int = 3) -> list[float]:
    """Return round numbers around [low, high], spaced by 1, 2 or 5 times a power of ten, about `count` steps."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def format_number(value: float) -> str:
    """Format a number with three digits, with k, M and G for large numbers."""
    for from_, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= from_:
            return f"{value / size:.3g}{unit}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def split_by_priority(known: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split metric names into those that a page shows first, in display order, and the other names.

    Bounds of an interval are in neither list: they are drawn with their metric.
    """
    names = [name for name in known if not is_interval_bound(name, known)]
    parts = [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]
    parts += [name for name in names if name.startswith("canary/") and name.endswith("/alarm")]
    evaluated = [name for name in names if name.startswith("eval/") and name not in MAIN_METRICS]
    first = (
        list(dict.fromkeys(name for name in (*MAIN_METRICS, *evaluated, *parts) if name in names)) or list(names)[:6]
    )
    return first, [name for name in names if name not in first]


# Shown first and in this order; every other curve is one click away.
MAIN_METRICS = (
    *("reward", "correct", "eval/accuracy", "eval/loss", "signal/share", "completions/mean_length"),
    *("completions/clipped_ratio", "entropy", "kl", "loss", "accuracy", "token_accuracy", "mean_token_accuracy"),
    *("rewards/accuracies", "rewards/margins", "grad_norm", "lr"),
)
