"""Parsers of LaTeX commands: fractions, roots, functions, sums, matrices, sets. Called by `reading.Reader`.

Operations left unevaluated (a sum, a gcd, a binomial coefficient of numbers) are recorded in `reader.forms`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy
from sympy import Expr, Function, Integer, Mul, Pow, Rational, S, Symbol

from posttrain.verify.math_values import Formula, Group, Unreadable
from posttrain.verify.names import read_name
from posttrain.verify.operations import (
    DEGREE,
    MAX_ARGUMENT,
    MAX_EXPONENT,
    is_beyond,
    is_long,
    negative,
    raised_to,
)
from posttrain.verify.tokens import GREEK, Token

if TYPE_CHECKING:
    from posttrain.verify.reading import Reader

MAX_PI_DENOMINATOR = 12  # largest denominator of a fraction of pi whose sine sympy looks up
MAX_TERMS = 100  # largest number of terms of a sum or product to expand
_INVERSE = {"sin": "asin", "cos": "acos", "tan": "atan", "cot": "acot", "sec": "asec", "csc": "acsc"}
_INVERSE |= {"sinh": "asinh", "cosh": "acosh", "tanh": "atanh", "coth": "acoth"}
_APPLIED = {name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "exp")}
_APPLIED |= {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsec": "asec", "arccsc": "acsc"}
_APPLIED |= {"asin": "asin", "acos": "acos", "atan": "atan", "abs": "Abs", "sech": "sech", "csch": "csch"}
_APPLIED |= {f"{arc}{name}": f"a{name}" for arc in ("a", "ar", "arc") for name in ("sinh", "cosh", "tanh", "coth")}
_EXPONENTIAL = ("sinh", "cosh", "tanh", "coth", "sech", "csch", "exp")  # arguments have the limit of exponents
COMMANDS: dict[str, Callable[..., Any]] = {}
# Commands that end the argument of a function without brackets.
_STOPS = (*_APPLIED, "ln", "log", "lg", "sum", "prod", "int", "lim")


def register_commands(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the parser of these commands."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        COMMANDS.update(dict.fromkeys(names, function))
        return function

    return register


def apply_function(name: str, argument: Any) -> Any:
    """Apply sympy's function to an argument; evaluate only if that is a look-up, for numbers and fractions of pi.

    In other cases sympy would query signs and zeros, at a cost that doubles with every nested function. Raises
    Unreadable for an argument that is not a number or is too large.
    """
    if not isinstance(argument, Expr):
        raise Unreadable("a function of no number")
    if name == "exp":
        return raised_to(S.Exp1, argument)
    turns = argument / sympy.pi
    simple = argument.is_Rational or argument.is_Symbol or (turns.is_Rational and turns.q <= MAX_PI_DENOMINATOR)
    if name == "log" and argument.is_Rational and is_long(argument):
        simple = False  # sympy would test whether it is prime
    limit = MAX_EXPONENT if name in _EXPONENTIAL else MAX_ARGUMENT
    if is_beyond(argument, limit):
        raise Unreadable("a function of too large a number")
    return getattr(sympy, name)(argument, evaluate=simple)


def mark_unevaluated(reader: Reader, form: str, value: Any) -> Any:
    """Return the value, and record the form as unevaluated if the value has no variables."""
    if not value.free_symbols:
        reader.forms.add(form)
    return value


@register_commands("frac")
def _fraction(reader: Reader) -> Expr:
    start = reader.position
    numerator = reader.argument()
    middle = reader.position
    denominator = reader.argument()
    upper, lower = (_letters(reader.tokens[a:b]) for a, b in ((start, middle), (middle, reader.position)))
    if upper[:1] in ("d", "∂") and lower[:1] == upper[:1] and len(lower) > 1:
        name = f"{upper}/{lower}"
        if len(upper) > 1:
            return Symbol(name)
        reader.forms.add("derivative")
        return Function(name)(_operand(reader))
    if denominator == 0:
        raise Unreadable("a quotient by zero")
    return Mul(numerator, Pow(denominator, -1))


def _letters(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens if token.text not in ("{", "}"))


@register_commands("sqrt")
def _root(reader: Reader) -> Expr:
    degree: Any = Integer(2)
    if reader.take("["):
        degree = reader.sum()
        reader.expect("]")
    inside = _function_argument(reader) if reader.at("(") else reader.argument()
    if degree == 0:
        raise Unreadable("a root of no degree")
    if degree.is_Integer and degree % 2 and inside.is_number and inside.is_negative:
        return negative(raised_to(-inside, Rational(1, degree)))
    return raised_to(inside, 1 / degree)


def _function_argument(reader: Reader) -> Expr:
    """Read the bracket after a name, which must hold a single formula."""
    value = reader.bracket(reader.next().text)
    if not isinstance(value, Expr):
        raise Unreadable("a function of several values")
    return value


def _operand(reader: Reader) -> Expr:
    """Read the argument of a function without brackets: adjacent factors up to the next function or sign."""
    if reader.at("(", "[", "{"):
        value = _function_argument(reader)  # sin(x)^2 means (sin x)^2
    else:
        value = reader.factor()
        while reader.starts_factor() and not reader.at(*_STOPS) and not reader.at("("):
            value = reader.read_adjacent(value)
    if not isinstance(value, Expr):
        raise Unreadable("a function of no number")
    return value


def _apply(reader: Reader, name: str) -> Expr:
    power = None
    if reader.at("^"):
        reader.position += 1
        power = reader.read_braces() if reader.at("{") else reader.atom() if not reader.at("-") else reader.factor()
    argument = _in_radians(_operand(reader))
    if power == -1 and name in _INVERSE:
        name, power = _INVERSE[name], None
    value = apply_function(_APPLIED.get(name, name), argument)
    return value if power is None else Pow(value, power)


def _in_radians(argument: Any) -> Any:
    return argument.subs(DEGREE, sympy.pi / 180)


for _name in _APPLIED:
    COMMANDS[_name] = lambda reader, name=_name: _apply(reader, name)


@register_commands("ln", "log", "lg")
def _logarithm(reader: Reader) -> Expr:
    name = reader.tokens[reader.position - 1].text
    base: Any = S.Exp1 if name == "ln" else Integer(10)
    power = None
    for _ in range(2):
        if reader.take("_"):
            base = reader.argument() if reader.at("{") else reader.atom()
        if reader.take("^"):
            power = reader.argument() if reader.at("{") else reader.atom()
    argument = _operand(reader)
    if argument == 0 or base in (0, 1) or (argument.has(S.ImaginaryUnit) and argument.has(sympy.log)):
        raise Unreadable("no logarithm")
    value = apply_function("log", argument)
    if base.is_Rational and argument.is_Rational and not is_long(argument):
        value = sympy.log(argument, base)
    elif base != S.Exp1:
        value = Mul(value, Pow(apply_function("log", base), -1))
    return value if power is None else Pow(value, power)


@register_commands("binom", "tbinom", "dbinom")
def _binomial(reader: Reader) -> Expr:
    n, k = reader.argument(), reader.argument()
    return mark_unevaluated(reader, "binomial", sympy.binomial(n, k))


@register_commands("choose")
def _choose(reader: Reader, n: Any = None) -> Expr:
    if not isinstance(n, Expr):
        raise Unreadable("nothing to choose from")
    return mark_unevaluated(reader, "binomial", sympy.binomial(n, reader.sum()))


@register_commands("over")
def _over(reader: Reader, numerator: Any = None) -> Expr:
    denominator = reader.sum()
    if not isinstance(numerator, Expr) or denominator == 0:
        raise Unreadable("a quotient of no numbers")
    return Mul(numerator, Pow(denominator, -1))


@register_commands("gcd", "lcm", "max", "min")
def _gcd_or_extremum(reader: Reader) -> Expr:
    name = reader.tokens[reader.position - 1].text
    reader.next() if reader.at("(", "\\{", "{") else reader.expect("(")
    end = reader.closing_position()
    value = reader.inside(end, "()")
    reader.position = end + 1
    given = [
        member.expr if isinstance(member, Formula) else member
        for member in (value.members if isinstance(value, Group) else [value])
    ]
    if not all(isinstance(expr, Expr) for expr in given):
        raise Unreadable("numbers are missing")
    if all(expr.is_Integer for expr in given) and name in ("gcd", "lcm"):
        found: Any = sympy.igcd(*given) if name == "gcd" else sympy.ilcm(*given)
    elif all(expr.is_number for expr in given) and name in ("max", "min"):
        found = getattr(sympy, name.capitalize())(*given)
    elif name in ("max", "min"):
        found = getattr(sympy, name.capitalize())(*given, evaluate=False)
    else:
        found = Function(name)(*sorted(given, key=str))
    return mark_unevaluated(reader, name, sympy.sympify(found))


@register_commands("lfloor", "lceil")
def _read_rounding(reader: Reader) -> Expr:
    down = reader.tokens[reader.position - 1].text == "lfloor"
    bars, reader.bars = reader.bars, 0
    value = reader.sum()
    reader.bars = bars
    reader.expect("rfloor" if down else "rceil")
    return mark_unevaluated(reader, "rounding", apply_function("floor" if down else "ceiling", value))


@register_commands("floor", "ceil")
def _rounded_by_name(reader: Reader) -> Expr:
    down = reader.tokens[reader.position - 1].text == "floor"
    return mark_unevaluated(
        reader, "rounding", apply_function("floor" if down else "ceiling", _function_argument(reader))
    )


@register_commands("sum", "prod")
def _sum(reader: Reader) -> Expr:
    kind = reader.tokens[reader.position - 1].text
    lower, upper = _limits(reader)
    reader.forms.add(kind)
    body = reader.product()
    if isinstance(lower, tuple) and isinstance(upper, Expr):
        letter, low = lower
        if low.is_Integer and upper.is_Integer and 0 <= upper - low < MAX_TERMS:
            terms = [body.subs(letter, low + k) for k in range(int(upper - low) + 1)]
            return sympy.Add(*terms) if kind == "sum" else Mul(*terms)
        bound = Symbol("bound variable")
        factor = Integer(1)
        if kind == "sum":
            factor, body = body.as_independent(letter, as_Add=False)
        return Mul(factor, Function(kind)(low, upper, body.subs(letter, bound)))
    return Function(kind)(_to_expr(lower), _to_expr(upper), body)


def _limits(reader: Reader) -> tuple[Any, Any]:
    """Read the lower and upper limits: each (letter, value) for `k=1`, or a formula, or text."""
    lower: Any = None
    upper: Any = None
    for _ in range(2):
        if reader.take("_"):
            lower = _lower(reader)
        elif reader.take("^"):
            upper = reader.argument() if reader.at("{") else reader.atom()
    return lower, upper


def _lower(reader: Reader) -> Any:
    if not reader.take("{"):
        return reader.atom()
    start, end = reader.position, reader.closing_position()
    letter, relation = reader.peek(), reader.peek(1)
    if letter.kind == "letter" and relation[:2] == ("relation", "="):
        reader.position += 2
        value = reader.sum()
        if reader.position == end and isinstance(value, Expr):
            reader.position += 1
            constants = {"i": S.ImaginaryUnit, "e": S.Exp1}  # the body reads these letters as constants
            return constants.get(letter.text, Symbol(letter.text)), value
    reader.position = start
    if reader.at("-") or reader.peek().kind in ("number", "letter", "command"):
        value = reader.sum()
        if reader.position == end and isinstance(value, Expr):
            reader.position += 1
            return value
    reader.position = end + 1
    return "".join(token.text for token in reader.tokens[start:end])


def _to_expr(value: Any) -> Any:
    return value if isinstance(value, Expr) else Symbol(str(value))


@register_commands("int", "iint", "oint")
def _integral(reader: Reader) -> Expr:
    lower, upper = _limits(reader)
    reader.forms.add("integral")
    return Function("integral")(_to_expr(lower), _to_expr(upper), reader.product())


@register_commands("lim")
def _limit(reader: Reader) -> Expr:
    lower, _ = _limits(reader)
    reader.forms.add("limit")
    return Function("limit")(_to_expr(lower), reader.product())


@register_commands("infty", "∞")
def _infinity(_: Reader) -> Expr:
    return S.Infinity


@register_commands("pi", "π")
def _pi(reader: Reader) -> Expr:
    following = reader.peek()
    return read_name(reader, "pi", constant=False) if following.text == "_" else sympy.pi


@register_commands("imath")
def _imaginary(_: Reader) -> Expr:
    return S.ImaginaryUnit


@register_commands(*GREEK)
def _greek(reader: Reader) -> Any:
    name = reader.tokens[reader.position - 1].text
    if name == "Gamma" and reader.at("("):
        return sympy.gamma(_function_argument(reader))
    if name == "Delta" and reader.peek().kind == "letter":  # a change: `\\Delta x`
        return read_name(reader, f"Delta {reader.next().text}", constant=False)
    return read_name(
        reader, {"varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta"}.get(name, name), constant=False
    )


def _names(token: Token) -> bool:
    return token.kind == "letter" or (token.kind == "command" and token.text in GREEK)


@register_commands(
    "angle",
    "triangle",
    "measuredangle",
    "overline",
    "bar",
    "vec",
    "overrightarrow",
    "hat",
    "widehat",
    "tilde",
    "dot",
    "ddot",
    "Delta_",
)
def _marked_name(reader: Reader) -> Expr:
    """Read a name with a mark: `\\angle ABC`, `\\overline{AB}`. Raises Unreadable for a mark on a number."""
    mark = reader.tokens[reader.position - 1].text
    tokens: list[Token] = []
    if reader.take("{"):
        end = reader.closing_position()
        tokens = reader.tokens[reader.position : end]
        reader.position = end + 1
    else:
        while _names(reader.peek()) and (mark.endswith("angle") or not tokens):
            tokens.append(reader.next())
    if mark.endswith("dot") and reader.at("_"):  # \dot{x}_{0}
        subscript = reader.tokens[reader.position : reader.position + 4]
        braced = [token.text for token in subscript[1::2]] == ["{", "}"]
        tokens += [subscript[0], subscript[2 if braced else 1]]
        reader.position += 4 if braced else 2
    if not tokens or any(
        not _names(token) and token.text != "_" and not (token.kind == "number" and at)
        for at, token in enumerate(tokens)
    ):
        raise Unreadable("a mark on no name")
    mark = {"overrightarrow": "vec", "widehat": "hat", "bar": "overline"}.get(mark, mark)
    return Symbol(mark + " " + "".join(token.text for token in tokens))
