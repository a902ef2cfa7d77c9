"""Rewards for SQL, JSON, BLEU, boxes, scripts and agents: properties and edge cases beyond the vectors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from posttrain.verify import agents, bleu, boxes, language, sql, structured
from rewards import format

DB = ["CREATE TABLE emp (id INTEGER, name TEXT, pay INTEGER)", "INSERT INTO emp VALUES (1, 'Ann', 10), (2, 'Bo', 20)"]
GOLD = "SELECT name FROM emp WHERE pay > 15"


def test_gold_against_itself_is_the_maximum() -> None:
    assert sql.sql_reward(GOLD, GOLD, DB)["reward"] == 8.0
    assert sql.sql_reward(f"```SQL\n{GOLD};\n```", GOLD, DB, weights={"judge": 0})["reward"] == 6.0


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE emp",
        "SELECT 1; SELECT 2",
        "WITH x AS (SELECT 1) DELETE FROM emp",
        "PRAGMA writable_schema = ON",
        "ATTACH DATABASE '/tmp/x' AS y",
        "SELECT load_extension('x')",
        "SELECT readfile('/etc/passwd')",
        "SELECT zeroblob(2000000000)",
        "SELECT * FROM pragma_database_list",
        "SELECT '\ud800'",
        "SELECT \x00",
    ],
)
def test_only_reading_queries_run_and_the_database_is_unchanged(query: str) -> None:
    connection = sql.database(DB)
    assert sql.run_query(connection, query, 1.0).rows is None
    assert sql.run_query(connection, "SELECT count(*) FROM emp", 1.0).rows == [(2,)]


def test_endless_query_costs_its_time_limit() -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    assert "interrupted" in sql.run_query(sql.database(DB), endless, 0.05).error
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100001) SELECT i FROM n"
    assert "more than" in sql.run_query(sql.database(DB), many, 5.0).error


def test_a_database_file_is_copied_not_opened_for_writing(tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (7)")
    before = (tmp_path / "shop.db").read_bytes()
    assert sql.sql_reward("SELECT x FROM t", "SELECT x FROM t", "shop.db", root=tmp_path)["reward"] == 8.0
    assert (tmp_path / "shop.db").read_bytes() == before
    with pytest.raises(sqlite3.OperationalError):
        sql.sql_reward("SELECT 1", "SELECT 1", str(tmp_path / "missing.db"))


def test_order_and_duplicates_count_only_if_requested() -> None:
    assert sql.same_rows([(1,), (2,)], [(2,), (1,), (1,)])
    assert not sql.same_rows([(1,), (2,)], [(2,), (1,)], order_sensitive=True)


def test_tokens_and_names() -> None:
    assert sql.tokens("SELECT a.\"B c\" FROM t WHERE x>='It''s' || 1.5") == [
        *("select", "a", ".", '"b c"', "from", "t", "where", "x", ">=", "'it''s'", "||", "1.5"),
    ]
    assert sql.names("SELECT `Pay`, 'emp' FROM \"Emp\"") == {"select", "pay", "from", "emp"}
    assert sql.ngram_overlap(["a"], ["a"]) == 1.0
    assert sql.ngram_overlap(["a"], ["b"]) == 0.0
    assert sql.query_in("<think>```sql\nno\n```</think><answer>SELECT 1 ;</answer>") == "SELECT 1"
    assert sql.query_in("<think>so</think>SELECT 1;<think>```sql\nSELECT 2\n```") == "SELECT 1"
    assert sql.query_in("<think>so: <answer>SELECT 1</answer>") == ""
    assert sql.run_query(sql.database(DB), "-- note\n/* two */ SELECT 1", 1.0).rows == [(1,)]


@pytest.mark.parametrize("text", ["{'a': 1}", '{"a": NaN}', '{"a": 1, "a": 1}', "[1]", "3", "so: {}", "[" * 100_000])
def test_text_that_is_not_an_object(text: str) -> None:
    assert structured.json_reward(text, {"a": 1})["validity"] == 0.0
    assert structured.json_reward(text, {"a": 1})["reward"] == 0.0


def test_values_are_compared_by_type() -> None:
    assert structured.alike(1, 1.0000001, 6) and structured.alike(" a", "a ", 6) and structured.alike([1], [1.0], 6)
    assert not structured.alike(1, True, 6) and not structured.alike("1", 1, 6) and not structured.alike([True], [1], 6)
    assert structured.alike(10**400, 10**400, 6) and not structured.alike(10**400, 1.0, 6)


def test_a_schema_replaces_the_overlap_of_keys() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 5}}}
    assert structured.json_reward('{"a": 7, "b": 1}', {"a": 7}, schema=schema)["structure"] == 1.0
    assert structured.json_reward('{"a": 4}', {"a": 4}, schema=schema)["structure"] == 0.0


def test_length_part_has_weight_0_by_default() -> None:
    long: dict[str, Any] = {"tokens": 50, "budget": 100}
    assert structured.json_reward('{"a": 1}', {"a": 1}, **long) == {
        **dict.fromkeys(("reward", "validity", "format", "structure", "content"), 1.0),
        "length": 0.5,
    }
    assert structured.json_reward('{"a": 1}', {"a": 1}, weights={"length": 1}, **long)["reward"] == 0.9


def test_bleu_by_hand() -> None:
    """a b c d against a b x d: 3 of 4, 1 of 3, 0 of 2, 0 of 1, add-one smoothed: (4/5 * 2/4 * 1/3 * 1/2)^(1/4)."""
    assert bleu.bleu("a b c d", ["a b x d"]) == pytest.approx((4 / 5 * 2 / 4 * 1 / 3 * 1 / 2) ** 0.25)
    assert bleu.bleu("same words here", ["same words here", "a longer reference than that"]) == 1.0
    assert bleu.bleu(" ", ["a"]) == 0.0


def test_tokens_of_machine_translation() -> None:
    text = "It's 3,000.5 km-long (about) 5-6 &quot;ok&quot;, e.g."
    assert bleu.tokens_13a(text) == [
        *("It's", "3,000.5", "km-long", "(", "about", ")", "5", "-", "6", '"', "ok", '"', ",", "e", ".", "g", "."),
    ]


def test_selection_of_rows() -> None:
    scores = [0.3, 0.1, 0.5, 0.1]
    assert bleu.choose(scores, 3) == [0, 1, 3]
    assert bleu.choose(scores, 1) == [1]
    assert bleu.choose(scores, 2, mode="easy") == [0, 2]
    assert bleu.choose(scores, 2, mode="random", seed_order=[2, 0, 1, 3]) == [0, 2]
    assert bleu.choose(scores, 9) == [0, 1, 2, 3]


def test_exact_boxes_with_full_confidence_get_the_maximum() -> None:
    text = "<think>a</think><answer>[{'Position': [0, 0, 2, 2], 'Confidence': 1}, {'Position': [5, 5, 9, 9]}</answer>"
    assert boxes.box_reward(text, [[5, 5, 9, 9], [0, 0, 2, 2]])["reward"] == 3.0


@pytest.mark.parametrize(
    "written",
    ["[{'Position': [0, 0, 1]}]", "[{'Box': [0, 0, 1, 1]}]", "5", "[[0, 0, 1, 1]]", "[{'Position': [0, 0, 1, NaN]}]"],
)
def test_unreadable_boxes_score_0(written: str) -> None:
    found = boxes.box_reward(f"<answer>{written}</answer>", [[0, 0, 1, 1]])
    assert (found["iou"], found["confidence"], found["format"]) == (0.0, 0.0, 0.0)


def test_confidence_is_clamped_to_0_and_1() -> None:
    """A matched box with c = 1e6 counts as c = 1, an unmatched one with c = -1e6 as c = 0: 1 each, never more."""
    box = "<answer>[{'Position': [0, 0, 2, 2], 'Confidence': %g}]</answer>"
    assert boxes.box_reward(box % 1e6, [[0, 0, 2, 2]])["confidence"] == 1.0
    assert boxes.box_reward(box % -1e6, [[5, 5, 9, 9]])["confidence"] == 1.0


def test_overlap_measures() -> None:
    assert boxes.iou((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(1 / 3)
    assert boxes.iou((2, 2, 0, 0), (0, 0, 2, 2)) == 0.0
    half = "<answer>[{'Position': [0, 0, 2, 1], 'Confidence': 0.8}]</answer>"
    assert boxes.box_reward(half, [[0, 0, 2, 2]])["confidence"] == pytest.approx(0.2), "0.5 is not above the threshold"
    assert boxes.box_reward(half, [])["iou"] == 0.0


def test_units_of_writing_systems() -> None:
    assert list(language.units("don't well-known x 5")) == ["LATIN", "LATIN"]
    assert list(language.units("漢字かな カナー 한국어")) == [
        *("CJK", "CJK", "HIRAGANA", "HIRAGANA", "KATAKANA", "KATAKANA", "KATAKANA", "HANGUL"),
    ]
    assert list(language.units("हिन्दी ไทย abcдеж")) == ["DEVANAGARI", "THAI", "LATIN", "CYRILLIC"]
    with pytest.raises(ValueError, match="unknown language 'xx'"):
        language.language_share("a", language="xx")


def test_translated_word_never_lowers_the_language_share() -> None:
    mixed = [language.language_share(f"yes {word} no") for word in ("да", "好", "yes")]
    assert mixed == [pytest.approx(2 / 3), pytest.approx(2 / 3), 1.0]
    assert language.language_share("opened thought</think> 答え", language="en") == 1.0


def test_steps_of_agents() -> None:
    valid = agents.read_step("so <planning>p</planning> then <action> go </action>", True)
    assert valid == ("planning", "go", True)
    for text in (
        "<action>go</action><planning>p</planning>",
        "<planning> </planning><action>go</action>",
        "<planning>p</planning><explore>e</explore><action>go</action>",
        "<planning>p</planning>",
    ):
        assert agents.read_step(text, True) == ("none", "", False)
    first = agents.read_step("<reflection>r</reflection><action>go</action>", True)
    assert agents.meta_rewards([first, first], True) == [1.0, 0.0]
    assert agents.tag_numbers([valid, agents.Step("none", "", False)]) == [0, -1]


def test_programs_and_personas() -> None:
    assert agents.submission_reward("a a b", ["a", "a", "c"]) == {"reward": pytest.approx(-9.9), "matched": 1.0}
    assert agents.submission_reward("", [], 0.0)["reward"] == 0.0
    assert agents.partial_credit(True, None, 3) == 0.0
    assert agents.persona_faithfulness([], [], [])["reward"] == 0
    assert agents.persona_faithfulness([1.0], [0.5], [0.0], average=True)["reward"] == 0.5
    with pytest.raises(ValueError, match="not a probability"):
        agents.persona_faithfulness([1.5], [0.5], [0.0])
    assert agents.turn_score([], []) == 0.0
    assert math.isclose(agents.turn_score([[0, 1], []], [1, 3]), 0.25)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("所以 w e t h i n k s o", 2 / 3),
        ("所以 \U0001d430\U0001d41e\U0001d42d \u24e6\u24d4\u24e3", 2 / 4),
        ("所以 <we think about it>", 2 / 6),
        (r"所以 $\text{so we}$ $\mbox{now add}$", 2 / 6),
        ("所以 x y z <b> </b> \U0001d465\U0001d466", 1.0),
        (r"所以 $\text{mod }n$ $\sin x$ <img src='a b.png'/>", 1.0),
    ],
)
def test_decorated_words_are_words(text: str, share: float) -> None:
    assert language.language_share(text, language="zh") == pytest.approx(share)


@pytest.mark.parametrize("box", ["", " ", r"\ ", ".", r"\,\;", "~", r"\quad", r"\text{ }", "...", "?"])
def test_blank_box_is_not_an_answer(box: str) -> None:
    assert format.structure(rf"<think>a</think> \boxed{{{box}}}", mode="boxed") == 0.0


@pytest.mark.parametrize("box", ["7", r"\emptyset", "A", r"\text{no}", "-", "+"])
def test_box_with_content_is_an_answer(box: str) -> None:
    assert format.structure(rf"<think>a</think> \boxed{{{box}}}", mode="boxed") == 1.0


@pytest.mark.parametrize("nothing", [None, "", " ", [], {}])
def test_keys_without_values_are_missing(nothing: object) -> None:
    assert structured.json_reward(json.dumps({"a": nothing, "b": 1}), {"a": "x", "b": 1})["structure"] == 0.5
    assert structured.json_reward(json.dumps({"a": nothing, "b": 1}), {"a": nothing, "b": 1})["reward"] == 1.0
