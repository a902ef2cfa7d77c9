"""Numbers with a base: `1010_2`, `204 base 5`. Pure functions of text."""

from __future__ import annotations

import re

_BASE_WORDS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_BASE = re.compile(
    r"(?<![\w.\\^])\(?(?P<digits>[0-9][0-9A-Fa-f,]*)\)?\s*"
    r"(?:_\s*(?:\{\s*\(?\s*(?:\\text\s*\{)?\s*(?:base\s*)?(?P<braced>[0-9]+|[a-z]+)\s*\}?\s*\)?\s*\}"
    r"|\\text\s*\{\s*(?:base\s*)?(?P<worded>[0-9]+|[a-z]+)\s*\}|(?P<bare>[0-9]))"
    r"|(?:\\text\s*\{)?\s*\(?\s*(?:in\s+)?base\s*[-~]?\s*\}?\s*\{?(?P<said>[0-9]+|[a-z]+)\s*\)?\s*\}?)"
)


def read_bases(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Strip the bases from the numbers in a text; return the text and (digits, base) of each number that had one."""
    if "_" not in text and "base" not in text:
        return text, []
    numbers: list[tuple[str, str]] = []

    def strip_base(match: re.Match[str]) -> str:
        base = match["braced"] or match["worded"] or match["bare"] or match["said"]
        if base in _BASE_WORDS:
            base = str(_BASE_WORDS.index(base) + 2)
        if not base.isdecimal():
            return match[0]
        digits = match["digits"].replace(",", "").upper()
        if int(base) <= 10 and not digits.isdecimal():
            return match[0]
        numbers.append((digits, base))
        return digits

    return _BASE.sub(strip_base, text), numbers


def in_base_ten(text: str) -> str:
    """Replace each number that has a base by its value in base ten."""
    for digits, base in read_bases(text)[1]:
        try:
            value = str(int(digits, int(base))) if 2 <= int(base) <= 36 else digits
        except ValueError:
            return text
        text = _BASE.sub(value, text, count=1)
    return text


def same_bases(gold: list[tuple[str, str]], candidate: list[tuple[str, str]]) -> bool:
    """Return whether each number with a base occurs in the gold answer with that base.

    Base ten may be omitted there.
    """
    return all(base in gold or (base[1] == "10" and not gold) for base in candidate)
