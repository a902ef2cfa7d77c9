"""Verifier of math answers.

An answer is normalized to one notation (`notation.py`), parsed as a whole (`tokens.py`, `reading.py`) into a value
(`math_values.py`), and compared with the gold value by kind (`compare.py`). Answers that are too large are not parsed
(`complexity_limits.py`). docs/verifier.md defines what counts as equal. sympy is imported with the first comparison
that needs it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.thoughts import end_in
from posttrain.verify import options
from posttrain.verify.bases import in_base_ten, read_bases, same_bases
from posttrain.verify.box_context import visible_text
from posttrain.verify.complexity_limits import MAX_CHARS, too_large
from posttrain.verify.conditions import without_conditions
from posttrain.verify.extract import THINK_END, Extractor, after_think, boxed_answer, every_box
from posttrain.verify.extract import extract as find_answer
from posttrain.verify.golds import gold_text, is_no_answer
from posttrain.verify.notation import clean, other_readings, plain, same_dates, same_times
from posttrain.verify.word_answers import means_all_reals, means_no_solution, same_words

# Plain integers are compared as text, a hundred times faster.
_INTEGER = re.compile(r"-?[1-9][0-9]{0,14}|0")
_LONG_SPACE = re.compile(r"(\s{16})\s++")  # means no more than 16 of them, and would be read many times
MAX_CACHED_CHARS = 400  # characters


def prepare() -> None:
    """Import the parser and the comparison, so that the first real comparison is as fast as later ones."""
    equal("1/2", "0.5")
    equal(r"\sin x", r"\frac{\cos x}{2}")


def parse_answer(text: str) -> Any:
    """Parse a text to its value (`math_values.Value`); None if it is too large or cannot be parsed as a whole."""
    from posttrain.verify.math_values import Group, NamedSet
    from posttrain.verify.reading import read

    if len(text) > MAX_CHARS:
        return None
    if means_no_solution(text):
        return Group("set", ())
    if means_all_reals(text):
        return NamedSet("R")
    text = clean(read_bases(text)[0])
    return None if not text or too_large(text) else read(text)


# Completions of one prompt share their gold answer and often their answers, so parses and comparisons are cached.
_parse_cached = functools.lru_cache(maxsize=8192)(parse_answer)


def forget() -> None:
    """Clear the caches of parses and comparisons, for benchmarks."""
    from posttrain.verify.identity import approximate

    for remembered in (_parse_cached, _same_cached, approximate):
        remembered.cache_clear()


def readable(gold: str) -> bool:
    """Return whether a gold answer can be compared with anything: it has a math value, or it is words."""
    return any(_parse_cached(text) is not None for text in (gold, *other_readings(gold, gold=True))) or _is_text(gold)


def _is_text(gold: str) -> bool:
    """Return whether the gold answer has letters or digits but no math value, so that only the same text equals it."""
    return (
        len(gold) <= MAX_CHARS
        and any(letter.isalpha() or (letter.isnumeric() and not letter.isascii()) for letter in gold)
        and not too_large(gold)
    )


def _same(gold: str, candidate: str, decimals: int) -> bool:
    """Return whether the texts, in any of their readings, are equal."""
    if plain(gold) == plain(candidate):
        return True
    if (same_choice := options.same(gold, candidate)) is not None:
        return same_choice
    for compare in (same_dates, same_times):
        if (same := compare(gold, candidate)) is not None:
            return same
    if not same_bases(read_bases(gold)[1], read_bases(candidate.rpartition("=")[2])[1]):
        return False
    pairs = [(gold, candidate), *((gold, other) for other in other_readings(candidate, gold=False))]
    pairs += [(other, candidate) for other in other_readings(gold, gold=True)]
    if (unconditioned := without_conditions(gold, candidate)) is not None:
        pairs.append(unconditioned)
    return any(_equal_readings(*pair, decimals) for pair in pairs)


_same_cached = functools.lru_cache(maxsize=16384)(_same)


def _equal_readings(gold: str, candidate: str, decimals: int) -> bool:
    from posttrain.verify.claims import has_false_claim
    from posttrain.verify.compare import same

    if (words := same_words(gold, candidate)) is not None:
        return words
    one = _parse_cached(gold)
    other = _parse_cached(candidate) if len(candidate) <= MAX_CACHED_CHARS else parse_answer(candidate)
    if one is None or other is None:
        return False
    claim = parse_answer(in_base_ten(candidate)) if read_bases(candidate)[1] else other
    try:
        return not has_false_claim(claim) and same(one, other, decimals)
    except (ArithmeticError, TypeError, ValueError, NotImplementedError, RecursionError):
        return False  # sympy failed: equality is not shown


def _strip_delimiters(text: str) -> str:
    r"""Strip blanks and delimiters around a whole text: `\(\text{blue}\)`, `**blue**`."""
    text = text.strip()
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]"), ("**", "**")):
        inner = text[2:-2]
        if text.startswith(opening) and text.endswith(closing) and not (opening in inner or closing in inner):
            return _strip_delimiters(inner) if inner else text
    return text


def equal(gold: str, candidate: str, *, decimals: int = 6) -> bool | None:
    r"""Return whether `candidate` is the same answer as `gold`; None if the gold answer cannot be parsed.

    decimals: if either number is a decimal, two numbers are equal when they agree after rounding to `decimals` places;
    exact values are compared exactly. docs/verifier.md defines equality for each kind of answer. An answer that is too
    large to parse (`complexity_limits.too_large`) is wrong as a candidate and None as a gold answer.
    """
    gold, candidate = (_LONG_SPACE.sub(r"\1", _strip_delimiters(text)) for text in (gold, candidate))
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(candidate):
        return gold == candidate
    if not readable(gold):
        return None
    if len(candidate) > MAX_CHARS:
        return False
    return (_same_cached if len(candidate) <= MAX_CACHED_CHARS else _same)(gold, candidate, decimals)


def grade(
    completion: str,
    answer: Any,
    *,
    extract: Sequence[Extractor] = ("boxed",),
    require_think: bool = False,
    think_delimiter: str = THINK_END,
    decimals: int = 6,
) -> dict[str, Any]:
    r"""Grade one completion; return {"reward": 1, 0 or None, "extracted": text or None}.

    Text up to the last `think_delimiter` is ignored; with `require_think`, a missing delimiter scores 0. The first
    extractor that finds something decides; an empty or missing answer scores 0. If the gold answer has several boxes,
    the same number of last boxes in the completion, wherever they stand, also counts as its answer. The reward is None
    if the gold answer is empty or cannot be parsed, so that the row cannot be graded.
    """
    gold = None if isinstance(answer, Mapping | list | tuple) else gold_text(answer)
    if gold is None or is_no_answer(gold):
        return {"reward": None, "extracted": None}
    found = None
    end = end_in(completion, think_delimiter)
    if not require_think or end in completion:
        found = find_answer(after_think(completion, end), extract)
    if found is None or not found.strip():
        return {"reward": 0.0 if _INTEGER.fullmatch(gold) or readable(gold) else None, "extracted": found}
    same = equal(gold, found, decimals=decimals)
    parts = every_box(str(answer))
    if same is False and len(parts) > 1 and "boxed" in extract:
        found = boxed_answer(visible_text(after_think(completion, end)), len(parts)) or found
        same = equal(gold, found, decimals=decimals)
    return {"reward": None if same is None else float(same), "extracted": found}
