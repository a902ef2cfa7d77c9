"""Functions and operators that an assert of a data set may use, bounded so that no expression fills the memory."""

from __future__ import annotations

import ast
import collections
import math
from collections.abc import Sequence
from typing import Any

MOST_ITEMS = 1_000_000


def bounded_range(*limits: int) -> range:
    """Return a range. Raises ValueError beyond MOST_ITEMS."""
    made = range(*limits)
    if len(made) > MOST_ITEMS:
        raise ValueError("the range is too long")
    return made


def multiply(left: Any, right: Any) -> Any:
    """Return left * right. Raises ValueError for a sequence beyond MOST_ITEMS."""
    for sequence, count in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(count, int) and len(sequence) * count > MOST_ITEMS:
            raise ValueError("the sequence is too long")
    return left * right


def power(base: Any, exponent: Any, modulus: Any = None) -> Any:
    """Return base ** exponent. Raises ValueError for an integer of more than MOST_ITEMS bits."""
    if modulus is None and isinstance(base, int) and isinstance(exponent, int):
        if base.bit_length() * exponent > MOST_ITEMS:
            raise ValueError("the power is too large")
        return base**exponent
    return pow(base, exponent, modulus)


def modulo(left: Any, right: Any) -> Any:
    """Return left % right. Raises TypeError for a text, whose width could be anything."""
    if isinstance(left, str | bytes):
        raise TypeError("no formatting of texts")
    return left % right


class Approx:
    """Expected value that equals numbers close to it, as `pytest.approx`: 1e-6 relative or 1e-12 absolute."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected = expected
        self.rel = rel if rel is not None else 0.0 if abs is not None else 1e-6
        self.abs = 1e-12 if abs is None else abs

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, value: object) -> bool:
        return self._equals(value, self.expected)

    def _equals(self, value: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            same = isinstance(value, dict) and value.keys() == expected.keys()
            return same and all(self._equals(value[key], item) for key, item in expected.items())
        if isinstance(expected, list | tuple):
            same = isinstance(value, list | tuple) and len(value) == len(expected)
            return same and all(map(self._equals, value, expected))
        if isinstance(value, int | float) and isinstance(expected, int | float):
            return bool(value == expected) or abs(value - expected) <= max(self.rel * abs(expected), self.abs)
        return bool(value == expected)


def all_close(value: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Return whether numbers, or sequences of the same shape, are equal within atol + rtol * |expected| (numpy)."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(
            all_close(a, b, rtol, atol) for a, b in zip(value, expected, strict=True)
        )
    return bool(value == expected) or abs(value - expected) <= atol + rtol * abs(expected)


def assert_equal_or_close(value: Any, expected: Any, atol: float) -> bool:
    """Return whether values are equal, or close if atol or a float is expected: EvalPlus's `assertion`."""
    parts: Sequence[Any] = expected if isinstance(expected, list | tuple) else [expected]
    if atol == 0 and all(isinstance(part, float) for part in parts):
        atol = 1e-6
    return bool(value == expected) or (atol != 0 and all_close(value, expected, 1e-7, atol))


BUILTINS: dict[str, Any] = {
    function.__name__: function
    for function in (
        abs, all, any, bool, complex, dict, enumerate, float, frozenset, int, isinstance, len, list, max, min, reversed,
        round, set, sorted, str, sum, tuple, type, zip,
    )
} | {"range": bounded_range, "pow": power, "_multiply": multiply, "_power": power, "_modulo": modulo}  # fmt: skip
KNOWN: dict[str, Any] = {
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "fabs", "floor", "gcd", "isclose", "isinf", "isnan",
                                                       "sqrt", "inf", "nan", "pi", "e")},
    "collections.Counter": collections.Counter,
    "collections.OrderedDict": collections.OrderedDict,
    "numpy.allclose": all_close,
    "numpy.isclose": all_close,
    "pytest.approx": Approx,
    "evalplus.assertion": assert_equal_or_close,
}  # fmt: skip
METHODS = frozenset(("count", "endswith", "get", "index", "items", "join", "keys", "lower", "split", "startswith",
                     "strip", "upper", "values"))  # fmt: skip
_OPERATORS: dict[type[ast.operator], str] = {ast.Mult: "_multiply", ast.Pow: "_power", ast.Mod: "_modulo"}


def bounded_operator(node: ast.AST) -> ast.AST:
    """Return the call of a bounded function in place of `*`, `**` and `%`; other nodes unchanged."""
    if isinstance(node, ast.BinOp) and (name := _OPERATORS.get(type(node.op))):
        return ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])
    return node
