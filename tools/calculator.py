"""`tools: [{use: calculator}]`: sums and products, as exact as Python's numbers."""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

Number = Any  # int, float or complex, as Python's operators make them

_LARGEST_BITS = 1000  # of an integer at most, about 300 digits
_LONGEST = 2000  # characters of an expression
_DEEPEST = 400  # operations within each other, those of a long sum too
_MOST_DIGITS = 300  # that `round` counts

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


def _round(value: Number, digits: int = 0) -> Number:
    """Python's, for as many digits as a number here can have: it computes 10 to that power."""
    if not isinstance(digits, int) or abs(digits) > _MOST_DIGITS:
        raise ValueError(f"round counts up to {_MOST_DIGITS} digits")
    return round(value, digits) if digits else round(value)


_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
    "log": math.log,
}
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: with + - * / // % ** ( ), sqrt, abs, round, min, max and log, for example 12 * (3 + 4)
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has at most {_LONGEST} characters")
    value = _value(_parse(expression.strip().replace("^", "**")), _DEEPEST)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _parse(text: str) -> ast.expr:
    """The expression. A comma divides the arguments of a function; elsewhere it is that of thousands."""
    try:
        body = _body(text)
    except SyntaxError:  # 1,034: Python knows no 034
        body = None
    if body is None or any(isinstance(node, ast.Tuple) for node in ast.walk(body)):
        body = _body(_THOUSANDS.sub(lambda number: number[0].replace(",", ""), text))
    return body


def _body(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (RecursionError, MemoryError):  # what Python says of a thousand brackets
        raise ValueError("too many operations within each other") from None


def _value(node: ast.AST, depth: int) -> Number:
    """The value, each part of which is bounded, so that no operation has much to do."""
    if depth == 0:
        raise ValueError("too many operations within each other")
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _check_size(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _check_size(_power(_value(node.left, depth - 1), _value(node.right, depth - 1)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _check_size(_BINARY[type(node.op)](_value(node.left, depth - 1), _value(node.right, depth - 1)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, depth - 1))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _check_size(_FUNCTIONS[node.func.id](*(_value(argument, depth - 1) for argument in node.args)))
    raise ValueError("not arithmetic: numbers, + - * / // % ** ( ) and a few functions")


def _check_size(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        raise ValueError("the result is too large")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if abs(base) > 1 and exponent * math.log2(abs(base)) > _LARGEST_BITS + 1:
        raise ValueError("the result is too large")
    return base**exponent


EXAMPLES = [
    ({"expression": "123 * 456"}, "56088"),
    ({"expression": "(1 + 2) / 4"}, "0.75"),
    ({"expression": "sqrt(16) + 2^3"}, "12"),
    ({"expression": "1,034,500 + max(2, 3)"}, "1034503"),
    ({"expression": "round(3.14159, 2) + log(1000,10)"}, "6.14"),
    ({"expression": "min(5,100)"}, "5"),
    ({"expression": "9**9**9"}, ValueError),
    ({"expression": "round(7, -10**8)"}, ValueError),
    ({"expression": "__import__('os')"}, ValueError),
    ({"expression": "1 / 0"}, ZeroDivisionError),
]
