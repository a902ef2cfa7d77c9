"""Rewards from judges: partial replies, the conversation that a judge sees, and win rates through the loaded reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify import audits
from posttrain.verify.score import Sample, Scorer
from posttrain.verify.transcript import Message


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("1: 0.9 0.7 0.0\n2: 0, 1, .5", [(0.9, 0.7, 0.0), (0.0, 1.0, 0.5)]),
        ("2: 1 1 1\n1: 0 0 0", [(0, 0, 0), (1, 1, 1)]),
        ("1: 0.9 0.7 0.0", None),
        ("1: 0.9 0.7 0.0\n1: 0.9 0.7 0.0", None),
        ("1: 0.9 0.7 1.5\n2: 0 0 0", None),
        ("I cannot say", None),
    ],
)
def test_probabilities_are_read_only_if_all_are_present(reply: str, expected: Any) -> None:
    assert audits.read_probabilities(reply, 2) == expected


def test_judge_sees_tool_results_up_to_the_turn() -> None:
    said = [
        Message("prompt", "task"),
        Message("model", "first"),
        Message("tool", "42", "calculator", "ok"),
        Message("model", "second"),
    ]
    assert audits.turns_so_far(said, ["first", "second"]) == [
        "model: first\ntool: 42",
        "model: first\ntool: 42\nmodel: second",
    ]
    assert audits.turns_so_far([], ["a", "b"]) == ["a", "a\nb"]


def score_samples(use: str, samples: list[Sample], reply: str) -> Any:
    params = {"endpoint": {"url": f"scripted:{reply}", "model": "none", "cache": "none"}}
    section = Reward(use=use, params=params)
    with Scorer([section], Scoring(workers=1), Path.cwd()) as scorer:
        return scorer.score(samples)


def test_win_rates_compare_the_answers_of_each_prompt() -> None:
    """A judge that always names the first position carries no information: every answer gets one half."""
    samples = [
        Sample(completion=text, row={"prompt": prompt}, prompt=prompt, group=group)
        for group, prompt in enumerate(("one?", "two?"))
        for text in ("a", "b", "c")
    ]
    found = score_samples("judge.win_rate", samples, "Verdict: A")
    assert [float(x) for x in found.rewards] == [0.5] * 6
    assert found.components["win_rate/unparsed"] == [0.0] * 6


def test_checklist_scores_each_turn_by_its_weights() -> None:
    sample = Sample(
        completion="hi\nbye",
        row={"prompt": "talk", "checklist": [["greets", {"text": "asks", "weight": 3}], ["ends"]]},
        parts=("hi", "bye"),
    )
    found = score_samples(
        "audits.checklist", [sample], "1: yes\n2: no"
    )  # the second turn has one criterion: unreadable
    assert found.rewards == [None]
    sample = Sample(completion="hi", row={"prompt": "talk", "checklist": [["greets"]]}, parts=("hi", "more"))
    found = score_samples("audits.checklist", [sample], "1: yes")
    assert found.rewards == [1.0]
    assert found.turn_scores["checklist"] == [(1.0, 0.0)]
