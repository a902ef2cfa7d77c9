"""Right answers with a changed sign, number, operator, order or bracket: none of the variants may be accepted."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posttrain.verify.math import equal

PAIRS = json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8"))
GOLDS = sorted({gold for pairs in PAIRS.values() for gold, _, _ in pairs})
MOST = 160  # golds for each kind of change
NUMBER = re.compile(r"(?<![\w.])[0-9]+(?![\w.])")
SWAPS = [
    *(("<", ">"), (r"\le", "<"), (r"\ge", ">"), ("[", "("), ("]", ")"), ("(-", "[-"), (r"\cup", r"\cap")),
    *((r"\sin", r"\cos"), (r"\ln", r"\sin"), (r"\sqrt", ""), (r"\frac", r"\binom"), ("^", "_")),
    *(("=", r"\ne "), ("=", "<")),
    *(("x", "z"), (r"\pi", "3"), (r"\pm", "+"), (r"\infty", "5"), (r"\overline", "")),
]  # fmt: skip


def another_number(gold: str) -> Iterator[str]:
    for match in NUMBER.finditer(gold):
        yield f"{gold[: match.start()]}{int(match[0]) + 1}{gold[match.end() :]}"


def another_digit(gold: str) -> Iterator[str]:
    for match in NUMBER.finditer(gold):
        if int(match[0]):
            yield f"{gold[: match.start()]}{match[0]}0{gold[match.end() :]}"


def another_operator(gold: str) -> Iterator[str]:
    for match in re.finditer(r"(?<=[\w}) ])[-+](?=[\w\\ (])", gold):
        yield gold[: match.start()] + {"+": "-", "-": "+"}[match[0]] + gold[match.end() :]


def another_sign(gold: str) -> Iterator[str]:
    if not re.match(r"0|[A-Za-z]+ ?=|.*(?:\\pm|±)", gold):  # -0 is 0, and all signs are there already
        yield f"-{gold}"


def another_mark(gold: str) -> Iterator[str]:
    for old, new in SWAPS:
        if old in gold:
            yield gold.replace(old, new, 1)


def one_value_less(gold: str) -> Iterator[str]:
    yield from re.findall(r"^(.+),[^,()\[\]{}]+$", gold)


def one_value_more(gold: str) -> Iterator[str]:
    yield from (f"{gold}, 987", rf"{gold} \text{{ or }} 987", f"987; {gold}")


def another_order(gold: str) -> Iterator[str]:
    pair = re.fullmatch(r"\(([^,()]+),([^,()]+)\)", gold)
    if pair and pair[1].strip() != pair[2].strip():
        yield f"({pair[2]},{pair[1]})"
    if re.fullmatch(r"[A-Za-z]{2,8}", gold) and gold[::-1].casefold() != gold.casefold():
        yield gold[::-1]


def more_around_it(gold: str) -> Iterator[str]:
    yield from (f"1+{gold}", f"2({gold})", f"[{gold}, 987]", rf"\neq {gold}", rf"987 = {gold}", f"{gold} = 987")
    yield from (rf"{gold}\ldots", f"{gold}?", rf"{gold}\text{{ is wrong}}", rf"\text{{not }}{gold}", f"{gold} 987")


CHANGES: list[Callable[[str], Iterator[str]]] = [
    *(another_number, another_digit, another_operator, another_sign, another_mark),
    *(one_value_less, one_value_more, another_order, more_around_it),
]
# Changes that leave the answer right.
RIGHT = {
    "{5 \\choose 3}", "\\binom{5}{3}",  # 5 over 2 is 5 over 3
    "(0)",  # of {0}
    "yx",
    "xk",
    "\\{2,3,3\\}", "\\{3,2,3\\}",  # a set
    "2(0)",
    "x=2",  # of x=2, x=2
    "-\\sin x=0",
    "-f(x)=0",
    "(-1)^{n-1}n",
    "€1.234,560",
    "(A) 987", "\\text{(A)} 987", "\\textbf{(B)} 987",  # an option with what it says
    "1+6.022 \\times 10^{23}", "1+6.022\\times 10^{23}",  # a decimal of four digits
    "2(\\textbf{(B) }\\frac12)",  # 2 B/2
    "\\gcd(480,36)",  # 12 as before
    "\\(5\\]", "\\[5\\)",  # delimiters of maths
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_answer_is_wrong(change: Callable[[str], Iterator[str]]) -> None:
    golds = [gold for gold in GOLDS if any(changed != gold for changed in change(gold))]
    chosen = random.Random(0).sample(golds, min(MOST, len(golds)))
    accepted = [
        (gold, changed) for gold in chosen for changed in change(gold) if changed != gold and equal(gold, changed)
    ]
    assert [pair for pair in accepted if pair[1] not in RIGHT] == []
    assert len(chosen) > 5
