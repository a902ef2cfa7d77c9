"""Comparison of answers in words, and the meaning of a few of them. Pure functions of text."""

from __future__ import annotations

import re

from posttrain.verify.notation import LETTERS, SPACE, SWITCH, plain

_NOTHING = re.compile(
    r"(?:(?:the )?(?:equation|system|inequality|it) )?(?:(?:there (?:is|are)|has|have) )?"
    r"no(?: (?:such|real|valid|possible|integer))*"
    r" (?:solutions?|roots?|values?|answers?|numbers?|integers?|pairs?|triples?)(?: exists?)?"
    r"|empty set|the empty set|null set"
)


_SENTENCE = re.compile(r"(?=.*[^\W\d_]{3})(?:[^\W\d_]|[\s.,;:'’!?-])+")


def _list_words(text: str) -> list[str]:
    """Return the words of a list such as `Alice and Bob`, sorted; [] for one word or anything else."""
    words = " ".join(LETTERS.sub(r" \1 ", text).split()).strip(" .$")
    parts = re.split(r" ?(?:, ?(?:and\b)?|\band\b|&) ?", words)
    found = len(parts) > 1 and all(re.fullmatch(r"[A-Z]?[a-z]{2,}(?: [A-Z]?[a-z]+)?", part) for part in parts)
    return sorted(part.casefold() for part in parts) if found else []


_SYNONYMS = {"dne": "doesnotexist", "infinitelymanysolutions": "infinitelymany", "infinite": "infinitelymany"}
_SYNONYMS |= {"infinite solutions".replace(" ", ""): "infinitelymany"}


def normalize_words(text: str) -> str | None:
    """Return the letters of a text that consists of words only, in lower case; None for anything else."""
    text = re.sub(rf"{SWITCH}|{SPACE}", " ", LETTERS.sub(r" \1 ", text)).strip()
    text = text[1:-1] if text[:1] == "(" and text[-1:] == ")" else text
    found = "".join(re.sub(r"(?<=[^\W\d_])[-'’](?=[^\W\d_])|[.$]", " ", text).casefold().split())
    return found if len(found) > 1 and found.isalpha() else None


def means_all_reals(text: str) -> bool:
    """Return whether the words mean every real number."""
    words = " ".join(LETTERS.sub(r" \1 ", text).casefold().strip(" .$").split())
    return re.fullmatch(r"(?:(?:the set of )?(?:all|any)(?: of)?(?: the)? )?real(?:s| numbers?)", words) is not None


def means_no_solution(text: str) -> bool:
    """Return whether the words mean that there is no solution: `no solution`."""
    return _NOTHING.fullmatch(" ".join(LETTERS.sub(r" \1 ", text).casefold().strip(" .$").split())) is not None


def same_words(a: str, b: str) -> bool | None:
    """Return whether two texts of words are the same; None if they are not words.

    Adjacent letters form a word, not a product: `no` is not `on`. Without a vowel, or for two of the letters a to d,
    they may be a product.
    """
    if _SENTENCE.fullmatch(plain(a)) and plain(a).casefold() == plain(b).casefold():
        return True
    x, y = (_SYNONYMS.get(found, found) if (found := normalize_words(text)) else None for text in (a, b))
    if (names := _list_words(a)) and (others := _list_words(b)):
        return names == others
    if x is None or y is None:
        return None
    if x == y or (means_no_solution(a) and means_no_solution(b)) or (means_all_reals(a) and means_all_reals(b)):
        return True
    products = (
        sorted(x) == sorted(y)
        and a.strip().islower()
        and (not set(x) & set("aeiou") or (len(x) == 2 and set(x) <= set("abcd")))
    )
    return None if products else False
