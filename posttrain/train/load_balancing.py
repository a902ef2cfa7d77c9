"""Rows dealt out to ranks and to micro-batches, so that each has about as much to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

StepOrder = Callable[[list[int], int], list[int]]  # (row numbers of a step, rows a micro-batch) -> in their order


def units_of(groups: Sequence[int]) -> list[list[int]]:
    """The rows of each group together. groups: the number of each row's group. By their first rows."""
    units: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        units.setdefault(group, []).append(row)
    return list(units.values())


def partition(weights: Sequence[float], count: int, room: Sequence[int] | None = None) -> list[list[int]]:
    """Numbers of the weights in `count` parts of nearly equal sums: the heaviest first, each to the lightest part.

    room: how many each part can take, enough for all; None = no limit.
    """
    loads, parts = [0.0] * count, [list[int]() for _ in range(count)]
    for number in sorted(range(len(weights)), key=lambda n: (-weights[n], n)):
        open_parts = [n for n in range(count) if room is None or len(parts[n]) < room[n]]
        lightest = min(open_parts, key=lambda n: (loads[n], n))
        loads[lightest] += weights[number]
        parts[lightest].append(number)
    return parts


def split_rows(costs: Sequence[float], count: int, units: Sequence[int] | None = None) -> list[list[int]]:
    """The rows of each of `count` ranks, rising: the most costly first, each to the rank with least to do.

    costs: what each row takes, e.g. its tokens. units: a number a row; rows of one unit stay together.
    """
    together = [[row] for row in range(len(costs))] if units is None else units_of(units)
    parts = partition([sum(costs[r] for r in rows) for rows in together], count)
    return [sorted(row for unit in part for row in together[unit]) for part in parts]


def by_length(lengths: Sequence[int], rows: list[int], micro: int) -> list[int]:
    """Longest first: micro-batches of rows of similar length, which need little padding."""
    del micro
    return sorted(rows, key=lambda row: -lengths[row])


def balance_micro_batches(lengths: Sequence[int], rows: list[int], micro: int) -> list[int]:
    """Micro-batches of about as many tokens each, all but the last of `micro` rows: each row goes to the lightest."""
    room = [min(micro, len(rows) - start) for start in range(0, len(rows), micro)]
    return [rows[n] for part in partition([lengths[row] for row in rows], len(room), room) for n in part]
