"""What of a recipe cannot stand beside rows with images, which only the rows can say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from posttrain.errors import Problem, RecipeError
from posttrain.recipe.requirements import Scope

# (key, where it stands against images, why)
_REFUSED = (
    ("sampler", "values in sampler.needs", "reads the policy's states of prompts without their images"),
    ("objective.behavior_model", "objective.behavior_model", "reads texts alone"),
    ("model.parallel.context", "model.parallel.context > 1", "cuts lines of rows anywhere, within an image as well"),
    ("model.parallel.tensor", "model.parallel.tensor > 1", "divides language models: transformers plans no tower"),
    ("model.parallel.expert", "model.parallel.expert > 1", "was not proven beside a vision tower"),
    ("search", "search", "grows answers on texts alone"),
    ("tree", "tree", "grows turns on texts alone"),
    ("eval.contamination", "eval.contamination and stage = eval", "asks with parts of texts"),
)


def problems_with_images(recipe: BaseModel) -> list[Problem]:
    """What is wrong with the recipe if its rows have images."""
    scope = Scope((((), recipe),))
    return [
        Problem("", f"{key}: the rows have images, and it {why}", hint="leave it out, or the column of images")
        for key, condition, why in _REFUSED
        if scope.holds(condition)
    ]


def refuse_with_images(recipe: BaseModel, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises RecipeError for a recipe that cannot stand beside the images of its rows."""
    if any(row.get("images") for row in rows) and (found := problems_with_images(recipe)):
        raise RecipeError.of(found)
