"""More ways to turn a vector case into calls of the product: methods that begin with text rewards or end in a schedule.

As in mechanics.py, only shapes and names: no formula lives here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mechanics import (
    Adapter,
    Case,
    Names,
    arguments,
    by_group,
    by_table,
    flat,
    given,
    gradient,
    part_of,
    refuse_others,
    renamed,
    sections,
    taken,
    tensor,
    typed,
)
from torch import Tensor

from posttrain.advantage.keep import count_admitted
from posttrain.batch import RolloutBatch
from posttrain.loss.aggregate import aggregate, totals
from posttrain.train.objective import Objective
from posttrain.verify.score import combine
from tests.preset_objectives import preset_objective

Scored = tuple[Callable[..., Any], Names, Mapping[str, Any], Sequence[str]]  # function, names, constants, required


def each(functions: Mapping[str, Callable[..., Any]], *, depth: str, over: str, names: Names) -> Adapter:
    """Call functions once per cell of input `over`, a list of rows or a table: output -> function(inputs and params).

    depth: `row` or `cell`. An input with one entry per prompt instead of one per cell is the same for all cells of the
    prompt.
    """

    def adapter(case: Case) -> dict[str, Any]:
        params = renamed(case["params"], names)
        inputs = given(case["inputs"])
        known = {name for function in functions.values() for name in inspect.signature(function).parameters}
        refuse_others([*params, *renamed(inputs, names)], known)

        def one(function: Callable[..., Any], place: tuple[int, ...]) -> Any:
            values = {name: at(value, place) for name, value in inputs.items()}
            return function(**taken(function, {"completion": "", **renamed(values, names), **params}))

        def table(function: Callable[..., Any]) -> Any:
            rows = range(len(inputs[over]))
            if depth == "row":
                return [one(function, (row,)) for row in rows]
            return [[one(function, (row, cell)) for cell in range(len(inputs[over][row]))] for row in rows]

        return {output: table(function) for output, function in functions.items()}

    return adapter


def at(value: Any, place: tuple[int, ...]) -> Any:
    """Return the entry at a position; a value that is not a list ends the descent."""
    for index in place:
        if not isinstance(value, list):
            return value
        value = value[index]
    return value


def scored(
    script: Callable[..., Any], names: Names, constants: Mapping[str, Any] | None = None, *, needs: Sequence[str] = ()
) -> Scored:
    """Return a row reward for `through`, which gets inputs and params by name.

    needs: params without which the reward is not used.
    """
    return script, names, constants or {}, needs


def through(
    preset: str,
    *,
    params: Mapping[str, str | Sequence[str]],
    fields: Mapping[str, Sequence[str]] | None = None,
    objects: Names | None = None,
    by_prompt: Sequence[str] = (),
    rewards: Mapping[str, Scored] | None = None,
    width: str | None = None,
    without: Sequence[str] = (),
    outputs: Names | None = None,
    details: Mapping[str, tuple[Callable[..., Any], str, str]] | None = None,
    tables: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> Adapter:
    """Run a preset's objective as the RL step does, starting from the rewards of the rows.

    params: vector name -> key or keys of the recipe; a name mapped to no key is left out. fields: input -> batch fields
    (default: the field of that name); objects: input that is an object -> the batch mapping that it fills. rewards:
    component -> row reward that computes it; posttrain's combiner sums the components. width: the param that holds the
    padded width, or `lengths` for the longest row: the mask is built from input `lengths`. without: steps left out.
    outputs: output -> `batch.FIELD` after the step, `policy` (the policy term), `terms.N`, `loss`, `grad_logp`.
    details: output -> (function, part, path): function(batch, ...) with the arguments of the part that it takes, on the
    batch before that part. tables: outputs [N] returned as [B,G]; flags: outputs [N] returned as one flag per group.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = given(arguments(case))
        known = {
            *params,
            *(fields or {}),
            *(objects or {}),
            *PLAIN,
            width,
            *(n for r in (rewards or {}).values() for n in r[1]),
        }
        refuse_others(values, known)
        keys = {key: value for name, value in values.items() for key in listed(params.get(name, ()))}
        made, components = components_of(rewards or {}, values)
        batch, logp = batch_of(case, fields or {}, objects or {}, by_prompt, made, components, width)
        objective = preset_objective(preset, **sections(keys))
        full, objective = (
            objective,
            dataclasses.replace(objective, **{step: empty(objective, step) for step in without}),
        )
        done = objective.compute_advantages(batch)
        found = read_step(objective, done, logp, outputs or {})
        found["kept"] = full.filter_rows(full.apply_group_rewards(batch))
        before = objective.subtract_kl(objective.apply_group_rewards(batch))
        for name, (function, part, path) in (details or {}).items():
            free = taken(function, {**part_of(full, part).params, **({} if logp is None else {"logp": logp})})
            found[name] = follow(function(batch if part.startswith("group_rewards") else before, **free), path)
        found |= components
        return {name: shaped(value, name, batch, tables, flags) for name, value in found.items()}

    return adapter


