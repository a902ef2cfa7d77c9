"""Is this the right answer to a maths question?

A text is rewritten as LaTeX (`notation.py`) and read by math-verify; its look and numbers decide where they can
(`values.py`), else math-verify compares.

math-verify (0.9) is called without its own time limits: they use `signal.alarm`, which works in main threads only. The
worker processes that run rewards enforce the limit of a call from outside. Its import is put off until the first
comparison that needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

from posttrain.verify import options
from posttrain.verify.extract import THINK_END, Extractor, after_think, boxed_answer, every_box, gold_text
from posttrain.verify.extract import extract as find_answer
from posttrain.verify.notation import based, latex, other_readings, plain, same_bases, same_words, without_modulus
from posttrain.verify.size import LONGEST, too_large

# Plain integers are compared as such: the library does the same with two exact values, a hundred times slower.
_INTEGER = re.compile(r"-?[1-9][0-9]{0,14}|0")
_UNIT = re.compile(
    r"(?<![A-Za-z\\])[a-hjkm-uwyz]?i[a-hjkm-uwyz]?(?![A-Za-z])"
)  # a single i, with a letter beside it at most: no word, no roman number

_DETERMINANT = re.compile(r"[vV]matrix|\\det\b")  # the library works it out as it reads


def prepare() -> None:
    """Import math-verify and build its patterns, so that the first comparison is as fast as the others."""
    equal("1/2", "0.5")


def parsed(text: str) -> list[Any]:
    r"""math-verify's reading of `\boxed{text}`: [value, normalised text], or [] if it is too large or unreadable.

    Only all of it as LaTeX: the library would else look for a number in what it cannot read, and find 5 in `\neq 5`.
    """
    if len(text) > LONGEST:
        return []
    text = latex(based(text)[0])
    if too_large(text):
        return []
    found: list[Any] = _library().parse(rf"\boxed{{{text}}}", _how(), parsing_timeout=None)
    if _UNIT.search(text):
        from posttrain.verify.values import with_unit

        found[:1] = map(with_unit, found[:1])
    return found


# The completions of one prompt share their gold and often their answer, so what was read or compared is remembered.
_parsed = functools.lru_cache(maxsize=8192)(parsed)
LONGEST_REMEMBERED = 400  # characters


def _same(gold: str, candidate: str, decimals: int) -> bool:
    """Whether the texts, or another reading of one of them, are equal."""
    if plain(gold) == plain(candidate):
        return True
    if (said := options.same(gold, candidate)) is not None:
        return said
    if _DETERMINANT.search(candidate) and not _DETERMINANT.search(gold):
        return False  # left open
    if not same_bases(based(gold)[1], based(candidate.rpartition("=")[2])[1]):
        return False
    if (said := same_words(gold, candidate)) is not None:
        return said
    if ("mod" in candidate) != ("mod" in gold):
        gold, candidate = without_modulus(gold), without_modulus(candidate)
    pairs = [(gold, candidate), *((gold, other) for other in other_readings(candidate))]
    pairs += [(other, candidate) for other in other_readings(gold)]
    return any(_equal_values(*pair, decimals) for pair in pairs)


_remembered = functools.lru_cache(maxsize=16384)(_same)


def _equal_values(gold: str, candidate: str, decimals: int) -> bool:
    """What the library says, where neither the look nor the numbers of both values decide; wrong beyond a size."""
    from posttrain.verify import values

    first = _parsed(gold)
    second = _parsed(candidate) if len(candidate) <= LONGEST_REMEMBERED else parsed(candidate)
    if not first or not second:
        return False
    one, other = first[0], second[0]
    if values.left_open(other) and not values.left_open(one):
        return False
    if not (based(candidate)[1] or "circ" in candidate) and values.false_equation(other):
        return False
    if one == other and first[-1] == second[-1]:
        return True
    for said in (values.decided(*values.unwrapped(one, other), decimals), values.related(one, other)):
        if said is not None:
            return said
    if values.too_many(one, other):
        return False
    return bool(
        _library().verify(first, second, float_rounding=decimals, timeout_seconds=None, allow_set_relation_comp=True)
    )


def equal(gold: str, candidate: str, *, decimals: int = 6) -> bool | None:
    r"""Whether `candidate` is the same value as `gold`; None if the gold cannot be parsed.

    decimals: two numbers are equal when they agree after rounding to so many places if either is a decimal; exact
    values are compared exactly. Sets ignore order, tuples and intervals do not; `x = 5` equals 5, `6 = 5` does not; 50%
    equals 0.5 and also 50; units, degrees, `$` and separators of thousands are dropped; words compare without case; a
    base counts. What is too large to read (`size.too_large`) is wrong as a candidate and None as a gold.
    docs/rewards.md has the whole table.
    """
    gold, candidate = gold.strip(), candidate.strip()
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(candidate):
        return gold == candidate
    if not any(map(_parsed, (gold, *other_readings(gold)))):
        return None
    return (_remembered if len(candidate) <= LONGEST_REMEMBERED else _same)(gold, candidate, decimals)


def grade(
    completion: str,
    answer: Any,
    *,
    extract: Sequence[Extractor] = ("boxed",),
    require_think: bool = False,
    think_delimiter: str = THINK_END,
    decimals: int = 6,
) -> dict[str, Any]:
    r"""{"reward": 1, 0 or None, "extracted": text or None} of one completion.

    Everything up to the last `think_delimiter` is ignored; with `require_think` a missing delimiter scores 0. The
    first extractor that finds something decides; nothing found, or only blanks, scores 0. Where the gold has several
    boxes, as many last boxes of the completion are its answer too, wherever they stand. None: the gold is empty or
    cannot be parsed, so the row cannot be graded. Only `\boxed{what was extracted}` goes to the library, because it
    merges several boxes of one text into a set.
    """
    gold = gold_text(str(answer)) if answer is not None else None
    if gold is None:
        return {"reward": None, "extracted": None}
    found = None
    if not require_think or think_delimiter in completion:
        found = find_answer(after_think(completion, think_delimiter), extract)
    if found is None or not found.strip():
        readable = bool(_INTEGER.fullmatch(gold)) or bool(_parsed(gold))
        return {"reward": 0.0 if readable else None, "extracted": found}
    same = equal(gold, found, decimals=decimals)
    parts = every_box(str(answer))
    if same is False and len(parts) > 1 and "boxed" in extract:
        found = boxed_answer(after_think(completion, think_delimiter), len(parts)) or found
        same = equal(gold, found, decimals=decimals)
    return {"reward": None if same is None else float(same), "extracted": found}


@functools.cache
def _how() -> list[Any]:
    """Without the library's units: it drops all from the first text to the last, and any lone letter."""
    config = _library().LatexExtractionConfig
    return [config(normalization_config=dataclasses.replace(config().normalization_config, units=False))]


@functools.cache
def _library() -> Any:
    import logging

    import math_verify

    # It warns on every process that its limits are off; ours are on.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
