"""Vocabulary of components' `needs` (needs.yaml), and which of them a recipe provides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.recipe.foreign.words import read_table
from posttrain.recipe.requirements import Scope
from posttrain.recipe.rl_stage import RlRecipe

_TABLE: Mapping[str, Any] = read_table(Path(__file__).with_name("needs.yaml"))
GIVERS: Mapping[str, tuple[str, Sequence[str]]] = _TABLE["given_by"]
SAMPLERS: dict[str, set[str]] = {name: set(needs) for name, needs in _TABLE["samplers"].items()}
MAKERS: Mapping[str, Sequence[str]] = _TABLE["makers"]
LACKS: Mapping[str, str] = {need: text for text, needs in _TABLE["lacks"] for need in needs}
CONFLICTS: Mapping[str, str] = _TABLE["conflicts"]
INTERNAL: Sequence[str] = _TABLE["internal"]
TOGETHER: Mapping[str, Sequence[str]] = _TABLE["together"]
REFUSED: Mapping[str, Sequence[Sequence[str]]] = _TABLE["refused"]
REFUSED_CONTROLLERS: Sequence[Sequence[str]] = _TABLE["refused_controllers"]
OF_STALE_ROLLOUTS: Sequence[Sequence[str]] = _TABLE["of_stale_rollouts"]
BY_ROW = frozenset[str](_TABLE["by_row"])


def given_by(*givers: str) -> set[str]:
    """Return what the named providers of needs.yaml give to a component; without names, what any provider can give."""
    return {need for name in givers or GIVERS for need in GIVERS[name][1]} | (set() if givers else set(MAKERS))


def givers_of(needs: Iterable[str]) -> set[str]:
    """Return the names in needs.yaml of the providers of any of these needs."""
    return {name for name, (_, fields) in GIVERS.items() if not set(fields).isdisjoint(needs)}


def provided_fields(recipe: RlRecipe) -> set[str]:
    """Return the batch fields and marks that a recipe provides to its components. A user's function may provide
    everything that its kind can."""
    scope, advantage = Scope.of(recipe), recipe.advantage
    provided = {field for when, fields in GIVERS.values() if scope.holds(when) for field in fields}
    provided |= {field for field, makers in MAKERS.items() if advantage.is_function or advantage.use in makers}
    return provided | fields_from_sampler(recipe)


def fields_from_sampler(recipe: RlRecipe) -> set[str]:
    """Return the fields that the recipe's sampler provides to components. A user's sampler may provide any of them."""
    every = set().union(*SAMPLERS.values())
    return every if recipe.sampler.is_function else SAMPLERS.get(recipe.sampler.use, set())


MARKS = given_by("marks")  # needs that are not fields of a batch
