"""Parser from the tokens of an answer to its value. The whole answer is parsed, or nothing.

The grammar, from the outside in: an answer is a list of items; an item is a chain of sides with relations between them;
a side is a sum of products of powers of atoms, followed by a unit. Commands (`\\frac`, `\\sum`) are in
`latex_commands.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from sympy import Expr, Rational, S, Symbol

from posttrain.verify.cursor import CLOSING, END, SEPARATORS, Cursor, closes
from posttrain.verify.latex_commands import apply_function
from posttrain.verify.math_values import Chain, Formula, Grid, Group, Unreadable, Value, Without
from posttrain.verify.names import read_name, read_subscript
from posttrain.verify.operations import DEGREE, add, apply_operator, negative, raised_to, reciprocal, times
from posttrain.verify.structures import COMMANDS, transpose
from posttrain.verify.tokens import FUNCTIONS, Token, tokenize
from posttrain.verify.units import ratio_of_units, read_unit

MAX_NESTED = 5  # maximum nesting depth of functions
HALVES_OF_DAY = ("am", "pm", "a.m.", "p.m.", "a.m", "p.m")
_ENDS = frozenset(["relation", "word", "end"])


def read(text: str) -> Value | None:
    """Parse a text normalized by `notation.clean`; return its value, or None if part of the text cannot be parsed."""
    reader = Reader(tokenize(text))
    try:
        value = reader.answer()
    except (Unreadable, RecursionError, ArithmeticError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None
    return value if reader.peek() is END else None


class Reader(Cursor):
    """Recursive-descent parser over tokens. `sign` is the value of the upper sign of `\\pm` in the current pass."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self.sign = 1
        self.forked = False
        self.bars = 0
        self.functions = 0
        self.exponent_end = -1  # position after the exponent read last
        self.approximate = False
        self.percent = False
        self.forms: set[str] = set()

    # Lists and items.

    def answer(self) -> Any:
        """Read one value, or a bare list of values separated by commas, semicolons, `and` or `or`."""
        members, joined = self.members()
        return members[0] if len(members) == 1 else Group("list", tuple(members), joined)

    def members(self, *, forking: bool = True) -> tuple[list[Any], str]:
        """Read the items and their separator.

        With `forking`, an item with a plus-minus gives two members; a tuple with a plus-minus stays one member and is
        read twice as a whole.
        """
        members, joined = self.item() if forking else [self.chain()], ","
        while (separator := self.separator()) is not None:
            if separator != ",":
                joined = separator
            members += self.item() if forking else [self.chain()]
        return members, joined

    def separator(self) -> str | None:
        """Read the marks between two items as `,`, `and` or `or`; return None if no further item follows."""
        found = None
        while self.at(*SEPARATORS):
            text = self.next().text
            if found in ("and", "or") or (found is not None and text not in ("and", "or")):
                raise Unreadable("two marks between items")
            found = text if text in ("and", "or") else ","
        return found

    def item(self) -> list[Any]:
        """Read an item; an item with a plus-minus gives two values, the upper sign first."""
        start, before = self.position, self.forked
        self.forked = False
        chains = [self.chain()]
        if self.forked:
            self.position, self.sign = start, -self.sign
            chains.append(self.chain())
            self.sign = -self.sign
        self.forked = before
        return chains

    def chain(self) -> Any:
        """Read sides with relations between them, and the modulus after them."""
        if self.peek()[:2] in (("relation", "="), ("relation", "approx")):
            self.position += 1
        if (point := self.named_point()) is not None:
            return point
        sides, relations = [self.side()], []
        while (token := self.peek()).kind == "relation":
            self.position += 1
            relations.append(token.text)
            sides.append(self.side())
        modulus = self.modulus()
        if not relations and modulus is None:
            return sides[0]
        return Chain(tuple(sides), tuple(relations), modulus)

    def named_point(self) -> Chain | None:
        """Read `P(1, 2)` as P = (1, 2) if it is a whole item; return None otherwise."""
        name = self.peek()
        if name.kind != "letter" or not name.text.isupper():
            return None
        start, label = self.position, self.next().text + read_subscript(self)
        if self.take("("):
            end = self.closing_position()
            following = self.tokens[end + 1] if end + 1 < len(self.tokens) else END
            last = following is END or following.text in SEPARATORS or closes(following)
            if last and self.is_list(end):
                self.position -= 1
                return Chain((Formula(Symbol(label)), self.bracket(self.next().text)), ("=",))
        self.position = start
        return None

    def modulus(self) -> Any:
        bracket = self.at("(") and self.peek(1).text in ("bmod", "pmod", "mod")
        self.position += bracket
        if not self.take("bmod", "pmod", "mod"):
            return None
        value = self.sum()
        if bracket:
            self.expect(")")
        return Formula(value)

    def side(self) -> Any:
        """Read a formula with its unit, a ratio, or a value of another kind."""
        before = self.approximate, self.percent, self.forms
        self.approximate, self.percent, self.forms = False, False, set()
        start = self.position
        value = self.sum()
        if isinstance(value, Expr):
            value = self.ratio(value, start) if self.at(":") else self.formula(value)
        self.approximate, self.percent, self.forms = before
        return value

    def formula(self, value: Expr) -> Formula:
        scale, unit = read_unit(self, value)
        if value.has(DEGREE):
            value, unit = value.subs(DEGREE, 1), unit or "°"
        if value.has(S.NaN, S.ComplexInfinity):
            raise Unreadable("no value")
        if self.percent:
            unit = f"% {unit}".strip()
        value = value * scale
        while unit and self.peek().kind == "number" and self.tokens[self.position - 1].kind == "word":
            value = add(value, self.smaller_part(unit))
        return Formula(value, self.approximate, unit, frozenset(self.forms))

    def smaller_part(self, unit: str) -> Expr:
        """Read the 30 minutes of `1 hour 30 minutes`, converted to hours."""
        part = self.power()
        _, smaller = read_unit(self, part)
        ratio = ratio_of_units(unit, smaller)
        if not smaller or ratio is None or ratio == 1 or not (part.is_Rational and 0 <= part * ratio < 1):
            raise Unreadable("two numbers side by side")
        return times(part, ratio)

    def ratio(self, first: Expr, start: int) -> Any:
        """Read a:b as a quotient, a:b:c as a tuple, and 10:30 as a time (a quotient would be in lowest terms)."""
        parts = [first]
        while self.take(":"):
            parts.append(self.sum())
        if not all(isinstance(part, Expr) for part in parts):
            raise Unreadable("a ratio of no numbers")
        if len(parts) > 2:
            return Group("()", tuple(map(Formula, parts)))
        digits = [token.text for token in self.tokens[start : self.position] if token.kind == "number"]
        _, unit = read_unit(self, first)
        if (
            all(part.is_Integer for part in parts)
            and len(digits) == 2
            and len(digits[1]) == 2
            and (digits[1][0] == "0" or unit.casefold() in HALVES_OF_DAY or sympy.igcd(*map(int, parts)) != 1)
            and 0 <= parts[0] <= 24
            and parts[1] < 60
        ):
            return Group("time", (Formula(parts[0], unit=unit), Formula(parts[1])))
        return Formula(parts[0] / parts[1], self.approximate, unit, frozenset(self.forms))

    # Sums and products.

    def sum(self) -> Any:
        left = self.product()
        while True:
            if self.take("+"):
                left = add(left, self.product())
            elif self.take("-"):
                right = self.product()
                left = add(left, negative(right)) if isinstance(left, Expr) else Without(left, right)
            elif self.at("pm", "mp", "±", "∓"):
                left = add(left, times(self.plus_minus(), self.product()))
            elif self.take("cup", "∪") or self.joins_sets(left):
                left = apply_operator("union", left, self.product())
            elif self.take("cap", "∩"):
                left = apply_operator("meet", left, self.product())
            elif self.take("setminus", "backslash"):
                left = Without(left, self.product())
            else:
                return left

    def joins_sets(self, left: Any) -> bool:
        """Return whether a `U` joins two sets, as in `(0,1) U (2,3)`, and consume the `U`."""
        token = self.peek()
        if isinstance(left, Expr) or token[:2] != ("letter", "U"):
            return False
        self.position += 1
        return True

    def plus_minus(self) -> Expr:
        self.forked = True
        return Rational(self.sign if self.next().text in ("pm", "±") else -self.sign)

    def product(self) -> Any:
        if self.take("+"):
            return self.product()
        if self.take("-"):
            return negative(self.product())
        if self.at("pm", "mp", "±", "∓"):
            sign = self.plus_minus()
            return times(sign, self.product())
        left = self.power()
        while True:
            if self.take("*", "×", "·", "⋅"):
                left = times(left, self.factor())
            elif self.at("/") and self.peek(1).kind == "word":
                return left
            elif self.take("/"):
                left = times(left, reciprocal(self.factor()))
            elif isinstance(left, Expr) and self.starts_factor():
                left = self.read_adjacent(left)
            else:
                return left

    def factor(self) -> Any:
        if self.take("-"):
            return negative(self.factor())
        if self.take("+"):
            return self.factor()
        return self.power()

    def starts_factor(self) -> bool:
        """Return whether another factor follows without an operator."""
        token = self.peek()
        if token.kind in _ENDS:
            return False
        if token.kind in ("number", "letter"):
            return True
        if token.kind == "command":
            return (token.text in COMMANDS and token.text not in ("choose", "over")) or token.text == "langle"
        if token.text == "(" and self.peek(1).text in ("bmod", "pmod", "mod"):
            return False
        if token.text == "(" and self.peek(1).kind == "word":
            return False
        return token.text in ("(", "[", "{") or (token.text == "|" and self.bars == 0)

    def read_adjacent(self, left: Any) -> Any:
        """Multiply by the adjacent factor, or read the mixed number of an integer and a fraction."""
        before, token = self.tokens[self.position - 1], self.peek()
        whole = before.kind == "number" and isinstance(left, sympy.Integer) and "." not in before.text
        if token.kind == "number":
            power = self.exponent_end == self.position  # 2^{6}3^{5} and 2^6 3^5, but not 2^6 3
            if power and (before.text == "}" or (token.spaced and self.peek(1).text == "^")):
                return times(left, self.power())
            if before.text == ")" and self.peek(1).text == "^":  # (n-2) 2^n
                return times(left, self.power())
            if before.text != "!" and (not token.spaced or before.kind not in ("letter", "number", "command")):
                raise Unreadable("two numbers side by side")
            if before.kind != "number":
                return times(left, self.power())
            above = self.next()
            if not (whole and self.take("/")):
                raise Unreadable("two numbers side by side")
            return self.mixed_number(left, above.text, self.next().text)
        if whole and token.text == "frac":
            right = self.atom()
            if isinstance(right, sympy.Rational) and self.is_proper(right):
                return self.postfix(left + right)
            return times(left, self.postfix(right))
        return times(left, self.power())

    def is_proper(self, fraction: Any) -> bool:
        """Return whether the fraction just read is written with two integers, the numerator smaller."""
        start = next(p for p in range(self.position - 1, -1, -1) if self.tokens[p].text == "frac")
        inside = [token for token in self.tokens[start + 1 : self.position] if token.text not in ("{", "}")]
        return all(token.kind == "number" and "." not in token.text for token in inside) and 0 < fraction < 1

    def mixed_number(self, whole: Any, above: str, below: str) -> Any:
        if not (above.isdecimal() and below.isdecimal() and 0 < int(above) < int(below)):
            raise Unreadable("no mixed number")
        return whole + Rational(int(above), int(below))

    # Powers and atoms.

    def power(self) -> Any:
        return self.postfix(self.atom())

    def postfix(self, base: Any) -> Any:
        """Apply the powers, factorials, degrees and percent signs that follow the base."""
        while True:
            if self.at("^"):
                base = self.read_power(base)
                self.exponent_end = self.position
            elif self.at("!") and isinstance(base, Expr):
                self.position += 1
                if self.at("!"):
                    raise Unreadable("a double factorial")
                base = sympy.factorial(base)
            elif self.take("%"):
                self.percent = True
                base = times(base, Rational(1, 100))
            elif self.take("degree", "°"):
                base = times(base, DEGREE)
            else:
                return base

    def read_power(self, base: Any) -> Any:
        self.expect("^")
        if self.take("circ", "degree"):
            return times(base, DEGREE)
        if self.at("{") and self.peek(1).text in ("circ", "degree"):
            self.position += 2
            self.expect("}")
            return times(base, DEGREE)
        exponent = self.factor() if not self.at("{") else self.read_braces()
        if isinstance(base, Grid | Group) and exponent == Symbol("T"):
            return transpose(base)
        return raised_to(base, exponent)

    def read_braces(self) -> Any:
        """Read the content of `{...}`."""
        self.expect("{")
        if self.at("}"):
            raise Unreadable("empty braces")
        value = self.inside(self.closing_position(), "list")
        self.expect("}")
        return value

    def argument(self) -> Any:
        """Read the argument of a command: a braced group, or the next token alone (the 1 of `12`)."""
        value = self.read_braces() if self.at("{") else self.atom()
        if not isinstance(value, Expr):
            raise Unreadable("no formula where one is needed")
        return value

    def inside(self, end: int, kind: str) -> Any:
        """Read a formula or chain up to `end`, or a group of the given kind if there are separators."""
        bars, self.bars = self.bars, 0
        if self.is_list(end):
            members, joined_by = self.members(forking=kind == "list")
            value: Any = Group(kind, tuple(members), joined_by)
        else:
            value = self.sum()
            if self.at("choose", "over"):
                value = COMMANDS[self.next().text](self, value)
            if self.peek().kind == "relation":
                raise Unreadable("a relation in brackets")
        self.bars = bars
        return value

    def atom(self) -> Any:
        token = self.next()
        if token.kind == "number":
            self.approximate = self.approximate or "." in token.text
            return Rational(token.text)
        if token.kind == "letter":
            return read_name(self, token.text)
        if token.kind == "word":
            following = self.peek()
            if following[:2] == ("relation", "="):
                return Symbol(token.text.casefold())
            raise Unreadable("words")
        if token.text == "|":
            return self.read_nested(self.absolute)
        if token.text in CLOSING:
            return self.bracket(token.text)
        if token.kind == "command" and token.text in FUNCTIONS:
            return self.read_nested(lambda: COMMANDS[token.text](self))
        if token.kind == "command" and token.text in COMMANDS:
            return COMMANDS[token.text](self)
        raise Unreadable(f"{token.text} is not known")

    def read_nested(self, read_function: Callable[[], Any]) -> Any:
        """Call a parser of a function unless functions are nested too deeply: sympy's cost doubles with each level."""
        self.functions += 1
        if self.functions > MAX_NESTED:
            raise Unreadable("functions of functions of functions")
        value = read_function()
        self.functions -= 1
        return value

    def absolute(self) -> Expr:
        self.bars += 1
        value = self.sum()
        self.expect("|")
        self.bars -= 1
        return apply_function("Abs", value)

    def bracket(self, opening: str) -> Any:
        if opening == "\\{":
            return COMMANDS["\\{"](self)
        end = self.closing_position()
        if self.tokens[end].text not in CLOSING[opening]:
            raise Unreadable("brackets that do not match")
        kind = {"{": "list", "langle": "<>"}.get(opening, opening + self.tokens[end].text)
        value = self.inside(end, kind)
        if self.position != end or (kind in ("[)", "(]") and not isinstance(value, Group)):
            raise Unreadable("brackets that do not match")
        self.position += 1
        return value
