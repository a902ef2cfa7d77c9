"""Test completions that a reward must tell apart: the gold answer, a near miss, and typical failures of models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.verify.golds import explain_unusable, gold_text
from posttrain.verify.score import Sample

Row = Mapping[str, Any]

THOUGHT_PREFIX = "<think>\nso\n</think>\n"
_PAIRS = (("yes", "no"), ("true", "false"), ("correct", "wrong"))
OPPOSITES = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class Writer:
    """Writer of the completion that earns full marks on a row.

    gold: returns the completion, or None if the row has no gold answer. column: column of the gold answer. wrong:
    writes an almost right completion, for scripts where changing the answer might give another right one; returns None
    for a row where a changed answer is always wrong.
    """

    gold: Callable[[Row], str | None]
    column: str = "answer"
    wrong: Callable[[Row], str | None] | None = None

    def __call__(self, row: Row) -> str | None:
        return self.gold(row)

    def with_answer(self, row: Row, answer: Any) -> str:
        """Write gold as if `answer` were the gold answer; "" if gold does not depend on the column."""
        text = self.gold({**row, self.column: answer}) or ""
        return text if text != self.gold(row) else ""

    def miss(self, row: Row) -> str:
        """Write an almost right completion; "" if gold does not depend on the answer."""
        return self.own_miss(row) or self.with_answer(row, near_miss(row.get(self.column)))

    def own_miss(self, row: Row) -> str:
        """Return the completion that the script's `NEAR_MISS` writes for the row; "" without one."""
        return (self.wrong(row) if self.wrong else None) or ""


def _wrap_answer(before: str, after: str, read: Callable[[str], str | None] = gold_text) -> Writer:
    """Build a writer that puts the answer between two texts.

    read: extracts the text to write, by default the answer of a reference solution.
    """

    def write(row: Row) -> str | None:
        answer = answer_text(row.get("answer"))
        written = None if answer is None else read(answer)
        return None if written is None else f"{before}{written}{after}"

    return Writer(write)


# Answer formats to try for scripts without their own `GOLD`.
WRITERS: dict[str, Writer] = {
    "boxed": _wrap_answer(THOUGHT_PREFIX + "\\boxed{", "}"),
    "answer_tag": _wrap_answer(THOUGHT_PREFIX + "<answer>", "</answer>"),
    "hash": _wrap_answer(THOUGHT_PREFIX + "#### ", ""),
    "anchor": _wrap_answer(THOUGHT_PREFIX + "The answer is ", ""),
    "plain": _wrap_answer("", "", str),
}


def describe_writer(writer: str) -> str:
    """Describe how gold is written as a completion. writer: a name in `WRITERS`, or another source."""
    known = {
        "boxed": "in \\boxed{}",
        "answer_tag": "in <answer>",
        "hash": "after ####",
        "anchor": "after `The answer is`",
        "plain": "as it stands in the row",
    }
    return known.get(writer, f"by {writer}")


def answer_text(answer: Any) -> str | None:
    """Return a gold answer as text, the first usable one of a list; None if there is none (`explain_unusable`)."""
    if explain_unusable(answer):
        return None
    if isinstance(answer, list | tuple):
        return next(text for option in answer if (text := answer_text(option)) is not None)
    return json.dumps(answer) if isinstance(answer, Mapping) else str(answer)


def near_miss(answer: Any) -> Any:
    """Return a wrong answer of the same form: one digit, letter or word is changed.

    For a reference solution, return only its changed answer: a change before the answer would have no effect.
    """
    if isinstance(answer, Mapping | list | tuple):
        return _change_first_leaf(answer)[0]
    if isinstance(answer, bool):
        return not answer
    if isinstance(answer, int | float):
        return answer + 1
    text = str(answer)
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(_change_first_leaf(json.loads(text))[0])
        except ValueError:
            pass  # a set or an interval, not JSON
    return _near_text(gold_text(text) or text)


def _near_text(text: str) -> str:
    if digit := re.search(r"[0-9]", text):  # the first digit, because verifiers may round the last one away
        return f"{text[: digit.start()]}{int(digit[0]) + 1 if digit[0] != '9' else 8}{text[digit.end() :]}"
    if text.strip().lower() in OPPOSITES:
        return OPPOSITES[text.strip().lower()]
    if option := re.search(r"(?<![A-Za-z\\])[A-Z](?![A-Za-z])", text):
        letter = chr(ord("A") + (ord(option[0]) - ord("A") + 1) % 26)
        return text[: option.start()] + letter + text[option.end() :]
    if "\\" in text or len(text.strip()) == 1 or not (letters := list(re.finditer(r"[A-Za-z]", text))):
        return f"{text} + 1"
    at = letters[-1].start()  # not a permutation: a verifier that reads words as products of letters would accept it
    return text[:at] + ("a" if text[at] in "zZ" else chr(ord(text[at]) + 1)) + text[at + 1 :]


def _change_first_leaf(value: Any) -> tuple[Any, bool]:
    """Return a copy of a JSON value with its first text or number changed, and whether there was one."""
    if isinstance(value, Mapping):
        changed, done = {}, False
        for key, item in value.items():
            changed[key], done = (item, True) if done else _change_first_leaf(item)
        return changed, done
    if isinstance(value, list | tuple):
        items, done = [], False
        for item in value:
            item, done = (item, True) if done else _change_first_leaf(item)
            items.append(item)
        return items, done
    return (value, False) if value is None or isinstance(value, bool) else (near_miss(value), True)


def variants(row: Row, write: Writer, group: int = 0) -> dict[str, Sample] | None:
    """Return variant name -> sample for this row; None if the row has no gold answer.

    Token counts are a quarter of the characters.
    """
    gold = write(row)
    if gold is None:
        return None
    texts = {
        "gold": gold,
        "near miss": write.miss(row),
        "empty": "",
        "truncated": gold[: len(gold) // 2],
        "very long": THOUGHT_PREFIX + "Wait, let me think about that again. " * 1000,
        "unicode": "答えは分かりません 🤔 \u202e é \x00 ﷽",
        "garbage": "}{ \\boxed{ <answer> $$ \\frac{1}{0} </think> #### \n <tool_call>",
    }
    prompt = row.get("prompt")
    return {
        name: Sample(
            completion=text,
            row=row,
            prompt=prompt if isinstance(prompt, str) else "",
            finish="length" if name in ("truncated", "very long") else "stop",
            token_count=-(-len(text) // 4),
            group=group,
        )
        for name, text in texts.items()
    }
