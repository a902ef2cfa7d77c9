"""Small line charts as inline SVG, from metrics rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 340, 150
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 22  # margins that hold the axis labels
MAX_POINTS = 300

Point = tuple[float, float]


def chart(title: str, points: Sequence[Point]) -> str:
    """A `<figure>` with the curve of (step, value) points: faint as measured, bold as a running mean."""
    shown = thin(points, MAX_POINTS)
    smooth = running_mean(shown, max(1, len(shown) // 12))
    ticks = nice_ticks(min(y for _, y in shown), max(y for _, y in shown))
    x0, x1 = shown[0][0], shown[-1][0]
    y0, y1 = ticks[0], ticks[-1]

    def place(point: Point) -> str:
        x = LEFT + (point[0] - x0) / ((x1 - x0) or 1) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (point[1] - y0) / ((y1 - y0) or 1) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{y:.1f}"

    def line(name: str, values: Sequence[Point]) -> str:
        return f'<polyline class="{name}" points="{" ".join(place(p) for p in values)}"/>'

    grid = "".join(_grid_line(float(place((x0, tick)).split(",")[1]), tick) for tick in ticks)
    ends = f'<text x="{LEFT}" y="{HEIGHT - 6}">{x0:g}</text>'
    ends += f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step {x1:g}</text>'
    dot_x, dot_y = place(smooth[-1]).split(",")
    curve = line("raw", shown) + line("mean", smooth) + f'<circle cx="{dot_x}" cy="{dot_y}" r="3"/>'
    name = escape(title)
    caption = f"<figcaption>{name}<b>{number(points[-1][1])}</b></figcaption>"
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{grid}{ends}{curve}</svg>'
    return f"<figure>{caption}{svg}</figure>"


def _grid_line(y: float, value: float) -> str:
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{line}<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(value)}</text>'


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: means of equal stretches. The last point stays as it is."""
    if len(points) <= limit:
        return list(points)
    edges = [round(i * len(points) / limit) for i in range(limit + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(edges)]
    means = [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]
    return [*means[:-1], points[-1]]


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Each value averaged with the `window - 1` before it."""
    values = [y for _, y in points]
    parts = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
    return [(x, sum(part) / len(part)) for (x, _), part in zip(points, parts, strict=True)]


def nice_ticks(low: float, high: float, count: int = 3) -> list[float]:
    """Round numbers around [low, high], 1, 2 or 5 times a power of ten apart, about `count` steps."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """Three digits, with k and M for large numbers."""
    for from_, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= from_:
            return f"{value / size:.3g}{unit}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
