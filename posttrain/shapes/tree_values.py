"""Formulas of tree search: which node grows next, and how the result of a path is backed up.

Nodes are numbered from 0, the root; `parent` is -1 for the root. Pure functions of lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

Numbers = Sequence[float]


# --- DeepSearch (arXiv 2509.25454, smiles724/DeepSearch) ---


def mean_value(value: float, visits: float) -> float:
    """Compute V / N; 0 for an unvisited node."""
    return value / visits if visits else 0.0


def uct_scores(
    parent: Sequence[int], value: Numbers, visits: Numbers, terminal: Numbers | None = None, *, c: float = 2.0
) -> list[float | None]:
    """Compute V/N + c sqrt(ln N_parent / N) of each node; 0 for the root, None for terminal nodes.

    The bonus is 0 if the node or its parent is unvisited.
    """
    scores: list[float | None] = []
    for node, above in enumerate(parent):
        if above < 0 or (terminal is not None and terminal[node]):
            scores.append(0.0 if above < 0 else None)
            continue
        seen = visits[node] > 0 and visits[above] > 0
        bonus = c * math.sqrt(math.log(visits[above]) / visits[node]) if seen else 0.0
        scores.append(mean_value(value[node], visits[node]) + bonus)
    return scores


class Frontier(NamedTuple):
    """score: None for the root and terminal nodes; best: the first node of the highest score, None if there is none."""

    score: list[float | None]
    best: int | None


def frontier(
    parent: Sequence[int],
    depth: Numbers,
    value: Numbers,
    visits: Numbers,
    terminal: Numbers,
    nll: Numbers | None = None,
    *,
    lambda1: float = 0.4,
    lambda2: float = 0.4,
    lambda3: float = 0.01,
    max_depth: float = 64,
    use_uncertainty: bool = False,
) -> Frontier:
    """Score all open nodes after a path has ended, to choose where the tree grows: lambda1 tanh(V/N of the parent) +
    lambda3 sqrt(depth / max_depth), with `use_uncertainty` + lambda2 * the mean -logp of the node's tokens (nll)."""
    score: list[float | None] = []
    for node, above in enumerate(parent):
        if above < 0 or terminal[node]:
            score.append(None)
            continue
        doubt = lambda2 * nll[node] if use_uncertainty and nll is not None else 0.0
        worth = lambda1 * math.tanh(mean_value(value[above], visits[above]))
        score.append(worth + doubt + lambda3 * math.sqrt(depth[node] / max_depth))
    open_nodes = [node for node, node_score in enumerate(score) if node_score is not None]
    return Frontier(score, max(open_nodes, key=lambda node: (score[node] or 0.0, -node), default=None))


def pick_terminal(status: Sequence[float], nll: Numbers) -> int:
    """Return the index of the end to back up, among several ends of one step: right (1) before wrong (-1) before
    unfinished (0), then the smallest mean -logp."""
    rank = {1: 0, -1: 1, 0: 2}
    return min(range(len(status)), key=lambda node: (rank[int(status[node])], nll[node], node))


class BackedUp(NamedTuple):
    """value, visits: of each node, after backing up the paths."""

    value: list[float]
    visits: list[float]


def back_up(
    parent: Sequence[int],
    depth: Numbers,
    value: Numbers,
    visits: Numbers,
    paths: Sequence[Sequence[float]],
    *,
    floor: float = 0.1,
) -> BackedUp:
    """Back up paths [leaf, z] in order; z: 1 right, -1 wrong, 0 or a small number unfinished.

    With L = depth of the leaf + 1, each node of the path gets one more visit, and g = max((depth + 1) / L, floor) * z
    is added to its V, unless V has the opposite sign: then a right path sets V = g, and a wrong path changes nothing.
    """
    values, counts = list(value), list(visits)
    for leaf, z in paths:
        node, length = int(leaf), depth[int(leaf)] + 1
        while node >= 0:
            gain = max((depth[node] + 1) / length, floor) * z
            counts[node] += 1
            if values[node] * z >= 0:
                values[node] += gain
            elif z > 0:
                values[node] = gain
            node = parent[node]
    return BackedUp(values, counts)


# --- MedS3 (arXiv 2501.12051, pixas/MedSSS) ---


def simulation_counts(depth: Sequence[int], *, base: int = 20) -> list[int]:
    """Return the number of completions that value a node of each depth: max(base // (depth + 1), 5)."""
    return [max(base // (d + 1), 5) for d in depth]


def child_scores(
    parent_visits: float, value: Numbers, visits: Numbers, closed: Numbers, *, c: float = 2.0, unvisited: float = 5.0
) -> list[float]:
    """Compute value + c sqrt(ln N_parent / N) of each child; `unvisited` for a child without visits, -1 if closed."""
    return [
        -1.0 if shut else unvisited if not n else v + c * math.sqrt(math.log(parent_visits) / n)
        for v, n, shut in zip(value, visits, closed, strict=True)
    ]


def node_value(
    own_value: float,
    child_values: Numbers,
    child_visits: Numbers,
    *,
    rule: Literal["default", "comp"] = "default",
) -> float:
    """Compute a node's value: the visit-weighted mean of its visited children (with `comp`, averaged with its own
    value); its own value if no child was visited."""
    visits = sum(child_visits)
    if not visits:
        return own_value
    below = sum(v * n for v, n in zip(child_values, child_visits, strict=True)) / visits
    return (own_value + below) / 2 if rule == "comp" else below