def listed(keys: str | Sequence[str]) -> Sequence[str]:
    return (keys,) if isinstance(keys, str) else keys


def components_of(rewards: Mapping[str, Scored], values: Mapping[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
    """Return the combined rewards (None without any) and the components, each as a table."""
    components: dict[str, Any] = {}
    ids: list[int] = []
    for name, (script, names, constants, needs) in rewards.items():
        table = next(values[n] for n in names if isinstance(values.get(n), list))
        ids = flat(table)[1].tolist()
        used = all(need in values for need in needs)
        passed = {argument: values[n] for n, argument in names.items() if n in values}

        def one(place: tuple[int, int], script: Any = script, fixed: Any = constants, passed: Any = passed) -> Any:
            read = {"completion": "", **fixed, **{argument: at(value, place) for argument, value in passed.items()}}
            return script(**taken(script, read))

        components[name] = [[one((b, g)) if used else 0.0 for g in range(len(row))] for b, row in enumerate(table)]
    if not components:
        return None, {}
    columns = {name: [x for row in table for x in row] for name, table in components.items()}
    total = combine(columns, dict.fromkeys(columns, 1.0), dict.fromkeys(columns, "ignore_component"), ids)
    return tensor(total), components


def batch_of(
    case: Case,
    fields: Mapping[str, Sequence[str]],
    objects: Names,
    by_prompt: Sequence[str],
    rewards: Tensor | None,
    components: Mapping[str, Any],
    width: str | None,
) -> tuple[RolloutBatch, Tensor | None]:
    """Return the batch of a case, and its logp with gradient."""
    values: dict[str, Any] = {}
    for name, value in given({**case["params"], **case["inputs"]}).items():
        if name in objects:
            values |= {f"{objects[name]}.{key}": table for key, table in value.items()}
        for field in fields.get(name, (name,) if name in PLAIN else ()):
            values[field] = value
    logp = tensor(values.pop("logp")).requires_grad_() if "logp" in values else None
    once = [field for name in by_prompt for field in fields[name]]
    batch, _ = typed(values, (), (), once)
    if rewards is not None:
        columns = {name: flat(table)[0] for name, table in components.items()}
        batch = batch.replace(rewards=rewards, components={**batch.components, **columns})
    if width is not None:
        assert batch.lengths is not None
        columns = batch.lengths.max() if width == "lengths" else case["params"][width]
        batch = batch.replace(mask=torch.arange(int(columns)) < batch.lengths[:, None])
    return batch, logp


PLAIN = ("rewards", "correct", "lengths", "truncated", "mask", "logp", "old_logp", "ref_logp", "step", "total_steps")


def empty(objective: Objective, step: str) -> Any:
    """Return the value of an objective's step that is left out."""
    return () if isinstance(getattr(objective, step), tuple) else None


def read_step(objective: Objective, done: RolloutBatch, logp: Tensor | None, outputs: Names) -> dict[str, Any]:
    """Return the outputs of the batch with advantages and, with logp, of the loss."""
    found: dict[str, Any] = {
        name: follow(done, path[6:]) for name, path in outputs.items() if path.startswith("batch.")
    }
    if logp is None:
        return found
    whole = objective.totals(done)
    loss, _ = objective.loss(done, logp, whole)
    for name, path in outputs.items():
        if path == "policy":
            found[name] = dataclasses.replace(objective, kl=None, regularisers=()).loss(done, logp, whole)[0].detach()
        elif path.startswith("terms."):
            part = objective.terms[int(path[6:])]
            found[name] = objective.aggregate_term(part, part(done, logp), done, whole).detach()
        elif path == "loss":
            found[name] = loss.detach()
        elif path == "grad_logp":
            found[name] = gradient(loss, logp)
    return found


def follow(value: Any, path: str) -> Any:
    """Follow a path: `.` or names joined by dots (attributes, keys, indices); component names may contain a `/`."""
    for part in [] if path == "." else path.split("."):
        if isinstance(value, Mapping):
            value = value[part]
        elif isinstance(value, (list, tuple)):
            value = value[int(part)]
        else:
            value = getattr(value, part)
    return value.detach() if isinstance(value, Tensor) else value


def shaped(value: Any, name: str, batch: RolloutBatch, tables: Sequence[str], flags: Sequence[str]) -> Any:
    if name in tables and isinstance(value, Tensor):
        return by_table(value, batch.group_ids)
    return by_group(value, batch.group_ids) if name in flags else value


def first_column(adapter: Adapter, name: str) -> Adapter:
    """Return an output [N,T] that is equal at every token of a row as [N]."""
    return lambda case: {k: v[:, 0] if k == name else v for k, v in adapter(case).items()}


def split_first(preset: str, outputs: tuple[str, str], step: Adapter) -> Adapter:
    """Average a preset's surrogate over the first token and over all later tokens of the rows.

    step: an adapter that computes the `advantages` and ignores the loss.
    """

    def adapter(case: Case) -> dict[str, Any]:
        batch, logp = batch_of(case, {}, {}, (), None, {}, None)
        assert logp is not None
        clip = {"loss": {"clip_low": case["params"]["clip"]}} if "clip" in case["params"] else {}
        objective = preset_objective(preset, **clip)
        values = objective.surrogate(batch.replace(advantages=step(case)["advantages"]), logp).values.detach()
        at_start = torch.arange(batch.mask.shape[1]) == 0
        masks = torch.where(at_start, batch.mask, False), torch.where(at_start, False, batch.mask)
        return {name: aggregate(values, m, "token_mean", totals(m)) for name, m in zip(outputs, masks, strict=True)}

    return adapter


def chosen(
    by: str, of: Mapping[str, Adapter], *, default: str = "None", drops: Mapping[str, Sequence[str]] | None = None
) -> Adapter:
    """Use the adapter chosen by a param's text. drops: params that the chosen adapter does not take."""

    def adapter(case: Case) -> dict[str, Any]:
        params = dict(case["params"])
        word = str(params.pop(by, default))
        kept = {name: value for name, value in params.items() if name not in (drops or {}).get(word, ())}
        return of[word]({**case, "params": kept})

    return adapter


def scheduled(controller: Callable[..., Any], output: str, names: Names, *, step: str) -> Adapter:
    """Return the value of a controller in the step given by param `step` (default: the first)."""

    def adapter(case: Case) -> dict[str, Any]:
        params = dict(case["params"])
        now = params.pop(step, 0)
        made = controller(**{"total_steps": int(True), **{names[n]: v for n, v in params.items()}})
        return {output: made.value(made.start(0.0), now)}

    return adapter


def staged_values(controller: Callable[..., Any], outputs: Names, *, stages: str, steps: str, until: str) -> Adapter:
    """Run a controller of stages: param `stages` is a list of objects.

    outputs: output -> key of the values of the stages.
    """

    def adapter(case: Case) -> dict[str, Any]:
        free = dict(case["params"])
        refuse_others(case["inputs"], [steps])
        table = free.pop(stages)
        *ends, _ = [stage[until] for stage in table]
        found: dict[str, Any] = {}
        for output, key in outputs.items():
            made = controller(values=tuple(stage[key] for stage in table), until=tuple(ends), **free)
            state = made.start(0.0)
            found[output] = [made.value(state, step) for step in case["inputs"][steps]]
        return found

    return adapter


def admission(
    controller: Callable[..., Any], output: str, *, traces: Names, mixed: str, solved: str, initial: str, params: Names
) -> Adapter:
    """Return how many solved groups each step admits, with the share that its controller had before the step."""

    def adapter(case: Case) -> dict[str, Any]:
        given_params = dict(case["params"])
        first = given_params.pop(initial, 0.0)
        made = controller(**renamed(given_params, params))
        state, counts = made.start(first), []
        inputs = case["inputs"]
        for step, groups in enumerate(zip(inputs[mixed], inputs[solved], strict=True)):
            counts.append(count_admitted(made.value(state, step), *groups))
            state = made.update(state, {metric: inputs[name][step] for name, metric in traces.items()}, step)
        return {output: counts}

    return adapter
