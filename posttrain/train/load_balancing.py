"""Load balancing: assigns rows to ranks and micro-batches of nearly equal cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

StepOrder = Callable[[list[int], int], list[int]]  # (rows of a step, rows per micro-batch) -> rows in order


def group_rows(groups: Sequence[int]) -> list[list[int]]:
    """Return the rows of each group, ordered by first appearance. groups: group number of each row."""
    units: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        units.setdefault(group, []).append(row)
    return list(units.values())


def partition(weights: Sequence[float], count: int, room: Sequence[int] | None = None) -> list[list[int]]:
    """Partition indices of `weights` into `count` parts of nearly equal sums.

    Greedy: the heaviest first, each to the lightest part. room: maximum size of each part, sufficient in total; None =
    no limit.
    """
    loads, parts = [0.0] * count, [list[int]() for _ in range(count)]
    for number in sorted(range(len(weights)), key=lambda n: (-weights[n], n)):
        open_parts = [n for n in range(count) if room is None or len(parts[n]) < room[n]]
        lightest = min(open_parts, key=lambda n: (loads[n], n))
        loads[lightest] += weights[number]
        parts[lightest].append(number)
    return parts


def split_rows(costs: Sequence[float], count: int, units: Sequence[int] | None = None) -> list[list[int]]:
    """Return the sorted rows of each of `count` ranks (greedy: most expensive first, to the rank with the least load).

    costs: cost of each row, e.g. its tokens. units: a unit number per row; rows of one unit stay together.
    """
    row_units = [[row] for row in range(len(costs))] if units is None else group_rows(units)
    parts = partition([sum(costs[r] for r in rows) for rows in row_units], count)
    return [sorted(row for unit in part for row in row_units[unit]) for part in parts]


def sort_by_length(lengths: Sequence[int], rows: list[int], micro: int) -> list[int]:
    """Sort rows by length, longest first: micro-batches of similar lengths need little padding."""
    del micro
    return sorted(rows, key=lambda row: -lengths[row])


def balance_micro_batches(lengths: Sequence[int], rows: list[int], micro: int) -> list[int]:
    """Order rows into micro-batches of nearly equal token counts, all but the last of `micro` rows."""
    room = [min(micro, len(rows) - start) for start in range(0, len(rows), micro)]
    return [rows[n] for part in partition([lengths[row] for row in rows], len(room), room) for n in part]
