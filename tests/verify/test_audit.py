"""The gold audit before training: gold answers must score full marks and wrong answers must score less."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RewardError
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.audit import audit_gold, choose_writer, spread_evenly
from posttrain.verify.reward_hacking_probes import probes
from posttrain.verify.reward_test_cases import WRITERS, describe_writer, near_miss, variants
from posttrain.verify.score import Scorer
from posttrain.verify.trial import try_rewards

Scorers = Callable[..., Scorer]
pytestmark = pytest.mark.usefixtures("forked_workers")


def rows(*answers: Any) -> list[dict[str, Any]]:
    return [{"uid": f"r{i}", "prompt": "q", "answer": answer} for i, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("params", "writer"), [({}, "boxed"), ({"extract": ["answer_tag"]}, "answer_tag"), ({"extract": ["hash"]}, "hash")]
)
def test_gold_is_formatted_so_that_the_extractor_finds_it(params: dict[str, Any], writer: str, scorer: Scorers) -> None:
    with scorer({"use": "math.accuracy", "params": params}) as s:
        audit = audit_gold(s, rows("7", "1/2", r"\pi", r"\text{(C)}"))
    assert (audit.checked, audit.bad, audit.writer) == (4, {}, writer)
    assert audit.summary == f"gold scores best on 4 of 4 rows (gold written {describe_writer(writer)})"


def test_gold_that_cannot_be_parsed_stops_the_run(scorer: Scorers) -> None:
    with scorer("math.accuracy") as s, pytest.raises(RewardError) as caught:
        audit_gold(s, rows("}", "7"))
    assert "gold does not score best on 1 of 2 rows" in str(caught.value)
    assert "row r0  gold has no score" in str(caught.value)


def test_audit_reports_the_exception_a_reward_raises_on_gold(script: Callable[..., Path], scorer: Scorers) -> None:
    path = script(
        "def score(completion, answer):\n"
        "    if int(answer) % 2: raise ValueError(f'odd {answer}')\n"
        "    return float(completion.endswith(answer + '}'))\n"
    )
    with (
        scorer(f"{path}:score") as s,
        pytest.raises(RewardError, match="row r1  gold has no score: ValueError: odd 71"),
    ):
        audit_gold(s, rows("70", "71"))


def test_bad_rows_beyond_those_shown_are_counted(scorer: Scorers) -> None:
    with scorer("math.accuracy") as s, pytest.raises(RewardError) as caught:
        audit_gold(s, rows(*["}"] * 12))
    (problem,) = caught.value.problems
    assert str(problem).count("gold has no score") == 5 and "\n  and 7 more rows\n  hint:" in str(problem)


@pytest.mark.parametrize("answer", [None, "", "n/a", ["1"]])
def test_unusable_golds_are_reported_as_data_errors(answer: Any, scorer: Scorers) -> None:
    with scorer("math.accuracy") as s, pytest.raises(RewardError) as caught:
        audit_gold(s, rows(*[answer] * 12))
    hint = caught.value.problems[0].hint
    assert "`data.columns: {answer: COLUMN}`, or remove these rows" in hint and "GOLD(row)" not in hint


def test_max_bad_gold_is_a_fraction_of_rows(scorer: Scorers) -> None:
    data = rows("}", *map(str, range(100, 109)))  # 1 of 10
    with scorer("math.accuracy", max_bad_gold=0.1) as s:
        assert audit_gold(s, data).bad == {"r0": "gold has no score"}
    with scorer("math.accuracy", max_bad_gold=0.09) as s, pytest.raises(RewardError, match="1 of 10 rows"):
        audit_gold(s, data)


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("return 1.0", "near miss and empty and truncated and very long and unicode and garbage score as much as gold"),
        (
            "return float(bool(completion))",
            "near miss and truncated and very long and unicode and garbage score as much",
        ),
        ("return 0.0", "gold scores 0, less than scoring.correct_at 1"),
        ("return None", "gold has no score"),
        ("raise ValueError", "every call on row r0 raised"),
        ("return float(answer in completion or len(completion) > 9000)", "very long scores as much as gold"),
    ],
)
def test_reward_that_fails_the_gold_audit_is_refused(
    body: str, wrong: str, script: Callable[..., Path], scorer: Scorers
) -> None:
    path = script(f"def score(completion, answer): {body}")
    with scorer(f"{path}:score") as s, pytest.raises(RewardError, match=wrong):
        audit_gold(s, rows("77", "88"))


def test_script_can_define_how_gold_is_formatted(script: Callable[..., Path], scorer: Scorers) -> None:
    path = script(
        """
        def score(completion, answer): return float(completion == f"<<{answer}>>")
        def GOLD(row): return f"<<{row['answer']}>>"
        """
    )
    with scorer(f"{path}:score") as s:
        assert audit_gold(s, rows("77")).writer == "GOLD of the script"


def test_audit_of_tool_call_gold(scorer: Scorers) -> None:
    gold = {"tools": [{"name": "weather", "parameters": {"city": "Paris", "n": 2}}], "response": True}
    with scorer("tools.toolrl") as s:
        assert audit_gold(s, rows(gold, json.dumps(gold))).bad == {}


def test_a_reward_that_reads_no_column_is_not_audited(scorer: Scorers) -> None:
    with scorer("format.structure") as s:
        assert audit_gold(s, rows("7")).summary == "gold not audited: structure reads no data column"


UNUSABLE = {
    "null": None,
    "empty": "  ",
    "NaN": float("nan"),
    "`nan`": "nan",
    "`None`": "None",
    "`see figure`": "see figure",
    "`See the diagram above.`": "See the diagram above.",
    "`Answers may vary`": "Answers may vary",
    "empty list": [],
    "a list": ["7", "8"],
    "prose": "The proof is by induction on n.",
}


def test_every_row_counts_and_rows_without_usable_gold_are_reported(scorer: Scorers) -> None:
    with scorer("math.accuracy", max_bad_gold=1.0) as s:
        audit = audit_gold(s, rows("7", *UNUSABLE.values(), r"\frac12"))
    assert (audit.checked, len(audit.bad)) == (13, 11)
    assert audit.bad == {f"r{i}": f"no usable gold: {why}" for i, why in enumerate(UNUSABLE, 1)}
    assert audit.summary.startswith(
        "gold scores best on 2 of 13 rows (gold written in \\boxed{}); 11 rows have no usable gold ("
    )
    with scorer("math.accuracy") as s, pytest.raises(RewardError, match=r"11 of 13 rows .*max_bad_gold 0\.05"):
        audit_gold(s, rows("7", *UNUSABLE.values(), r"\frac12"))


@pytest.mark.parametrize("answers", [(None,), ("", None), (float("nan"),) * 3, ([], [None]), ("n/a", "-")])
def test_golds_that_are_all_unusable_stop_the_run(answers: tuple[Any, ...], scorer: Scorers) -> None:
    """Whatever other rewards there are to train with."""
    with scorer("math.accuracy", "format.structure") as s, pytest.raises(RewardError, match="no usable gold") as caught:
        audit_gold(s, rows(*answers))
    assert f"on {len(answers)} of {len(answers)} row" in str(caught.value)


def test_rows_of_mixed_data_are_audited_by_the_reward_that_applies(
    script: Callable[..., Path], scorer: Scorers
) -> None:
    """A null answer beside program tests is not a missing gold; a row that no reward can judge is."""
    other = script("def passes(completion, tests): return float(tests in completion)")
    data = [
        {"uid": "maths", "prompt": "q", "answer": "7", "tests": None},
        {"uid": "program", "prompt": "q", "answer": None, "tests": "assert True"},
        {"uid": "neither", "prompt": "q", "answer": None, "tests": None},
    ]
    with scorer("math.accuracy", f"{other}:passes", max_bad_gold=1.0) as s:
        assert s.rewards[s.correctness].name == "accuracy"
        audit = audit_gold(s, data)
    assert (audit.checked, dict(audit.bad)) == (2, {"neither": "no usable gold: null"})
    with scorer("math.accuracy", {"use": f"{other}:passes", "weight": 0}, max_bad_gold=1.0) as s:
        assert audit_gold(s, data).checked == 3


@pytest.mark.parametrize("extract", ["boxed", "answer_tag", "hash", "anchor", "last_number"])
def test_gold_reply_holds_the_final_answer_of_a_reference_solution(extract: str, scorer: Scorers) -> None:
    """The solution itself is never written (it would be compared with itself); a near miss is a different answer."""
    golds = ("6 * 7 = 42\n#### 42", r"We get $x = \boxed{17}$.", "Half of 18 is 9. The answer is 9.", '["18"]', "25")
    with scorer({"use": "math.accuracy", "params": {"extract": [extract]}}, max_bad_gold=0.0) as s:
        audit = audit_gold(s, rows(*golds))
        name, write = choose_writer(s, rows(*golds))
    assert (audit.checked, dict(audit.bad)) == (5, {})
    if name != "plain":
        written = [write(row) or "" for row in rows(*golds)]
        assert all(
            gold in text and "*" not in text for gold, text in zip(("42", "17", "9", "18", "25"), written, strict=True)
        )


@pytest.mark.parametrize("use", ["math.accuracy", "numeric.distance"])
def test_column_of_dicts_is_refused_with_the_key_to_use(use: str, scorer: Scorers) -> None:
    golds = [{"style": "rule", "ground_truth": str(n)} for n in range(8)]
    with scorer(use) as s, pytest.raises(RewardError, match="column `answer` holds dicts") as caught:
        audit_gold(s, rows(*golds))
    assert "its keys: style, ground_truth" in str(caught.value)
    assert "data.columns: {answer: THEIR_COLUMN.ground_truth}" in str(caught.value)
    with pytest.raises(RewardError, match="holds dicts"):
        try_rewards([Reward(use=use)], Scoring(workers=1), None, rows(*golds))


@pytest.mark.parametrize(
    ("use", "golds"),
    [
        ("qa.search_r1", (["Oslo", "Kristiania"], "Paris", ["", "Rome"])),
        ("qa.search_r2", (["Oslo", "Kristiania"], "Paris")),
        ("qa.reseek", (["Oslo", "Kristiania"], "Paris")),
        ("qa.ansf1", (["Oslo", "Rome"], [["New York City", "NYC"], "Boston"], "Paris")),
        ("bleu.bleuberi", (["The cat sat on the mat.", "A cat sat there."], "It rains today again.")),
    ],
)
def test_lists_are_valid_gold_for_rewards_that_take_lists(use: str, golds: tuple[Any, ...], scorer: Scorers) -> None:
    with scorer(use, max_bad_gold=0.0) as s:
        audit = audit_gold(s, rows(*golds))
    assert (audit.checked, dict(audit.bad)) == (len(golds), {})


def test_rows_are_not_counted_if_the_reward_does_not_read_the_column(scorer: Scorers) -> None:
    """Programs are judged by `tests`; an `answer` beside the tests is only tried."""
    with scorer("countdown.expression") as s:
        data = [{"uid": "a", "prompt": "q", "target": 16, "numbers": [3, 5, 2]}]
        assert audit_gold(s, data).skipped.startswith("no row has an `answer`; GOLD(row)")
        assert audit_gold(s, [*data, {**data[0], "uid": "b", "answer": "(3+5)*2"}]).checked == 1


def test_a_trial_counts_every_row() -> None:
    data = rows("7", "12", None, float("nan"), "see figure")
    trial = try_rewards([Reward(use="math.accuracy")], Scoring(workers=1), None, data)
    assert trial.rows == 5
    assert trial.bad_gold == {
        f"r{i}": f"no usable gold: {w}" for i, w in ((2, "null"), (3, "NaN"), (4, "`see figure`"))
    }


OWN_GOLD = """
import re

