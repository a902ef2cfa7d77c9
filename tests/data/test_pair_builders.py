"""Each pair builder on one prompt's answers, with the reason if there is no pair; rules and per-row report."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.data.pair_builders import Options, build
from posttrain.data.pair_rows import pair_rows
from posttrain.errors import DataError

SOURCES = {str(n): {"uid": str(n), "prompt": f"{n}?", "completion": "gold"} for n in (1, 2)}


def answer(text: str, reward: float | None, source: str = "own", *, cut: bool = False, **more: Any) -> dict[str, Any]:
    graded = {"reward": reward, "correct": None if reward is None else reward >= 1}
    finish = "length" if cut else "stop"
    return {"uid": "1", "completion": text, "finish": finish, "tokens": len(text), "source": source, **graded, **more}


RIGHT, LONG, WRONG = answer("ok", 1), answer("okay ok", 1), answer("no", 0)
THOUGHT = "<think>1+1</think><answer>2</answer>"


@pytest.mark.parametrize(
    ("builder", "pool", "texts"),
    [
        ("right_wrong", [RIGHT, WRONG, answer("nope", 0, cut=True)], [("ok", "no")]),
        (
            "right_wrong",
            [RIGHT, WRONG, WRONG, answer("no ", 0), RIGHT, answer("nay", 0)],
            [("ok", "no"), ("ok", "nay")],
        ),
        ("short_long", [LONG, RIGHT], [("ok", "okay ok")]),
        ("best_worst", [answer("a", 0.2), answer("b", 0.7), answer("c", 0.9, cut=True)], [("b", "a")]),
        ("tournament", [answer(t, s) for t, s in zip("abcdcx", (2, 0, 3, 1, 9, 9), strict=True)], [("c", "b")]),
        ("tournament", [answer("a", 1), answer("b", 9, cut=True), answer("c", 2), answer("d", 8)], [("c", "a")]),
        ("large_margin", [answer("a", 5.5), answer("b", 4.5), answer("t", 6, "teacher")], [("a", "b")]),
        ("large_margin", [answer("b", 4), answer("t", 6, "teacher")], [("t", "b")]),
        ("verified", [RIGHT, WRONG, answer("t", 1, "teacher")], [("t", "no")]),
        ("verified", [RIGHT, WRONG, answer("t", 0, "teacher")], [("ok", "no")]),
        ("after_verification", [RIGHT, LONG, WRONG], [("okay ok", "no")]),
        ("temporal", [answer("a", 3), answer("b", 2), answer("p", 1, "past"), answer("q", 4, "past")], [("a", "p")]),
        ("temporal", [answer("a", 3), answer("p", 1, "past"), answer("f", 5, "future")], [("f", "p")]),
        ("versus_past", [answer("a", 3), answer("p", 5, "past")], [("p", "a")]),
        ("gold_vs_own", [answer("a", None), answer("gold", None, "gold")], [("gold", "a")]),
    ],
)
def test_pair_builders(builder: Any, pool: list[Any], texts: Any) -> None:
    found = build(list(pool), builder, Options())
    assert [(pool[c]["completion"], pool[r]["completion"]) for c, r in found.choices] == texts


def test_broken_format_preserves_the_answer() -> None:
    pool: list[Any] = [answer(THOUGHT, 1), WRONG]
    found = build(pool, "broken_format", Options())
    assert [pool[c]["completion"] for c, _ in found.choices] == [THOUGHT]
    rejected = pool[found.choices[0][1]]["completion"]
    assert rejected != THOUGHT and "<answer>2</answer>" in rejected
    assert build([RIGHT], "broken_format", Options()).reason == "no right, well-formed answer"


def test_flags_come_from_reward_components() -> None:
    """A right answer by luck is not good; type 1 uses it as the rejected side."""
    lucky = answer("lucky", 1, scores={"sound": 0})
    pool: list[Any] = [{**RIGHT, "scores": {"sound": 1}}, lucky]
    found = build(pool, "after_verification", Options(flags={"consistent": "sound"}))
    assert [pool[r]["completion"] for _, r in found.choices] == ["lucky"]
    with pytest.raises(DataError, match="no reward `sund` in the completions"):
        build(pool, "after_verification", Options(flags={"consistent": "sund"}))


@pytest.mark.parametrize(
    ("builder", "pool", "why"),
    [
        ("right_wrong", [RIGHT, LONG], "no wrong answer"),
        ("right_wrong", [WRONG, WRONG], "no right answer"),
        ("right_wrong", [answer("a", 1, cut=True), answer("b", 0, cut=True)], "all answers truncated"),
        ("best_worst", [answer("a", 0.5), answer("b", 0.5)], "all scores equal"),
        ("tournament", [answer("a", 1), answer("b", 1)], "all scores equal"),
        ("tournament", [answer("a", 1), answer("b", None)], "fewer than two different answers with a score"),
        ("short_long", [RIGHT, answer("no", 1)], "right answers of one length"),
        ("versus_past", [answer("a", 1), answer("p", 1, "past")], "all scores equal"),
        ("gold_vs_own", [answer("a", 1)], "no `completion` in the row"),
    ],
)
def test_reasons_for_missing_pairs(builder: Any, pool: list[Any], why: str) -> None:
    assert build(list(pool), builder, Options()) == ([], why)


def test_report_names_rows_and_rules_are_applied() -> None:
    other = {"uid": "2"}
    records = [RIGHT, WRONG, answer("", 0), answer("x" * 60, 0), {**RIGHT, **other}, {**LONG, **other}]
    found = pair_rows(SOURCES, records, max_gap=10)
    assert [(r["chosen"], r["rejected"]) for r in found.rows] == [("ok", "no")]
    assert found.dropped == {
        "prompts: no wrong answer": ["2"],
        "pairs: an empty side": ["1"],
        "pairs: lengths too far apart": ["1"],
    }
    assert (found.rows[0]["chosen_source"], found.rows[0]["rejected_source"]) == ("own", "own")


def test_pairs_with_answers_of_other_policies() -> None:
    """Only the policy's answers have win rates; xpo's column says which side the reference sampled."""
    won = pair_rows(SOURCES, [answer("a", 0)], "versus_past", others={"past": [answer("p", 1)]}).rows[0]
    assert (won["ref_sample_is_chosen"], won["chosen_source"], won["chosen_win"], won["rejected_win"]) == (
        True, "past", None, 0.5,
    )  # fmt: skip
    gold = pair_rows(SOURCES, [answer("a", 0)], "gold_vs_own").rows[0]
    assert (gold["chosen"], gold["chosen_tokens"]) == ("gold", None)
    with pytest.raises(DataError, match="builder temporal needs completions of `past`"):
        pair_rows(SOURCES, [RIGHT], "temporal")
    with pytest.raises(DataError, match="builder best_worst reads no completions of `teacher`"):
        pair_rows(SOURCES, [RIGHT, WRONG], "best_worst", others={"teacher": [RIGHT]})


@pytest.mark.parametrize(
    ("records", "hint"),
    [
        ([answer("a", 1, cut=True), answer("b", 0, cut=True)], "raise sampling.max_new_tokens"),
        ([RIGHT, LONG], "take harder prompts"),
        ([WRONG], "take easier prompts"),
    ],
)
def test_error_without_pairs_gives_a_hint(records: Any, hint: str) -> None:
    with pytest.raises(DataError, match=hint):
        pair_rows(SOURCES, records)
