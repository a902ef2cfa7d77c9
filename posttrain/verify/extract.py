"""Where the answer stands in a completion. Pure functions of text; each returns None when nothing is found."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

Extractor = Literal["boxed", "answer_tag", "hash", "anchor", "last_number"]

THINK_START, THINK_END = "<think>", "</think>"

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\{)|\\(?=\\(?:boxed|fbox)\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_HASH = re.compile(r"####[ \t]*([^\n]+)")
_ANCHOR = re.compile(r"answer\s+is[ \t]*:?", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w.)])[-+])?\.\d+")


def after_think(text: str, delimiter: str = THINK_END) -> str:
    r"""What follows the last `delimiter`; the whole text if there is none."""
    return text.rpartition(delimiter)[2]


def outside_thoughts(text: str) -> str:
    """The text without its closed thoughts, for transcripts that think several times: what stands in one is no answer.

    A closing mark before any opening one ends a thought that the prompt opened. An unclosed thought stays, as with
    `after_think`.
    """
    kept: list[str] = []
    end = text.find(THINK_END)
    position = 0 if end < 0 or 0 <= text.find(THINK_START) < end else end + len(THINK_END)
    while (start := text.find(THINK_START, position)) >= 0 and (end := text.find(THINK_END, start)) >= 0:
        kept.append(text[position:start])
        position = end + len(THINK_END)
    return "".join(kept) + text[position:]


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{..}` or `\fbox{..}` whose braces close. Nested braces count, `\{` and `\}` do not.

    An unclosed last box falls back to the previous closed one. One pass over the text, whatever it holds.
    """
    opened: list[tuple[bool, int]] = []  # (is a box, where its content starts) for every brace still open
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        if match["box"] or match["open"]:
            opened.append((match["box"] is not None, match.end()))
        elif match["close"] and opened:
            is_box, start = opened.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, match.start())
    return text[last[0] : last[1]] if last else None


def thought_of(text: str) -> str | None:
    """The last thought; one that the prompt opened counts. None without one."""
    closed = last_tag(text, "think")
    return text.rpartition(THINK_END)[0] if closed is None and THINK_END in text else closed


def tag_contents(text: str, tag: str) -> list[str]:
    """The contents of all complete `<tag>..</tag>` pairs; an opening tag pairs with the first closing one after it."""
    found, position = [], 0
    opening, closing = f"<{tag}>", f"</{tag}>"
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        found.append(text[start + len(opening) : end])
        position = end + len(closing)
    return found


def last_tag(text: str, tag: str) -> str | None:
    """The last of `tag_contents`, None without one."""
    found = tag_contents(text, tag)
    return found[-1] if found else None


def answer_tag(text: str) -> str | None:
    r"""Content of the last `<answer>` block, or of the last `\boxed{..}` inside it."""
    content = last_tag(text, "answer")
    if content is None:
        return None
    box = last_boxed(content)
    return content if box is None else box


def hash_line(text: str) -> str | None:
    """x of the last `#### x` (GSM8K's form), up to the end of its line."""
    found = _HASH.findall(text)
    return found[-1].strip() if found else None


def anchor(text: str) -> str | None:
    """x of the last `answer is x`, up to the line end, without outer blanks, `*`, `$` and one final full stop."""
    found = list(_ANCHOR.finditer(text))
    if not found:
        return None
    line = text[found[-1].end() :].partition("\n")[0].strip(" \t\r*$")
    return line.removesuffix(".").strip(" \t\r*$")


def last_number(text: str) -> str | None:
    """The last integer or decimal, with its sign and thousands commas: `cost 1,234.50 in all` -> `1,234.50`."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "boxed": last_boxed,
    "answer_tag": answer_tag,
    "hash": hash_line,
    "anchor": anchor,
    "last_number": last_number,
}


def extract(text: str, order: Sequence[Extractor]) -> str | None:
    """What the first extractor of `order` that finds something finds; None if none does."""
    for name in order:
        if name not in EXTRACTORS:
            raise ValueError(f"unknown extractor {name!r}; known: {', '.join(EXTRACTORS)}")
        found = EXTRACTORS[name](text)
        if found is not None:
            return found
    return None
