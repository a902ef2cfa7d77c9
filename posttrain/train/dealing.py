"""Rows dealt out to ranks and to micro-batches, so that each has about as much to do."""

from __future__ import annotations

from collections.abc import Sequence


def units_of(count: int, groups: Sequence[int] | None) -> list[list[int]]:
    """Rows 0 to count - 1, those of one group together; without groups, each by itself. By their first rows."""
    units: dict[int, list[int]] = {}
    for row in range(count):
        units.setdefault(row if groups is None else groups[row], []).append(row)
    return list(units.values())


def dealt(weights: Sequence[float], count: int) -> list[list[int]]:
    """Numbers of the weights in `count` parts of nearly equal sums: the heaviest first, each to the lightest part."""
    loads, parts = [0.0] * count, [list[int]() for _ in range(count)]
    for number in sorted(range(len(weights)), key=lambda n: (-weights[n], n)):
        lightest = min(range(count), key=lambda n: (loads[n], n))
        loads[lightest] += weights[number]
        parts[lightest].append(number)
    return parts
