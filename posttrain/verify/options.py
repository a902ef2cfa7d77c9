r"""Multiple choice: find the options that an answer names. Pure functions of text.

An option is a letter from A to J, alone or in brackets (`B`, `(B)`, `B.`, `\text{(B)}`), or such a label followed by
the text of the option: `(B) 12`. An answer that names two options is no answer: `(A) (B)`, `A. B`, `(A) 5 (B) 6`.
"""

from __future__ import annotations

import re

_FONT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|boldsymbol|bm)\s*\{([^{}]*)\}")
_GAPS = re.compile(r"(?:\\q?quad\b|\\[ ,;:!]|~|\$|\*\*|\\[()\[\]]|\s)+")
_WORD = re.compile(
    r"故?选[：:]?\s*|(?:the\s+)?(?:(?:correct\s+)?(?:option|choice|answer)s?(?:\s+is\b|\s*:|\s+)\s*)+", re.IGNORECASE
)
_ALONE = re.compile(r"(?:\(\s*([A-J])\s*\)|([A-J])\s*\)?)\s*[.:]?", re.IGNORECASE)
# After the label: a blank, or nothing if it has brackets; not an operator, which would make it a formula with a
# variable.
_NO_LABEL = r"[=+*/^_<>&,;?]|-\s|(?:or|and|is|are|was|not|nor)\b|\\[lc]?dots|\.\."
_LABEL = re.compile(rf"(?:\(([A-J])\)[.:]?\s*|([A-J])[).:]\s+)(?!{_NO_LABEL})(\S.*)")
_BETWEEN = re.compile(r"\s*(?:[,;/|&、，；]|\b(?:and|or)\b)\s*|\s+|(?<=\))(?=\()", re.IGNORECASE)
_TOGETHER = re.compile(r"[A-J]{2,5}")  # several options of one question: ABD
_LAST = re.compile(r"(?:,|;|/|\bor|\band)\s*\(?([A-J])\)?\.?$")  # `5 or B` after the label of A
_RELATED = re.compile(r"\(?([A-J])\)?\s*=\s*\(?[A-J]\)?", re.IGNORECASE)
_FURTHER = re.compile(r"(?<![\w\\])\(([A-J])\)|(?<![\w\\(])([A-J])[).:](?=\s)")
_ABOUT_OPTIONS = re.compile(r"(?:both|neither|either|all|none|only|not|statements?|options?|choices?)\b", re.IGNORECASE)


def strip_markup(text: str) -> str:
    """Remove fonts, `$`, LaTeX spacing and a leading word such as `option`."""
    plain = _GAPS.sub(" ", _FONT.sub(r" \1 ", text)).strip()
    word = _WORD.match(plain)
    return plain[word.end() :] if word else plain


def option_letter(text: str) -> str | None:
    """Return the option that the text consists of, as a capital letter; None for anything else."""
    found = _ALONE.fullmatch(strip_markup(text))
    return (found[1] or found[2]).upper() if found else None


def split_label(text: str) -> tuple[str, str] | None:
    """Return (letter, option text) if the text is a label followed by text; None for anything else."""
    found = _LABEL.fullmatch(strip_markup(text))
    return (found[1] or found[2], found[3]) if found else None


def find_options(text: str) -> list[str]:
    """Return the options that an answer names, each once: [] if it names none, several for a hedged answer.

    The text of an option may mention other options: `(D) Both (A) and (B)` names only D.
    """
    label = split_label(text)
    if label is None:
        return _option_letters(text)
    first, content = label
    about = _ABOUT_OPTIONS.match(content)
    if about is None or re.match(r"(?:all|none)\s+of\s+the\s+above\b", content, re.IGNORECASE):
        others = _option_letters(content) or [a or b for a, b in _FURTHER.findall(content)] or _LAST.findall(content)
    else:
        others = []
    return list(dict.fromkeys([first, *others]))


def same(gold: str, candidate: str) -> bool | None:
    """Return whether an answer chooses exactly the options of the gold answer; None if labels do not decide.

    A gold answer of letters alone equals the same letters, whatever text follows a label. Any other gold answer does
    not equal a hedge between labels. `A/C` is a quotient, and names two options only if the gold answer is a list such
    as `A, C`.
    """
    found = find_options(candidate) or _joined_letters(candidate)
    listed = [] if _may_be_quotient(gold) else _option_letters(gold)
    wanted = listed or _joined_letters(gold)
    if found and wanted:
        quotient = len(found) > 1 and len(listed) < 2 and _may_be_quotient(candidate)
        return set(found) == set(wanted) and not quotient
    if option_letter(gold) and _RELATED.fullmatch(strip_markup(candidate)):
        return False  # D = C names two options
    return False if len(found) > 1 and split_label(candidate) else None


def _may_be_quotient(text: str) -> bool:
    """Return whether the text may be a quotient: `a/b` is more than the list a, b."""
    return "/" in text or "|" in text


def _joined_letters(text: str) -> list[str]:
    """Return the letters of several options written together in order, such as `ABD`; else []."""
    plain = strip_markup(text)
    return list(plain) if _TOGETHER.fullmatch(plain) and list(plain) == sorted(set(plain)) else []


def _option_letters(text: str) -> list[str]:
    """Return the letters of a text that consists only of options and separators such as `,` and `or`; else []."""
    letters = [option_letter(part) for part in _BETWEEN.split(strip_markup(text)) if part]
    return list(dict.fromkeys(letter for letter in letters if letter)) if all(letters) else []
