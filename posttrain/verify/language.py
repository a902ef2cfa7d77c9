"""Script detection by Unicode names, without a detector model. Pure functions."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence

from posttrain.verify.extract import last_thought

LATIN = frozenset({"LATIN"})
SCRIPTS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("en", "fr", "de", "es", "it", "pt", "vi", "nl", "sv", "fi", "pl", "tr", "id", "sw"), LATIN),
    "zh": frozenset({"CJK"}),
    "ja": frozenset({"CJK", "HIRAGANA", "KATAKANA"}),
    "ko": frozenset({"HANGUL", "CJK"}),
    **dict.fromkeys(("ru", "bg", "uk"), frozenset({"CYRILLIC"})),
    "el": frozenset({"GREEK"}),
    **dict.fromkeys(("ar", "fa", "ur"), frozenset({"ARABIC"})),
    "he": frozenset({"HEBREW"}),
    **dict.fromkeys(("hi", "mr", "ne"), frozenset({"DEVANAGARI"})),
    "bn": frozenset({"BENGALI"}),
    "gu": frozenset({"GUJARATI"}),
    "kn": frozenset({"KANNADA"}),
    "ml": frozenset({"MALAYALAM"}),
    "pa": frozenset({"GURMUKHI"}),
    "ta": frozenset({"TAMIL"}),
    "te": frozenset({"TELUGU"}),
    "th": frozenset({"THAI"}),
}
_ONE_EACH = frozenset({"CJK", "HIRAGANA", "KATAKANA"})  # written without blanks: each character is a unit
_SYMBOLS = frozenset({"MATHEMATICAL", "DOUBLE-STRUCK", "SCRIPT", "BLACK-LETTER", "MICRO", "FEMININE", "MASCULINE"})
_JOINERS = frozenset("'’-‐‑")
# Code and math. A `$...$` span contains no blank line, so that prices are not read as math.
_SPANS = re.compile(
    r"(?P<code>```.*?```)|\$\$.*?\$\$|\$(?:[^$\n]|\n(?!\s*\n))*\$"
    r"|\\\((?:[^\\]|\\(?![()]))*+\\\)|\\\[(?:[^\\]|\\(?![\[\]]))*+\\\]",
    re.DOTALL,
)
_COMMANDS = re.compile(r"\\[A-Za-z]+|</?[A-Za-z][\w-]*(?:\s+[\w-]+=(?:\"[^\"<>]*\"|'[^'<>]*'|[^\s<>]+))*\s*/?>")
# Math letters and letters in circles or squares, as words: three in a row are not a formula.
_DRESSED = re.compile("[\U0001d400-\U0001d7ff\u24b6-\u24e9\U0001f110-\U0001f189]{3,}")
_SPACED = re.compile(r"(?<![^\s])(?:[^\W\d_][ \t]+){4,}[^\W\d_](?![^\s.,;:!?])")  # `w e t h i n k`
_TEXT_IN_MATHS = re.compile(
    r"\\(?:text|mbox|textbf|textit|mathrm)\s*\{\s*[^\W\d_]{2,}(?:[\s,;:'’-]+[^\W\d_]{2,})+\W*\}"
)
# four words in a row are not a formula
_SENTENCE = re.compile(r"(?<![^\W\d_])(?:[^\W\d_]{2,}+[\s,;:'’-]++){3,}[^\W\d_]{2,}")


@functools.lru_cache(maxsize=65536)
def script_of(character: str) -> str | None:
    """Return the script of a letter (LATIN, CJK, CYRILLIC, ...); None for other characters and math symbols."""
    if not unicodedata.category(character).startswith("L"):
        return None
    name = unicodedata.name(character, "UNKNOWN").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    if name.startswith("IDEOGRAPHIC"):
        return "CJK"
    if name.startswith("KATAKANA-HIRAGANA"):
        return "KATAKANA"
    first = name.partition(" ")[0]
    return None if first in _SYMBOLS else first


def units(text: str) -> Iterator[str]:
    """Yield the script of each unit: a CJK or kana character, or a run of other letters of one script.

    Combining marks, apostrophes and hyphens do not break a run; a single Latin letter is a variable and not a unit.
    """
    script, length = None, 0
    for character in [*text, "\n"]:
        found = script_of(character)
        if found is None and (unicodedata.category(character).startswith("M") or character in _JOINERS):
            continue
        if script is not None and found != script:
            if script != "LATIN" or length > 1:
                yield script
            script, length = None, 0
        if found in _ONE_EACH:
            yield found
        elif found is not None:
            script, length = found, length + 1


def prose(text: str) -> str:
    """Return the text without LaTeX commands, tags, and the Latin and Greek letters of code and math.

    Letters of other scripts stay, and so does math that contains a sentence or words in `\\text{}`, so that a thought
    cannot be hidden there. Words in math or circled letters, and words with a blank after each letter, count as words.
    """
    text = _DRESSED.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)

    def remaining_text(span: re.Match[str]) -> str:
        inside = _COMMANDS.sub(" ", span[0])
        if span["code"] is None and (_SENTENCE.search(inside) or _TEXT_IN_MATHS.search(span[0])):
            return inside
        return "".join(c if script_of(c) not in (None, "LATIN", "GREEK") else " " for c in inside)

    text = _COMMANDS.sub(" ", _SPANS.sub(remaining_text, text))
    return _SPACED.sub(lambda match: "".join(match[0].split()), text)


def language_share(completion: str, *, language: str = "en", forbid_scripts: Sequence[str] = ()) -> float:
    """Compute the share of units in the scripts of the language, in the last thought or the whole text.

    1 without units.

    Only `prose` is counted. forbid_scripts: any letter of these scripts gives 0. Languages in Latin script are not
    distinguished. Raises ValueError for an unknown language.
    """
    if language not in SCRIPTS:
        raise ValueError(f"unknown language {language!r}; known: {', '.join(sorted(SCRIPTS))}")
    thought = last_thought(completion)
    text = prose(completion if thought is None else thought)
    scripts = list(units(text))
    if any(script_of(character) in forbid_scripts for character in (text if forbid_scripts else "")):
        return 0.0
    return sum(script in SCRIPTS[language] for script in scripts) / len(scripts) if scripts else 1.0
