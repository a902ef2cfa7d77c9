r"""Conditions on the variables of an answer: `x = k\pi, k \in \mathbb{Z}`, `2^n - 1 (n \ge 1)`, `for all x`.

Pure functions of text. A condition that the other text omits is ignored, and an integer variable may have any name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PARAMETERS = "kmnl"  # letters used for an arbitrary integer
_LIGHT = re.compile(r"\\(?:text|textrm|mbox|mathrm)\s*\{([^{}]*)\}")
_GAPS = re.compile(r"\\q?quad\b|\\[,;:! ]|~|\$|\\left(?=\()|\\right(?=\))")
_QUANTIFIER = r"(?:(?:where|with|any|every|for(?:\s+(?:all|any|some|every|each))?|\\forall|∀)\s*)"
_SET = (
    r"(?:\\in|∈)\s*(?:\\math(?:bb|bf|rm)\s*|\\Bbb\s*)?\{?\s*(?P<set>[ZRNℤℝℕ])\s*\}?"
    r"(?P<mark>[\^_]?\{?[*+0]?\}?|[\^_]?\{?>\s*0\}?)"
)
_KIND = (
    r"(?:(?:is|are)\s+)?(?:(?:an?|any|some)\s+)?(?:arbitrary\s+)?(?P<kind>integer|real|natural|constant)s?"
    r"(?:\s+numbers?)?"
)
_TAIL = re.compile(
    rf"(?:[,;\s]|(?<=.)(?=\())\s*\(?\s*(?:{_QUANTIFIER}?(?P<letter>[A-Za-z])\s*(?:{_SET}|{_KIND})"
    rf"|{_QUANTIFIER}(?P<before>integers?|reals?|constants?)\s+(?P<letter2>[A-Za-z])"
    r"|(?:for\s+all|for\s+any|for\s+every|\\forall|∀)\s*(?P<letter3>[A-Za-z])"
    r"|(?P<letter4>n)\s*(?:\\geq?(?:slant)?|≥|>=)\s*[01])\s*\)?\s*\.?$"
)
_RELATION = re.compile(r"[<>≤≥≠∈|]|\\(?:leq?|geq?|lt|gt|neq?|in|notin|mid|pmod|bmod|equiv)(?![a-z])|\bmod\b")
_DOMAINS = {"Z": "integer", "ℤ": "integer", "N": "natural", "ℕ": "natural", "R": "real", "ℝ": "real"}


class Condition(NamedTuple):
    """Condition on a variable. letter: name of the variable. domain: `integer`, `natural`, `real` or `constant`."""

    letter: str
    domain: str


def split_condition(text: str) -> tuple[str, Condition | None]:
    """Return (text without the condition at its end, condition); None as condition if none may be left out."""
    light = " ".join(_GAPS.sub(" ", _LIGHT.sub(r" \1 ", text)).split())
    found = _TAIL.search(light)
    if found is None:
        return text, None
    letter = found["letter"] or found["letter2"] or found["letter3"] or found["letter4"]
    kind = found["kind"] or (found["before"] or "").rstrip("s")
    domain = kind or ("natural" if found["letter4"] else _DOMAINS.get(found["set"] or "R", "real"))
    if domain == "integer" and (found["mark"] or "").strip("{}"):
        domain = "natural"
    head = light[: found.start()].strip(" ,;")
    left, relation, right = head.partition("=")
    if not head or _RELATION.search(head) or letter not in _letters(right if relation else head):
        return text, None  # a condition on the answer itself: x > 2, x an integer
    defined = re.search(rf"(?:\(\s*|_\{{?){letter}\b", left) is not None if relation else domain != "real"
    if domain == "real" and not defined:
        return text, None  # only the definition of a function or a sequence holds for all x
    return (head, Condition(letter, domain)) if left.strip() != letter else (text, None)


def _letters(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text)))


def without_conditions(gold: str, candidate: str) -> tuple[str, str] | None:
    """Return both texts without their conditions, the candidate's integer variable renamed to the gold's.

    None if neither has a condition or their domains differ.
    """
    (gold, wanted), (candidate, stated) = split_condition(gold), split_condition(candidate)
    if wanted is None and stated is None:
        return None
    if wanted and stated and wanted.domain != stated.domain:
        return None
    known = wanted or stated
    if known is not None and known.domain == "integer":
        candidate = _rename_letters(gold, wanted, candidate, stated)
    return gold, candidate


def _rename_letters(gold: str, wanted: Condition | None, candidate: str, stated: Condition | None) -> str:
    ours, theirs = _letters(gold), _letters(candidate)
    new = {wanted.letter} if wanted else (ours - theirs) & set(_PARAMETERS)
    old = {stated.letter} if stated else (theirs - ours) & set(_PARAMETERS)
    if len(new) != 1 or len(old) != 1 or new <= theirs:
        return candidate
    return re.sub(rf"(?<![A-Za-z\\]){old.pop()}(?![A-Za-z])", new.pop(), candidate)
