"""Modes for whole models: objects of tensors go in and come out. Shapes and names only, as in mechanics.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mechanics import Adapter, Case, Names, given, gradient, picked, refuse_others, renamed, taken, tensor
from torch import Tensor

from posttrain.merge.rules import merge_state


def states(value: Any) -> Any:
    """Convert an object of lists to a model, and a list of such objects to models; return anything else unchanged."""
    if isinstance(value, Mapping) and all(isinstance(item, list) for item in value.values()):
        return {name: tensor(item) for name, item in value.items()}
    return [states(item) for item in value] if isinstance(value, list) else value


def on_states(
    function: Callable[..., Any],
    outputs: Names | str,
    *,
    names: Names | None = None,
    drops: Sequence[str] = (),
    start: Mapping[str, Any] | None = None,
) -> Adapter:
    """Call the function once with models as tensors by name. drops: params and inputs that it does not take."""

    def adapter(case: Case) -> dict[str, Any]:
        values = {**case["params"], **{name: states(value) for name, value in given(case["inputs"]).items()}}
        kept = {name: value for name, value in values.items() if name not in drops}
        return picked(function(**{**(start or {}), **renamed(kept, names or {})}), outputs)

    return adapter


def ruled(rule: Callable[..., Tensor], *, names: Names | None = None, drops: Sequence[str] = ()) -> Adapter:
    """Apply a merge rule to `models` and `base`."""

    def function(models: Any, base: Any = None, **params: Any) -> Any:
        return merge_state(rule, models, base, **params)

    return on_states(function, "merged", names=names, drops=drops)


def drawn(rule: Callable[..., Tensor]) -> Adapter:
    """Apply a rule that drops entries at random, as in the papers: kept entries are divided by their probability.

    The recipe's meaning and defaults are mergekit's.
    """

    def function(*, draws: Any, rescale: bool = True, normalize: bool = False, **values: Any) -> Any:
        own = {name: [state[name] for state in draws] for name in draws[0]}
        return merge_state(rule, extras=own, rescale="chance" if rescale else False, normalize=normalize, **values)

    return on_states(function, "merged")


def soup(choose: Callable[..., Sequence[int]], rule: Callable[..., Tensor]) -> Adapter:
    """Average all models, or the models that a greedy soup keeps by a table of scores: "0,2" -> score."""

    def function(models: Any, mode: str = "uniform", val_scores: Any = None, table: Any = None) -> Any:
        kept = list(range(len(models)))
        if mode == "greedy":
            kept = choose(val_scores.tolist(), lambda indices: float(table[",".join(map(str, indices))]))
        return {"kept": kept, "merged": merge_state(rule, [models[i] for i in kept])}

    def adapter(case: Case) -> dict[str, Any]:
        values = {**case["params"], **given(case["inputs"])}
        read = {name: states(value) if name == "models" else value for name, value in values.items()}
        read |= {"val_scores": tensor(values["val_scores"])} if "val_scores" in values else {}
        return function(**read)

    return adapter


def by_tensor(
    function: Callable[..., Any],
    differences: Callable[..., Any],
    output: str,
    *,
    takes: Sequence[str],
    start: Mapping[str, float],
    rows: bool = False,
) -> Adapter:
    """Call the function on the differences to the base, tensor by tensor.

    rows: call it once per tensor with each model's difference as one row [1, n] -> a number by name; otherwise call it
    once per difference -> a list, with the models of the first tensor first. takes: arguments of the function, in
    order; start: their defaults.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = {**case["params"], **given(case["inputs"])}
        free = [values.get(name, start[name]) for name in takes]
        base, models = states(values["base"]), states(values["models"])
        found = {name: list(differences([model[name] for model in models], base[name])) for name in base}
        if rows:
            wide = {name: [part.flatten()[None] for part in parts] for name, parts in found.items()}
            return {output: {name: float(function(parts, *free)) for name, parts in wide.items()}}
        return {output: [function(part, *free) for parts in found.values() for part in parts]}

    return adapter


