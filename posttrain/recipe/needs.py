"""The words of components' `needs` (needs.yaml): who gives what a component reads, and what it cannot stand beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.recipe.foreign.words import read_table

_TABLE: Mapping[str, Any] = read_table(Path(__file__).with_name("needs.yaml"))
SAMPLERS: dict[str, set[str]] = {name: set(needs) for name, needs in _TABLE["samplers"].items()}
MAKERS: Mapping[str, Sequence[str]] = _TABLE["makers"]
LACKS: Mapping[str, str] = _TABLE["lacks"]
CONFLICTS: Mapping[str, str] = _TABLE["conflicts"]
INTERNAL: Sequence[str] = _TABLE["internal"]
TOGETHER: Mapping[str, Sequence[str]] = _TABLE["together"]
REFUSED: Mapping[str, Sequence[Sequence[str]]] = _TABLE["refused"]
REFUSED_CONTROLLERS: Sequence[Sequence[str]] = _TABLE["refused_controllers"]
BY_ROW = frozenset[str](_TABLE["by_row"])


def given_by(*givers: str) -> set[str]:
    """What these give to a component, by their names in needs.yaml; of all of them without a name."""
    return {need for name in givers or _TABLE["given_by"] for need in _TABLE["given_by"][name]}


def givers_of(needs: Iterable[str]) -> set[str]:
    """Who gives any of these, by their names in needs.yaml."""
    return {name for name, fields in _TABLE["given_by"].items() if not set(fields).isdisjoint(needs)}


MARKS = given_by("marks")  # needs that are no fields of a batch
