"""The ways in which a vector case is turned into calls of the product. Shapes and names only: no formula lives here.

A mode takes product functions and name maps and returns an adapter, `case -> {output name: value}`. Names that a map
does not hold are passed as they are; a name that the product does not take is an error, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain import registry
from posttrain.batch import PairBatch, RolloutBatch
from posttrain.loss.aggregate import aggregate, totals
from posttrain.loss.pair import mean
from posttrain.merge.rules import merge_state
from posttrain.places import shipped
from posttrain.train.objective import Objective
from posttrain.train.rl_metrics import update_metrics
from posttrain.verify.combine import combine

Names = Mapping[str, str]
Case = Mapping[str, Any]
Adapter = Callable[[Case], dict[str, Any]]


def tensor(value: Any) -> Tensor:
    """A JSON array as float64; null is NaN."""
    if isinstance(value, list):
        return torch.stack([tensor(item) for item in value]) if value else torch.zeros(0, dtype=torch.float64)
    return torch.tensor(torch.nan if value is None else value, dtype=torch.float64)


def renamed(values: Mapping[str, Any], names: Names) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}


def given(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs that are there: a whole input of null is one that the case leaves out."""
    return {name: value for name, value in inputs.items() if value is not None}


def arguments(case: Case) -> dict[str, Any]:
    """One call's arguments: the union of params and inputs."""
    return {**case["params"], **case["inputs"]}


def picked(result: Any, outputs: Names | str) -> dict[str, Any]:
    """A result under one name, or its attributes or keys under the names wanted."""
    if isinstance(outputs, str):
        return {outputs: result}
    read = result.__getitem__ if isinstance(result, Mapping) else lambda name: getattr(result, name)
    return {output: read(name) for output, name in outputs.items()}


def reward(use: str) -> Callable[..., Any]:
    """A shipped reward function, loaded by path as runs load it: `length.cosine` is rewards/length.py:cosine."""
    script, name = use.split(".")
    return registry.load_function(f"{shipped('rewards').joinpath(script)}.py:{name}", None, what="reward")


def both(*adapters: Adapter) -> Adapter:
    """The outputs of several adapters together."""
    return lambda case: {name: value for adapter in adapters for name, value in adapter(case).items()}


def call(function: Callable[..., Any], outputs: Names | str, names: Names | None = None) -> Adapter:
    """One call with the case's values as they are."""
    return lambda case: picked(function(**renamed(arguments(case), names or {})), outputs)


def cells(function: Callable[..., Any], output: str, names: Names) -> Adapter:
    """One call a cell: inputs are tables of one shape, a param is the same for all; a length reward sees no text."""

    def table(inputs: dict[str, Any], params: dict[str, Any]) -> Any:
        if any(isinstance(value, list) for value in inputs.values()):
            rows = zip(*inputs.values(), strict=True)
            return [table(dict(zip(inputs, row, strict=True)), params) for row in rows]
        return function("", **inputs, **params)

    return lambda case: {output: table(renamed(given(case["inputs"]), names), renamed(case["params"], names))}


def trace(function: Callable[..., Any], output: str, *, over: str, state: str, names: Names) -> Adapter:
    """A state that is fed back: function(state, item, ...) for each item of input `over`, from param `state` on."""

    def adapter(case: Case) -> dict[str, Any]:
        params = dict(case["params"])
        first = params.pop(state)
        taken = _mapped(params, names)
        values: list[Any] = []
        for item in case["inputs"][over]:
            first = function(first, item, **taken)
            values.append(first)
        return {output: values}

    return adapter


def flat(value: Any, group_ids: Any = None) -> tuple[Tensor, Tensor]:
    """Rows [N] and their group ids, from a table [B,G] (groups may differ in size), or [N] with ids or as one group."""
    if value and isinstance(value[0], list):
        ids = [group for group, row in enumerate(value) for _ in row]
        return tensor([cell for row in value for cell in row]), torch.tensor(ids, dtype=torch.long)
    rows = tensor(value)
    ids = torch.zeros(len(rows), dtype=torch.long) if group_ids is None else torch.tensor(group_ids, dtype=torch.long)
    return rows, ids


def rl_step(
    preset: str,
    params: Names,
    fields: Mapping[str, tuple[str, ...]] | None = None,
    start: Mapping[str, Any] | None = None,
) -> Adapter:
    """A preset through the objective that the RL step calls: assign, totals, loss, backward.

    params: vector name -> `section.key`; start: keys that a case may leave out; fields: input -> batch fields.
    """

    def adapter(case: Case) -> dict[str, Any]:
        objective = Objective.from_preset(preset, **sections({**(start or {}), **_mapped(case["params"], params)}))
        logp = tensor(case["inputs"]["logp"]).requires_grad_()
        batch = objective.assign(rollouts(case["inputs"], fields or {}))
        loss, stats = objective.loss(batch, logp, objective.totals(batch))
        sums = {name: value.item() for name, value in {**stats, "tokens": batch.mask.sum()}.items()}
        return {
            "advantages": batch.advantages,
            "loss": loss.detach(),
            "grad_logp": gradient(loss, logp),
            "clip_frac": update_metrics(sums, [], lr=0.0)["clip_ratio/region_mean"],
            "keep": by_group(batch.keep, batch.group_ids),
        }

    return adapter


