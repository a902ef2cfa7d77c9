"""Complexity bounds that reject answers too large to compare, without evaluating them.

`9^{9^{9}}`, for example, would block the interpreter in one C loop.

The sizes are upper bounds on what a LaTeX parser may build, not values: adjacent digits are multiplied, whatever stands
between them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

MAX_CHARS = 2000  # characters
MAX_DEPTH = 12  # nested brackets; sympy's cost may double with each level
MAX_POWER_HEIGHT = 2  # levels of nested powers
MAX_DIGITS = 10_000.0
MAX_ROWS = 5  # of a determinant
MAX_MEMBERS = 200  # of a list; an interval of a union counts as ten

_OPEN, _CLOSE = "{([", "})]"
_ATOM = re.compile(r"[0-9][0-9,]*|\\[A-Za-z]+|!+|\S")
_DETERMINANT = re.compile(r"\\begin\{([vV]matrix)\}(.*?)\\end\{\1\}", re.DOTALL)
_VALUES = (r"\binom", r"\dbinom", r"\tbinom", r"\Gamma")  # results with about as many digits as the argument's value


def too_large(text: str) -> bool:
    """Return whether a LaTeX text is too long, deep or tall, or may evaluate to more than MAX_DIGITS digits."""
    members = text.count(",") + 10 * (text.count(r"\cup") + text.count("∪"))
    if (
        len(text) > MAX_CHARS
        or members > MAX_MEMBERS
        or any(rows.count("\\\\") >= MAX_ROWS for _, rows in _DETERMINANT.findall(text))
    ):
        return True
    plain = re.sub(r"\\(?=[{}])|\\(?:left|right)(?![a-z])", "", text)
    return _depth(plain) > MAX_DEPTH or _height(plain) > MAX_POWER_HEIGHT or _log10(plain) > MAX_DIGITS


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth = max(0, depth + (character in _OPEN) - (character in _CLOSE))
        deepest = max(deepest, depth)
    return deepest


def _height(text: str) -> int:
    """Return the height of the tallest power tower: 2 for a^b^c and a^{b^c}.

    Needed for base e, where no digit shows the size.
    """
    atoms = list(_atoms(text))
    highest = run = 0
    for position in reversed(range(len(atoms))):
        if atoms[position] == "^":
            continue
        inner = _height(atoms[position][1:-1]) if atoms[position][0] in _OPEN else 0
        raised = position > 0 and atoms[position - 1] in ("^", r"\exp")
        run = max(inner, run if atoms[position + 1 : position + 2] == ["^"] else 0) + raised
        highest = max(highest, run)
    return highest


def _atoms(text: str) -> Iterator[str]:
    """Yield brackets with their contents, numbers, commands, runs of `!`, and other characters one by one."""
    position = 0
    while match := _ATOM.search(text, position):
        position = _after_bracket(text, match.start()) if match[0] in _OPEN else match.end()
        yield text[match.start() : position]


def _after_bracket(text: str, start: int) -> int:
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in _OPEN) - (text[position] in _CLOSE)
        if depth == 0:
            return position + 1
    return len(text)


def _exponent_bounds(text: str) -> Iterator[tuple[str, float]]:
    """Yield each atom with a bound on its exponent, 1 if it has none. a^b^c is a^(b^c)."""
    atoms, position = list(_atoms(text)), 0
    while position < len(atoms):
        tower = [atoms[position]]
        while position + 2 < len(atoms) and atoms[position + 1] == "^":
            position += 2
            tower.append(atoms[position])
        position += 1
        exponent = 1.0
        for atom in reversed(tower[1:]):
            exponent = 10 ** min(_log10_of(atom) * exponent, 300.0)
        yield tower[0], exponent


def _log10(text: str) -> float:
    """Return a bound on log10 of any number built from the numbers of a text; variables count as 1."""
    total = last = 0.0  # last: log10 of the operand of a factorial
    before = ""
    for atom, exponent in _exponent_bounds(text):
        if atom[0] == "!":
            now = last * 10 ** min(last, 300.0)  # n! < n^n
        else:
            total += last
            now = _value(atom) if before in _VALUES else _log10_of(atom)
        last, before = now * max(1.0, exponent), atom
    return total + last


def _log10_of(atom: str) -> float:
    if atom[0] in _OPEN:
        return _log10(atom[1:-1])
    digits = atom.replace(",", "")
    return math.log10(max(2.0, float(digits[:300]))) + max(0, len(digits) - 300) if digits.isdecimal() else 0.0


def _value(atom: str) -> float:
    return 10 ** min(_log10_of(atom), 300.0)
