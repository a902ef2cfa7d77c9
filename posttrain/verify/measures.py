"""Units of measurement: `km/h`, `m s^{-2}`, `square feet`, `miles per hour`. Pure functions.

Sizes are exact if their definition is: an inch is 0.0254 m, a pound 0.45359237 kg.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from sympy import Rational, pi


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measure. size: in the base units of its dimensions. dimensions: (name, power), sorted by name; () for none."""

    size: Any
    dimensions: tuple[tuple[str, int], ...] = ()


_PREFIXES = {"k": 3, "M": 6, "G": 9, "T": 12, "h": 2, "d": -1, "c": -2, "m": -3, "u": -6, "μ": -6, "µ": -6, "n": -9}
_PREFIXES |= {"p": -12}
_LONG_PREFIXES = {"kilo": 3, "mega": 6, "giga": 9, "tera": 12, "hecto": 2, "deci": -1, "centi": -2, "milli": -3}
_LONG_PREFIXES |= {"micro": -6, "nano": -9, "pico": -12}
# Dimensions. If a unit name has two meanings, `_SECOND` holds the other one.
_LENGTH, _MASS, _TIME, _ENERGY = {"length": 1}, {"mass": 1}, {"time": 1}, {"length": 2, "mass": 1, "time": -2}
_VOLUME, _FORCE = {"length": 3}, {"length": 1, "mass": 1, "time": -2}
_PRESSURE, _POWER = {"length": -1, "mass": 1, "time": -2}, {"length": 2, "mass": 1, "time": -3}
_SPEED, _VOLT = {"length": 1, "time": -1}, {"length": 2, "mass": 1, "time": -3, "current": -1}
# Units with prefixes: (symbols, names, size, dimensions).
_METRIC: list[tuple[str, str, str, dict[str, int]]] = [
    ("m", "meter metre", "1", _LENGTH),
    ("g", "gram gramme", "1/1000", _MASS),
    ("s", "second sec", "1", _TIME),
    ("L l", "liter litre", "1/1000", _VOLUME),
    ("N", "newton", "1", _FORCE),
    ("J", "joule", "1", _ENERGY),
    ("W", "watt", "1", _POWER),
    ("Wh", "", "3600", _ENERGY),
    ("Pa", "pascal", "1", _PRESSURE),
    ("bar", "", "100000", _PRESSURE),
    ("Hz", "hertz", "1", {"time": -1}),
    ("A", "ampere amp", "1", {"current": 1}),
    ("V", "volt", "1", _VOLT),
    ("Ω", "ohm", "1", {"length": 2, "mass": 1, "time": -3, "current": -2}),
    ("C", "coulomb", "1", {"current": 1, "time": 1}),
    ("F", "farad", "1", {"length": -2, "mass": -1, "time": 4, "current": 2}),
    ("Wb", "weber", "1", {"length": 2, "mass": 1, "time": -2, "current": -1}),
    ("T", "tesla", "1", {"mass": 1, "time": -2, "current": -1}),
    ("H", "henry", "1", {"length": 2, "mass": 1, "time": -2, "current": -2}),
    ("K", "kelvin", "1", {"temperature": 1}),
    ("mol", "mole", "1", {"amount": 1}),
    ("M", "molar", "1000", {"amount": 1, "length": -3}),
    ("eV", "electronvolt", "1602176634/10000000000000000000000000000", _ENERGY),
    ("cal", "calorie", "4184/1000", _ENERGY),
    ("b", "bit", "1", {"information": 1}),
    ("B", "byte", "8", {"information": 1}),
]
# Units without prefixes: (names, size, dimensions).
_OTHERS: list[tuple[str, str, dict[str, int]]] = [
    ("in inch inche", "254/10000", _LENGTH),
    ("ft foot feet", "3048/10000", _LENGTH),
    ("yd yard", "9144/10000", _LENGTH),
    ("mi mile", "1609344/1000", _LENGTH),
    ("nautical_mile", "1852", _LENGTH),
    ("lb pound", "45359237/100000000", _MASS),
    ("oz ounce", "45359237/1600000000", _MASS),
    ("t tonne", "1000", _MASS),
    ("ton", "1", {"ton": 1}),
    ("min minute", "60", _TIME),
    ("h hr hour", "3600", _TIME),
    ("day", "86400", _TIME),
    ("week wk", "604800", _TIME),
    ("month", "1", {"month": 1}),
    ("year yr", "12", {"month": 1}),
    ("decade", "120", {"month": 1}),
    ("century centurie", "1200", {"month": 1}),
    ("mph", "1609344/3600000", _SPEED),
    ("kph kmh kmph", "1000/3600", _SPEED),
    ("knot", "1852/3600", _SPEED),
    ("rpm", "1/60", {"time": -1, "turn": 1}),
    ("revolution turn", "1", {"turn": 1}),
    ("acre", "40468564224/10000000", {"length": 2}),
    ("ha hectare", "10000", {"length": 2}),
    ("gal gallon", "3785411784/1000000000000", _VOLUME),
    ("qt quart", "946352946/1000000000000", _VOLUME),
    ("pt pint", "473176473/1000000000000", _VOLUME),
    ("cup", "2365882365/10000000000000", _VOLUME),
    ("cc", "1/1000000", _VOLUME),
    ("atm atmosphere", "101325", _PRESSURE),
    ("° degree deg", "pi/180", {"angle": 1}),
    ("rad radian", "1", {"angle": 1}),
    ("gradian gon", "pi/200", {"angle": 1}),
    ("celsius °c", "1", {"celsius": 1}),
    ("fahrenheit °f", "1", {"fahrenheit": 1}),
    ("cent ¢", "1/100", {"dollars": 1}),
    ("dollar buck usd", "1", {"dollars": 1}),
    ("nickel", "5/100", {"dollars": 1}),
    ("dime", "10/100", {"dollars": 1}),
    ("euro eur", "1", {"euros": 1}),
    ("yen jpy", "1", {"yen": 1}),
    ("yuan rmb cny", "1", {"yuan": 1}),
    ("rupee inr rs", "1", {"rupees": 1}),
    ("peso", "1", {"pesos": 1}),
    ("gbp", "1", {"pounds sterling": 1}),
    ("pence penny", "1/100", {"pounds sterling": 1}),
    ("am", "1", {"half of the day": 1}),
    ("pm", "1", {"half of the day": -1}),
]
_SECOND = {"pound": Measure(Rational(1), (("pounds sterling", 1),)), "c": Measure(Rational(1), (("celsius", 1),))}
_SECOND |= {"f": Measure(Rational(1), (("fahrenheit", 1),)), "penny": Measure(Rational(1, 100), (("dollars", 1),))}