def _mapped(values: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Renamed by a map that must hold every name."""
    return {names[key]: value for key, value in values.items()}


def sections(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{"loss.clip_low": 0.2} -> {"loss": {"clip_low": 0.2}}"""
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, key = path.split(".")
        nested.setdefault(section, {})[key] = value
    return nested


def rollouts(inputs: Mapping[str, Any], fields: Mapping[str, tuple[str, ...]]) -> RolloutBatch:
    """The typed batch of a case: per-row tables are flattened in group-major order, masks become bool."""
    values: dict[str, Any] = {}
    for name, value in given(inputs).items():
        for field in fields.get(name, (name,)):
            if field in ("rewards", "correct", "truncated"):
                values[field], values["group_ids"] = flat(value, inputs.get("group_ids"))
            elif field not in ("logp", "group_ids"):
                values[field] = tensor(value)
    return RolloutBatch(**{**values, "mask": values["mask"].bool()})


def by_group(rows: Tensor, group_ids: Tensor) -> list[bool]:
    """One flag a group, in order of first appearance: any of its rows."""
    return [bool(rows[group_ids.eq(group)].any()) for group in dict.fromkeys(group_ids.tolist())]


def gradient(scalar: Tensor, wanted: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(scalar, wanted, allow_unused=True, retain_graph=True)
    return torch.zeros_like(wanted) if found is None else found


def advantages(function: Callable[[RolloutBatch], Tensor], params: Names) -> Adapter:
    """An advantage function of rewards, or of reward components that the product's own combiner sums."""

    def adapter(case: Case) -> dict[str, Any]:
        values = dict(case["params"])
        weights = values.pop("weights", None)
        inputs = case["inputs"]
        if inputs.get("rewards") is None:
            rewards, group_ids = combined(inputs["reward_components"], weights or {}, inputs.get("group_ids"))
        else:
            rewards, group_ids = flat(inputs["rewards"], inputs.get("group_ids"))
        batch = RolloutBatch(group_ids=group_ids, mask=torch.ones(len(rewards), 1, dtype=torch.bool), rewards=rewards)
        return {"advantages": function(batch, **renamed(values, params))}

    return adapter


def combined(components: Mapping[str, Any], weights: Mapping[str, float], group_ids: Any) -> tuple[Tensor, Tensor]:
    """Weighted sum of the components that a row has; a weight that is not named is 1."""
    columns = {name: flat(table, group_ids) for name, table in components.items()}
    ids = next(iter(columns.values()))[1]
    scores = {name: [None if math.isnan(x) else x for x in column.tolist()] for name, (column, _) in columns.items()}
    every = {**dict.fromkeys(components, 1.0), **weights}
    rewards = combine(scores, every, dict.fromkeys(components, "ignore_component"), ids.tolist())
    return tensor(rewards), ids


def token_terms(functions: Mapping[str, Callable[[RolloutBatch, Tensor], Any]], ignored: Sequence[str]) -> Adapter:
    """Terms per token: NAME, NAME_mean over trained tokens, and grad_NAME by logp, element by element."""

    def adapter(case: Case) -> dict[str, Any]:
        inputs = {name: tensor(value) for name, value in case["inputs"].items() if name not in ignored}
        logp, mask = inputs.pop("logp").requires_grad_(), inputs.pop("mask").bool()
        batch = RolloutBatch(group_ids=torch.zeros(len(mask), dtype=torch.long), mask=mask, **inputs)
        found: dict[str, Any] = {}
        for name, function in functions.items():
            values = function(batch, logp).values
            found[name] = values.detach()
            found[f"{name}_mean"] = aggregate(values.detach(), mask, "token_mean", totals(mask))
            found[f"grad_{name}"] = gradient(values.sum(), logp)
        return found

    return adapter


def aggregations(modes: Mapping[str, tuple[Any, bool]], values: str) -> Adapter:
    """Each output is the aggregation of that mode, with or without empty rows in the row count."""

    def adapter(case: Case) -> dict[str, Any]:
        matrix, mask = tensor(case["inputs"][values]), tensor(case["inputs"]["mask"]).bool()
        return {
            output: aggregate(matrix, mask, mode, totals(mask, empty), **case["params"])
            for output, (mode, empty) in modes.items()
        }

    return adapter


def pairs(function: Callable[..., Any], inputs: Names, rows: Sequence[str] = (), means: Sequence[str] = ()) -> Adapter:
    """A pair loss: losses, their mean, its gradients by both sides; stats by row, or averaged as the trainer does."""

    def adapter(case: Case) -> dict[str, Any]:
        batch = PairBatch(**{name: tensor(value) for name, value in renamed(case["inputs"], inputs).items()})
        chosen, rejected = batch.chosen_logp.requires_grad_(), batch.rejected_logp.requires_grad_()
        result = function(batch, **case["params"])
        loss = mean(result.losses)
        return {
            "losses": result.losses.detach(),
            "loss": loss.detach(),
            "grad_chosen": gradient(loss, chosen),
            "grad_rejected": gradient(loss, rejected),
            **{name: result.stats[name] for name in rows},
            **{name: mean(result.stats[name]) for name in means},
        }

    return adapter


def merged(rule: Callable[..., Tensor], names: Names) -> Adapter:
    """A merge rule over whole models, given as objects of tensors."""

    def adapter(case: Case) -> dict[str, Any]:
        inputs = case["inputs"]
        models = [{name: tensor(value) for name, value in model.items()} for model in inputs["models"]]
        base = None if inputs.get("base") is None else {name: tensor(v) for name, v in inputs["base"].items()}
        return {"merged": merge_state(rule, models, base, **renamed(case["params"], names))}

    return adapter
