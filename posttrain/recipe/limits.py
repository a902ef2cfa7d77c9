"""Ranges of the numbers in a recipe: counts of the schema, and component arguments (arguments.yaml)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from posttrain.recipe.foreign.words import read_table

MAX_COUNT = 10**9  # upper limit of counts without a smaller limit
MAX_MAGNITUDE = 1e30  # upper limit of any number: products beyond it overflow float32
MAX_DIGITS = 100  # maximum length of a number in characters

_TABLE = read_table(Path(__file__).with_name("arguments.yaml"))
ARGUMENTS: Mapping[str, Mapping[str, float]] = {name: limits for limits, names in _TABLE["ranges"] for name in names}
IDLE: Mapping[str, Sequence[Mapping[str, Any]]] = _TABLE["idle"]
REFUSED: Mapping[str, Sequence[Sequence[str]]] = _TABLE["refused"]
T = TypeVar("T")


def argument_limits(kind: str, component: str, argument: str) -> dict[str, Any]:
    """Return the limits of a component's argument as keyword arguments of pydantic's Field."""
    return {} if kind == "merge" else dict(find_entry(ARGUMENTS, kind, component, argument, {}))


def find_entry(table: Mapping[str, T], kind: str, component: str, argument: str, default: T) -> T:
    """Return the most specific entry of a table of arguments.yaml for a component's argument."""
    names = (f"{kind}/{component}.{argument}", f"{kind}.{argument}", argument)
    return next((table[name] for name in names if name in table), default)
