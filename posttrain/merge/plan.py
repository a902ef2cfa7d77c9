"""Merge plan from file headers alone: inputs, weights, rule arguments and output tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from posttrain import registry
from posttrain.errors import MergeError, count_noun
from posttrain.merge import vocabulary
from posttrain.merge.arguments import Arguments, TensorPosition
from posttrain.merge.layers import count_layers, layer_of, precedes_layers, replace_layer
from posttrain.merge.rules import MIN_WEIGHT_SUM, normalize_weights
from posttrain.merge.sources import Source, open_source
from posttrain.merge.tensors import Spec
from posttrain.merge.vocabulary import Vocabulary
from posttrain.recipe import merging
from posttrain.recipe.stages import MergeRecipe


@dataclass(frozen=True)
class Slice:
    """A slice of the output (all layers without `slices`) with its opened inputs.

    key: its key in the recipe, "" or `slices.N`. starts: first layer in each model. first: first layer in the output.
    """

    key: str
    models: list[Source]
    starts: list[int]
    base: Source | None
    base_start: int
    first: int
    layers: int
    arguments: Arguments

    @property
    def anchor(self) -> Source:
        """The reference for differences: the base, or the first model."""
        return self.base or self.models[0]

    @property
    def anchor_start(self) -> int:
        return self.base_start if self.base else self.starts[0]

    @property
    def sources(self) -> list[Source]:
        """The inputs without duplicates, anchor first."""
        return list({s.folder: s for s in (self.anchor, *self.models)}.values())


@dataclass(frozen=True)
class Plan:
    """A checked merge, ready to run.

    stacked: the layers are chosen by `slices`, so they are renumbered. config: source of the output's config.json.
    tokenizer: source of the tokenizer files, unless `tokens` creates a new tokenizer.
    """

    method: str
    rule: registry.Component
    slices: list[Slice]
    stacked: bool
    config: Source
    tokenizer: Source
    seed: int
    tokens: Vocabulary | None = None
    chat_template: str | None = None
    out: dict[str, Spec] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def anchor(self) -> Source:
        return self.slices[0].anchor

    @property
    def base(self) -> Source | None:
        return self.slices[0].base

    @property
    def models(self) -> list[Source]:
        """The models passed to the rule; with `slices`, those of all slices without duplicates."""
        if not self.stacked:
            return self.slices[0].models
        return list({s.folder: s for part in self.slices for s in part.models}.values())

    @property
    def sources(self) -> list[Source]:
        """All inputs without duplicates, anchor first."""
        inputs = [s for part in self.slices for s in part.sources]
        return list({s.folder: s for s in (*inputs, self.config, self.tokenizer)}.values())

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.out.values())

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """Number of layers of each stack of the output."""
        if self.stacked:
            return {stack: sum(part.layers for part in self.slices) for stack in count_layers(self.anchor.tensors)}
        return count_layers(self.anchor.tensors)

    def slice_of(self, name: str) -> Slice:
        """Return the slice that a tensor of the output belongs to."""
        layer = layer_of(name)
        if layer is None:
            return self.slices[0] if precedes_layers(name) else self.slices[-1]
        return next((p for p in self.slices if p.first <= layer[1] < p.first + p.layers), self.slices[0])

    def position(self, name: str) -> TensorPosition:
        """Return the position of an output tensor: its name in each model, and the relative depth of its layer."""
        part = self.slice_of(name)
        inputs = [self._name_in_input(name, part, start) for start in part.starts]
        layer = layer_of(name)
        if layer is None:
            return TensorPosition(name, inputs)
        count = part.layers if self.stacked else self.counts[layer[0]]
        return TensorPosition(name, inputs, (layer[1] - part.first) / (count - 1) if count > 1 else 1.0)

    def anchor_name(self, name: str) -> str:
        """Return the name of an output tensor in the anchor of its slice."""
        part = self.slice_of(name)
        return self._name_in_input(name, part, part.anchor_start)

    def _name_in_input(self, name: str, part: Slice, start: int) -> str:
        layer = layer_of(name)
        return replace_layer(name, layer[1] - part.first + start) if self.stacked and layer else name


def make_plan(recipe: MergeRecipe, scratch: Path) -> Plan:
    """Open the inputs and decide everything except tensor values. Raises MergeError for mistakes in the recipe."""
    for key, what, right in merging.problems(recipe):
        raise MergeError(f"{key}: {what}", hint=right)

    @functools.cache
    def source(name: str) -> Source:
        return open_source(name, recipe.base_dir, scratch)

    rule = registry.get("merge", recipe.merge_method)
    slices = list(_make_slices(recipe, rule, source))
    named = source(recipe.base_model) if recipe.base_model else None
    takes_part = named is not None and any(named.folder == s.folder for part in slices for s in part.sources)
    plan = Plan(
        method=recipe.merge_method,
        rule=rule,
        slices=slices,
        stacked=bool(recipe.slices),
        config=named
        if named is not None and (takes_part or recipe.merge_method == "passthrough")
        else slices[0].anchor,
        tokenizer=named or slices[0].anchor,
        seed=recipe.run.seed,
    )
    if plan.stacked:
        _check_stacks(plan)
    _check_weights(plan)
    models = {name: source(name) for name in merging.named_models(recipe)}
    together = [part.sources for part in slices]
    plan = replace(plan, tokens=vocabulary.build_vocabulary(recipe, together, models, plan.tokenizer))
    plan = replace(plan, tokenizer=_select_tokenizer(recipe, plan.tokenizer, models))
    template = vocabulary.select_template(recipe.chat_template, list(models.values()), plan.tokenizer)
    return replace(
        plan, chat_template=template, out=_output_specs(plan, recipe.dtype), warnings=_collect_warnings(plan, recipe)
    )


def _make_slices(recipe: MergeRecipe, rule: registry.Component, source: Any) -> Iterator[Slice]:
    """Yield the slices of the output with their inputs opened."""
    first = 0
    for section in merging.parts(recipe):
        models = [source(entry.name) for entry in section.models]
        base = source(section.base.name) if section.base else None
        layers = section.layers or max(count_layers((base or models[0]).tensors).values(), default=0)
        yield Slice(
            key=section.at.rstrip("."),
            models=models,
            starts=[entry.first for entry in section.models],
            base=base,
            base_start=section.base.first if section.base else 0,
            first=first,
            layers=layers,
            arguments=Arguments.of(
                rule, [section.parameters, recipe.parameters], [entry.parameters for entry in section.models]
            ),
        )
        first += layers


def _check_stacks(plan: Plan) -> None:
    """Raise MergeError if `slices` name layers that a model lacks, or a model has several stacks of layers."""
    for part in plan.slices:
        starts = [
            *zip(part.models, part.starts, strict=True),
            *([(part.base, part.base_start)] if part.base else []),
        ]
        for model, start in starts:
            counts = count_layers(model.tensors)
            if len(counts) != 1:
                stacks = ", ".join(counts) or "none"
                raise MergeError(
                    f"`slices` choose layers of one stack; {model.name} has {count_noun(len(counts), 'stack')}:"
                    f" {stacks}",
                    hint="merge whole models with `models`",
                )
            (count,) = counts.values()
            if start + part.layers > count:
                asked = f"{part.key}: layer_range [{start}, {start + part.layers}] of {model.name}"
                hint = f"write [first, last + 1] within 0 and {count}"
                raise MergeError(f"{asked}, which has {count_noun(count, 'layer')}", hint=hint)


def _check_weights(plan: Plan) -> None:
    """Raise MergeError if weights cancel, also those of a model listed twice: only rounding errors would remain."""
    if plan.method in merging.UNWEIGHTED:
        return
    for name in _output_names(plan):
        part, position = plan.slice_of(name), plan.position(name)
        weights = part.arguments.weights(position)
        if part.arguments.params(position).get("normalize") and plan.method in ("linear", "task_arithmetic"):
            normalize_weights(weights)
        for source in part.models:
            own = [w for s, w in zip(part.models, weights, strict=True) if s.folder == source.folder]
            if any(own) and abs(sum(own)) < MIN_WEIGHT_SUM:
                raise MergeError(
                    f"{source.name} is given {len(own)} times with weights that cancel, so it adds nothing"
                )


def _select_tokenizer(recipe: MergeRecipe, default: Source, models: dict[str, Source]) -> Source:
    asked = recipe.tokenizer.source.removeprefix("model:") if recipe.tokenizer else recipe.tokenizer_source
    return models.get(asked or "", default)


def _output_specs(plan: Plan, dtype: str | None) -> dict[str, Spec]:
    """Return the specs of the output tensors, with the names of the anchors.

    Floats are in `dtype`; None means the dtype of the base, or the common dtype of all models without a base.
    """
    specs: dict[str, Spec] = {}
    for name in _output_names(plan):
        part, position = plan.slice_of(name), plan.position(name)
        spec = part.anchor.tensors[plan.anchor_name(name)]
        kind = spec.dtype
        if kind.is_floating_point and dtype is not None:
            kind = getattr(torch, dtype)
        elif kind.is_floating_point and part.base is None:
            given = (s.tensors[n].dtype for s, n in zip(part.models, position.inputs, strict=True) if n in s.tensors)
            kind = functools.reduce(torch.promote_types, given, kind)
        shape = spec.shape
        if plan.tokens is not None and name in plan.tokens.embeddings:
            shape = (plan.tokens.rows, *shape[1:])
        specs[name] = Spec(kind, shape)
    return specs


def _output_names(plan: Plan) -> list[str]:
    """Return the names of the output tensors: those of the anchor, or of the anchor of each slice."""
    if not plan.stacked:
        return list(plan.anchor.tensors)
    first, last = plan.slices[0].anchor, plan.slices[-1].anchor
    names = [name for name in first.tensors if layer_of(name) is None and precedes_layers(name)]
    for part in plan.slices:
        end = part.anchor_start + part.layers
        for name in part.anchor.tensors:
            layer = layer_of(name)
            if layer and part.anchor_start <= layer[1] < end:
                names.append(replace_layer(name, layer[1] - part.anchor_start + part.first))
    return names + [name for name in last.tensors if layer_of(name) is None and not precedes_layers(name)]


def _collect_warnings(plan: Plan, recipe: MergeRecipe) -> list[str]:
    """Return warnings about settings that are allowed but probably not intended."""
    warnings = []
    part = plan.slices[0]
    listed = {m.model for m in recipe.models}
    if not plan.stacked:
        folders = [s.folder for s in plan.models]
        twice = [s.name for i, s in enumerate(plan.models) if s.folder in folders[:i]]
        warnings += [f"{name} is given twice" for name in twice]
        if twice:
            warnings.append("each entry of a model that is given twice counts; mergekit takes the first one alone")
        if plan.base is not None and plan.method != "reasoning_vector" and recipe.base_model in listed:
            warnings.append(f"{plan.base.name} is the base and one of the models: it adds nothing")
        if plan.method == "linear" and recipe.base_model and plan.config.name != recipe.base_model:
            warnings.append(
                f"base_model {recipe.base_model} has no part in a linear merge; list it under models to average it"
            )
    if plan.tokens is not None and plan.tokens.tokenizer is None:
        counts = sorted({s.tensors[n].shape[0] for s in plan.sources for n in plan.tokens.embeddings if n in s.tensors})
        row_counts = ", ".join(map(str, counts))
        warnings.append(
            f"embeddings have {row_counts} rows: the first {plan.tokens.rows} are merged, the others are left out"
        )
    name = next(iter(part.anchor.tensors), "")
    if not plan.stacked and not part.arguments.names_matter:
        warnings += _warn_about_weights(plan, name)
    names = plan.anchor.tensors if part.arguments.names_matter else [name]
    if not plan.stacked and not any(any(part.arguments.contributing_models(plan.position(each))) for each in names):
        warnings.append("every weight, or the factor on all of them, is 0: the merged model is the base or first model")
    return warnings


def _warn_about_weights(plan: Plan, name: str) -> list[str]:
    """Return warnings about negative weights, weights that rescale the model, and clamped probabilities."""
    part, position = plan.slices[0], plan.position(name)
    weights, params = part.arguments.weights(position), part.arguments.params(position)
    warnings = [
        f"{s.name} has the negative weight {w:g}: its part is subtracted"
        for s, w in zip(part.models, weights, strict=True)
        if w < 0
    ]
    if plan.method != "passthrough" and part.arguments.rescales(position):
        warnings.append(f"the weights sum to {sum(weights):g} and normalize is off: all values are scaled by that")
    if "epsilon" in params:
        warnings += _warn_about_probabilities(params["density"], params["epsilon"])
    return warnings


def _warn_about_probabilities(density: Any, epsilon: Any) -> Sequence[str]:
    densities = density if isinstance(density, list) else [density]
    spread = max(epsilon) if isinstance(epsilon, list) else epsilon
    if any(0 < d < 1 and (d - spread <= 0 or d + spread >= 1) for d in densities):
        return ["density - epsilon or density + epsilon lies outside (0, 1): chances are held within [0, 1]"]
    return []