def _parse_measure(size: str, dimensions: dict[str, int]) -> Measure:
    above, _, below = size.partition("/")
    value = pi / int(below) if above == "pi" else Rational(int(above), int(below or 1))
    return Measure(value, tuple(sorted(dimensions.items())))


def _table() -> tuple[dict[str, Measure], dict[str, Measure]]:
    """Build the tables of measures: (by case-sensitive symbol, by lowercase name)."""
    symbols: dict[str, Measure] = {}
    names: dict[str, Measure] = {}
    for marks, words, size, dimensions in _METRIC:
        base = _parse_measure(size, dimensions)
        for prefixes, group, table in ((_PREFIXES, marks, symbols), (_LONG_PREFIXES, words, names)):
            for name in group.split():
                table[name] = base
                for prefix, power in prefixes.items():
                    table.setdefault(prefix + name, Measure(base.size * Rational(10) ** power, base.dimensions))
    for words, size, dimensions in _OTHERS:
        for name in words.split():
            names[name] = _parse_measure(size, dimensions)
    return symbols, names


_SYMBOLS, _NAMES = _table()
_FACTOR = re.compile(r"(?P<over>/|\bper\b)|(?P<name>[^\W\d_]+|°[A-Za-z]?|[¢$])(?:\^\{?(?P<power>-?[1-9])\}?)?")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


def measure_of(unit: str, choice: int = 0) -> tuple[Measure, list[str]]:
    """Return the measure that a unit text names, and its other words in lower case. choice: 1 for second meanings.

    An unknown word after `per` is a unit of its own: 5 dollars per apple. A power of an unknown word is another word,
    and `square units` or `units^2` measure an area of any unit: the dimension `unit` to the power 2.
    """
    size: Any = Rational(1)
    dimensions: dict[str, int] = {}
    rest: list[str] = []
    sign, power = 1, 1
    text = re.sub(r"\b([ap])\.?\s?m\b\.?", r"\1m", unit.strip(". "))
    for match in _FACTOR.finditer(text):
        if match["over"]:
            sign = -1
            continue
        if match["name"].casefold() in _POWERS:
            power = _POWERS[match["name"].casefold()]
            continue
        found = find_measure(match["name"], choice)
        exponent = sign * power * int(match["power"] or 1)
        word = match["name"].casefold()
        if found is None and (sign < 0 or (exponent != 1 and word in ("unit", "units"))):
            found = Measure(Rational(1), ((word.rstrip("s"), 1),))
        if found is None:
            rest.append(word + (f"^{match['power']}" if match["power"] not in (None, "1") else ""))
        else:
            size *= found.size**exponent
            for name, count in found.dimensions:
                dimensions[name] = dimensions.get(name, 0) + count * exponent
        sign, power = 1, 1
    return Measure(size, tuple(sorted((name, count) for name, count in dimensions.items() if count))), rest


def find_measure(name: str, choice: int = 0) -> Measure | None:
    """Return the measure of one word: a case-sensitive symbol, or a name in any case, singular or plural."""
    lower = name.casefold()
    plain = lower[:-1] if lower.endswith("s") and len(lower) > 2 else lower
    if choice and plain in _SECOND:
        return _SECOND[plain]
    if lower in _NAMES or plain in _NAMES:
        return _NAMES.get(lower) or _NAMES[plain]
    if name in _SYMBOLS:
        return _SYMBOLS[name]
    folded = _SYMBOLS.get(lower) or (_SYMBOLS.get(plain) if len(plain) > 1 else None)  # `KM`, `Kg`, `mins`
    return folded if folded and len(lower) > 1 and folded.dimensions[0][0] in ("length", "mass", "time") else None
