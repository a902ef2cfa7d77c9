"""Presets: a paper as a row of choices, which `algorithm: NAME` puts under the recipe's own values."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.errors import RecipeError, nearest
from posttrain.recipe.tree import plain
from posttrain.recipe.yaml import read

FOLDER = Path(__file__).with_name("presets")
SHOWN = 4  # maximum number of similar names to show


@dataclass(frozen=True)
class Preset:
    """A preset of `algorithm`.

    `choices` are merged over the defaults and under the recipe. `not_stated`: what the paper leaves open. `rewards`:
    the rewards that the components read. `example`: placeholders for what only the user knows. Both must be written
    into the recipe.
    """

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
    """Return the names of the presets of one stage, or of all stages."""
    return [name for name in _list_shipped() if stage is None or preset(name).stage == stage]


@functools.cache
def _list_shipped() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def of_stage(name: str, stage: str) -> Preset:
    """Return the preset of that name. Raises RecipeError with the names allowed in a recipe of this stage."""
    found = preset(name) if name in names() else None
    if found and found.stage == stage:
        return found
    import difflib  # lazy: every command imports this module, and few need difflib

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
    """Return the preset of that name, one of `names()`."""
    path = FOLDER / f"{name}.yaml"
    values = plain(read(path).tree)
    return Preset(name=name, **{key: value for key, value in values.items() if key != "name"})
