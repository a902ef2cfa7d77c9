"""`--sweep`: its values, combinations, and the recipe key they apply to."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.recipe.merge_sweep import Axis, best, parse, points, slim
from posttrain.recipe.stages import MergeRecipe

STACKED = [{"sources": [{"model": name, "layer_range": [0, 2]} for name in "ab"]}]


def recipe(method: str = "linear", **values: Any) -> MergeRecipe:
    models = [{"model": "a"}, {"model": "b"}]
    return MergeRecipe.model_validate({"stage": "merge", "merge_method": method, "models": models, **values})


def test_range_includes_both_ends_and_exact_decimals() -> None:
    """In floats 0.1 * 3 is 0.30000000000000004."""
    written = ("0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1")
    assert parse("weight=0:1:0.1") == Axis("weight", written)
    assert parse("alpha=1:-1:-1").values == ("1", "0", "-1")
    assert parse("t=0:1:0.4").values == ("0", "0.4", "0.8")
    assert parse(" lambda = 0.50, 1e-1 ").values == ("0.5", "0.1")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("weight", "not KEY=VALUES"),
        ("weight=", "not KEY=VALUES"),
        ("weight=0:1", "START:STOP:STEP"),
        ("weight=0:1:0", "do not lead"),
        ("weight=0:1:-0.1", "do not lead"),
        ("weight=0,x", "`x` is not a number"),
        ("weight=0,nan", "`nan` is not a number"),
        ("weight=1,1.0", "twice"),
    ],
)
def test_invalid_sweeps_raise(text: str, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        parse(text)


def test_weight_of_a_two_model_blend_sets_the_first_to_the_remainder() -> None:
    [_, second] = points([parse("weight=0,0.3")], recipe())
    assert second.name == "weight=0.3"
    assert second.overrides == ("models.0.parameters.weight=0.7", "models.1.parameters.weight=0.3")


def test_plain_keys_set_parameters_and_dotted_keys_set_their_path() -> None:
    [point] = points([parse("weight=0.5")], recipe("ties", base_model="c"))
    assert point.overrides == ("parameters.weight=0.5",)
    [point] = points([parse("models.1.parameters.density=0.2")], recipe("ties", base_model="c"))
    assert point.overrides == ("models.1.parameters.density=0.2",)


def test_several_keys_give_all_combinations() -> None:
    found = points([parse("weight=0,1"), parse("density=0.2,0.4")], recipe("ties", base_model="c"))
    names = ["weight=0,density=0.2", "weight=0,density=0.4", "weight=1,density=0.2", "weight=1,density=0.4"]
    assert [point.name for point in found] == names


@pytest.mark.parametrize(
    ("keys", "values", "match"),
    [
        (["wieght=0,1"], {}, "did you mean `weight`"),
        (["weight=0,1", "weight=1,2"], {}, "weight is given twice"),
        (["weight=0,1"], {"models": [{"model": name} for name in "abc"]}, "which one"),
        (["weight=0,1"], {"method": "reasoning_vector", "base_model": "c"}, "sweep `alpha`"),
        (["weight=0,1"], {"method": "nearswap", "base_model": "c", "parameters": {"t": 0.1}}, "sweep `t`"),
        (["weight=0,1"], {"models": [], "slices": STACKED}, r"slices\.0\.sources\.0\.parameters\.weight"),
        (
            ["weight=0,1"],
            {"method": "ties", "base_model": "c", "models": [{"model": "a", "parameters": {"weight": 1}}]},
            "models.0 sets its own weight",
        ),
    ],
)
def test_key_that_cannot_be_swept_raises(keys: list[str], values: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        points([parse(key) for key in keys], recipe(**values))


def test_best_is_the_first_maximum() -> None:
    assert best({"a": 0.1, "b": 0.4, "c": 0.4, "d": None}) == "b"
    assert best({"a": None}) is None


def test_slim_recipe_keeps_zeros_and_drops_empty_values() -> None:
    values = {"run": {"seed": 1}, "parameters": {"weight": 0.0, "t": None, "normalize": False}, "models": [{"x": {}}]}
    assert slim(values) == {"parameters": {"weight": 0.0, "normalize": False}, "models": [{}]}
