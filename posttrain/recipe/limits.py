"""The ranges of numbers in a recipe: of the schema's counts, and of the arguments of components (arguments.yaml)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from posttrain.recipe.foreign.words import read_table

MOST = 10**9  # of a count for which no smaller limit is known
LARGEST = 1e30  # of any number: beyond it products leave float32
DIGITS = 100  # characters of a number

_TABLE = read_table(Path(__file__).with_name("arguments.yaml"))
ARGUMENTS: Mapping[str, Mapping[str, float]] = {name: limits for limits, names in _TABLE["ranges"] for name in names}
T = TypeVar("T")


def of_argument(kind: str, component: str, argument: str) -> dict[str, Any]:
    """The limits of a component's argument, as keywords of pydantic's Field."""
    return {} if kind == "merge" else dict(_find(ARGUMENTS, kind, component, argument, {}))


@functools.cache
def refused_argument(kind: str, component: str, argument: str) -> Sequence[Sequence[str]]:
    """What a component's argument cannot stand beside: the values of marks `Refused`."""
    return _find(_TABLE["refused"], kind, component, argument, ())


def _find(table: Mapping[str, T], kind: str, component: str, argument: str, default: T) -> T:
    names = (f"{kind}/{component}.{argument}", f"{kind}.{argument}", argument)
    return next((table[name] for name in names if name in table), default)
