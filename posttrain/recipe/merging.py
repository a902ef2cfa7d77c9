"""What a merge recipe says: mergekit's `slices`, and which keys each method takes. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic_core import PydanticCustomError

from posttrain import registry
from posttrain.errors import nearest

PER_MODEL = ("weight", "density", "gamma", "epsilon")  # keys that each model may have its own value of
ARGUMENTS = {"lambda_": "lam"}  # recipe key -> argument of the rule, where they differ
UNWEIGHTED = ("slerp", "checkpoint_average", "model_stock", "ram", "reasoning_vector", "update_selective")
IDLE = ("int8_mask",)  # of mergekit's files: a matter of its memory, not of the result
# Recipe key -> whether a number may stand there, and the same in words; other keys take every number.
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "density": (lambda x: 0 <= x <= 1, "a share from 0 to 1"),
    "gamma": (lambda x: 0 <= x <= 1, "a share from 0 to 1"),
    "epsilon": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "t": (lambda x: 0 <= x <= 1, "from 0 (the first model) to 1 (the second)"),
    "decay": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
    "dot_threshold": (lambda x: 0 <= x < 1, "a cosine, at least 0 and below 1"),
    "eps": (lambda x: x >= 0, "at least 0"),
}
_TYPED = {"one_model": "one model", "two_models": "two models", "several_models": "at least two models"}


def without_slices(values: Any) -> tuple[Any, int | None]:
    """The recipe with the sources of its only slice as `models`, and the number of layers that it names.

    mergekit writes some merges (slerp above all) as one slice over all layers. Several slices would stack layers of
    different models into a new architecture, which is refused.
    """
    if not isinstance(values, dict) or "slices" not in values:
        return values, None
    rest = {key: value for key, value in values.items() if key != "slices"}
    try:
        if "models" in values:
            raise ValueError("give either `models` or `slices`")
        if len(values["slices"]) != 1:
            raise ValueError("several slices build a model of another depth, which posttrain does not do")
        sources = values["slices"][0]["sources"]
        ranges = {tuple(source["layer_range"]) for source in sources}
        if len(ranges) != 1 or min(ranges)[0] != 0:
            raise ValueError("the sources of a slice must all have the same layer_range, from 0 to the last layer")
        models = [{key: value for key, value in source.items() if key != "layer_range"} for source in sources]
    except (KeyError, TypeError, IndexError) as cause:
        raise PydanticCustomError("value_error", "slices must be a list of one entry with `sources`") from cause
    return {**rest, "models": models}, int(min(ranges)[1])


def written_dtype(values: Any) -> Any:
    """The recipe with mergekit's `out_dtype`, the dtype that is written, as `dtype`.

    Where both are there, mergekit's `dtype` is that of its arithmetic, which is not a choice here.
    """
    if not isinstance(values, dict) or "out_dtype" not in values:
        return values
    rest = {key: value for key, value in values.items() if key != "out_dtype"}
    return rest if values["out_dtype"] is None else {**rest, "dtype": values["out_dtype"]}


def given(parameters: Any) -> dict[str, Any]:
    """The keys of a `parameters` block that say something, by the rule's argument."""
    values = {key: getattr(parameters, key) for key in type(parameters).model_fields}
    return {ARGUMENTS.get(key, key): v for key, v in values.items() if v is not None and key not in IDLE}


def problems(recipe: Any) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, what would be right) of a merge recipe whose values are right one by one."""
    method = recipe.merge_method
    described = registry.index()["merge"][method]
    if "base_model" in described["needs"] and not recipe.base_model:
        yield "merge_method", f"{method} adds differences to a base and none is named", "write `base_model`"
    yield from _counts(recipe, described["needs"])
    if "adapters" in described["needs"]:
        yield from _adapters(recipe)
    elif recipe.tokenizer_source is not None:
        base = ["base", recipe.base_model] if recipe.base_model else []
        known = [*base, *(model.model for model in recipe.models)]
        if recipe.tokenizer_source not in known:
            near = nearest(recipe.tokenizer_source, known)
            right = f"did you mean `{near}`?" if near else f"known: {', '.join(dict.fromkeys(known))}"
            yield "tokenizer_source", f"`{recipe.tokenizer_source}` is none of the models", right
    takes = {*described["params"], *(() if method in UNWEIGHTED else ("weight",))}
    shown = ", ".join(sorted(_shown(key) for key in takes)) or "none"
    for place, block in _blocks(recipe):
        for key in given(block):
            if key not in takes:
                yield f"{place}.{_shown(key)}", f"{method} has no parameter {_shown(key)}", f"it takes: {shown}"
            elif place != "parameters" and key not in PER_MODEL:
                what = f"{_shown(key)} holds for the whole merge, not for one model"
                yield f"{place}.{_shown(key)}", what, "put it under the top-level `parameters`"
            elif place != "parameters" and "float | list" not in str(described["params"].get(key, "float | list")):
                yield f"{place}.{_shown(key)}", f"{method} takes one {key} for all", "put it under `parameters`"
            else:
                yield from _outside(f"{place}.{_shown(key)}", key, getattr(block, key, None))
    if recipe.parameters.granularity == "global" and isinstance(recipe.parameters.density, list):
        yield "parameters.density", "one share of the whole model is wanted", "write a number"


def _outside(path: str, key: str, setting: Any) -> Iterator[tuple[str, str, str]]:
    """The numbers of a setting, in lists and behind filters too, that their key does not take."""
    if isinstance(setting, list):
        if not setting:
            yield path, "the list is empty", "write a number, or one for the first and one for the last layer"
        for position, entry in enumerate(setting):
            yield from _outside(f"{path}.{position}", key, entry)
    elif hasattr(setting, "filter"):
        yield from _outside(f"{path}.value", key, setting.value)
    elif key in RANGES and isinstance(setting, int | float) and not RANGES[key][0](setting):
        yield path, f"must be {RANGES[key][1]}, not {setting:g}", ""


def _counts(recipe: Any, needs: list[str]) -> Iterator[tuple[str, str, str]]:
    names = [model.model for model in recipe.models]
    base = recipe.base_model
    if recipe.merge_method == "slerp":
        names = [*names, *([base] if base and base not in names else [])]
    elif recipe.merge_method != "reasoning_vector":
        names = [name for name in names if name != base or "base_model" not in needs]
    right = {"one_model": len(names) == 1, "two_models": len(names) == 2, "several_models": len(names) >= 2}
    for need in needs:
        if need in _TYPED and not right[need]:
            beside = " beside the base" if "base_model" in needs else ""
            yield "models", f"{recipe.merge_method} takes {_TYPED[need]}{beside}, here are {len(names)}", ""


def _adapters(recipe: Any) -> Iterator[tuple[str, str, str]]:
    for key in ("base_model", "tokenizer_source"):
        if getattr(recipe, key) is not None:
            yield key, f"{recipe.merge_method} takes its base from the adapters", "remove it"
    svd, rank = recipe.parameters.combination == "svd", recipe.parameters.rank
    if svd and rank is None:
        yield "parameters", "svd needs the rank of the result", "write `rank`"
    if rank is not None and not svd:
        yield "parameters.rank", "only svd takes a rank", "write `combination: svd`, or remove it"


def _blocks(recipe: Any) -> Iterator[tuple[str, Any]]:
    yield "parameters", recipe.parameters
    for number, model in enumerate(recipe.models):
        yield f"models.{number}.parameters", model.parameters


def _shown(argument: str) -> str:
    return "lambda" if argument == "lam" else argument
