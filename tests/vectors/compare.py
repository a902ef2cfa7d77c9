"""When a computed output equals an expected one: |a - b| <= 1e-8 + 1e-6 |b|, or a case's own absolute tolerance.

Expected null is None or NaN; True is 1; words equal words only; lists have equal lengths; objects have equal keys, as
strings. Every cell counts, masked ones too (they are 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

ABSOLUTE = 1e-8
RELATIVE = 1e-6


def plain(value: Any) -> Any:
    """JSON-able: tensors and arrays become lists, tuples lists, NaN None, keys strings."""
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
    """What is wrong with a case's outputs, [] if nothing. A missing output is wrong, one that nobody expects is not."""
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
    """Each place where two plain values differ, as `path: expected ..., got ...`."""
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
