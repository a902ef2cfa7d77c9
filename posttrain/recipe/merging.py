"""Interpretation of a merge recipe: the models that make up each part of the result, and the keys of each method.

The keys and their meaning follow mergekit (https://github.com/arcee-ai/mergekit). Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain import registry
from posttrain.errors import nearest
from posttrain.recipe.merge_sections import MergeModel, MergeParameters, SliceSource
from posttrain.recipe.requirements import Found

PER_MODEL = ("weight", "density", "gamma", "epsilon", "scale")  # keys that may be set per model
ARGUMENTS = {"lambda_": "lam"}  # recipe key -> argument of the merge rule, if different
RENAMED = {"ram": {"epsilon": "eps"}, "ramplus_tl": {"epsilon": "eps"}}  # method -> mergekit's key -> ours
# Methods that mergekit does not have.
OURS = ("checkpoint_average", "lora_combine", "reasoning_vector", "update_selective")
UNWEIGHTED = (
    "arcee_fusion",
    "checkpoint_average",
    "karcher",
    "model_stock",
    "nearswap",
    "passthrough",
    "ram",
    "ramplus_tl",
    "reasoning_vector",
    "sce",
    "slerp",
    "update_selective",
)
# Keys that mergekit's files contain even for methods that do not read them; they have no effect in either tool.
CARRIED = ("weight", "density", "normalize", "rescale", "int8_mask")
# Recipe key -> predicate for valid numbers, and the range in words; other keys take any number.
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "density": (lambda x: 0 <= x <= 1, "a share from 0 to 1"),
    "gamma": (lambda x: 0 <= x <= 1, "a share from 0 to 1"),
    "epsilon": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "select_topk": (lambda x: 0 <= x <= 1, "a share from 0 to 1"),
    "t": (lambda x: 0 <= x <= 1, "from 0 (the first model) to 1 (the second)"),
    "decay": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "dot_threshold": (lambda x: 0 <= x < 1, "a cosine, at least 0 and below 1"),
    "eps": (lambda x: x >= 0, "at least 0"),
    "tol": (lambda x: x > 0, "above 0"),
}
NAMED_TEMPLATES = ("chatml", "llama3")  # chat templates that a recipe names
_COUNT_NAMES = {"one_model": "one model", "two_models": "two models", "several_models": "at least two models"}


@dataclass(frozen=True)
class Ingredient:
    """One model of a part: its name, its parameters in the recipe, and its first layer (0 for all layers)."""

    name: str
    parameters: MergeParameters
    first: int = 0


@dataclass(frozen=True)
class Part:
    """Some layers of the result (all layers without `slices`), and the models from which a merge rule computes them.

    models: in the order of the rule's arguments. base: the model from which differences are taken. layers: number of
    layers, None for all.
    """

    at: str  # path in the recipe: "" or `slices.N.`
    models: list[Ingredient]
    base: Ingredient | None
    parameters: MergeParameters
    layers: int | None


def parts(recipe: Any) -> list[Part]:
    """Return the parts of the result, from the first layer to the last."""
    if not recipe.slices:
        whole = [Ingredient(model.model, model.parameters) for model in recipe.models]
        return [_make_part(recipe, "", whole, recipe.base_model, MergeParameters(), None)]
    parts = []
    for number, merge_slice in enumerate(recipe.slices):
        listed = [Ingredient(s.model, s.parameters, s.layer_range[0]) for s in merge_slice.sources]
        first, end = merge_slice.sources[0].layer_range
        base = merge_slice.base_model or recipe.base_model
        parts.append(_make_part(recipe, f"slices.{number}.", listed, base, merge_slice.parameters, end - first))
    return parts


def _make_part(
    recipe: Any, at: str, listed: list[Ingredient], base: str | None, parameters: MergeParameters, layers: int | None
) -> Part:
    """Build a part. Whether the base counts as one of the models depends on the method, as in mergekit."""
    method, needs = recipe.merge_method, registry.load_index()["merge"][recipe.merge_method]["needs"]
    others = [model for model in listed if model.name != base]
    named = next((model for model in listed if model.name == base), None)
    if base is None or method == "passthrough":
        return Part(at, listed, None, parameters, layers)
    origin = named or Ingredient(base, MergeParameters(), listed[0].first if listed else 0)
    if method == "reasoning_vector":
        return Part(at, listed, origin, parameters, layers)
    if "base_model" in needs or "base_optional" in needs:
        return Part(at, others, origin, parameters, layers)
    if method == "slerp":
        return Part(at, [origin, *others], None, parameters, layers)
    joins = method == "karcher" or (method == "linear" and recipe.parameters.weight is not None)
    joined = [*listed, origin] if joins and layers is None and named is None else listed
    return Part(at, joined, None, parameters, layers)


def named_models(recipe: Any) -> list[str]:
    """Return every model that the recipe names, once each; the base comes first."""
    listed = [model.model for model in recipe.models]
    listed += [source.model for merge_slice in recipe.slices for source in merge_slice.sources]
    bases = [recipe.base_model, *(merge_slice.base_model for merge_slice in recipe.slices)]
    return list(dict.fromkeys(name for name in [*bases, *listed] if name))


def from_mergekit_keys(values: Any) -> Any:
    """Convert the top-level keys of a mergekit file to this schema.

    `modules: {default: ...}`, the only module of a text model, becomes its content. `tokenizer_source: model:NAME` of
    older files becomes the model alone. `random_seed`, a command-line option of mergekit that many files contain,
    becomes `run.seed`. `name` is left out: it names the result for other merges of `mergekit-multi`.
    """
    if not isinstance(values, Mapping):
        return values
    renamed = rename_out_dtype(_join_module(values))
    if isinstance(renamed.get("name"), str):
        del renamed["name"]
    if isinstance(renamed.get("random_seed"), int) and isinstance(renamed.get("run", {}), Mapping):
        renamed["run"] = {"seed": renamed.pop("random_seed"), **renamed.get("run", {})}
    if isinstance(renamed.get("tokenizer_source"), str):
        renamed["tokenizer_source"] = renamed["tokenizer_source"].removeprefix("model:")
    return renamed


def _join_module(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the recipe with the content of its module `default`, whose parameters override those of the merge."""
    if "modules" not in values:
        return values
    modules, others = values["modules"], {key: value for key, value in values.items() if key != "modules"}
    if not isinstance(modules, Mapping) or [*modules] != ["default"] or not isinstance(modules["default"], Mapping):
        raise ValueError("`modules` is not read here: write `models`, which merges all modules of a model")
    if twice := [key for key in ("models", "slices") if key in others and key in modules["default"]]:
        raise ValueError(f"`{twice[0]}` is given twice: in the recipe and in `modules`")
    parameters = {**(others.get("parameters") or {}), **(modules["default"].get("parameters") or {})}
    return {**others, **modules["default"], **({"parameters": parameters} if parameters else {})}


