"""Optimal one-to-one matching of two lists, given a table of pair values. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence


def best_pairs(values: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return the (row, column) pairs with the largest sum of values, using each row and column at most once.

    Only values above 0 are paired.

    values: [R, C], all >= 0. Shortest augmenting paths (the Hungarian method), O(min(R, C)^2 max(R, C)).
    """
    if not values or not values[0]:
        return []
    if len(values) > len(values[0]):
        turned = [list(column) for column in zip(*values, strict=True)]
        return sorted((row, column) for column, row in best_pairs(turned))
    taken_by = _assign([[-value for value in row] for row in values])
    return sorted((row, column) for column, row in taken_by.items() if values[row][column] > 0)


def _assign(costs: Sequence[Sequence[float]]) -> dict[int, int]:
    """Return column -> row of a minimum-cost assignment of every row. costs: [R, C] with R <= C.

    Rows are added one at a time. For each row, Dijkstra over reduced costs finds the cheapest augmenting path to a free
    column; the potentials keep reduced costs nonnegative.
    """
    width = len(costs[0])
    row_potential, column_potential = [0.0] * len(costs), [0.0] * width
    owner: dict[int, int] = {}
    for entering in range(len(costs)):
        distance, before = [math.inf] * width, [-1] * width
        left = set(range(width))
        row, reached, last = entering, 0.0, -1
        while True:
            for column in left:
                step = reached + costs[row][column] - row_potential[row] - column_potential[column]
                if step < distance[column]:
                    distance[column], before[column] = step, last
            last = min(left, key=lambda column: (distance[column], column))
            reached = distance[last]
            left.remove(last)
            if last not in owner:
                break
            row = owner[last]
        row_potential[entering] += reached
        for column in range(width):
            if column not in left and column != last:
                column_potential[column] += distance[column] - reached
                row_potential[owner[column]] += reached - distance[column]
        while last >= 0:
            owner[last] = owner[before[last]] if before[last] >= 0 else entering
            last = before[last]
    return owner
