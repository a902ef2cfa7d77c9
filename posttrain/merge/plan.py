"""What a merge will do, decided from headers alone: inputs, weights, rule arguments, the tensors to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain import registry
from posttrain.errors import MergeError, nearest
from posttrain.merge.rules import CANCELS, normalized
from posttrain.merge.sources import Source, open_source
from posttrain.merge.tensors import Spec
from posttrain.recipe.stages import MergeRecipe


@dataclass(frozen=True)
class Plan:
    """A merge that can start. `anchor` (base or first model) gives config, tensor order and integer buffers."""

    method: str
    rule: registry.Component
    params: dict[str, Any]
    models: list[Source]
    weights: list[float]
    base: Source | None
    tokenizer: Source
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

    @property
    def moving(self) -> list[bool]:
        """Per model: whether it has a part in the result."""
        return [weight != 0 and self.params.get("lam", 1.0) != 0 for weight in self.weights]

    @property
    def rescales(self) -> bool:
        """Whether equal inputs would come out as something else: a plain sum whose weights do not sum to 1."""
        return self.method == "linear" and not self.params["normalize"] and abs(sum(self.weights) - 1) > CANCELS


def make_plan(recipe: MergeRecipe, scratch: Path) -> Plan:
    """Open the inputs and settle everything but the values. Raises MergeError for what the recipe gets wrong."""
    rule = registry.get("merge", recipe.merge_method)
    params, weights = _params(recipe, rule), _weights(recipe)
    if params.get("normalize"):
        normalized(weights)  # refuses weights that cancel before any model is opened
    needs_base = recipe.merge_method == "task_arithmetic"
    if needs_base and recipe.base_model is None:
        raise MergeError("task_arithmetic needs `base_model`", hint="name the model that the others were trained from")
    opened: dict[str, Source] = {}
    for name in (*([recipe.base_model] if recipe.base_model else []), *(m.model for m in recipe.models)):
        if name not in opened:
            opened[name] = open_source(name, recipe.base_dir, scratch)
    models = [opened[m.model] for m in recipe.models]
    _refuse_cancelling(models, weights)
    base = opened[recipe.base_model] if recipe.base_model else None
    tokenizer = _tokenizer_source(recipe, models, base)
    plan = Plan(
        method=recipe.merge_method,
        rule=rule,
        params=params,
        models=models,
        weights=weights,
        base=base if needs_base else None,
        tokenizer=tokenizer,
        out={},
        warnings=[],
    )
    return Plan(**{**vars(plan), "out": _out(plan, recipe.dtype), "warnings": _warnings(plan, recipe)})


def _params(recipe: MergeRecipe, rule: registry.Component) -> dict[str, Any]:
    """The rule's keyword arguments: mergekit's top-level `parameters` over its defaults."""
    given = {"normalize": recipe.parameters.normalize, "lam": recipe.parameters.lambda_}
    given = {key: value for key, value in given.items() if value is not None}
    unknown = [key for key in given if key not in rule.params]
    if unknown:
        raise MergeError(f"{rule.name} has no parameter {'lambda' if unknown[0] == 'lam' else unknown[0]}")
    for model in recipe.models:
        if model.parameters.normalize is not None or model.parameters.lambda_ is not None:
            raise MergeError(
                f"{model.model}: normalize and lambda hold for the whole merge, not for one model",
                hint="put them under the top-level `parameters`",
            )
    return {key: given.get(key, default) for key, (_, default) in rule.params.items()}


def _weights(recipe: MergeRecipe) -> list[float]:
    """One weight a model: its own, else the top-level one, else 1."""
    common = 1.0 if recipe.parameters.weight is None else recipe.parameters.weight
    return [common if m.parameters.weight is None else m.parameters.weight for m in recipe.models]


def _refuse_cancelling(models: Sequence[Source], weights: Sequence[float]) -> None:
    """A model given twice with weights that sum to 0 would leave rounding errors behind, and nothing else."""
    for source in models:
        own = [w for s, w in zip(models, weights, strict=True) if s.folder == source.folder]
        if any(own) and abs(sum(own)) < CANCELS:
            raise MergeError(f"{source.name} is given {len(own)} times with weights that cancel: nothing of it is left")


def _tokenizer_source(recipe: MergeRecipe, models: Sequence[Source], base: Source | None) -> Source:
    asked = recipe.tokenizer_source
    if asked is None:
        return base or models[0]
    known = {source.name: source for source in models}
    if base is not None:
        known |= {"base": base, base.name: base}
    if asked not in known:
        near = nearest(asked, known)
        raise MergeError(
            f"tokenizer_source `{asked}` is none of the models",
            allowed=f"known: {', '.join(known)}",
            hint=f"did you mean `{near}`?" if near else "",
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
    if plan.base is not None and plan.base.folder in folders:
        found.append(f"{plan.base.name} is the base and one of the models: it adds nothing")
    found += [
        f"{s.name} has the negative weight {w:g}: its part is subtracted"
        for s, w in zip(plan.models, plan.weights, strict=True)
        if w < 0
    ]
    if plan.rescales:
        found.append(f"the weights sum to {sum(plan.weights):g} and normalize is off: all values are scaled by that")
    if plan.method == "linear" and recipe.base_model and recipe.base_model not in {m.model for m in recipe.models}:
        found.append(
            f"base_model {recipe.base_model} has no part in a linear merge; list it under models to average it"
        )
    if not any(plan.moving):
        found.append("every weight, or lambda, is 0: the merged model is the base")
    return found