def on_matrices(
    function: Callable[..., Any], outputs: Names | str, matrices: Sequence[str], made: Mapping[str, Any] | None = None
) -> Adapter:
    """Call the function once with the inputs in `matrices` as tensors.

    made: input -> function that builds each of its items from tensors.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = {**case["params"], **given(case["inputs"])}
        values = {name: tensor(value) if name in matrices else value for name, value in values.items()}
        for name, build in (made or {}).items():
            values[name] = [build(**{k: tensor(v) for k, v in item.items()}) for item in values[name]]
        return picked(function(**values), outputs)

    return adapter


def listed(function: Callable[..., Any], output: str, names: Names) -> Adapter:
    """Call the function once per item: the inputs are lists of one length, params are the same for all items."""

    def adapter(case: Case) -> dict[str, Any]:
        inputs = {names[name]: value for name, value in given(case["inputs"]).items()}
        rows = zip(*inputs.values(), strict=True)
        return {output: [function(**dict(zip(inputs, row, strict=True)), **case["params"]) for row in rows]}

    return adapter


def records(function: Callable[..., Any], outputs: Names, names: Names) -> Adapter:
    """Call the function once per item, as `listed`; output -> the list of one key of all results."""

    def adapter(case: Case) -> dict[str, Any]:
        made = listed(function, "made", names)(case)["made"]
        return {output: [result[key] for result in made] for output, key in outputs.items()}

    return adapter


def token_loss(
    weigh: Callable[..., Tensor],
    loss: Callable[..., Tensor],
    rows: Callable[..., Any],
    start: Mapping[str, Any] | None = None,
) -> Adapter:
    """Compute a supervised objective: weights of token rows, their loss, and its gradient by `logp`.

    Each param goes to the function that takes it; a param that neither function takes is an error. start: params of the
    loss that a case may leave out.
    """

    def adapter(case: Case) -> dict[str, Any]:
        inputs = {name: value if name == "tokens" else tensor(value) for name, value in given(case["inputs"]).items()}
        logp, mask, params = inputs["logp"].requires_grad_(), inputs["mask"].bool(), dict(case["params"])
        refuse_others(params, [*taken(weigh, params), *taken(loss, params)])
        refuse_others(inputs, ("logp", "mask", "behavior_logp", "tokens"))
        made = rows(logp.detach(), mask, inputs.get("behavior_logp"), inputs.get("tokens"))
        weights = weigh(made, **taken(weigh, params))
        value = loss(logp, mask, weights, **{**(start or {}), **taken(loss, params)})
        return {"loss": value, "weights": weights, "grad_logp": gradient(value, logp)}

    return adapter


def on_logits(function: Callable[..., Any], outputs: Names, read: Callable[..., Tensor] | None = None) -> Adapter:
    """Call the function on student and teacher logits.

    With `read`, call it on log-probs of the tokens instead, and return the gradient by the student's log-probs.
    """

    def adapter(case: Case) -> dict[str, Any]:
        inputs = {name: tensor(value) for name, value in case["inputs"].items()}
        params, mask = dict(case["params"]), inputs["mask"]
        refuse_others(inputs, ("student_logits", "teacher_logits", "mask", "tokens"))
        pair = (inputs["student_logits"], inputs["teacher_logits"])
        if read is None:
            return picked(function(*pair, mask, **params), outputs)
        at = {"temperature": params.pop("temperature")} if "temperature" in params else {}
        params.pop("beta", None)  # a share of two divergences over the vocabulary, which a sampled token has not
        student, teacher = (read(logits, inputs["tokens"], **at) for logits in pair)
        leaf = student.detach().requires_grad_()
        result = function(leaf, teacher, mask, **params)
        return {**picked(result, outputs), "grad_logp": gradient(result.loss, leaf)}

    return adapter
