"""Is this the right answer to a maths question? Extraction is ours, equivalence is math-verify's.

math-verify (0.9) is called without its own time limits: they use `signal.alarm`, which works in main threads only. The
worker processes that run rewards enforce the limit of a call from outside. Its import is put off until the first
comparison that needs it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from posttrain.verify.extract import THINK_END, Extractor, after_think, last_boxed
from posttrain.verify.extract import extract as find_answer
from posttrain.verify.size import too_large

# Plain integers are compared as such: the library does the same with two exact values, a hundred times slower.
_INTEGER = re.compile(r"-?[1-9][0-9]{0,14}|0")
# Signs that the library does not know, as LaTeX. It reads the others itself: the minus sign, pi, <=, the union.
_SIGNS = str.maketrans({"°": r"^\circ", "∞": r"\infty", "½": r"\frac{1}{2}", "∅": r"\emptyset"})
_ROOT = re.compile(r"√\s*([0-9]+|[a-z](?![a-z]))")
_POWER = re.compile(r"(?<=[0-9)}xyz])[²³]")  # behind other letters it belongs to a unit: 5 m²


def prepare() -> None:
    """Import math-verify and build its patterns, so that the first comparison is as fast as the others."""
    equal("1/2", "0.5")


def gold_text(answer: str) -> str | None:
    r"""The gold answer inside a reference solution: its last box, else what follows the last `####`, else all of it.

    None if that is blank: the row has no gold.
    """
    box = last_boxed(answer)
    text = answer.rpartition("####")[2] if box is None else box
    return text.strip() or None


def parsed(text: str) -> list[Any]:
    r"""math-verify's reading of `\boxed{text}`: [value, normalised text], or [] if it is too large or unreadable."""
    if too_large(text):
        return []
    return _library().parse(rf"\boxed{{{_as_latex(text)}}}", parsing_timeout=None)


def _as_latex(text: str) -> str:
    text = _ROOT.sub(r"\\sqrt{\1}", text.translate(_SIGNS)).replace(r"\varnothing", r"\emptyset")
    return _POWER.sub(lambda sign: "^2" if sign[0] == "²" else "^3", text)


# The completions of one prompt share their gold and often their answer, so what was read or compared is remembered.
_parsed = functools.lru_cache(maxsize=8192)(parsed)
LONGEST_REMEMBERED = 400  # characters


@functools.lru_cache(maxsize=16384)
def _same(gold: str, candidate: str, decimals: int) -> bool:
    values = (_parsed(gold), _parsed(candidate))
    return bool(_library().verify(*values, float_rounding=decimals, timeout_seconds=None))


def equal(gold: str, candidate: str, *, decimals: int = 6) -> bool | None:
    r"""Whether `candidate` is the same value as `gold`; None if the gold cannot be parsed.

    decimals: two numbers are equal when they agree after rounding to so many places if either is a decimal; exact
    values are compared exactly. Sets ignore order, tuples and intervals do not; `x = 5` equals 5; 50% equals 0.5 and
    also 50; units, degrees, `$` and thousands commas are dropped; words compare without case; ° √ ∞ and the like are
    read as LaTeX. `9^{9^{9}}` and texts of thousands of characters are not read (`size.too_large`): as a candidate
    wrong, as a gold None.
    """
    gold, candidate = gold.strip(), candidate.strip()
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(candidate):
        return gold == candidate
    if not _parsed(gold):
        return None
    if len(candidate) > LONGEST_REMEMBERED:
        return bool(_library().verify(_parsed(gold), parsed(candidate), float_rounding=decimals, timeout_seconds=None))
    return _same(gold, candidate, decimals)


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
    first extractor that finds something decides; nothing found, or only blanks, scores 0. None: the gold is empty or
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
    return {"reward": None if same is None else float(same), "extracted": found}


@functools.cache
def _library() -> Any:
    import logging

    import math_verify

    # It warns on every process that its limits are off; ours are on.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
