"""A preset is a paper as a row of choices: what `algorithm: NAME` puts under a recipe's own values."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import RecipeError, nearest
from posttrain.recipe.tree import plain
from posttrain.recipe.yaml import read

FOLDER = Path(__file__).with_name("presets")
SHOWN = 4  # names near to an unknown one


@dataclass(frozen=True)
class Preset:
    """`choices` merge over the defaults and under the recipe. `not_stated` says what the paper leaves open; `rewards`
    are those that its components read, and `example` stands for what only the user knows: both are to be written into
    the recipe."""

    name: str
    title: str
    paper: str
    purpose: str
    stage: Literal["rl", "dpo", "reward_model"]
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_stated: str = ""
    rewards: list[dict[str, Any]] = field(default_factory=list)
    example: dict[str, dict[str, Any]] = field(default_factory=dict)


def names(stage: str | None = None) -> list[str]:
    """The presets that exist, of one stage or of all."""
    return [name for name in _list_shipped() if stage is None or preset(name).stage == stage]


@functools.cache
def _list_shipped() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def of_stage(name: str, stage: str) -> Preset:
    """The preset of that name. Raises RecipeError with the names that a recipe of this stage may write."""
    found = preset(name) if name in names() else None
    if found and found.stage == stage:
        return found
    import difflib  # here: every command imports this file, and few need it

    known = names(stage)
    near = [] if found else difflib.get_close_matches(name, known, n=SHOWN)
    listed = f"`posttrain methods list --kind preset` lists all, {len(known)} of them for {stage}"
    raise RecipeError(
        f"`{name}` is a method of stage {found.stage}, not of {stage}" if found else f"unknown algorithm `{name}`",
        allowed=f"near it: {', '.join(near)}; {listed}" if len(near) > 1 else listed,
        hint=f"did you mean `{nearest(name, known)}`?" if near else "",
    )


@functools.cache
def preset(name: str) -> Preset:
    """The preset of that name, one of `names()`."""
    path = FOLDER / f"{name}.yaml"
    values = plain(read(path).tree)
    return Preset(name=name, **{key: value for key, value in values.items() if key != "name"})
