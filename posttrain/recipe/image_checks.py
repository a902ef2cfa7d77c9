"""Check of a recipe against rows or replies with images; it needs the data, so the schema alone cannot make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from posttrain.errors import Problem, RecipeError
from posttrain.recipe.requirements import find_marks
from posttrain.recipe.section import NoImages
from posttrain.recipe.tree import format_path

_ROWS = ("the rows have images", "leave it out, or the column of images")
_REPLIES = (
    "tools or the environment may show images",
    "leave it out; or annotate what shows none: a tool as `-> str`, an environment's `step` as `-> tuple[str, bool]`",
)


def problems_with_images(recipe: BaseModel, *, rows: bool, replies: bool = False) -> list[Problem]:
    """Return the problems of a recipe whose rows have images, or whose tools or environment may reply with images."""
    what, hint = _ROWS if rows else _REPLIES
    return [
        Problem("", f"{format_path(path)}: {what}, and it {mark.why}", hint=hint)
        for scope, path, mark in find_marks(recipe, NoImages)
        if (rows or (replies and mark.in_replies)) and scope.holds(mark.when)
    ]


def refuse_with_images(recipe: BaseModel, rows: Sequence[Mapping[str, Any]], *, replies: bool = False) -> None:
    """Raise RecipeError if the recipe cannot be used with the images of its rows, or of replies.

    `replies`: the model reads images, and the tools or the environment may return some.
    """
    if found := problems_with_images(recipe, rows=any(row.get("images") for row in rows), replies=replies):
        raise RecipeError.of(found)
