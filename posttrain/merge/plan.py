"""The plan of a merge, made from headers alone: inputs, weights, rule arguments, the tensors to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from posttrain import registry
from posttrain.errors import MergeError, counted, did_you_mean
from posttrain.merge.arguments import Arguments
from posttrain.merge.rules import CANCELS, normalized
from posttrain.merge.sources import Source, open_source
from posttrain.merge.tensors import Spec
from posttrain.merge.values import layer_count
from posttrain.recipe import merging
from posttrain.recipe.merge_sections import MergeModel
from posttrain.recipe.stages import MergeRecipe


@dataclass(frozen=True)
class Plan:
    """A merge that can start. `anchor` (base or first model) gives config, tensor order and integer buffers."""

    method: str
    rule: registry.Component
    arguments: Arguments
    models: list[Source]
    base: Source | None
    tokenizer: Source
    seed: int
    out: dict[str, Spec]
    warnings: list[str]

    @property
    def anchor(self) -> Source:
        return self.base or self.models[0]

    @property
    def sources(self) -> list[Source]:
        """All inputs, the anchor first, each once."""
        return list({s.folder: s for s in (self.anchor, *self.models, self.tokenizer)}.values())

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.out.values())

    def rescales(self, name: str) -> bool:
        """Whether equal inputs would come out as something else: a plain sum whose weights do not sum to 1."""
        if self.method != "linear" or self.arguments.params(name)["normalize"]:
            return False
        return abs(sum(self.arguments.weights(name)) - 1) > CANCELS


def make_plan(recipe: MergeRecipe, scratch: Path) -> Plan:
    """Open the inputs and decide everything but the tensors' values. Raises MergeError for mistakes in the recipe."""
    for key, what, right in merging.problems(recipe):
        raise MergeError(f"{key}: {what}", hint=right)
    rule = registry.get("merge", recipe.merge_method)
    needs_base = "base_model" in rule.needs
    opened: dict[str, Source] = {}

    def source(name: str) -> Source:
        if name not in opened:
            opened[name] = open_source(name, recipe.base_dir, scratch)
        return opened[name]

    base = source(recipe.base_model) if recipe.base_model else None
    chosen = _models(recipe, needs_base)
    models = [source(name) for name, _ in chosen]
    tokenizer = _tokenizer_source(recipe, models, base)
    layers = layer_count((base or models[0]).tensors)
    if recipe.layers not in (None, layers):
        raise MergeError(f"the slice goes to layer {recipe.layers}, but the models have {counted(layers, 'layer')}")
    arguments = Arguments.of(rule, recipe.parameters, [model for _, model in chosen], layers)
    plan = Plan(
        method=recipe.merge_method,
        rule=rule,
        arguments=arguments,
        models=models,
        base=base if needs_base else None,
        tokenizer=tokenizer,
        seed=recipe.run.seed,
        out={},
        warnings=[],
    )
    _refuse_cancelling(plan)
    return Plan(**{**vars(plan), "out": _out(plan, recipe.dtype), "warnings": _warnings(plan, recipe)})


def _models(recipe: MergeRecipe, needs_base: bool) -> list[tuple[str, MergeModel | None]]:
    """The models that the rule sees, by name. A base among them has no difference from itself and is left out.

    slerp goes from the base, if there is one, to the other model.
    """
    listed: list[tuple[str, MergeModel | None]] = [(model.model, model) for model in recipe.models]
    base = recipe.base_model
    if recipe.merge_method == "slerp" and base is not None:
        named = dict(listed)
        return [(base, named.get(base)), *((name, model) for name, model in listed if name != base)]
    if needs_base and recipe.merge_method != "reasoning_vector":
        kept = [(name, model) for name, model in listed if name != base]
        if not kept:
            raise MergeError("no model beside the base", hint="list the models whose differences are added")
        return kept
    return listed


def _refuse_cancelling(plan: Plan) -> None:
    """Raise MergeError if weights cancel, also those of a model listed twice: only rounding errors would be left."""
    if plan.method in merging.UNWEIGHTED:
        return
    for name in plan.anchor.tensors if plan.arguments.names_matter else [next(iter(plan.anchor.tensors), "")]:
        weights = plan.arguments.weights(name)
        if plan.arguments.params(name).get("normalize") and plan.method in ("linear", "task_arithmetic"):
            normalized(weights)
        for source in plan.models:
            own = [w for s, w in zip(plan.models, weights, strict=True) if s.folder == source.folder]
            if any(own) and abs(sum(own)) < CANCELS:
                count = f"{source.name} is given {len(own)} times"
                raise MergeError(f"{count} with weights that cancel: nothing of it is left")


def _tokenizer_source(recipe: MergeRecipe, models: Sequence[Source], base: Source | None) -> Source:
    asked = recipe.tokenizer_source
    if asked is None:
        return base or models[0]
    known = {source.name: source for source in models}
    if base is not None:
        known |= {"base": base, base.name: base}
    if asked not in known:
        raise MergeError(
            f"tokenizer_source `{asked}` is none of the models",
            allowed=f"known: {', '.join(known)}",
            hint=did_you_mean(asked, known),
        )
    return known[asked]


def _out(plan: Plan, dtype: str | None) -> dict[str, Spec]:
    """What will be written: the anchor's tensors, floats in `dtype` (None: as the first model stores them)."""
    found: dict[str, Spec] = {}
    for name, spec in plan.anchor.tensors.items():
        kind = plan.models[0].tensors.get(name, spec).dtype if dtype is None else getattr(torch, dtype)
        found[name] = Spec(kind if spec.dtype.is_floating_point else spec.dtype, spec.shape)
    return found


def _warnings(plan: Plan, recipe: MergeRecipe) -> list[str]:
    found = []
    folders = [s.folder for s in plan.models]
    found += [f"{s.name} is given twice" for i, s in enumerate(plan.models) if s.folder in folders[:i]]
    if plan.base is not None and plan.method != "reasoning_vector":
        listed = recipe.base_model in {m.model for m in recipe.models}
        if listed or plan.base.folder in folders:
            found.append(f"{plan.base.name} is the base and one of the models: it adds nothing")
    name = next(iter(plan.out or plan.anchor.tensors), "")
    if not plan.arguments.names_matter:
        found += _of_weights(plan, name)
    if plan.method == "linear" and recipe.base_model and recipe.base_model not in {m.model for m in recipe.models}:
        found.append(
            f"base_model {recipe.base_model} has no part in a linear merge; list it under models to average it"
        )
    names = plan.anchor.tensors if plan.arguments.names_matter else [name]
    if not any(any(plan.arguments.moving(each)) for each in names):
        found.append("every weight, or the factor on all of them, is 0: the merged model is the base or first model")
    return found


def _of_weights(plan: Plan, name: str) -> list[str]:
    weights, params = plan.arguments.weights(name), plan.arguments.params(name)
    found = [
        f"{s.name} has the negative weight {w:g}: its part is subtracted"
        for s, w in zip(plan.models, weights, strict=True)
        if w < 0
    ]
    if plan.rescales(name):
        found.append(f"the weights sum to {sum(weights):g} and normalize is off: all values are scaled by that")
    if "epsilon" in params:
        densities = params["density"] if isinstance(params["density"], list) else [params["density"]]
        spreads = params["epsilon"] if isinstance(params["epsilon"], list) else [params["epsilon"]]
        if min(densities) - max(spreads) <= 0 or max(densities) + max(spreads) >= 1:
            found.append("density - epsilon or density + epsilon lies outside (0, 1): chances are held within [0, 1]")
    return found
