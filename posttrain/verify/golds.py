"""Checks whether an answer can be compared with a gold answer. Pure functions of a row's `answer`."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, is_typeddict

from posttrain.verify.extract import anchor, every_box, hash_line
from posttrain.verify.numerals import SCALES, changes_number
from posttrain.verify.tokens import FUNCTIONS, GREEK, SHORT

_MISSING = re.compile(r"nan|none|null|n/?a|nil|todo|tbd|[-.?_ ]+", re.IGNORECASE)
_ELSEWHERE = re.compile(
    r"(?:please\s+)?(?:see|refer\s+to|as\s+(?:shown|given|stated)(?:\s+in)?)\s+"
    r"(?:the\s+|an?\s+)?(?:attached\s+|full\s+|above\s+|below\s+)*"
    r"(?:figure|diagram|graph|chart|table|image|picture|drawing|map|solution|answer|explanation|proof|text|above|below|attached"
    r"|attachment|notes?|appendix|page)s?\b.*"
    r"|answers?\s+(?:may|will|can)\s+vary.*|(?:no|not)\s+(?:answer|available|provided|given|found|applicable)|proof|omitted",
    re.IGNORECASE | re.DOTALL,
)
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+(?:['’-][A-Za-z]+)*")
_MATHS = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]|\\[A-Za-z]+\s*\{[^{}]*\}", re.DOTALL)
_CONTAINER = re.compile(r"""\{\s*(["'])[^"']*\1\s*:|\[\s*(["'])[^"']*\2\s*[],]""")
_VERBS = frozenset(
    [
        *("is", "are", "was", "were", "be", "been", "has", "have", "had", "can", "cannot", "could", "must", "may"),
        *("might", "will", "would", "should", "follows", "holds", "exists", "proves", "shows", "implies", "means"),
        *("gives", "prove", "show", "because", "since", "therefore", "hence", "thus"),
    ]
)
MAX_PHRASE_WORDS = 4  # words of a verbal answer; more words with a verb form a sentence
MAX_ANSWER_CHARS = 100  # maximum characters of x in a solution that ends with `the answer is x`


def gold_text(answer: Any) -> str | None:
    r"""Return the gold answer of a reference solution.

    That is the content of its boxes, else the text after the last `####`, else x of `the answer is x`, else the whole
    text.

    Several boxes form one list answer. Returns None if there is no usable gold answer (`explain_unusable`).
    """
    if explain_unusable(answer):
        return None
    text = unwrap_json_list(str(answer))
    if boxes := every_box(text):
        return ", ".join(boxes).strip() or None
    if "####" in text:
        return (hash_line(text) or text.rpartition("####")[2]).strip() or None
    stated = anchor(text)
    found = stated if stated and len(stated) <= MAX_ANSWER_CHARS and not is_sentence(stated) else text.strip()
    return _write_unit(_SOLUTION.sub("", found)) or None


_SOLUTION = re.compile(
    r"^(?:the\s+)?solutions?\s+(?:is|are)\s*:?\s*(?=\$|\\|[\[({]|-?[0-9]|[A-Za-z]\s*=)", re.IGNORECASE
)
# `12 (inches of snow)`, as in ASDiv; `3(x)` is a product
_BRACKETED_UNIT = re.compile(r"([-+]?[0-9][0-9.,/]*)\s+\(\s*([A-Za-z][A-Za-z .'-]*)\)")
_MATHS_WORDS = FUNCTIONS | GREEK | {"mod"}


def _write_unit(text: str) -> str:
    r"""Return a number and its unit in brackets as `12\text{ inches}`, without a unit that changes the number.

    Any other text, and one whose words could be maths, stays as it is.
    """
    match = _BRACKETED_UNIT.fullmatch(text)
    if match is None:
        return text
    words = match[2].casefold().replace(".", " ").replace("-", " ").split()
    named = words and (len(words[0]) > 2 or words[0] in SHORT)
    if not named or any(word in _MATHS_WORDS or word in SCALES for word in words):
        return text
    return match[1] if any(map(changes_number, words)) else rf"{match[1]}\text{{ {match[2].strip()}}}"


def explain_unusable(answer: Any) -> str:
    """Return why a row's answer cannot be compared with anything, or ''. A list is usable if any of its entries is."""
    if answer is None:
        return "null"
    if isinstance(answer, float) and answer != answer:
        return "NaN"
    if isinstance(answer, Mapping):
        return "" if answer else "empty"
    if isinstance(answer, list | tuple):
        return "" if any(not explain_unusable(gold) for gold in answer) else "empty list"
    text = str(answer).strip()
    if not text:
        return "empty"
    if _MISSING.fullmatch(text):
        return f"`{text}`"
    return f"`{text[:40]}`" if _ELSEWHERE.fullmatch(text) else ""


def unwrap_json_list(text: str) -> str:
    """Return the text inside a JSON list with one text (`["18"]` -> `18`), else the text itself."""
    try:
        held = json.loads(text) if text.lstrip().startswith('["') else None
    except (ValueError, RecursionError):
        return text
    return held[0] if isinstance(held, list) and len(held) == 1 and isinstance(held[0], str) else text


def is_no_answer(text: str) -> bool:
    """Return whether a gold answer is prose, or the text of a dict or of a list of texts: no math answer equals it."""
    return is_sentence(text) or _CONTAINER.match(text.strip()) is not None


def is_sentence(text: str) -> bool:
    """Return whether a text is prose: more than four words outside of math, with a verb."""
    words = [word.lower() for word in _WORDS.findall(_MATHS.sub(" ", text))]
    return len(words) > MAX_PHRASE_WORDS and not _VERBS.isdisjoint(words)


def accepts_type(annotation: Any, kind: type) -> bool:
    """Return whether values of type `kind` match an annotation; None (no annotation) matches everything."""
    if annotation in (None, Any, object):
        return True
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(accepts_type(part, kind) for part in get_args(annotation) if part is not types.NoneType)
    wanted = origin or annotation
    if is_typeddict(wanted):
        return kind is dict
    return isinstance(wanted, type) and issubclass(kind, wanted)
