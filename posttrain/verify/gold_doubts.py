"""Detection of comparable but probably wrong gold answers: ids, placeholders, the prompt itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.errors import count_noun
from posttrain.verify.golds import gold_text

Row = Mapping[str, Any]

MIN_ALIKE_ROWS = 8  # minimum number of rows for equal or consecutive gold answers to be suspicious
MIN_ALIKE_SHARE = 0.9
MIN_TEXT_SHARE = 0.5
_SHOWN = 3
_MAX_EXAMPLE_CHARS = 40  # maximum characters of an example

_PLACEHOLDER = re.compile(
    r"(?:unknown|undefined|placeholder|(?:final[ _]|(?:the |your ))?answer(?: here)?|ground[ _]?truth|gold|target"
    r"|result|response|solution|label|string|text|foo|bar|test|dummy|x{3,}|\*+"
    r"|\{+\s*[A-Za-z_]{3,}\s*\}+|\$\{\s*\w+\s*\}|<\s*[A-Za-z_ ]{3,}\s*>|%\(?\w*\)?s"
    r"|\[\s*(?:answer|solution|result|insert[^\]]*)\s*\])",
    re.IGNORECASE,
)
_ID = re.compile(
    r"(?:row|id|idx|index|item|sample|example|question|problem|doc|uid|uuid|train|test|dev|val)s?[ _/#-]?\d+"
    r"|[A-Za-z]{2,}[_#]\d{2,}"
    r"|(?=[0-9a-f-]*[a-f])(?=[0-9a-f-]*\d)(?:[0-9a-f]{4,}(?:-[0-9a-f]{4,})+|[0-9a-f]{16,})"
    r"|(?:https?://|www\.)\S+|[\w./-]+\.(?:png|jpe?g|pdf|txt|json|html?)",
    re.IGNORECASE,
)
_MARKUP = re.compile(
    r"</?(?:p|div|span|br|b|i|u|li|ul|ol|strong|em|td|tr|table|sub|sup|a|h[1-6])\b[^<>]*>", re.IGNORECASE
)
_CUT_OFF = re.compile(r".*(?:[:=+,;([{]|(?<![\d.])\.{3}|\b(?:the|is|are|of|so|and|equals))\s*", re.DOTALL)
_INEXACT = re.compile(
    r"\b(?:approx(?:imately|\.)?|about|around|roughly|nearly|almost|circa|between|(?:more|less) than|at (?:least|most)"
    r"|up to|ranges?|estimated?)\b|\\approx\b|≈|^\s*~\s*\d"
    r"|^\s*-?[\d.,]+\s*(?:-|\N{EN DASH}|\N{EM DASH}|to)\s*[\d.,]+\s*$",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"\W*(?:(?i:yes|no|true|false|none)|[A-Z](?:[\W_]*[A-H]){0,5})\W*")


class Doubt(NamedTuple):
    """Suspicious pattern in gold answers.

    what: description. rows: numbers of the affected rows. wrong: such a gold answer can never be right, so the column
    is unusable if every row is affected.
    """

    what: str
    rows: tuple[int, ...]
    examples: tuple[str, ...]
    wrong: bool = True
    hint: str = ""

    def describe(self, total: int) -> str:
        """Format the doubt: `3 of 8 golds are placeholders (`xxx`, `unknown`)`."""
        shown = ", ".join(f"`{_short(example)}`" for example in self.examples)
        hint = f" ({self.hint})" if self.hint else ""
        return f"{len(self.rows)} of {count_noun(total, 'gold')} {self.what}: {shown}{hint}"


def detect_doubts(rows: Sequence[Row], column: str, *, maths: bool) -> list[Doubt]:
    """Find suspicious patterns in the gold answers of the rows, most frequent first; [] if there are none.

    column: column of the gold answers. maths: the reward reads gold answers as math, so tests for ids, ranges and words
    apply.
    """
    golds = {i: text for i, row in enumerate(rows) if (text := _text(row.get(column))) is not None}
    doubts = [_make_doubt("are the prompt itself", {i: g for i, g in golds.items() if _is_prompt(g, rows[i])})]
    for what, test, only_maths, wrong in _TESTS:
        if maths or not only_maths:
            doubts.append(_make_doubt(what, {i: g for i, g in golds.items() if test(g)}, wrong))
    doubts += [_all_the_same(golds, rows), _find_counting(golds), _only_text(golds) if maths else None]
    return sorted((doubt for doubt in doubts if doubt is not None), key=lambda doubt: -len(doubt.rows))


_TESTS: tuple[tuple[str, Callable[[str], Any], bool, bool], ...] = (  # (description, test, math only, never right)
    ("are placeholders", _PLACEHOLDER.fullmatch, False, True),
    ("look like ids, hashes, links or file names", _ID.fullmatch, True, True),
    ("hold HTML", _MARKUP.search, True, True),
    ("are cut off", lambda gold: _CUT_OFF.fullmatch(gold) and not _PLACEHOLDER.fullmatch(gold), True, True),
    ("name a range or an approximation, which only the same text equals", _INEXACT.search, True, True),
)


def find_column_doubt(found: Sequence[Doubt], total: int) -> Doubt | None:
    """Return the doubt that makes the column unusable, if any.

    Every gold answer then matches a pattern that is never right.
    """
    return next((doubt for doubt in found if doubt.wrong and total > 1 and len(doubt.rows) == total), None)


def _make_doubt(what: str, golds: Mapping[int, str], wrong: bool = True, hint: str = "") -> Doubt | None:
    return Doubt(what, tuple(golds), tuple(dict.fromkeys(golds.values()))[:_SHOWN], wrong, hint) if golds else None


def _text(answer: Any) -> str | None:
    return None if isinstance(answer, Mapping | list | tuple) else gold_text(answer)


def _is_prompt(gold: str, row: Row) -> bool:
    return " ".join(gold.split()) == " ".join(_prompt_text(row).split())


def _prompt_text(row: Row) -> str:
    """Return the text of the prompt; for a conversation the text of its last message."""
    prompt = row.get("prompt") if row.get("prompt") is not None else row.get("messages")
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return prompt if isinstance(prompt, str) else ""


def _all_the_same(golds: Mapping[int, str], rows: Sequence[Row]) -> Doubt | None:
    """Detect one gold answer in nearly all rows although their prompts differ.

    A policy that always writes it would earn everything.
    """
    if len(golds) < MIN_ALIKE_ROWS or len({_prompt_text(rows[i]) for i in golds}) < MIN_ALIKE_ROWS:
        return None
    most, count = Counter(golds.values()).most_common(1)[0]
    same = {i: gold for i, gold in golds.items() if gold == most}
    return _make_doubt("are the same", same) if count >= MIN_ALIKE_SHARE * len(golds) else None


def _find_counting(golds: Mapping[int, str]) -> Doubt | None:
    if len(golds) < MIN_ALIKE_ROWS or not all(re.fullmatch(r"\d{1,9}", gold) for gold in golds.values()):
        return None
    numbers = [int(gold) for gold in golds.values()]
    counting = numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] in (0, 1)
    return _make_doubt("count the rows", golds, False, "row numbers?") if counting else None


def _only_text(golds: Mapping[int, str]) -> Doubt | None:
    words = {i: gold for i, gold in golds.items() if is_only_text(gold)}
    hint = "only the same text is right; qa.search_r1 compares words"
    return (
        _make_doubt("can be compared only as text", words, False, hint)
        if len(words) > MIN_TEXT_SHARE * len(golds)
        else None
    )


def is_only_text(gold: str) -> bool:
    """Return whether a gold answer has no math value, so that only its own text equals it.

    Labels of choices do not count.
    """
    from posttrain.verify.math import parse_answer

    if _CHOICE.fullmatch(gold) or re.fullmatch(r"-?[\d.,/]+", gold):
        return False
    return parse_answer(gold) is None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_EXAMPLE_CHARS else line[: _MAX_EXAMPLE_CHARS - 1] + "…"
