"""Gold columns that are comparable but probably do not answer the questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from posttrain.errors import RewardError
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.audit import audit_gold
from posttrain.verify.gold_doubts import detect_doubts, is_only_text
from posttrain.verify.score import Scorer
from posttrain.verify.trial import try_rewards

pytestmark = pytest.mark.usefixtures("forked_workers")

MIXED = ["12", "-3", "1/2", "40", "7", "x+1", "95", "8"]


def rows(golds: list[Any]) -> list[dict[str, Any]]:
    return [{"uid": f"r{i}", "prompt": f"What is question {i}?", "answer": gold} for i, gold in enumerate(golds)]


@pytest.mark.parametrize(
    ("gold", "what"),
    [
        ("What is question {i}?", "are the prompt itself"),
        *(
            (gold, "are placeholders")
            for gold in ("unknown", "xxx", "{answer}", "<answer>", "answer", "your answer", "%s")
        ),
        *(
            (gold, "look like ids")
            for gold in ("row_00{i}", "id-{i}", "a8f3-1b2{i}", "https://a.org/{i}", "img_{i}.png")
        ),
        *((gold, "hold HTML") for gold in ("<p>{i}5</p>", "{i}2<br>", "<b>{i}4</b>")),
        *((gold, "are cut off") for gold in ("Step 1: 2+2={i}. Step 2: ", "So {i}+1 =", "the sum of {i} and")),
        *((gold, "name a range") for gold in ("approximately {i}5", "between {i} and 90", "{i} to 12", "about {i}")),
    ],
)
def test_suspicious_golds_are_reported_with_their_count(gold: str, what: str) -> None:
    odd = [*MIXED, *(gold.replace("{i}", str(i)) for i in range(8, 11))]
    found = [doubt.describe(11) for doubt in detect_doubts(rows(odd), "answer", maths=True)]
    assert any(told.startswith(f"3 of 11 golds {what}") for told in found), found


@pytest.mark.parametrize(
    "golds",
    [
        MIXED,
        ["A", "B", "C", "AC", "(D)", "B, D", "A", "C"],
        ["True", "False", "yes", "No", "True", "False", "Yes", "no"],
        [r"\frac{1}{2}", r"x_1 = 3", r"a_{12}", r"\{1, 2\}", "[1, 2)", r"1 < x < 2", r"\text{(C)}", "2:3"],
        ["2a", "abc", "x_{12}", r"\emptyset", "5 apples", "10 m/s", "3 + 4i", "2^{10}"],
        [r"... so it is \boxed{5}.", "#### 72", "The answer is 4.", r"\boxed{9}", "1", "2", "6", "8"],
        [None, [1, 2], {"a": 1}, "5"],
    ],
)
def test_usual_golds_give_no_warning(golds: list[Any]) -> None:
    assert detect_doubts(rows(golds), "answer", maths=True) == []


def test_same_gold_in_nearly_all_rows_is_reported() -> None:
    (doubt,) = detect_doubts(rows(["7"] * 15 + ["8"]), "answer", maths=True)
    assert doubt.describe(16) == "15 of 16 golds are the same: `7`"
    same_prompt = [{"prompt": "What?", "answer": "7"}] * 16
    assert detect_doubts(same_prompt, "answer", maths=True) == []  # one question, one answer
    assert detect_doubts(rows(["7"] * 4), "answer", maths=True) == []


def test_row_numbers_and_words_as_gold_are_reported() -> None:
    assert detect_doubts(rows([str(i) for i in range(9)]), "answer", maths=True)[0].what == "count the rows"
    assert not detect_doubts(rows([str(3 * i) for i in range(9)]), "answer", maths=True)
    words = ["Paris is nice", "seven apples we get", "Nile", "photosynthesis"]
    assert detect_doubts(rows(words), "answer", maths=True)[0].what == "can be compared only as text"
    assert detect_doubts(rows(words), "answer", maths=False) == []
    assert not is_only_text("5 apples")


def test_chat_prompt_as_its_own_gold_is_reported() -> None:
    row = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "What is 2+3?"}]}
    (doubt,) = detect_doubts([{**row, "answer": " What is\n2+3?"}], "answer", maths=False)
    assert doubt.what == "are the prompt itself"


@pytest.mark.parametrize(
    "gold", ["What is question {i}?", "xxx", "{answer}", "row_00{i}", "7", "<p>{i}</p>", "approximately {i}"]
)
def test_column_of_only_suspicious_golds_is_refused(gold: str, scorer: Callable[..., Scorer]) -> None:
    bad = rows([gold.replace("{i}", str(i)) for i in range(8)])
    trial = try_rewards([Reward(use="math.accuracy")], Scoring(workers=1), None, bad)
    assert len(trial.bad_gold) == 8
    assert any("8 of 8 golds" in doubt for doubt in trial.doubts)
    with scorer("math.accuracy") as s, pytest.raises(RewardError, match="the golds "):
        audit_gold(s, bad)
    with scorer("math.accuracy", max_bad_gold=1.0) as s:
        assert "8 of 8 golds" in audit_gold(s, bad).summary


def test_some_suspicious_golds_are_reported_without_stopping(scorer: Callable[..., Scorer]) -> None:
    with scorer("math.accuracy") as s:
        audit = audit_gold(s, rows([*MIXED, "xxx"]))
    assert audit.summary.endswith("(gold written in \\boxed{}); 1 of 9 golds are placeholders: `xxx`")
    assert audit.bad == {}


def test_words_are_valid_gold_for_rewards_that_compare_words(scorer: Callable[..., Scorer]) -> None:
    with scorer("qa.search_r1") as s:
        assert audit_gold(s, rows(["Paris", "row 7", "about a boy", "Nile", "between"])).doubts == []


def test_gold_queries_without_results_are_reported(scorer: Callable[..., Scorer]) -> None:
    db = ["CREATE TABLE emp (name TEXT, pay INTEGER)", "INSERT INTO emp VALUES ('Ann', 10), ('Bo', 20)"]
    full, none = "SELECT name FROM emp WHERE pay > 10", "SELECT name FROM emp WHERE pay > 90"
    golds = [full, none, "SELECT sum(pay) FROM emp WHERE pay > 90", "SELECT count(*) FROM emp", "SELECT 1 FROM nowhere"]
    data = [{**row, "db": db} for row in rows(golds)]
    with scorer("sql.execution", max_bad_gold=1.0) as s:
        (told,) = audit_gold(s, data).doubts
    assert told.startswith(f"2 of 5 golds find no rows, which any query that finds none equals: `{none}`")
