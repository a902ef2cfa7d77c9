"""Modes that turn vector cases of agents (turns, steps, tool calls) into calls of the product.

Like mechanics.py, only shapes and names: no formula is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mechanics import Adapter, Case, Names, arguments, by_table, given, gradient, refuse_others, renamed, tensor

from posttrain.batch import RolloutBatch
from posttrain.loss.aggregate import aggregate, totals


def by_rows(
    function: Callable[..., Any], outputs: Names, *, tables: Sequence[str], back: Sequence[str], names: Names
) -> Adapter:
    """Call the function once with inputs `tables` [B,G,...] as rows, and their group_ids.

    Outputs in `back` are returned as [B,G,...].
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = given(arguments(case))
        ids = torch.tensor([group for group, rows in enumerate(values[tables[0]]) for _ in rows], dtype=torch.long)
        rows = {name: tensor([row for group in values[name] for row in group]) for name in tables if name in values}
        rest = {n: tensor(v) if isinstance(v, list) else v for n, v in values.items() if n not in tables}
        result = function(**renamed({**rest, **rows}, names), group_ids=ids)
        found = {output: getattr(result, path) for output, path in outputs.items()}
        return {output: by_table(value, ids) if output in back else value for output, value in found.items()}

    return adapter


def episodes(
    read: Callable[..., Any],
    score: Callable[..., Any],
    number: Callable[..., Any],
    advantage: Callable[..., Any],
    params: Names,
) -> Adapter:
    """Read and score episodes of text steps and compute their advantages as rows of one batch.

    Returns tags, step rewards and advantages.
    """

    def adapter(case: Case) -> dict[str, Any]:
        refuse_others(case["inputs"], ["episodes"])
        played = case["inputs"]["episodes"]
        read_steps = read(played)
        earned = [score(steps, episode["success"]) for steps, episode in zip(read_steps, played, strict=True)]
        prompts = list(dict.fromkeys(episode["prompt"] for episode in played))
        owner = [index for index, steps in enumerate(read_steps) for _ in steps]
        batch = RolloutBatch(
            group_ids=torch.tensor([prompts.index(played[index]["prompt"]) for index in owner], dtype=torch.long),
            mask=torch.ones(len(owner), 1).bool(),
            rewards=tensor([played[index]["success"] for index in owner]),
            trajectory_ids=torch.tensor(owner, dtype=torch.long),
            components={
                "meta_reward": tensor([value for row in earned for value in row]),
                "meta_tag": tensor([value for steps in read_steps for value in number(steps)]),
            },
        )
        found = advantage(batch, **{params[name]: value for name, value in case["params"].items()}).tolist()
        split = [[a for a, index in zip(found, owner, strict=True) if index == k] for k in range(len(played))]
        return {
            "tags": [[step.tag for step in steps] for steps in read_steps],
            "step_rewards": earned,
            "advantages": split,
        }

    return adapter


def by_edges(spread: Callable[..., Any], number: Callable[..., Any], output: str) -> Adapter:
    """Lay out the trajectories of one prompt as rows with one token per step; equal steps have one edge id."""

    def adapter(case: Case) -> dict[str, Any]:
        values = given(arguments(case))
        numbers = number(values["trajectories"], **{k: v for k, v in values.items() if k == "history"})
        lengths = torch.tensor([len(row) for row in numbers])
        place = torch.arange(int(lengths.max()))
        edges = torch.zeros(len(numbers), len(place), dtype=torch.long)
        for row, found in zip(edges, numbers, strict=True):
            row[: len(found)] = torch.tensor(found, dtype=torch.long)
        batch = RolloutBatch(
            group_ids=torch.zeros(len(numbers), dtype=torch.long),
            mask=place < lengths[:, None],
            advantages=tensor(values["traj_advantages"]),
            turn_ids=place.expand_as(edges),
            edge_ids=edges,
        )
        rows = spread(batch).tolist()
        return {output: [row[: len(found)] for row, found in zip(rows, numbers, strict=True)]}

    return adapter


def masked_rollouts(lay_out: Callable[..., Any], loss: Callable[..., Any], aggregation: Any) -> Adapter:
    """Lay out segments as rows; with log-probs, also compute a component's loss over them and its gradient."""

    def adapter(case: Case) -> dict[str, Any]:
        values = given(arguments(case))
        refuse_others(values, ("segments", "max_length", "logp", "advantages"))
        rows = [lay_out(segments, values["max_length"]) for segments in values["segments"]]
        found = {
            "mask": [row.mask for row in rows],
            "lengths": [row.length for row in rows],
            "total": [row.total for row in rows],
            "truncated": [row.truncated for row in rows],
            "tool_calls": [row.tool_calls for row in rows],
        }
        return found if values.get("logp") is None else {**found, **_loss(found["mask"], values, loss, aggregation)}

    return adapter


def _loss(mask: list[list[bool]], values: Mapping[str, Any], loss: Callable[..., Any], aggregation: Any) -> Any:
    logp = tensor(values["logp"]).requires_grad_()
    one_group = torch.zeros(len(mask), dtype=torch.long)
    batch = RolloutBatch(group_ids=one_group, mask=torch.tensor(mask), advantages=tensor(values["advantages"]))
    total = aggregate(loss(batch, logp).values, batch.mask, aggregation, totals(batch.mask))
    return {"loss": total.detach(), "grad_logp": gradient(total, logp)}


def over_rollouts(
    function: Callable[..., Any], outputs: Names, *, tables: Names, counts: str, back: Sequence[str]
) -> Adapter:
    """Call the function once with inputs `tables` [B,G] as rollouts [N] and their group_ids, renamed by `tables`.

    Outputs in `back` are returned as [B,G]. All other outputs are rows of the rollouts, returned as [B,G,...] by the
    input `counts`.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = given(arguments(case))
        ids = torch.tensor([group for group, row in enumerate(values[counts]) for _ in row], dtype=torch.long)
        flat_rows = {tables[n]: tensor([x for row in values[n] for x in row]) for n in tables if n in values}
        flat_rows[tables[counts]] = flat_rows[tables[counts]].long()
        rest = {name: value for name, value in values.items() if name not in tables}
        result = function(group_ids=ids, **flat_rows, **rest)
        found: dict[str, Any] = {}
        for output, path in outputs.items():
            value = getattr(result, path)
            if output in back:
                found[output] = by_table(value, ids)
            else:
                parts = iter(value.split(flat_rows[tables[counts]].tolist()))
                found[output] = [[next(parts).tolist() for _ in row] for row in values[counts]]
        return found

    return adapter


def scalar_loss(function: Callable[..., Any]) -> Adapter:
    """Call function(tensors, params) -> a loss, and compute its gradient by input `logp`."""

    def adapter(case: Case) -> dict[str, Any]:
        inputs = {name: tensor(value) for name, value in given(case["inputs"]).items()}
        leaf = inputs["logp"].requires_grad_()
        loss = function(**inputs, **case["params"])
        return {"loss": loss.detach(), "grad_logp": gradient(loss, leaf)}

    return adapter
