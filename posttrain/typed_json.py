"""JSON serialization that round-trips Python values: tuples, sets, non-string keys, dates, numpy values.

Values that JSON supports are written as plain JSON, so text without type marks reads as with `json.loads`. All others
become an object with the key `__type__`. Loading creates values only: no code is run and no class is looked up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MARK = "__type__"


def dumps(value: Any) -> str:
    """Return the value as JSON text. Raises TypeError with the type of a value that cannot be restored."""
    return json.dumps(_to_json(value), ensure_ascii=False)


def loads(text: str) -> Any:
    """Return the value of JSON text. Raises ValueError for invalid JSON or an unknown type mark."""
    return json.loads(text, object_hook=_restore)


# Name of a type -> (the type, function to its JSON value, function back).
_TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, lambda v: [_to_json(item) for item in v], tuple),
    "set": (set, lambda v: [_to_json(item) for item in v], set),
    "frozenset": (frozenset, lambda v: [_to_json(item) for item in v], frozenset),
    "dict": (dict, lambda v: [[_to_json(key), _to_json(item)] for key, item in v.items()], dict),
    "complex": (complex, lambda v: [v.real, v.imag], lambda v: complex(*v)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda v: timedelta(*v)),
}


def _to_json(value: Any) -> Any:
    """Return the value as plain JSON values, with type marks for the types that JSON lacks."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) is list:
        return [_to_json(item) for item in value]
    if type(value) is dict and MARK not in value and all(type(key) is str for key in value):
        return {key: _to_json(item) for key, item in value.items()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return {MARK: "numpy", "value": [value.dtype.str, _to_json(value.tolist())]}
    for name, (kind, write, _) in _TYPES.items():
        if isinstance(value, kind):  # a named tuple is a tuple, a defaultdict a dict
            return {MARK: name, "value": write(value)}
    if isinstance(value, list):  # here and below: subclasses, such as StrEnum
        return _to_json(list(value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be written as JSON")


def _restore(found: dict[str, Any]) -> Any:
    """Return the Python value of a JSON object with a type mark; other objects are returned unchanged."""
    if found.keys() != {MARK, "value"}:
        return found
    name, value = found[MARK], found["value"]
    if name == "numpy":
        import numpy

        kind = numpy.dtype(value[0])
        return numpy.array(value[1], kind) if isinstance(value[1], list) else kind.type(value[1])
    if name not in _TYPES:
        raise ValueError(f"JSON of an unknown type {name!r}; known: {', '.join([*_TYPES, 'numpy'])}")
    return _TYPES[name][2](value)
