"""Advantages for the steps of paths through a tree of rollouts (`rollout.shape: mcts`), from the node values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import require_field, require_rewards
from posttrain.batch import RolloutBatch
from posttrain.registry import register


@register("advantage", "tree_steps", paper="2509.25454", needs=("node_ids", "node_values"))
def tree_steps(
    batch: RolloutBatch, *, temp: float = 1.0, q_max: float = 1.0, final: Literal["value", "reward"] = "value"
) -> Tensor:
    """Credit tokens with the value of their tree node minus the mean final score of the tree -> [N,T] (DeepSearch).

    tanh(V / temp) * q_max, V the value of a token's node, minus the mean final score of the tree's paths.

    The final score is the value of a path's last node (1 for a right end and -1 for a wrong one), or the row's reward.
    The last node gets the final score instead of its tanh. A single path subtracts 0. A row without a trained token, or
    without a reward if that is the final score, counts as 0. Raises ValueError for rows that are not paths of a tree.
    """
    ids, values = require_field(batch.node_ids, "node_ids"), require_field(batch.node_values, "node_values")
    rows = [row[mask] for row, mask in zip(ids, batch.mask, strict=True)]
    steps = [torch.unique_consecutive(row, return_inverse=True)[1] for row in rows]  # index of each token's node
    node_values: list[list[float]] = []
    for row, mask, step in zip(values, batch.mask, steps, strict=True):
        first = torch.ones_like(step, dtype=torch.bool)
        first[1:] = step[1:] != step[:-1]
        node_values.append(row[mask][first].tolist() or [0.0])
    if final == "reward":
        ends = require_rewards(batch).nan_to_num(nan=0.0).tolist()
    else:
        ends = [path[-1] for path in node_values]
    found = step_advantages(node_values, batch.group_ids.tolist(), final=ends, temp=temp, q_max=q_max)
    advantages = torch.zeros_like(values)
    advantages[batch.mask] = torch.cat([values.new_tensor(a)[step] for a, step in zip(found, steps, strict=True)])
    return advantages


def step_advantages(
    node_value: Sequence[Sequence[float]],
    group: Sequence[int],
    *,
    final: Sequence[float] | float | None = None,
    temp: float = 1.0,
    q_max: float = 1.0,
) -> list[list[float]]:
    """Compute the advantage of each step of each path [N][steps] from node values.

    tanh(V / temp) * q_max minus the mean of the final scores of the paths of its group. A group of one path subtracts
    0. final [N]: the score of the last step, which is that of the whole path, or one number for all; None: the score of
    its node.
    """
    scores = [[math.tanh(v / temp) * q_max for v in row] for row in node_value]
    if isinstance(final, int | float):
        final = [float(final)] * len(scores)
    if final is not None:
        scores = [[*row[:-1], float(end)] for row, end in zip(scores, final, strict=True)]
    ends: dict[int, list[float]] = {}
    for row, number in zip(scores, group, strict=True):
        ends.setdefault(number, []).append(row[-1])
    means = {number: sum(values) / len(values) if len(values) > 1 else 0.0 for number, values in ends.items()}
    return [[score - means[number] for score in row] for row, number in zip(scores, group, strict=True)]
