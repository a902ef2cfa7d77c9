"""`tools: [{use: calculator}]`: sums and products, as exact as Python's numbers."""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

Number = Any  # int, float or complex, as Python's operators make them

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
    "log": math.log,
}
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")
LARGEST_POWER = 1000  # bits of a result at most, about 300 digits


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: with + - * / // % ** ( ), sqrt, abs, round, min, max and log, for example 12 * (3 + 4)
    """
    value = _value(_parsed(expression.strip().replace("^", "**")))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _parsed(text: str) -> ast.expr:
    """The expression. A comma divides the arguments of a function; elsewhere it is that of thousands."""
    try:
        body = ast.parse(text, mode="eval").body
    except SyntaxError:  # 1,034: Python knows no 034
        body = None
    if body is None or any(isinstance(node, ast.Tuple) for node in ast.walk(body)):
        body = ast.parse(_THOUSANDS.sub(lambda number: number[0].replace(",", ""), text), mode="eval").body
    return body


def _value(node: ast.AST) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*map(_value, node.args))
    raise ValueError("not arithmetic: numbers, + - * / // % ** ( ) and a few functions")


def _power(base: Number, exponent: Number) -> Number:
    if abs(base) > 1 and exponent * math.log2(abs(base)) > LARGEST_POWER:
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
    ({"expression": "__import__('os')"}, ValueError),
    ({"expression": "1 / 0"}, ZeroDivisionError),
]
