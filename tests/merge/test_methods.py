"""Every merge method from files to files, with settings by layer and filter, and mergekit's own files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain import registry
from posttrain.errors import MergeError, RecipeError
from posttrain.merge import state_dict_merges
from posttrain.merge.layer_values import value_at
from posttrain.merge.rules import merge_state
from posttrain.merge.stream import draw_uniform
from posttrain.recipe.load import load
from posttrain.recipe.merge_sections import Filtered

Merge = Callable[..., dict[str, Any]]
AB = [{"model": "a"}, {"model": "b"}]
# method -> (models, parameters): whatever is registered must be here
RUNS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "linear": (AB, {}),
    "task_arithmetic": (AB, {"weight": 0.3}),
    "ties": (AB, {"density": 0.3, "lambda": 0.7}),
    "dare_linear": (AB, {"density": 0.4, "weight": 0.5}),
    "dare_ties": (AB, {"density": 0.4}),
    "della": (AB, {"density": 0.6, "epsilon": 0.1}),
    "della_linear": (AB, {"density": 0.6}),
    "breadcrumbs": (AB, {"density": 0.5, "gamma": 0.1}),
    "breadcrumbs_ties": (AB, {"density": 0.5}),
    "model_stock": (AB, {}),
    "ram": (AB, {}),
    "ramplus_tl": (AB, {"r": 0.5, "alpha": 1.0}),
    "sce": (AB, {"select_topk": 0.4}),
    "nearswap": (AB[:1], {"t": 0.01}),
    "arcee_fusion": (AB[:1], {}),
    "nuslerp": (AB, {"weight": 0.4, "nuslerp_flatten": False}),
    "multislerp": (AB, {}),
    "karcher": (AB, {"max_iter": 3}),
    "passthrough": (AB[:1], {"scale": 0.5}),
    "slerp": (AB[:1], {"t": 0.3}),
    "reasoning_vector": (AB, {"alpha": 0.5}),
    "update_selective": (AB[:1], {"density": 0.25, "scale": 0.7}),
    "checkpoint_average": (AB, {"mode": "ema", "decay": 0.5}),
}


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_all_methods_are_tested() -> None:
    assert RUNS.keys() | {"lora_combine"} == registry.load_index()["merge"].keys()  # test_combine_adapters.py


@pytest.mark.parametrize("method", RUNS)
def test_written_model_equals_the_rule_in_memory(models: Path, merge: Merge, method: str) -> None:
    listed, parameters = RUNS[method]
    summary = merge(merge_method=method, models=listed, base_model="base", parameters=parameters)
    assert summary["changed"] > 0
    assert {key: summary["parameters"].get(key) for key in parameters} == parameters
    rule = registry.get("merge", method)
    base, inputs = read_weights(models / "base"), [read_weights(models / m["model"]) for m in listed]
    if method == "slerp":
        inputs = [base, *inputs]
    if method == "karcher":  # the base is one of the models
        inputs = [*inputs, base]
    given = {"lam" if key == "lambda" else key: value for key, value in parameters.items() if key != "weight"}
    extras = (
        {name: draw_uniform(0, name, [m[name] for m in inputs]) for name in base} if "draws" in rule.needs else None
    )
    anchor = base if {"base_model", "base_optional"} & set(rule.needs) else None
    weights = [parameters.get("weight", 1.0)] * len(inputs)
    expected = merge_state(rule.function, inputs, anchor, weights, extras, **given)
    # Their norms are sums, whose order depends on memory alignment and on the number of threads.
    rounding = 1e-7 if method in ("karcher", "model_stock") else 0
    torch.testing.assert_close(read_weights(models / "run/final"), expected, rtol=0, atol=rounding)


def test_share_of_the_whole_model(models: Path, merge: Merge) -> None:
    parameters = {"density": 0.1, "scale": 1.0, "granularity": "global"}
    merge(merge_method="update_selective", models=AB[:1], base_model="base", parameters=parameters)
    base, tuned, merged = (read_weights(models / name) for name in ("base", "a", "run/final"))
    expected = state_dict_merges.update_selective(base, tuned, **parameters)
    torch.testing.assert_close(merged, expected, rtol=0, atol=0)
    changed = sum(int((merged[name] != base[name]).sum()) for name in base)
    assert changed == int(0.1 * sum(t.numel() for t in base.values()))


def test_random_numbers_depend_only_on_the_seed(models: Path, merge: Merge) -> None:
    recipe = {"merge_method": "dare_ties", "models": AB, "base_model": "base", "parameters": {"density": 0.3}}
    for output, seed in (("one", 0), ("two", 0), ("three", 1)):
        merge(output=models / output, run={"seed": seed}, **recipe)
    one, two, three = (read_weights(models / name / "final") for name in ("one", "two", "three"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], three[name]) for name in one)


def test_settings_by_layer_and_filter() -> None:
    """Layers 0, 1, 2 of 3 with [0, 1, 0.5]: 0, 1, 0.5; with [0, 1]: 0, 0.5, 1. The first matching filter applies."""
    name = "model.layers.1.mlp.up_proj.weight"
    assert [value_at([0.0, 1.0, 0.5], name, depth) for depth in (0, 0.5, 1)] == [0, 1, 0.5]
    assert [value_at([0.0, 1.0], name, depth) for depth in (0, 0.5, 1)] == [0, 0.5, 1]
    assert value_at([0.3], name, 1) == 0.3
    by_filter = [Filtered(filter="mlp", value=[0.0, 1.0]), Filtered(filter="self_attn", value=0.3)]
    assert value_at(by_filter, name, 0.5) == 0.5
    assert value_at(by_filter, "model.norm.weight", 0) is None
    assert value_at([*by_filter, Filtered(value=0.9)], "model.norm.weight", 0) == 0.9


MERGEKIT = """
slices:
  - sources:
      - model: ./base
        layer_range: [0, 2]
      - model: ./a
        layer_range: [0, 2]
