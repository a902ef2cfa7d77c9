"""Equality of a computed and an expected output: |a - b| <= 1e-8 + 1e-6 |b|, or a case's absolute tolerance.

Expected null is None or NaN; True is 1; text equals only the same text; lists have equal lengths; objects have equal
keys, as strings. Every cell counts, including masked ones (they are 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

ABSOLUTE = 1e-8
RELATIVE = 1e-6


def plain(value: Any) -> Any:
    """Convert to JSON values: tensors and arrays become lists, tuples lists, NaN None, keys strings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def case_differences(case: Mapping[str, Any], output: Mapping[str, Any]) -> list[str]:
    """Return the errors in a case's outputs, [] if there are none.

    A missing expected output is an error, an additional output is not.
    """
    tolerance = case.get("tolerance", {})
    found: list[str] = []
    if not case["expected"]:
        found.append("nothing is expected")
    for key, expected in case["expected"].items():
        if key not in output:
            found.append(f"{key}: missing")
        else:
            found.extend(differences(expected, output[key], key, tolerance.get(key)))
    return found


def differences(expected: Any, got: Any, path: str, tolerance: float | None = None) -> Iterator[str]:
    """Return each difference between two plain values as `path: expected ..., got ...`."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        for key in sorted(expected.keys() ^ got.keys()):
            yield f"{path}.{key}: {'missing' if key in expected else 'not expected'}"
        for key in sorted(expected.keys() & got.keys()):
            yield from differences(expected[key], got[key], f"{path}.{key}", tolerance)
    elif isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            yield f"{path}: expected {len(expected)} items, got {len(got)}"
        for index, pair in enumerate(zip(expected, got, strict=False)):
            yield from differences(*pair, f"{path}[{index}]", tolerance)
    elif not _same_leaf(expected, got, tolerance):
        yield f"{path}: expected {expected!r}, got {got!r}"


def _same_leaf(expected: Any, got: Any, tolerance: float | None) -> bool:
    if not _is_number(expected) or not _is_number(got):
        return type(expected) is type(got) and expected == got
    if math.isinf(expected) or math.isinf(got):
        return expected == got
    allowed = ABSOLUTE + RELATIVE * abs(expected) if tolerance is None else tolerance
    return abs(got - expected) <= allowed


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
