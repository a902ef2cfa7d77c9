"""What a reward may return: a finite number, None, or a dict of named parts with the key `reward`."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


class BrokenContract(Exception):
    """A reward returned something else."""


def checked(value: Any, *, batched: bool = False) -> float | dict[str, float | None] | None:
    """The returned value as numbers. batched: it must be a list of one. Raises BrokenContract with the value in it."""
    if batched:
        if not isinstance(value, list | tuple) or len(value) != 1:
            raise BrokenContract(f"returned {shown(value)} for one completion, must return a list of one number")
        value = value[0]
    if not isinstance(value, Mapping):
        return _number(value)
    if "reward" not in value:
        raise BrokenContract(f"returned parts without the key `reward`: {shown(value)}")
    if not all(isinstance(name, str) for name in value):
        raise BrokenContract(f"returned parts whose names are not text: {shown(value)}")
    return {name: _number(part, f"part `{name}`: ") for name, part in value.items()}


def _number(value: Any, what: str = "") -> float | None:
    if value is None:
        return None
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()  # numpy.bool_ is no number to Python
    if not isinstance(value, numbers.Real):
        raise BrokenContract(f"{what}returned {shown(value)} ({type(value).__name__}), must return a number or None")
    number = float(value)
    if not math.isfinite(number):
        raise BrokenContract(f"{what}returned {number}, must return a finite number or None")
    return number


def shown(value: Any) -> str:
    """A short repr; objects whose repr fails are named by their type."""
    try:
        return _short.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
