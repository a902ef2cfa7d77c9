"""More ways to turn a vector case into calls of the product: preference pairs, functions with gradients of their own.

As in mechanics.py, only shapes and names: no formula lives here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mechanics import (
    Adapter,
    Case,
    Names,
    _read,
    arguments,
    by_table,
    combined,
    given,
    gradient,
    refuse_others,
    renamed,
    tensor,
    translated,
)

from posttrain.batch import PairBatch, RolloutBatch
from posttrain.loss.pair import mean

SIDES = {"grad_chosen": "chosen_logp", "grad_rejected": "rejected_logp"}


def pairs(
    function: Callable[..., Any],
    inputs: Names,
    *,
    params: Names | None = None,
    start: Mapping[str, Any] | None = None,
    words: Mapping[str, Mapping[Any, Any]] | None = None,
    grads: Names | None = None,
    rows: Names | None = None,
    means: Names | None = None,
) -> Adapter:
    """Compute a pair loss: losses, their mean, and the mean's gradients.

    grads: output -> field of the PairBatch (default: both sides). inputs: vector name -> field; params: vector name ->
    keyword; words: param -> the values of posttrain for the vector's values; start: keywords that a case may leave out.
    rows, means: output -> stat, per pair or averaged as the trainer does. A side that a case leaves out has no rows.
    """

    def adapter(case: Case) -> dict[str, Any]:
        sides = dict.fromkeys(SIDES.values(), torch.zeros(0, dtype=torch.float64))
        fields = {name: tensor(value) for name, value in renamed(given(case["inputs"]), inputs).items()}
        batch = PairBatch(**{**sides, **fields})
        leaves = {name: getattr(batch, field).requires_grad_() for name, field in (grads or SIDES).items()}
        written = {n: numbers(v) for n, v in translated(case["params"], words or {}).items()}
        result = function(batch, **{**(start or {}), **renamed(written, params or {})})
        loss = mean(result.losses)
        return {
            "losses": result.losses.detach(),
            "loss": loss.detach(),
            **{name: gradient(loss, leaf) for name, leaf in leaves.items()},
            **{name: result.stats[stat] for name, stat in (rows or {}).items()},
            **{name: mean(result.stats[stat]) for name, stat in (means or {}).items()},
        }

    return adapter


def numbers(value: Any) -> Any:
    """Convert a list to a tensor; return anything else unchanged."""
    return tensor(value) if isinstance(value, list) else value


def by_inputs(of: Mapping[str, Adapter], drops: Mapping[str, Sequence[str]] | None = None) -> Adapter:
    """Use the first adapter whose input the case gives; inputs of null are left out.

    drops: input -> params of the other adapters, which its adapter does not take.
    """

    def adapter(case: Case) -> dict[str, Any]:
        inputs = given(case["inputs"])
        first = next(name for name in of if name in inputs)
        params = {n: v for n, v in case["params"].items() if n not in (drops or {}).get(first, ())}
        return of[first]({**case, "params": params, "inputs": inputs})

    return adapter


def tensors(
    function: Callable[..., Any],
    outputs: Names,
    *,
    names: Names | None = None,
    averaged: Names | None = None,
    grads: Mapping[str, Sequence[str]] | None = None,
    flags: Sequence[str] = (),
    counts: Sequence[str] = (),
    tables: Sequence[str] = (),
    columns: Sequence[str] = (),
    start: Mapping[str, Any] | None = None,
) -> Adapter:
    """Call the function once with the inputs as tensors, without inputs that are null.

    flags: inputs converted to bool; counts: inputs converted to int64; tables: a row that is null becomes a row of
    nulls; columns: inputs [N] passed as [N,1]; start: arguments that the case does not give. outputs: output -> path in
    the result; averaged: output -> path of the values to average. grads: output -> (input, output to differentiate).
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = {n: numbers(rowed(v) if n in tables else v) for n, v in given(arguments(case)).items()}
        values |= {n: values[n].bool() for n in flags} | {n: values[n].long() for n in counts}
        values |= {n: values[n][:, None] for n in columns}
        leaves = {n: values[n].requires_grad_() for n in {pair[0] for pair in (grads or {}).values()}}
        result = function(**{**(start or {}), **renamed({**values, **leaves}, names or {})})
        own = getattr(result, "loss", None)
        found = {name: _read(result, own, path) for name, path in outputs.items()}
        found |= {name: mean(_read(result, None, path)) for name, path in (averaged or {}).items()}
        slopes = {name: gradient(found[of], leaves[by]) for name, (by, of) in (grads or {}).items()}
        return {**{n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in found.items()}, **slopes}

    return adapter


def rowed(table: Sequence[Any]) -> list[list[Any]]:
    """Replace each missing row of a table by a row of nulls."""
    width = max((len(row) for row in table if row is not None), default=0)
    return [list(itertools.repeat(None, width)) if row is None else row for row in table]


def offline_and_online(function: Callable[..., Any], inputs: Names, outputs: Names, *, group_size: str) -> Adapter:
    """Call function(PairBatch, RolloutBatch, logp, ...) and compute gradients by both sides and by logp.

    The rows of a group are consecutive; `group_size` is their number.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values, params = given(case["inputs"]), dict(case["params"])
        refuse_others(values, [*inputs, "mask", "logp", "ref_logp"])
        batch = PairBatch(**{field: tensor(values[name]) for name, field in inputs.items()})
        mask, logp = tensor(values["mask"]).bool(), tensor(values["logp"]).requires_grad_()
        rows = torch.arange(len(mask))
        ids = rows.repeat_interleave(params.pop(group_size, 1))[: len(mask)]
        leaves = {name: getattr(batch, field).requires_grad_() for name, field in SIDES.items()}
        samples = RolloutBatch(group_ids=ids, mask=mask, ref_logp=tensor(values["ref_logp"]))
        result = function(batch, samples, logp, **params)
        return {
            **{name: getattr(result, field).detach() for name, field in outputs.items()},
            **{name: gradient(result.loss, leaf) for name, leaf in {**leaves, "grad_logp": logp}.items()},
        }

    return adapter


def weighted(output: str, *, components: str, weights: str, table: bool = True) -> Adapter:
    """Return posttrain's own sum of reward components, as a table or as rows."""

    def adapter(case: Case) -> dict[str, Any]:
        rewards, ids = combined(case["inputs"][components], case["params"][weights], None)
        return {output: by_table(rewards, ids) if table else rewards}

    return adapter
