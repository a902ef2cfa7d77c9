"""Checks of a recipe against rows or replies with images; they need the data, so the schema alone cannot make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from posttrain.errors import Problem, RecipeError
from posttrain.recipe.requirements import Scope

# (key, condition under which it conflicts with images, why)
_REFUSED = (
    ("sampler", "values in sampler.needs", "reads the policy's states of prompts without their images"),
    ("objective.behavior_model", "objective.behavior_model", "reads text only"),
    ("model.parallel.context", "model.parallel.context > 1", "splits packed rows anywhere, also inside an image"),
    (
        "model.parallel.tensor",
        "model.parallel.tensor > 1",
        "divides language models only: transformers has no plan for vision towers",
    ),
    ("model.parallel.expert", "model.parallel.expert > 1", "is untested with a vision tower"),
    ("search", "search", "samples answers from text only"),
    ("tree", "tree", "samples turns from text only"),
    ("eval.contamination", "eval.contamination and stage = eval", "asks with parts of texts"),
)
# Keys below it conflict with images anywhere in a rollout, the other keys only with images in the prompt.
_WHOLE_ROLLOUT = "model.parallel"
_ROWS = ("the rows have images", "leave it out, or the column of images")
_REPLIES = (
    "tools or the environment may show images",
    "leave it out; or annotate what shows none: a tool as `-> str`, an environment's `step` as `-> tuple[str, bool]`",
)


def problems_with_images(recipe: BaseModel, *, rows: bool, replies: bool = False) -> list[Problem]:
    """Return the problems of a recipe whose rows have images, or whose tools or environment may reply with images."""
    scope = Scope.of(recipe)
    what, hint = _ROWS if rows else _REPLIES
    return [
        Problem("", f"{key}: {what}, and it {why}", hint=hint)
        for key, condition, why in _REFUSED
        if (rows or (replies and key.startswith(_WHOLE_ROLLOUT))) and scope.holds(condition)
    ]


def refuse_with_images(recipe: BaseModel, rows: Sequence[Mapping[str, Any]], *, replies: bool = False) -> None:
    """Raise RecipeError if the recipe cannot be used with the images of its rows, or of replies.

    `replies`: the model reads images, and the tools or the environment may return some.
    """
    if found := problems_with_images(recipe, rows=any(row.get("images") for row in rows), replies=replies):
        raise RecipeError.of(found)