merge_method: slerp
base_model: ./base
parameters:
  t:
    - filter: self_attn
      value: [0, 1]
    - filter: mlp
      value: [1, 0]
    - value: 0.5
dtype: float32
"""


def test_mergekit_file(models: Path, merge: Merge) -> None:
    """slerp in mergekit's format: t 0 is the base, 1 the other model; attention goes 0 -> 1 over the layers, mlp 1 ->
    0."""
    (models / "theirs.yml").write_text(MERGEKIT)
    values = load(str(models / "theirs.yml"), stage="merge").recipe.model_dump(by_alias=True, exclude_none=True)
    merge(**{key: value for key, value in values.items() if key not in ("stage", "run")})
    base, other, merged = (read_weights(models / name) for name in ("base", "a", "run/final"))
    for layer, attention in ((0, base), (1, other)):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        torch.testing.assert_close(merged[name], attention[name])
    torch.testing.assert_close(merged["model.layers.0.mlp.up_proj.weight"], other["model.layers.0.mlp.up_proj.weight"])


def test_mergekit_file_without_stage_and_with_a_seed(tmp_path: Path) -> None:
    (tmp_path / "theirs.yml").write_text(f"{MERGEKIT}random_seed: 7\n")
    for verb in ("merge", None):  # None: `recipe validate` and `recipe show`
        recipe = load(str(tmp_path / "theirs.yml"), stage=verb).recipe
        assert (recipe.verb, recipe.run.seed) == ("merge", 7)
    (tmp_path / "theirs.yml").write_text(f"{MERGEKIT}random_seed: seven\n")
    with pytest.raises(RecipeError, match="random_seed: unknown key"):
        load(str(tmp_path / "theirs.yml"), stage="merge")


def test_a_file_as_mergekit_saves_it_is_the_same_merge(tmp_path: Path) -> None:
    """A single module, flags as numbers, the name for other merges, and a tokenizer section without keys."""
    plain = """
merge_method: ties
base_model: base
slices:
  - sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 2], parameters: {weight: 0.5}}]
parameters: {lambda: 0.5, density: 0.3, normalize: false, rescale: true}
tokenizer: {source: union}
"""
    saved = """
name: First
base_model: base
merge_method: ties
modules:
  default:
    slices:
    - sources:
      - {layer_range: [0, 2], model: a}
      - layer_range: [0, 2]
        model: b
        parameters: {weight: 0.5}
    parameters: {density: 0.3}
