"""Units behind numbers: which words are one, and what two of them have to do with each other. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sympy import Rational

from posttrain.verify.cursor import END
from posttrain.verify.values import Unreadable

if TYPE_CHECKING:
    from posttrain.verify.reading import Reader

SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALES |= {"hundreds": 100, "thousands": 10**3, "millions": 10**6, "billions": 10**9}
# Behind a number these say more than what it counts.
_MORE_WORDS = """
or and not no but is are isn aren plus minus times over squared cubed factorial wrong right maybe possibly
perhaps probably to through between less more than least most if when where for other another half halves third
thirds quarter quarters fifth fifths sixth sixths seventh eighth eighths ninth tenth tenths hundredth hundredths
thousandth thousandths pi sqrt alpha either neither nor except unless mod modulo base instead rather point into
one two three four five six seven eight nine ten eleven twelve zero negative positive false incorrect from below
above under exceeding divided root power fewer greater smaller too only also false non lower upper up down etc
so remainder rem with out
"""
_MORE = frozenset(_MORE_WORDS.split())

# How many of the smallest unit of a dimension others are, for units that are told apart.
_DIMENSIONS: dict[str, dict[str, int]] = {
    "length": {"mm": 1, "millimeter": 1, "cm": 10, "centimeter": 10, "dm": 100, "m": 1000, "meter": 1000}
    | {"metre": 1000, "km": 10**6, "kilometer": 10**6, "kilometre": 10**6},
    "english length": {"in": 1, "inch": 1, "inche": 1, "ft": 12, "feet": 12, "foot": 12, "yd": 36, "yard": 36}
    | {"mi": 63360, "mile": 63360},
    "mass": {"mg": 1, "g": 1000, "gram": 1000, "kg": 10**6, "kilogram": 10**6},
    "time": {"s": 1, "sec": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hr": 3600, "hour": 3600}
    | {"day": 86400, "week": 604800},
    "dollars": {"cent": 1, "dollar": 100},
    "volume": {"ml": 1, "milliliter": 1, "l": 1000, "liter": 1000, "litre": 1000},
    "degrees": {"°": 1, "degree": 1},
    "radians": {"rad": 1, "radian": 1},
    "half of the day": {"am": 1, "a.m": 1, "pm": 2, "p.m": 2},
}
_KNOWN = {name: (dimension, size) for dimension, units in _DIMENSIONS.items() for name, size in units.items()}


def read_unit(reader: Reader, value: Any) -> tuple[int, str]:
    """(what the words multiply the number by, the unit): 5 million people are 5 * 10^6, `people`.

    Words that say more than a unit (`or six`, `at least`) make the answer unreadable.
    """
    scale, words = 1, []
    while (token := reader.peek()) is not END:
        following = reader.peek(1)
        if token.kind == "word":
            reader.place += 1
            words.append(token.text)
        elif token.text == "/" and following.kind in (("word", "letter") if words else ("word",)):
            reader.place += 2
            words.append("/" + following.text)
        elif words and token.text == "^":
            reader.place += 1
            braced = reader.take("{")
            words[-1] += "^" + reader.next().text
            if braced:
                reader.expect("}")
        elif token.text == "(" and following.kind == "word":
            reader.place += 2
            words.append(following.text)
            reader.expect(")")
        else:
            break
    found = re.findall(r"[^\W\d_]+", " ".join(words).casefold())
    while found and found[0] in SCALES:
        scale *= SCALES[found.pop(0)]
        words = [" ".join(found)]
    if any(word in _MORE or word in SCALES for word in found) or re.search(
        r"[0-9]", re.sub(r"\^[23]", "", "".join(words))
    ):
        raise Unreadable("words that say more than a unit")
    if words and value.is_number is False and not value.free_symbols:
        raise Unreadable("a unit of no number")
    return scale, " ".join(" ".join(words).split())


def ratio_of_units(gold: str, candidate: str) -> Any:
    """How many of the gold's unit the candidate's is: 1 where a unit is missing or not known, None for other kinds."""
    one, other = _known(gold), _known(candidate)
    if one is None or other is None:
        return 1
    if one[0] != other[0] or (one != other and one[0].startswith("half of the day")):
        return None
    return Rational(other[1], one[1])


def _known(unit: str) -> tuple[str, int] | None:
    """(its dimension, how many of the smallest unit), squares and cubes with a power; None for other words."""
    name = unit.casefold().strip(". ")
    power = 1
    for degree, before, behind in ((2, ("square ", "sq "), "^2"), (3, ("cubic ", "cu "), "^3")):
        if name.startswith(before) or name.endswith(behind):
            power = degree
            name = name.removesuffix(behind).removeprefix(before[0]).removeprefix(before[1])
    found = _KNOWN.get(name) or _KNOWN.get(name.rstrip("s") if len(name) > 2 else name)
    return (f"{found[0]} {power}", found[1] ** power) if found else None
