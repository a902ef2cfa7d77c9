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
_PASSES = "model.parallel"  # keys of it stand against images anywhere in a rollout, the others in its prompt
_ROWS = ("the rows have images", "leave it out, or the column of images")
_REPLIES = (
    "tools or the environment may show images",
    "leave it out; or annotate what shows none: a tool as `-> str`, an environment's `step` as `-> tuple[str, bool]`",
)


def problems_with_images(recipe: BaseModel, *, rows: bool, replies: bool = False) -> list[Problem]:
    """What is wrong with the recipe if its rows have images, or replies of tools or of an environment have some."""
    scope = Scope((((), recipe),))
    what, hint = _ROWS if rows else _REPLIES
    return [
        Problem("", f"{key}: {what}, and it {why}", hint=hint)
        for key, condition, why in _REFUSED
        if (rows or (replies and key.startswith(_PASSES))) and scope.holds(condition)
    ]


def refuse_with_images(recipe: BaseModel, rows: Sequence[Mapping[str, Any]], *, replies: bool = False) -> None:
    """Raises RecipeError for a recipe that cannot stand beside the images of its rows, or of replies, which may have
    some if the model reads images and what answers may return them."""
    if found := problems_with_images(recipe, rows=any(row.get("images") for row in rows), replies=replies):
        raise RecipeError.of(found)
