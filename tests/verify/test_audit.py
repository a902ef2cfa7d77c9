"""Gold is tried before training: it must be right and nothing wrong may score as much."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RewardError
from posttrain.verify.audit import audit_gold, choose_writer, spread
from posttrain.verify.probes import probes
from posttrain.verify.score import Scorer
from posttrain.verify.trial import try_rewards
from posttrain.verify.variants import WRITERS, near_miss, variants

Scorers = Callable[..., Scorer]


def rows(*answers: Any) -> list[dict[str, Any]]:
    return [{"uid": f"r{i}", "prompt": "q", "answer": answer} for i, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("params", "writer"), [({}, "boxed"), ({"extract": ["answer_tag"]}, "answer_tag"), ({"extract": ["hash"]}, "hash")]
)
def test_gold_is_written_the_way_the_extractor_finds_it(params: dict[str, Any], writer: str, scorer: Scorers) -> None:
    with scorer({"use": "math.accuracy", "params": params}) as s:
        audit = audit_gold(s, rows("7", "1/2", r"\pi", r"\text{(C)}"))
    assert (audit.checked, audit.bad, audit.writer) == (4, {}, writer)
    assert audit.summary == f"gold scores best on 4 of 4 rows (as {writer})"


def test_gold_that_cannot_be_parsed_stops_the_run(scorer: Scorers) -> None:
    with scorer("math.accuracy") as s, pytest.raises(RewardError) as caught:
        audit_gold(s, rows("}", "7"))
    assert "gold does not score best on 1 of 2 rows" in str(caught.value)
    assert "row r0  gold has no score" in str(caught.value)


def test_max_bad_gold_is_a_share(scorer: Scorers) -> None:
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
        ("return 0.0", "gold scores 0, right is 1"),
        ("return None", "gold has no score"),
        ("raise ValueError", "gold has no score"),
        ("return float(answer in completion or len(completion) > 9000)", "very long scores as much as gold"),
    ],
)
def test_a_reward_that_does_not_know_gold_is_refused(
    body: str, wrong: str, script: Callable[..., Path], scorer: Scorers
) -> None:
    path = script(f"def score(completion, answer): {body}")
    with scorer(f"{path}:score") as s, pytest.raises(RewardError, match=wrong):
        audit_gold(s, rows("77", "88"))


def test_a_script_may_say_how_its_gold_looks(script: Callable[..., Path], scorer: Scorers) -> None:
    path = script(
        """
        def score(completion, answer): return float(completion == f"<<{answer}>>")
        def GOLD(row): return f"<<{row['answer']}>>"
        """
    )
    with scorer(f"{path}:score") as s:
        assert audit_gold(s, rows("77")).writer == "GOLD of the script"


def test_tool_calls(scorer: Scorers) -> None:
    gold = {"tools": [{"name": "weather", "parameters": {"city": "Paris", "n": 2}}], "response": True}
    with scorer("tools.toolrl") as s:
        assert audit_gold(s, rows(gold, json.dumps(gold))).bad == {}


def test_a_reward_that_reads_no_column_is_not_audited(scorer: Scorers) -> None:
    with scorer("format.structure") as s:
        assert audit_gold(s, rows("7")).summary == "gold not audited: structure reads no data column"


def test_rows_without_an_answer_are_not_audited(scorer: Scorers) -> None:
    with scorer("math.accuracy") as s:
        assert audit_gold(s, rows(None, "")).skipped.startswith("no row has an `answer`; GOLD(row)")
        assert audit_gold(s, rows(None, "7")).checked == 1


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
        ('row["solution"]', ""),  # a stored text follows no column: there is no near miss to write
    ],
)
def test_gold_of_a_script_in_another_column_than_answer(
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
    assert ("every answer" in probes(data[1], write)) == bool(miss)  # without wrong answers nothing names them all


def test_a_missing_column_is_told_before_a_worker_is_asked(scorer: Scorers) -> None:
    with scorer("math.accuracy") as s, pytest.raises(RewardError, match="no column `answer`"):
        audit_gold(s, [{"uid": "a", "solution": "7"}])


def test_a_broken_contract_is_told(script: Callable[..., Path], scorer: Scorers) -> None:
    path = script("def score(completion, answer): return 'yes'")
    with scorer(f"{path}:score") as s, pytest.raises(RewardError, match=r"row r0: returned 'yes'"):
        audit_gold(s, rows("7"))


def test_at_most_64_rows_evenly_spaced() -> None:
    chosen = spread([{"i": i} for i in range(640)], 64)
    assert [row["i"] for row in chosen] == list(range(0, 640, 10))
    assert len(spread([{"i": i} for i in range(65)], 64)) == 64
    assert len(spread([{"i": 0}], 64)) == 1


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


def test_variants_differ_and_know_their_ending() -> None:
    found = variants(rows("825")[0], WRITERS["answer_tag"])
    assert found is not None
    assert len({v.completion for v in found.values()}) == len(found)
    assert {name for name, v in found.items() if v.finish == "length"} == {"truncated", "very long"}
    assert found["very long"].token_count > 1000
    assert variants({"answer": " "}, WRITERS["boxed"]) is None


def test_a_trial_counts_what_happens_by_kind(script: Callable[..., Path]) -> None:
    from posttrain.recipe.reward_sections import Reward, Scoring

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


def test_gold_that_is_late_stops_the_audit_early(script: Callable[..., Path], scorer: Scorers) -> None:
    """Four calls of 0.4 s in one worker, not 64 rows of seven variants."""
    path = script("def score(completion, answer):\n    while True:\n        pass")
    started = time.monotonic()
    with (
        scorer({"use": f"{path}:score", "timeout_s": 0.4}) as s,
        pytest.raises(RewardError, match=r"every gold answer of row a takes longer than 0\.4 s"),
    ):
        audit_gold(s, [{"uid": "a", "answer": "1"}] * 64)
    assert time.monotonic() - started < 20
