"""Credit of the steps of paths through a tree of rollouts (`rollout.shape: mcts`), from what their nodes are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import require_field, rewards_of
from posttrain.batch import RolloutBatch
from posttrain.registry import register


@register("advantage", "tree_steps", paper="2509.25454", needs=("node_ids", "node_values"))
def tree_steps(
    batch: RolloutBatch, *, temp: float = 1.0, q_max: float = 1.0, final: Literal["value", "reward"] = "value"
) -> Tensor:
    """DeepSearch: tanh(V / temp) * q_max of a token's node minus the mean final score of the tree's paths -> [N,T].

    The final score is that of a path's last node: its value as it is, which is 1 for a right end and -1 for a wrong
    one, or the row's reward. The last node gets it in place of its tanh. A single path subtracts 0. A row without a
    trained token, or without a reward if that is the final score, counts 0. Raises ValueError for rows that are no
    paths of a tree.
    """
    ids, values = require_field(batch.node_ids, "node_ids"), require_field(batch.node_values, "node_values")
    rows = [own[mask] for own, mask in zip(ids, batch.mask, strict=True)]
    nodes = [torch.unique_consecutive(own, return_inverse=True)[1] for own in rows]  # place of each token's node
    worth: list[list[float]] = []
    for own, mask, place in zip(values, batch.mask, nodes, strict=True):
        first = torch.ones_like(place, dtype=torch.bool)
        first[1:] = place[1:] != place[:-1]
        worth.append(own[mask][first].tolist() or [0.0])
    ends = rewards_of(batch).nan_to_num(nan=0.0).tolist() if final == "reward" else [row[-1] for row in worth]
    found = step_advantages(worth, batch.group_ids.tolist(), final=ends, temp=temp, q_max=q_max)
    spread = torch.zeros_like(values)
    spread[batch.mask] = torch.cat([values.new_tensor(a)[place] for a, place in zip(found, nodes, strict=True)])
    return spread


def step_advantages(
    node_value: Sequence[Sequence[float]],
    group: Sequence[int],
    *,
    final: Sequence[float] | float | None = None,
    temp: float = 1.0,
    q_max: float = 1.0,
) -> list[list[float]]:
    """Advantage of each step of each path [N][steps]: tanh(V / temp) * q_max of its node minus the mean of the final
    scores of the paths of its group; a group of one subtracts 0.

    final [N]: the score of the last step, that of the whole path, or one number for all; None: its node's.
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