parameters: {lambda: 0.5, density: 0.9, normalize: 0.0, rescale: 1.0}
tokenizer: {}
"""
    recipes = []
    for number, text in enumerate((plain, saved)):
        (tmp_path / f"{number}.yml").write_text(text)
        recipes.append(load(str(tmp_path / f"{number}.yml"), stage="merge").recipe)
    assert recipes[0] == recipes[1]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (MERGEKIT.replace("[0, 2]", "[1, 2]", 1), "the same number of layers of every model, not 1 and 2"),
        (MERGEKIT.replace("[0, 2]", "[2, 2]"), r"layer_range \[2, 2\] holds no layer"),
        (MERGEKIT.replace("./a", "./base"), "a model is listed twice in one slice"),
        (MERGEKIT.replace("slices:", "models: [{model: a}]\nslices:"), "either `models` or `slices`"),
        (MERGEKIT.replace("merge_method", "  - sources: []\nmerge_method"), "sources"),
        (f"{MERGEKIT}---\n{MERGEKIT}", "make each document a stage of a pipeline"),
        ("merge_method: linear\n", "nothing to merge is named"),
        (
            "merge_method: passthrough\nmodels: [{model: a}, {model: b}]\n",
            "takes one model, here are 2; layers are stack",
        ),
        ("merge_method: nearswap\nbase_model: c\nmodels: [{model: a}]\n", "nearswap needs t"),
        ("merge_method: linear\nmodels: [{model: a}]\nmodules: {}\n", "`modules` is not read here"),
        ("merge_method: linear\nmodules: {text: {models: [{model: a}]}}\n", "`modules` is not read here"),
        ("merge_method: linear\nmodels: [{model: a}]\nmodules: {default: {models: [{model: b}]}}\n", "given twice"),
        ("merge_method: linear\nmodels: [{model: a}]\nparameters: {normalize: 2.0}\n", "must be true or false"),
        ("merge_method: linear\nmodels: [{model: a}]\nchat_template: alpaca\n", "`alpaca` is not a template"),
        ("merge_method: linear\nmodels: [{model: a}]\ntokenizer_source: aa\n", "did you mean `a`"),
        (
            "merge_method: linear\nmodels: [{model: a}]\ntokenizer: {source: union, tokens: {x: {source: b}}}\n",
            "`b` is none of the models",
        ),
        (MERGEKIT.replace("slerp", "ties"), "ties has no parameter t"),
        (MERGEKIT.replace("slerp", "model_stock"), "at least two models besides the base, here are 1"),
        ("merge_method: ties\nmodels: [{model: a}]\n", "adds differences to a base"),
        ("merge_method: slerp\nmodels: [{model: a, parameters: {gamma: 1}}, {model: b}]\n", "no parameter gamma"),
        (
            "merge_method: ties\nbase_model: c\nmodels: [{model: a, parameters: {lambda: 1}}]\n",
            "lambda holds for the whole merge",
        ),
    ],
)
def test_inconsistent_settings_raise_at_load(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "theirs.yml").write_text(text)
    with pytest.raises(RecipeError, match=match):
        load(str(tmp_path / "theirs.yml"), stage="merge")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            MERGEKIT.replace("filter: mlp", "fliter: mlp"),
            r"parameters.t.1.fliter: unknown key\n.*\n.*did you mean `filter`",
        ),
        (MERGEKIT.replace("filter: mlp\n      value: [1, 0]", "filter: mlp"), "parameters.t.1.value: is missing"),
        (MERGEKIT.replace("value: 0.5", "value: '0.5'"), "parameters.t.2.value: must be a number or a list, not `0.5`"),
        (MERGEKIT.replace("dtype: float32", "tokenizer: {tokens: {x: {sorce: a}}}"), "did you mean `source`"),
        (
            MERGEKIT.replace("dtype: float32", "tokenizer: {tokens: {x: {source: {kind: zeros}}}}"),
            r"tokens.x.source.kind: `zeros` .* is not a value of this key\n.*allowed: zero, model_token",
        ),
    ],
)
def test_error_in_a_union_value_is_reported_once(tmp_path: Path, text: str, match: str) -> None:
    """If a number, a list or filters are allowed, the error is only about the intended type."""
    (tmp_path / "theirs.yml").write_text(text)
    with pytest.raises(RecipeError, match=match) as told:
        load(str(tmp_path / "theirs.yml"), stage="merge")
    assert len(told.value.problems) == 1


def test_missing_layers_are_refused(models: Path, tmp_path: Path) -> None:
    from posttrain.merge.plan import make_plan

    (models / "theirs.yml").write_text(MERGEKIT.replace("[0, 2]", "[1, 3]"))
    recipe = load(str(models / "theirs.yml"), stage="merge").recipe
    with pytest.raises(MergeError, match=r"layer_range \[1, 3\] of ./base, which has 2 layers"):
        make_plan(recipe, tmp_path / "scratch")
