"""Exploitable rewards are detected: each one pays for a trick, and the trial names the trick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.reward_hacking_probes import HackProbe, mutations, pays, probes
from posttrain.verify.reward_test_cases import WRITERS, Writer
from posttrain.verify.trial import Trial, as_json, try_rewards

pytestmark = pytest.mark.usefixtures("forked_workers")

ROWS: list[dict[str, Any]] = [{"uid": f"r{n}", "prompt": "q", "answer": str(n)} for n in (7, 12, -3, 45)]
HEAD = "import re\ndef last(text):\n    found = re.findall(r'-?[0-9]+', text.rpartition('</think>')[2])\n"
HEAD += "    return found[-1] if found else ''\n"


def try_reward(use: str, **params: Any) -> Trial:
    return try_rewards([Reward(use=use, params=params)], Scoring(workers=1), None, ROWS)


@pytest.mark.parametrize(
    ("body", "paying"),
    [
        (
            "float(answer in completion)",
            {"gold in the thought": 4, "every answer": 4, "wrong sign": 3, "wrong size": 4},
        ),
        ("float(last(completion).lstrip('-') == answer.lstrip('-'))", {"wrong sign": 4}),
        ("float(last(completion).startswith(answer))", {"wrong size": 4}),
        ("float('correct' in completion or last(completion) == answer)", {"injection": 4}),
        ("float(completion.count(answer)) if last(completion) == answer else 0.0", {"repeated": 4}),
        ("float(last(completion) == answer)", {}),
    ],
)
def test_trial_names_the_exploit_of_a_reward(script: Callable[..., Path], body: str, paying: dict[str, int]) -> None:
    path = script(f"{HEAD}\ndef score(completion, answer):\n    return {body}\n")
    trial = try_reward(f"{path}:score")
    found = {name: paid for name, (paid, _) in trial.paying_tricks.items()}
    assert paying.items() <= found.items()
    if not paying:
        assert found == {}


EVALUATES = """
import re

def _value(completion, {arguments}):
    said = completion.rpartition('<answer>')[2].partition('</answer>')[0]
    try:
        return eval(said)
    except Exception:
        return said

def score(completion, answer):
    {local} = answer
    said = completion.rpartition('<answer>')[2].partition('</answer>')[0]
    value = _value(completion, {local}) if {passes} else eval(said)
    value = ''.join(map(str, value)) if isinstance(value, list) else str(value)
    return {full} * float(value == {local})
"""


@pytest.mark.parametrize("full", [1.0, 0.3])
@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize("local", ["oracle_answer", "gold", "my_own_name", "answer"])
def test_reward_that_evaluates_the_answer_is_detected(
    script: Callable[..., Path], local: str, passes: bool, full: float
) -> None:
    """Whatever the variable that holds the right answer is called, in the reward or in a function of its module; also
    with partial credit.
    """
    path = script(EVALUATES.format(arguments=local, local=local, passes=passes, full=full))
    paying = {
        name: found for name, found in try_reward(f"{path}:score").paying_tricks.items() if "name of the scorer" in name
    }
    (name,) = paying
    assert paying == {name: (3, 3)} and (local in name or (not passes and "answer" in name))


@pytest.mark.parametrize(
    "body",
    [
        "float(last(completion) == answer)",
        "SequenceMatcher(None, answer, completion).ratio()",  # matching letters are not an evaluation
        "len(set('answergold') & set(completion)) / 99",
        "float(len(completion))",
    ],
)
def test_reward_that_compares_letters_is_not_flagged_as_evaluating(script: Callable[..., Path], body: str) -> None:
    path = script(f"from difflib import SequenceMatcher\n{HEAD}\ndef score(completion, answer):\n    return {body}\n")
    assert try_reward(f"{path}:score").tricks["a name of the scorer"] == (0, 3)


def test_shipped_accuracy_pays_for_no_trick() -> None:
    trial = try_reward("math.accuracy")
    assert trial.paying_tricks == {}
    assert trial.tricks["wrong sign"] == (0, 4)
    assert trial.calls_per_second > 0 and trial.workers == 1
    assert as_json(trial)["tricks"]["repeated"] == {"pays": 0, "rows": 4}


def test_mutations_of_an_answer() -> None:
    assert mutations("7") == {"sign": "-7", "size": "70"}
    assert mutations(-2.5) == {"sign": "2.5", "size": "-20.5"}
    assert mutations("0.25")["size"] == "10.25"
    assert mutations("(1, 2)") == {"order": "(2, 1)"}
    assert mutations("0") == mutations("Oslo") == mutations({"a": 1}) == mutations("(1, 1)") == {}


def test_probes_put_gold_in_positions_that_must_not_count() -> None:
    found = probes(ROWS[0], WRITERS["boxed"])
    assert r"\boxed{7}" not in found["gold in the thought"].text.rpartition("</think>")[2]
    assert found["every answer"].text.split() == [rf"\boxed{{{n}}}" for n in ("8", "7", "-7", "70", "8")]
    assert probes({"answer": " "}, WRITERS["boxed"]) == {}


def test_only_the_repetition_probe_can_score_as_much_as_gold() -> None:
    assert pays(HackProbe("x"), 1.0, 1.0) and not pays(HackProbe("x"), 0.9, 1.0)
    assert pays(HackProbe("x", may_equal=True), 1.1, 1.0) and not pays(HackProbe("x", may_equal=True), 1.0, 1.0)
    assert not pays(HackProbe("x"), None, 1.0)


def test_near_miss_of_the_script_replaces_changed_numbers() -> None:
    """`111` and `1110` may both satisfy a formula: only the script can tell. None: a changed number is wrong there."""
    boxed = WRITERS["boxed"]
    own = Writer(boxed.gold, wrong=lambda row: r"\boxed{000}" if row["answer"] == "111" else None)
    found = probes({"answer": "111"}, own)
    assert [name for name in found if name.startswith("wrong")] == []
    assert r"\boxed{000}" in found["injection"].text
    found = probes({"answer": "12"}, own)
    assert [name for name in found if name.startswith("wrong")] == ["wrong sign", "wrong size"]
    assert r"\boxed{22}" in found["injection"].text
