"""Units after numbers: which words form a unit, and the ratio of two units. Pure functions.

`measures.py` has the table of units. An unknown word (`apples`) is a unit of its own kind.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from posttrain.verify.cursor import END
from posttrain.verify.foreign_units import to_english
from posttrain.verify.math_values import Unreadable
from posttrain.verify.measures import Measure, find_measure, measure_of
from posttrain.verify.numerals import SCALES, changes_number, split_scale

if TYPE_CHECKING:
    from posttrain.verify.reading import Reader

# Words that carry no information about the unit.
_FILLER_WORDS = "a an the of in total altogether all each exactly approximately approx about roughly such"
_FILLERS = frozenset(_FILLER_WORDS.split())
# General nouns that match any other counted noun: 12 ways are 12 arrangements.
_GENERAL_WORDS = """
way person people piece item time solution arrangement possibility outcome choice combination
permutation method object thing element different distinct possible
"""
_GENERAL = frozenset(_GENERAL_WORDS.split())
# In the plural before `of`, a scale is what is counted: 5 million people, but 5 dozens of eggs.
_COUNTED = frozenset((*(name for name in SCALES if name.removesuffix("s") in SCALES and name[-1] == "s"), "pairs"))
# `right` of a shape, which elsewhere denies or confirms.
_SHAPE = re.compile(r"\bright (?=(?:triangle|angle|isosceles|prism|pyramid|cone|cylinder|turn)s?\b)")
_UNITS = frozenset(["unit", "units"])
_POWERS = {"squared": 2, "cubed": 3}
_POWER_WORD = re.compile(r"\b([^\W\d_]+) (squared|cubed)\b")  # 5 feet squared
_NEUTRAL = frozenset(["unit", "number", "value", "answer", "total"])
_IRREGULAR = {"men": "man", "women": "woman", "children": "child", "feet": "foot", "people": "person", "mice": "mouse"}


def read_unit(reader: Reader, value: Any) -> tuple[int, str]:
    """Return (factor from scale words, unit): 5 million people are 5 * 10^6 `people`, 5 dozens of eggs 5 `dozens`.

    Raises Unreadable for words that say more than a unit (`or six`, `at least`).
    """
    scale, words_read = 1, split_scale(_read_words(reader))
    if (unit := to_english(words_read)) is None:
        raise Unreadable("a word that is not known as a unit")
    unit = _POWER_WORD.sub(lambda m: f"{m[1]}^{_POWERS[m[2]]}" if find_measure(m[1]) or m[1] in _UNITS else m[0], unit)
    found = re.findall(r"[^\W\d_]+", unit.casefold())
    counted = found[0] if found[1:2] == ["of"] and found[0] in _COUNTED else None
    while found and found[0] in SCALES and found[0] != counted:
        scale *= SCALES[found.pop(0)]
        unit = " ".join(found)
    if unit == "k":
        raise Unreadable("a thousand, or a letter")
    plain = _SHAPE.sub("", unit.casefold())
    words = re.findall(r"[^\W\d_]+", plain)
    if words != ["times"] and any(changes_number(word) for word in words if word != counted):
        raise Unreadable("words that say more than a unit")
    if re.search(r"[0-9]", re.sub(r"\^\{?-?[1-9]\}?", "", unit)):
        raise Unreadable("a number in a unit")
    if unit and value.is_number is False and not value.free_symbols:
        raise Unreadable("a unit of no number")
    return scale, unit


def _read_words(reader: Reader) -> str:
    """Read the words after a number, with the powers, dots and slashes between them."""
    words: list[str] = []
    while (token := reader.peek()) is not END:
        following = reader.peek(1)
        if token.kind == "word":
            reader.position += 1
            words.append(token.text)
        elif token.text == "/" and following.kind in (("word", "letter") if words else ("word",)):
            reader.position += 2
            words.append("/" + following.text)
        elif words and token.text == "*" and following.kind == "word":
            reader.position += 1
        elif words and token.text == "^":
            reader.position += 1
            braced = reader.take("{")
            sign = "-" if reader.take("-") else ""
            words[-1] += f"^{sign}{reader.next().text}"
            if braced:
                reader.expect("}")
        elif token.text == "(" and following.kind == "word":
            reader.position += 2
            words.append(following.text)
            reader.expect(")")
        else:
            break
    return " ".join(" ".join(words).split())


def ratio_of_units(gold: str, candidate: str) -> Any:
    """Return the ratio of the candidate's unit to the gold's unit: 1 if a unit is missing, None if the kinds differ.

    Measures of one dimension are converted. Other words must be equal, or the words of one unit a subset of the
    other's.
    """
    if gold == candidate or not gold or not candidate:
        return 1
    ratios = [
        ratio
        for meaning in _meanings(gold)
        for other in _meanings(candidate)
        if (ratio := _ratio(meaning, other)) is not None
    ]
    return 1 if 1 in ratios else ratios[0] if ratios else None


def _ratio(gold: tuple[Measure, frozenset[str]], candidate: tuple[Measure, frozenset[str]]) -> Any:
    (one, one_words), (other, other_words) = gold, candidate
    within = one_words <= other_words or other_words <= one_words
    if not one.dimensions and not other.dimensions:
        return 1 if within or not one_words - _GENERAL or not other_words - _GENERAL else None
    if not one.dimensions or not other.dimensions:  # a length matches `units`, but not `apples`
        return 1 if not (other_words if one.dimensions else one_words) else None
    if not within:
        return None
    if one.dimensions == other.dimensions:
        return other.size / one.size
    return 1 if _is_of_any_unit(one, other) or _is_of_any_unit(other, one) else None


def _is_of_any_unit(measure: Measure, other: Measure) -> bool:
    """Return whether a measure in `units^2` or `units^3` is that of an area or volume in a named unit."""
    return any(
        measure.dimensions == (("unit", power),) and other.dimensions == (("length", power),) for power in (2, 3)
    )


@functools.lru_cache(maxsize=1024)
def _meanings(unit: str) -> tuple[tuple[Measure, frozenset[str]], ...]:
    """Return the possible meanings of a unit: (measure, words that are no measure). A pound is a mass or money."""
    meanings = []
    for choice in (0, 1):
        measure, rest = measure_of(unit, choice)
        words = frozenset(singular(word) for word in rest) - _FILLERS - _NEUTRAL
        if (measure, words) not in meanings:
            meanings.append((measure, words))
    return tuple(meanings)


def words_beside(unit: str) -> frozenset[str]:
    """Return the words of a unit that are no measure and carry information."""
    return _meanings(unit)[0][1]


def singular(word: str) -> str:
    """Return an English noun without its plural ending."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if re.search(r"(?:ch|sh|x|ss|z)es$", word):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word