def right(completion, final):
    found = re.findall(r"boxed{(.*?)}", completion.rpartition("</think>")[2])
    return float(found[-1:] == [str(final)])

def GOLD(row):
    return {gold}
"""


@pytest.mark.parametrize(
    ("gold", "miss"),
    [
        ("f\"so boxed{{{row['final']}}}\"", "so boxed{17}"),
        ('row["solution"]', ""),  # a stored text does not depend on the column, so there is no near miss to write
    ],
)
def test_script_gold_in_a_column_other_than_answer(
    gold: str, miss: str, script: Callable[..., Path], scorer: Scorers
) -> None:
    path = script(OWN_GOLD.replace("{gold}", gold))
    data = [{"uid": "a", "prompt": "3 + 4", "final": 7, "solution": "3 + 4 = 7, boxed{7}", "answer": "not it"}]
    data += [{"uid": "b", "prompt": "3 + 13", "final": "16", "solution": "3 + 13 = 16, boxed{16}"}]
    with scorer(f"{path}:right") as s:
        audit = audit_gold(s, data)
        _, write = choose_writer(s, data)
    assert (audit.checked, dict(audit.bad)) == (2, {})
    assert write.with_answer(data[1], "17") == miss
    assert ("every answer" in probes(data[1], write)) == bool(miss)  # without wrong answers the list is not complete


def test_missing_column_is_reported_before_a_worker_is_called(scorer: Scorers) -> None:
    with scorer("math.accuracy") as s, pytest.raises(RewardError, match="no column `answer`"):
        audit_gold(s, [{"uid": "a", "solution": "7"}])


def test_invalid_return_value_is_reported(script: Callable[..., Path], scorer: Scorers) -> None:
    path = script("def score(completion, answer): return 'yes'")
    with scorer(f"{path}:score") as s, pytest.raises(RewardError, match=r"row r0: returned 'yes'"):
        audit_gold(s, rows("7"))


def test_audit_samples_at_most_64_evenly_spaced_rows() -> None:
    chosen = spread_evenly([{"i": i} for i in range(640)], 64)
    assert [row["i"] for row in chosen] == list(range(0, 640, 10))
    assert len(spread_evenly([{"i": i} for i in range(65)], 64)) == 64
    assert len(spread_evenly([{"i": 0}], 64)) == 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("825", "925"),
        ("9", "8"),
        (r"\frac{1}{2}", r"\frac{2}{2}"),
        (r"\text{(C)}", r"\text{(D)}"),
        ("Z", "A"),
        ("yes", "no"),
        (r"\pi", r"\pi + 1"),
        ("x", "x + 1"),
        ("Paris", "Parit"),
        ("{1, 2}", "{2, 2}"),  # a set, not JSON
        (5, 6),
        (True, False),
        ({"a": None, "b": {"c": "7"}}, {"a": None, "b": {"c": "8"}}),
        ('{"a": ["yes", "no"]}', '{"a": ["no", "no"]}'),
        (["7", "8"], ["8", "8"]),
    ],
)
def test_near_miss(answer: Any, expected: Any) -> None:
    assert near_miss(answer) == expected


def test_answer_variants_differ_and_record_how_they_end() -> None:
    found = variants(rows("825")[0], WRITERS["answer_tag"])
    assert found is not None
    assert len({v.completion for v in found.values()}) == len(found)
    assert {name for name, v in found.items() if v.finish == "length"} == {"truncated", "very long"}
    assert found["very long"].token_count > 1000
    assert variants({"answer": " "}, WRITERS["boxed"]) is None


def test_trial_counts_outcomes_by_kind(script: Callable[..., Path]) -> None:
    path = script(
        """
        def picky(completion, answer):
            if not completion:
                raise ValueError("empty")
            if len(completion) > 9000:
                return None
            return float(answer in completion)
        """
    )
    trial = try_rewards([Reward(use=f"{path}:picky")], Scoring(workers=1), None, rows("77", "88"))
    cells = trial.table["picky"]
    assert (cells["gold"].mean, cells["near miss"].mean) == (1.0, 0.0)
    assert (cells["empty"].mean, cells["empty"].errors) == (None, 2)
    assert (cells["very long"].mean, cells["very long"].abstained) == (None, 2)
    assert trial.failures == 2
    assert trial.bad_gold == {}
    assert trial.first_traceback is not None and "ValueError: empty" in trial.first_traceback


def test_gold_time_outs_stop_the_audit_early(script: Callable[..., Path], scorer: Scorers) -> None:
    """Four calls of 0.4 s in one worker instead of 64 rows with seven variants each."""
    path = script("def score(completion, answer):\n    while True:\n        pass")
    started = time.monotonic()
    with (
        scorer({"use": f"{path}:score", "timeout_s": 0.4}) as s,
        pytest.raises(RewardError, match=r"every gold answer of row a takes longer than 0\.4 s"),
    ):
        audit_gold(s, [{"uid": "a", "answer": "1"}] * 64)
    assert time.monotonic() - started < 20


def test_error_for_a_reward_without_a_return_asks_for_one(script: Callable[..., Path], scorer: Scorers) -> None:
    path = script("def score(completion, answer):\n    answer in completion\n")
    with scorer(f"{path}:score") as s, pytest.raises(RewardError, match="score returned None for every gold: is a"):
        audit_gold(s, rows("1", "2"))
    half = script("def score(completion, answer):\n    if answer == '1': return float(answer in completion)\n")
    with scorer(f"{half}:score") as s, pytest.raises(RewardError) as caught:
        audit_gold(s, rows("1", "2"))
    assert "returned None for every" not in str(caught.value)
