"""The ways in which a vector case is turned into calls of the product. Shapes and names only: no formula lives here.

A mode takes product functions and name maps and returns an adapter, `case -> {output name: value}`. Names that a map
does not hold are passed as they are; a name that the product does not take is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain import registry
from posttrain.batch import GroupLoss, RolloutBatch
from posttrain.loss.aggregate import aggregate, totals
from posttrain.merge.rules import merge_state
from posttrain.path_resolution import shipped_folder
from posttrain.train.controls import Controls
from posttrain.train.objective import Objective
from posttrain.train.rl_metrics import update_metrics
from posttrain.verify.score import combine
from tests.preset_objectives import preset_objective, preset_recipe

Names = Mapping[str, str]
Case = Mapping[str, Any]
Adapter = Callable[[Case], dict[str, Any]]


def tensor(value: Any) -> Tensor:
    """Convert a JSON array to a float64 tensor, null to NaN; a tensor is returned unchanged."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list):
        return torch.stack([tensor(item) for item in value]) if value else torch.zeros(0, dtype=torch.float64)
    return torch.tensor(torch.nan if value is None else value, dtype=torch.float64)


def renamed(values: Mapping[str, Any], names: Names) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}


def given(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that are not null: the case leaves out an input that is null as a whole."""
    return {name: value for name, value in inputs.items() if value is not None}


def arguments(case: Case) -> dict[str, Any]:
    """Return the arguments of one call: params and inputs together."""
    return {**case["params"], **case["inputs"]}


def refuse_others(values: Iterable[str], known: Iterable[str]) -> None:
    """Raise KeyError for params and inputs that no function reads."""
    if strange := sorted(set(values).difference(known)):
        raise KeyError(f"takes no {', '.join(strange)}")


def picked(result: Any, outputs: Names | str) -> dict[str, Any]:
    """Return a result under one name, or some of its attributes or keys under the names in `outputs`."""
    if isinstance(outputs, str):
        return {outputs: result}
    read = result.__getitem__ if isinstance(result, Mapping) else lambda name: getattr(result, name)
    return {output: read(name) for output, name in outputs.items()}


def reward(use: str) -> Callable[..., Any]:
    """Load a shipped reward function by path, as runs do: `length.cosine` is rewards/length.py:cosine."""
    script, name = use.split(".")
    return registry.load_function(f"{shipped_folder('rewards').joinpath(script)}.py:{name}", None, what="reward")


def both(*adapters: Adapter) -> Adapter:
    """Return an adapter with the outputs of several adapters."""
    return lambda case: {name: value for adapter in adapters for name, value in adapter(case).items()}


def call(function: Callable[..., Any], outputs: Names | str, names: Names | None = None) -> Adapter:
    """Call the function once with the case's values unchanged."""
    return lambda case: picked(function(**renamed(arguments(case), names or {})), outputs)


def cells(function: Callable[..., Any], output: str, names: Names) -> Adapter:
    """Call the function once per cell: inputs are tables of one shape, params are the same for all cells.

    The function is a length reward and gets an empty text.
    """

    def table(inputs: dict[str, Any], params: dict[str, Any]) -> Any:
        if any(isinstance(value, list) for value in inputs.values()):
            rows = zip(*inputs.values(), strict=True)
            return [table(dict(zip(inputs, row, strict=True)), params) for row in rows]
        return function("", **inputs, **params)

    return lambda case: {output: table(renamed(given(case["inputs"]), names), renamed(case["params"], names))}


def trace(function: Callable[..., Any], output: str, *, over: str, state: str, names: Names) -> Adapter:
    """Feed a state back: function(state, item, ...) for each item of input `over`, starting from param `state`."""

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
    """Return rows [N] and their group ids, from a table [B,G] with groups of any size, or from a list [N].

    The group ids of a list are `group_ids`, or 0 without them.
    """
    if isinstance(value, Tensor):
        return value.flatten(), flat(value.detach().tolist(), group_ids)[1]
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
    """Run a preset's objective as the RL step does: compute_advantages, totals, loss, backward.

    params: vector name -> `section.key`; start: keys that a case may leave out; fields: input -> batch fields.
    """

    def adapter(case: Case) -> dict[str, Any]:
        objective = preset_objective(preset, **sections({**(start or {}), **_mapped(case["params"], params)}))
        logp = tensor(case["inputs"]["logp"]).requires_grad_()
        batch = objective.compute_advantages(rollouts(case["inputs"], fields or {}))
        loss, stats = objective.loss(batch, logp, objective.totals(batch))
        sums = {name: value.item() for name, value in {**stats, "tokens": batch.mask.sum()}.items()}
        return {
            "advantages": batch.advantages,
            "loss": loss.detach(),
            "grad_logp": gradient(loss, logp),
            "clip_frac": update_metrics(sums, [], lr=0.0, updates=0)["clip_ratio/region_mean"],
            "keep": by_group(batch.keep, batch.group_ids),
        }

    return adapter


def _mapped(values: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Rename the keys of a mapping; every key must be in `names`."""
    return {names[key]: value for key, value in values.items()}


def sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest dotted keys: {"loss.clip_low": 0.2} -> {"loss": {"clip_low": 0.2}}; "factors.0.alpha" names a list entry."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *parents, key = path.split(".")
        place = nested
        for part in parents:
            place = place.setdefault(part, {})
        place[key] = value
    return nested


def rollouts(inputs: Mapping[str, Any], fields: Mapping[str, tuple[str, ...]]) -> RolloutBatch:
    """Return the batch of a case: tables of rows are flattened in group-major order, and masks become bool."""
    values: dict[str, Any] = {}
    for name, value in given(inputs).items():
        for field in fields.get(name, (name,)):
            if field in ("rewards", "correct", "truncated"):
                values[field], values["group_ids"] = flat(value, inputs.get("group_ids"))
            elif field not in ("logp", "group_ids"):
                values[field] = tensor(value)
    return RolloutBatch(**{**values, "mask": values["mask"].bool()})


def by_group(rows: Tensor, group_ids: Tensor) -> list[bool]:
    """Return one flag per group, in order of first appearance: whether any row of the group is set."""
    return [bool(rows[group_ids.eq(group)].any()) for group in dict.fromkeys(group_ids.tolist())]


def gradient(scalar: Tensor, wanted: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(scalar, wanted, allow_unused=True, retain_graph=True)
    return torch.zeros_like(wanted) if found is None else found


ROWS = ("rewards", "correct", "truncated", "lengths")  # batch fields of one number a row
LABELS = ("answer_ids", "agent_ids", "trajectory_ids", "state_ids")  # words or numbers that are only equal or not


def on_batch(
    function: Callable[..., Any],
    outputs: Names | str,
    *,
    params: Names | None = None,
    fields: Names | None = None,
    start: Mapping[str, Any] | None = None,
    rows: Sequence[str] = (),
    single: Sequence[str] = (),
    by_prompt: Sequence[str] = (),
    words: Mapping[str, Mapping[Any, Any]] | None = None,
    logp: bool = False,
    grads: Names | None = None,
    aggregation: str | None = None,
    tables: Sequence[str] = (),
) -> Adapter:
    """Call function(batch, **params) and return one output, or {output: attribute path of the result}.

    Params and inputs whose name is a batch field, or is mapped to one in `fields`, go into the batch; all others are
    keywords, renamed by `params`. start: keywords that a case may leave out. Fields with one number per row (ROWS,
    LABELS, components.NAME, columns.NAME, and the fields in `rows`) may be tables [B,G], which also give the groups.
    single: inputs [B,G] that are one token per row. by_prompt: inputs with one entry per prompt, which all rows of the
    prompt get. words: param -> the values of posttrain for the vector's values. logp: call function(batch, logp, ...).
    grads: output -> input to differentiate the `loss` by: the mean of a GroupLoss, or the `aggregation` of a TokenLoss.
    In an attribute path `loss` is that loss and `.` is the result. tables: outputs [N] to return as [B,G].
    """

    def adapter(case: Case) -> dict[str, Any]:
        case = {**case, "params": translated(case["params"], words or {})}
        values = given(arguments(case))
        leaves = {name: tensor(values[name]).requires_grad_() for name in set((grads or {}).values()) if name in values}
        places = {name: (fields or {}).get(name, name) for name in values}
        inside = {n: f for n, f in places.items() if f.split(".")[0] in _FIELDS or f == "logp"}
        once, prompts = _places(single, inside), _places(by_prompt, inside)
        batch, policy = typed({f: leaves.get(n, values[n]) for n, f in inside.items()}, rows, once, prompts)
        every = {n: v for n, v in arguments(case).items() if (fields or {}).get(n, n).split(".")[0] not in _FIELDS}
        free = {**(start or {}), **renamed({n: v for n, v in every.items() if n not in inside}, params or {})}
        result = function(batch, policy, **free) if logp else function(batch, **free)
        loss = scalar(result, batch, aggregation) if grads or _wants_loss(outputs) else None
        found = {n: _read(result, loss, path) for n, path in _paths(outputs).items()}
        found |= {n: gradient(loss, leaves[x]) for n, x in (grads or {}).items() if x in leaves}
        return {n: by_table(v, batch.group_ids) if n in tables else _detached(v) for n, v in found.items()}

    return adapter


_FIELDS = tuple(field.name for field in dataclasses.fields(RolloutBatch))


def _places(names: Sequence[str], inside: Names) -> set[str]:
    return {inside[name] for name in names if name in inside}


def _paths(outputs: Names | str) -> Names:
    return {outputs: "."} if isinstance(outputs, str) else outputs


def _wants_loss(outputs: Names | str) -> bool:
    return "loss" in _paths(outputs).values()


def _read(result: Any, loss: Any, path: str) -> Any:
    """Follow a path in the result: `.`, `loss`, or names joined by dots (attributes, mapping keys, tuple indices)."""
    if path in (".", "loss"):
        return result if path == "." else loss
    for part in path.split(".", 1) if path.startswith("stats.") else path.split("."):
        if isinstance(result, Mapping):
            result = result[part]
        else:
            result = result[int(part)] if part.isdigit() else getattr(result, part)
    return result


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def typed(
    values: Mapping[str, Any], rows: Sequence[str] = (), single: Sequence[str] = (), by_prompt: Sequence[str] = ()
) -> tuple[RolloutBatch, Tensor | None]:
    """Return a RolloutBatch and `logp` from field name -> JSON or tensor; `components.NAME` is one component.

    Group ids are given, or come from the first table [B,G], or are 0. Without a mask every row has one trained token.
    """
    made: dict[str, Any] = {"components": {}, "columns": {}}
    ids = values.get("group_ids")
    for place, value in values.items():
        field, _, name = place.partition(".")
        if place in by_prompt:
            continue
        if field in (*ROWS, *LABELS) or name or place in rows or place in single:
            column, made_ids = numbered(value, ids) if field in LABELS else flat(value, ids)
            made.setdefault("group_ids", made_ids)
            column = column[:, None] if place in single else column
            made[field] = {**made[field], name: column} if name else column
        elif field != "group_ids":
            made[field] = tensor(value) if isinstance(value, (list, Tensor)) else value
    count = next(len(x) for x in made.values() if isinstance(x, Tensor))
    mask = made.get("mask", torch.ones(count, 1))
    one = torch.zeros(count, dtype=torch.long) if ids is None else torch.tensor(ids, dtype=torch.long)
    made = {**made, "mask": mask.bool(), "group_ids": made.get("group_ids", one)}
    for place in by_prompt:
        field, _, name = place.partition(".")
        column = of_rows(tensor(values[place]), made["group_ids"])
        made[field] = {**made[field], name: column} if name else column
    logp = made.pop("logp", None)
    return RolloutBatch(**made), logp


def of_rows(prompts: Tensor, group_ids: Tensor) -> Tensor:
    """Repeat values given per prompt [B, ...], in order of first appearance, for the rows of each prompt."""
    order = list(dict.fromkeys(group_ids.tolist()))
    return prompts[[order.index(group) for group in group_ids.tolist()]]


def translated(params: Mapping[str, Any], words: Mapping[str, Mapping[Any, Any]]) -> dict[str, Any]:
    """Replace the vector's values of params by posttrain's values for them."""
    return {name: words[name].get(value, value) if name in words else value for name, value in params.items()}


def numbered(value: Any, group_ids: Any = None) -> tuple[Tensor, Tensor]:
    """Number words, [N] or [B,G]: equal words share a number, null is -1."""
    words = list(dict.fromkeys(x for row in value for x in (row if isinstance(row, list) else [row]) if x is not None))
    numbers = {None: None, **{word: number for number, word in enumerate(words)}}
    table = [[numbers[x] for x in row] if isinstance(row, list) else numbers[row] for row in value]
    column, ids = flat(table, group_ids)
    return column.nan_to_num(nan=float("-1")).long(), ids


def scalar(result: Any, batch: RolloutBatch, aggregation: str | None) -> Tensor:
    """Return the loss of a result: the mean over groups, the aggregation of a token matrix, or the result's `loss`."""
    if isinstance(result, GroupLoss):
        return result.values.mean()
    if aggregation is not None:
        return aggregate(result.values, batch.mask, aggregation, totals(batch.mask))  # type: ignore[arg-type]
    return result if isinstance(result, Tensor) else result.loss


def by_table(rows: Tensor, group_ids: Tensor) -> list[list[Any]]:
    """Return values [N] as one list per group, in order of first appearance."""
    return [rows.detach()[group_ids.eq(group)].tolist() for group in dict.fromkeys(group_ids.tolist())]


def taking(names: str, adapter: Adapter) -> Adapter:
    """Return the adapter; a case with a param or input of another name is an error.

    For modes that select the values they read.
    """
    known = frozenset(names.split())

    def strict(case: Case) -> dict[str, Any]:
        refuse_others(arguments(case), known)
        return adapter(case)

    return strict


def parts(of: Mapping[str, tuple[str, Adapter]], by: str = "part") -> Adapter:
    """Return the adapter that the case's param `by` chooses, with the params and inputs named before it.

    The names are one text with spaces. Values that only another part reads are left out; a value that no part reads is
    an error.
    """
    known = " ".join(names for names, _ in of.values())

    def adapter(case: Case) -> dict[str, Any]:
        params = dict(case["params"])
        names, chosen = of[params.pop(by)]
        return taking(known, only(names.split(), chosen))({**case, "params": params})

    return adapter


def controlled(
    controller: Callable[..., Any],
    outputs: Names,
    *,
    traces: Names | None = None,
    steps: str | None = None,
    params: Names | None = None,
    initial: str | None = None,
) -> Adapter:
    """Run a controller over several steps; outputs are lists with one entry per step.

    traces: input -> metric; entry i of every trace was measured in step i, and outputs are read after that update.
    steps: an input of step numbers, for controllers that depend on the step only. initial: the param or input that
    holds the recipe's number (default 0). An output is `value` (of the step; with traces, of the next step) or a path
    into the state.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = given(arguments(case))
        first = values.pop(initial, 0.0) if initial else 0.0
        series = {metric: values.pop(name) for name, metric in (traces or {}).items() if name in values}
        numbers = values.pop(steps) if steps else range(len(next(iter(series.values()), [])))
        made = controller(**renamed(values, params or {}))
        state = made.start(first)
        found: dict[str, list[Any]] = {name: [] for name in outputs}
        for step, after in zip(numbers, itertools.count(1), strict=False):
            if traces:
                state = made.update(state, {metric: trace[step] for metric, trace in series.items()}, step)
            now = after if traces else step
            for name, path in outputs.items():
                found[name].append(made.value(state, now) if path == "value" else _read(state, None, path))
        return found

    return adapter


def advantages(function: Callable[[RolloutBatch], Tensor], params: Names) -> Adapter:
    """Call an advantage function on rewards, or on reward components that posttrain's own combiner sums."""

    def adapter(case: Case) -> dict[str, Any]:
        values = dict(case["params"])
        weights = values.pop("weights", None)
        inputs = case["inputs"]
        refuse_others(inputs, ("rewards", "reward_components", "group_ids"))
        if inputs.get("rewards") is None:
            rewards, group_ids = combined(inputs["reward_components"], weights or {}, inputs.get("group_ids"))
        else:
            rewards, group_ids = flat(inputs["rewards"], inputs.get("group_ids"))
        batch = RolloutBatch(group_ids=group_ids, mask=torch.ones(len(rewards), 1, dtype=torch.bool), rewards=rewards)
        return {"advantages": function(batch, **renamed(values, params))}

    return adapter


def combined(components: Mapping[str, Any], weights: Mapping[str, float], group_ids: Any) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the components that a row has; an unnamed weight is 1."""
    columns = {name: flat(table, group_ids) for name, table in components.items()}
    ids = next(iter(columns.values()))[1]
    scores = {name: [None if math.isnan(x) else x for x in column.tolist()] for name, (column, _) in columns.items()}
    every = {**dict.fromkeys(components, 1.0), **weights}
    rewards = combine(scores, every, dict.fromkeys(components, "ignore_component"), ids.tolist())
    return tensor(rewards), ids


def token_terms(functions: Mapping[str, Callable[[RolloutBatch, Tensor], Any]], ignored: Sequence[str]) -> Adapter:
    """Compute terms per token: NAME, NAME_mean over trained tokens, and grad_NAME by logp, elementwise."""

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
    """Aggregate the values once per output, by the output's mode, with or without empty rows in the row count."""

    def adapter(case: Case) -> dict[str, Any]:
        refuse_others(case["inputs"], (values, "mask"))
        matrix, mask = tensor(case["inputs"][values]), tensor(case["inputs"]["mask"]).bool()
        return {
            output: aggregate(matrix, mask, mode, totals(mask, empty), **case["params"])
            for output, (mode, empty) in modes.items()
        }

    return adapter


def merged(rule: Callable[..., Tensor], names: Names) -> Adapter:
    """Apply a merge rule to whole models, given as objects of tensors."""

    def adapter(case: Case) -> dict[str, Any]:
        inputs = case["inputs"]
        refuse_others(inputs, ("models", "base"))
        models = [{name: tensor(value) for name, value in model.items()} for model in inputs["models"]]
        base = None if inputs.get("base") is None else {name: tensor(v) for name, v in inputs["base"].items()}
        return {"merged": merge_state(rule, models, base, **renamed(case["params"], names))}

    return adapter


def staged(
    preset: str,
    *,
    params: Names,
    fields: Names | None = None,
    start: Mapping[str, Any] | None = None,
    choices: Mapping[str, Any] | None = None,
    words: Mapping[str, Mapping[Any, Any]] | None = None,
    by_prompt: Sequence[str] = (),
    as_given: bool = False,
    details: Mapping[str, tuple[Callable[..., Any], str, str]] | None = None,
    outputs: Names | None = None,
    per_prompt: Sequence[str] = (),
) -> Adapter:
    """Run a preset's objective as the RL step does: `advantages`, and with `logp` also `loss` and `grad_logp`.

    params: vector name -> `section.key`; start: keys that a case may leave out; choices: sections that replace the
    preset's. fields, words, by_prompt: as in `on_batch`. as_given: the case provides normalized advantages. outputs:
    output -> field of the batch with advantages. details: output -> (function, part, path): function(batch, ...) with
    the arguments of that part that it takes, e.g. `factors.0`. per_prompt: outputs [N] of which only the first row of
    each prompt is returned.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = given(arguments({**case, "params": translated(case["params"], words or {})}))
        inside = {n: f for n in values if (f := (fields or {}).get(n, n)).split(".")[0] in _FIELDS or f == "logp"}
        keys = {**(start or {}), **_mapped({n: v for n, v in values.items() if n not in inside}, params)}
        objective = preset_objective(preset, **over(choices or {}, sections(keys)))
        if as_given:
            same = dataclasses.replace(objective.advantage, function=lambda batch, **_: batch.advantages)
            objective = dataclasses.replace(objective, advantage=same)
        leaf = tensor(values["logp"]).requires_grad_() if "logp" in values else None
        batch, _ = typed({f: values[n] for n, f in inside.items() if f != "logp"}, (), (), _places(by_prompt, inside))
        done = objective.compute_advantages(batch)
        found = {"advantages": done.advantages, **{n: _read(done, None, path) for n, path in (outputs or {}).items()}}
        before = objective.subtract_kl(batch)
        for name, (function, key, path) in (details or {}).items():
            found[name] = _read(function(before, **taken(function, part_of(objective, key).params)), None, path)
        if leaf is not None:
            loss, _ = objective.loss(done, leaf, objective.totals(done))
            found = {**found, "loss": loss.detach(), "grad_logp": gradient(loss, leaf)}
        return {n: first_of(v, batch.group_ids) if n in per_prompt else v for n, v in found.items()}

    return adapter


def over(lower: Any, upper: Any) -> Any:
    """Merge `upper` into `lower`, key by key; a list entry is named by its index."""
    if isinstance(lower, list) and isinstance(upper, Mapping):
        return [over(entry, upper.get(str(n), {})) for n, entry in zip(range(len(lower)), lower, strict=True)]
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return upper
    return {**lower, **{key: over(lower[key], value) if key in lower else value for key, value in upper.items()}}


def part_of(objective: Objective, key: str) -> Any:
    """Return a component of the objective by its key: `advantage`, or `factors.0`."""
    name, _, number = key.partition(".")
    found = getattr(objective, name)
    return found[int(number)] if number else found


def taken(function: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the params that are arguments of the function."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in params.items() if name in names}


def first_of(rows: Tensor, group_ids: Tensor) -> list[Any]:
    """Return the first row of each group, in order of first appearance."""
    return [column[0] for column in by_table(rows, group_ids)]


def on_tensors(
    function: Callable[..., Any],
    outputs: Names | str,
    names: Names | None = None,
    each: Sequence[str] = (),
) -> Adapter:
    """Call the function once with every list as a tensor; inputs in `each` become lists of tensors.

    outputs: output -> attribute path of the result.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = {
            name: [tensor(item) for item in value]
            if name in each
            else tensor(value)
            if isinstance(value, list)
            else value
            for name, value in arguments(case).items()
        }
        result = function(**renamed(values, names or {}))
        return {name: _read(result, None, path) for name, path in _paths(outputs).items()}

    return adapter


def prepared(adapter: Adapter, into: str, function: Callable[..., Any], takes: Names, drops: Sequence[str]) -> Adapter:
    """Run the adapter after input `into` is computed by function(...) from values of the case; `drops` are left out.

    takes: name in the case -> argument; the function's default replaces a value that the case leaves out.
    """

    def before(case: Case) -> dict[str, Any]:
        values = arguments(case)
        made = function(**{argument: values[name] for name, argument in takes.items() if name in values})
        inputs = {name: value for name, value in case["inputs"].items() if name not in drops}
        params = {name: value for name, value in case["params"].items() if name not in drops}
        return adapter({**case, "inputs": {**inputs, into: made}, "params": params})

    return before


def ragged(function: Callable[..., Any], outputs: Names, *, table: str, counts: str) -> Adapter:
    """Call function(tensors, params) and cut its outputs [N,S] to the row lengths of input `table`.

    The table is padded with NaN; its row lengths are the argument `counts`. outputs: output -> attribute path.
    """

    def adapter(case: Case) -> dict[str, Any]:
        rows = case["inputs"][table]
        lengths = [len(row) for row in rows]
        filled = [list(row) for row in zip(*itertools.zip_longest(*rows), strict=True)]
        inputs = {name: tensor(value) for name, value in {**case["inputs"], table: filled}.items()}
        result = function(**inputs, **case["params"], **{counts: torch.tensor(lengths, dtype=torch.long)})
        return {
            name: [row[:length].tolist() for row, length in zip(_read(result, None, path), lengths, strict=True)]
            for name, path in outputs.items()
        }

    return adapter


def with_hints(function: Callable[..., Any], protect: Callable[..., Any], ratio: Callable[..., Any]) -> Adapter:
    """Score plain and hinted rows of one prompt as one group, hinted rows also by token, and the hint's ratio."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        refuse_others(case["inputs"], ("rewards_naive", "rewards_hint", "hint_mask", "mask"))
        plain, helped = tensor(values["rewards_naive"]), tensor(values["rewards_hint"])
        hinted = torch.cat([torch.zeros(len(plain)), torch.ones(len(helped))]).bool()
        unaided = torch.logical_not(hinted)
        one = torch.zeros(len(hinted), dtype=torch.long)
        shares = taken(ratio, values)
        rest = {name: value for name, value in case["params"].items() if name not in shares}
        rows, gap = function(torch.cat([plain, helped]), one, hinted, **rest)
        return {
            "advantages_naive": rows[unaided],
            "advantages_hint": rows[hinted],
            "token_advantages_hint": protect(rows[hinted], tensor(values["hint_mask"]), tensor(values["mask"]).bool()),
            "difficulty_gap": gap[0],
            "hint_ratio": ratio(**shares),
        }

    return adapter


def only(names: Sequence[str], adapter: Adapter) -> Adapter:
    """Return an adapter that passes only these params and inputs of a case."""

    def adapted(case: Case) -> dict[str, Any]:
        limited = {part: {n: v for n, v in case[part].items() if n in names} for part in ("params", "inputs")}
        return adapter({**case, **limited})

    return adapted


def shared(*shares: tuple[Sequence[str], Adapter]) -> Adapter:
    """Return the outputs of several adapters, each with the params and inputs named before it.

    A param or input that no adapter is given is an error.
    """

    def adapter(case: Case) -> dict[str, Any]:
        refuse_others(arguments(case), {name for names, _ in shares for name in names})
        return both(*(only(names, share) for names, share in shares))(case)

    return adapter


def fed(first: Adapter, inputs: Names, second: Adapter) -> Adapter:
    """Return the outputs of both adapters; the inputs of the second are outputs of the first."""

    def adapter(case: Case) -> dict[str, Any]:
        found = first(case)
        given_on = {name: found[output] for name, output in inputs.items()}
        return {**found, **second({"params": {}, "inputs": given_on})}

    return adapter


def summed(output: str, adapter: Adapter) -> Adapter:
    """Return the adapter's outputs, with the output of one number per group [K] summed over the groups."""
    return lambda case: {name: value.sum() if name == output else value for name, value in adapter(case).items()}


def averaged(step: Callable[..., Any], values: str, decay: str, output: str) -> Adapter:
    """Return the average after each value but the first, which is the start: step(average, weight, value, decay)."""

    def adapter(case: Case) -> dict[str, Any]:
        first, *rest = case["inputs"][values]
        state, found = (first, float(True)), []
        for value in rest:
            state = step(*state, value, case["params"][decay])
            found.append(state[0])
        return {output: found}

    return adapter


def blended(
    blend: Callable[..., Tensor], loss: Callable[..., Tensor], output: str, start: Mapping[str, Any]
) -> Adapter:
    """Return the mean loss of a value blended from two heads. start: arguments of the loss that the case leaves out."""

    def adapter(case: Case) -> dict[str, Any]:
        values = {name: tensor(value) for name, value in given(case["inputs"]).items()}
        params = renamed(case["params"], {"cliprange_value": "clip"})
        made = blend(values["v1"], values["v2"], **taken(blend, params))
        return {
            output: loss(made, values["old_values"], values["rewards_n"], **{**start, **taken(loss, params)}).mean()
        }

    return adapter


def at_steps(function: Callable[[int], float], output: str, steps: Sequence[int]) -> Adapter:
    """Return [[step, function(step)], ...] for fixed steps."""
    return lambda _: {output: [[step, function(step)] for step in steps]}


def optimised(
    preset: str,
    *,
    params: Names | None = None,
    fields: Names | None = None,
    start: Mapping[str, Any] | None = None,
    choices: Mapping[str, Any] | None = None,
    single: Sequence[str] = (),
    ignored: Sequence[str] = (),
    made: Mapping[str, tuple[Callable[..., Tensor], Names]] | None = None,
    of: str = "loss",
    outputs: Names | None = None,
    grads: Names | None = None,
    tables: Sequence[str] = (),
) -> Adapter:
    """Run a preset's objective as the RL step does: its loss, and gradients by the current policy's log-probs.

    params: vector name -> `section.key`, or several joined by spaces; a key that a controller drives has its value at
    the case's `step`. start: keys that a case may leave out; choices: sections that replace the preset's. fields,
    single: as in `on_batch`. A case that gives advantages, or no rewards, skips `compute_advantages`. made: batch field
    -> (function(batch, ...), vector name -> argument). of: the path of the output `loss` in the namespace that outputs
    are read from: loss; policy (the policy's part); terms.KEY.loss, .value (without its coefficient) and .term (by
    token); batch (with advantages); paid (with KL in its rewards); surrogate and corrections.N (what they return);
    metrics (of the step). grads: output -> input.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = {n: v for n, v in given(case["inputs"]).items() if n not in ignored}
        places = {n: (fields or {}).get(n, n) for n in (*values, *case["params"])}
        inside = {n: f for n, f in places.items() if f.split(".")[0] in _FIELDS or f == "logp"}
        refuse_others(values, [*inside, *(name for _, takes in (made or {}).values() for name in takes)])
        free = {n: v for n, v in case["params"].items() if n not in (*inside, *ignored)}
        keys = {key: value for n, value in free.items() for key in (params or {})[n].split()}
        written = over(choices or {}, sections({**(start or {}), **keys}))
        batch, policy, leaves = _leaves(
            {n: {**values, **case["params"]}[n] for n in inside}, inside, single, grads or {}
        )
        for field, (function, takes) in (made or {}).items():
            given_on = {argument: arguments(case)[n] for n, argument in takes.items()}
            given_on = {n: tensor(v) if isinstance(v, list) else v for n, v in given_on.items()}
            batch = batch.replace(**{field: function(batch, **given_on)})
        controls = Controls.from_recipe(preset_recipe(preset, **written))
        objective = preset_objective(preset, **written).at(controls.numbers(controls.start(), batch.step))
        space = _namespace(objective, batch, policy)
        reading = {"loss": of, **(outputs or {})}
        found = {n: _read(space, space["loss"], path) for n, path in reading.items()}
        found |= {n: gradient(found["loss"], leaves[x]) for n, x in (grads or {"grad_logp": "logp"}).items()}
        return {n: by_table(v, batch.group_ids) if n in tables else _detached(v) for n, v in found.items()}

    return adapter


def _leaves(values: Mapping[str, Any], inside: Names, single: Sequence[str], grads: Names) -> Any:
    """Return the batch, the current log-probs, and the tensors to differentiate by."""
    wanted = (grads or {"grad_logp": "logp"}).values()
    leaves = {n: tensor(values[n]).requires_grad_() for n in wanted}
    batch, policy = typed({inside[n]: leaves.get(n, v) for n, v in values.items()}, (), _places(single, inside))
    return batch, policy, leaves


def _namespace(objective: Objective, batch: RolloutBatch, logp: Any) -> dict[str, Any]:
    """Compute everything of one optimizer batch and return it by name."""
    paid = batch
    if batch.advantages is None and (batch.rewards is not None or batch.token_rewards is not None):
        batch, paid = objective.compute_advantages(batch), objective.subtract_kl(batch)
    totals = objective.totals(batch)
    terms = {part.key: part(batch, logp) for part in objective.terms}
    loss, stats = objective.loss(batch, logp, totals)
    sums = {name: value.item() for name, value in {**stats, "tokens": batch.mask.sum()}.items()}
    return {
        "loss": loss,
        "metrics": update_metrics(sums, [], lr=0.0, updates=0),
        "policy": dataclasses.replace(objective, kl=None, regularisers=()).loss(batch, logp, totals)[0],
        "surrogate": objective.surrogate(batch, logp),
        "corrections": tuple(part(batch, logp.detach()) for part in objective.corrections),
        "terms": {
            part.key.replace(".", ""): {
                "term": terms[part.key],
                "value": objective.aggregate_term(part, terms[part.key], batch, totals),
                "loss": objective.aggregate_term(part, terms[part.key], batch, totals, coef=part.coef),
            }
            for part in objective.terms
        },
        "batch": batch,
        "paid": paid,
    }