def rename_out_dtype(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with mergekit's `out_dtype`, the dtype of the written file, as `dtype`.

    If both are given, mergekit's `dtype` is the dtype of its arithmetic, which cannot be chosen here.
    """
    renamed = {key: value for key, value in values.items() if key != "out_dtype"}
    if values.get("out_dtype") is not None:
        renamed["dtype"] = values["out_dtype"]
    if isinstance(renamed.get("dtype"), str):
        renamed["dtype"] = renamed["dtype"].removeprefix("torch.")
    return renamed


def given_parameters(parameters: Any, method: str | None = None) -> dict[str, Any]:
    """Return the values of a `parameters` block that are set, by the argument names of the method's rule."""
    values = {key: getattr(parameters, key) for key in type(parameters).model_fields}
    names = ARGUMENTS | RENAMED.get(method or "", {})
    return {names.get(key, key): v for key, v in values.items() if v is not None and key != "int8_mask"}


def arguments_of(method: str) -> set[str]:
    """Return the arguments that a method reads."""
    return {*registry.load_index()["merge"][method]["params"], *(() if method in UNWEIGHTED else ("weight",))}


def keys_of(method: str) -> set[str]:
    """Return the keys of a `parameters` block, by the schema's names, that a method reads."""
    names = ARGUMENTS | RENAMED.get(method, {})
    return {key for key in MergeParameters.model_fields if names.get(key, key) in arguments_of(method)}


def problems(recipe: Any) -> Found:
    """Yield (key, what is wrong, what would be right) for a merge recipe whose single values are valid."""
    method = recipe.merge_method
    described = registry.load_index()["merge"][method]
    yield from _check_inputs(recipe)
    if "base_model" in described["needs"] and not all(part.base for part in parts(recipe)):
        yield "merge_method", f"{method} adds differences to a base and none is named", "write `base_model`"
    for part in parts(recipe):
        yield from _check_counts(recipe, part, described["needs"])
    if "adapters" in described["needs"]:
        yield from _check_adapters(recipe)
    else:
        yield from _check_tokenizer(recipe)
        yield from _check_template(recipe)
    for place, block in _parameter_blocks(recipe):
        yield from _check_block(method, place, block, described["params"])
    for key, known in described["params"].items():
        if len(known) == 1 and not any(
            key in given_parameters(block, method) for _, block in _parameter_blocks(recipe)
        ):
            yield "parameters", f"{method} needs {_to_recipe_key(key)}", f"write `{_to_recipe_key(key)}`"
    if recipe.parameters.granularity == "global" and isinstance(recipe.parameters.density, list):
        yield "parameters.density", "one share of the whole model is wanted", "write a number"


def _check_inputs(recipe: Any) -> Found:
    """Check `models` and `slices`: one of the two; every slice takes the same number of layers of each model, once
    each."""
    if recipe.models and recipe.slices:
        yield "slices", "give either `models` or `slices`", "remove one of them"
    if not recipe.models and not recipe.slices:
        yield "models", "nothing to merge is named", "list `models`, or layers of them under `slices`"
    if recipe.slices and recipe.merge_method in ("lora_combine", "checkpoint_average", "reasoning_vector"):
        yield "slices", f"{recipe.merge_method} takes whole models", "write `models`"
    if recipe.slices and recipe.parameters.granularity == "global":
        yield "parameters.granularity", "`global` needs whole models, not slices", "write `models`"
    for number, merge_slice in enumerate(recipe.slices):
        at, names = f"slices.{number}.sources", [source.model for source in merge_slice.sources]
        lengths = {source.layer_range[1] - source.layer_range[0] for source in merge_slice.sources}
        if len(lengths) > 1:
            listed = " and ".join(str(length) for length in sorted(lengths))
            yield at, f"a slice takes the same number of layers of every model, not {listed}", "correct a `layer_range`"
        if len(set(names)) < len(names):
            yield at, "a model is listed twice in one slice", "list it once; layers are stacked by several slices"
        base = merge_slice.base_model or recipe.base_model
        firsts = {source.layer_range[0] for source in merge_slice.sources}
        if base and base not in names and len(firsts) > 1 and recipe.merge_method != "passthrough":
            yield at, f"the layers of the base {base} are not given", "list it among the sources"


def _check_block(method: str, place: str, block: MergeParameters, params: Mapping[str, Any]) -> Found:
    """Check the keys of one `parameters` block."""
    takes = arguments_of(method)
    shown = ", ".join(sorted(_to_recipe_key(key) for key in takes)) or "none"
    of_model = ".sources." in place or place.startswith("models.")
    for key in given_parameters(block, method):
        at = f"{place}.{_to_recipe_key(key)}"
        if key not in takes:
            if key not in CARRIED or method in OURS:
                yield at, f"{method} has no parameter {_to_recipe_key(key)}", f"it takes: {shown}"
        elif of_model and key not in PER_MODEL:
            what = f"{_to_recipe_key(key)} holds for the whole merge, not for one model"
            yield at, what, "put it under the top-level `parameters`"
        elif of_model and "float | list" not in str(params.get(key, "float | list")):
            yield at, f"{method} takes one {key} for all", "put it under `parameters`"
        else:
            yield from _check_range(at, key, getattr(block, key, None))


def _check_range(path: str, key: str, setting: Any) -> Found:
    """Yield the numbers of a setting, also in lists and under filters, that are out of range for their key."""
    if isinstance(setting, list):
        if not setting:
            yield path, "the list is empty", "write a number, or one for the first and one for the last layer"
        for position, entry in enumerate(setting):
            yield from _check_range(f"{path}.{position}", key, entry)
    elif hasattr(setting, "filter"):
        yield from _check_range(f"{path}.value", key, setting.value)
    elif key in RANGES and isinstance(setting, int | float) and not RANGES[key][0](setting):
        yield path, f"must be {RANGES[key][1]}, not {setting:g}", ""


def _check_counts(recipe: Any, part: Part, needs: Sequence[str]) -> Found:
    """Check the number of models that a method takes."""
    count = len(part.models)
    right = {"one_model": count == 1, "two_models": count == 2, "several_models": count >= 2}
    besides = " besides the base" if part.base else ""
    at = f"{part.at}sources" if part.at else "models"
    for need in needs:
        if need in _COUNT_NAMES and not right[need] and (recipe.models or recipe.slices):
            stacked = "; layers are stacked by `slices`" if recipe.merge_method == "passthrough" and not part.at else ""
            yield at, f"{recipe.merge_method} takes {_COUNT_NAMES[need]}{besides}, here are {count}{stacked}", ""
    if "base_model" in needs and part.base and not count:
        yield at, "no model besides the base", "list the models whose differences are added"


def _check_tokenizer(recipe: Any) -> Found:
    """Check that the sources of the tokenizer and of single tokens are among the models."""
    models = named_models(recipe)
    base = ["base"] if recipe.base_model else []
    asked = {"tokenizer_source": recipe.tokenizer_source}
    if recipe.tokenizer is not None:
        if recipe.tokenizer_source is not None:
            yield "tokenizer", "`tokenizer_source` says the same", "write one of them"
        asked = {"tokenizer.source": recipe.tokenizer.source.removeprefix("model:")}
        for token, entry in recipe.tokenizer.tokens.items():
            source = entry.source
            name = source if isinstance(source, str) or source is None else source.model
            if name is not None and name not in models:
                yield (
                    f"tokenizer.tokens.{token}.source",
                    f"`{name}` is none of the models",
                    _allowed_names(name, models),
                )
    for key, name in asked.items():
        if name is not None and name not in ("union", *base, *models):
            yield key, f"`{name}` is none of the models", _allowed_names(name, ["union", *base, *models])


def _check_template(recipe: Any) -> Found:
    text = recipe.chat_template
    if text is not None and text not in ("auto", *NAMED_TEMPLATES) and "{" not in text:
        what = f"`{text}` is not a template"
        yield (
            "chat_template",
            what,
            "write chatml, llama3, auto (what most models have), or the text of a Jinja template",
        )


def _allowed_names(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f"did you mean `{near}`?" if near else f"known: {', '.join(dict.fromkeys(known))}"


def _check_adapters(recipe: Any) -> Found:
    """Check a merge of adapters: no base, tokenizer or template of its own; `rank` belongs to svd."""
    for key in ("base_model", "tokenizer_source", "tokenizer", "chat_template"):
        if getattr(recipe, key) is not None:
            yield key, f"{recipe.merge_method} takes its base from the adapters, and their tokenizer", "remove it"
    svd, rank = recipe.parameters.combination == "svd", recipe.parameters.rank
    if svd and rank is None:
        yield "parameters", "svd needs the rank of the result", "write `rank`"
    if rank is not None and not svd:
        yield "parameters.rank", "only svd takes a rank", "write `combination: svd`, or remove it"


def _parameter_blocks(recipe: Any) -> Iterator[tuple[str, MergeParameters]]:
    yield "parameters", recipe.parameters
    inputs: list[tuple[str, MergeModel | SliceSource]] = [
        (f"models.{n}", model) for n, model in enumerate(recipe.models)
    ]
    for number, merge_slice in enumerate(recipe.slices):
        yield f"slices.{number}.parameters", merge_slice.parameters
        inputs += [(f"slices.{number}.sources.{n}", source) for n, source in enumerate(merge_slice.sources)]
    for place, source in inputs:
        yield f"{place}.parameters", source.parameters


def _to_recipe_key(argument: str) -> str:
    return "lambda" if argument == "lam" else argument
