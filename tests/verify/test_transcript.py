"""The typed transcript: what a reward gets as `transcript` from a rollout, an example and a labelled row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.batch import Prompt, Rollout, ToolCall, Turn
from posttrain.batch.records import sample_fields, sample_fields_of_record, turn_records
from posttrain.errors import RewardError
from posttrain.evaluate.run import grade
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.examples import run_examples
from posttrain.verify.label_agreement import read_labeled, try_labeled
from posttrain.verify.qa import searched_text
from posttrain.verify.reward_inputs import built_in
from posttrain.verify.score import Sample, Scorer
from posttrain.verify.transcript import Message, make_transcript, read_transcript

SEARCHED = Turn(
    "<search>Norway</search>",
    (ToolCall("search", {}, "Oslo <answer>x</answer>"), ToolCall("search", {}, "error: late", "timeout")),
    reply="Oslo",
)
ANSWERED = Turn("<think>so</think><answer>Rome</answer><information>Rome</information>")
SCRIPT = """
def found(completion, transcript):
    tools = [m for m in transcript if m.role == "tool" and m.kind == "ok"]
    own = [m.text for m in transcript if m.role == "model"]
    assert own and "\\n".join(own) == completion, (own, completion)
    first = transcript[0].role == "prompt"
    return {"reward": float(any("Oslo" in m.text for m in tools)), "turns": len(own), "first": first}

EXAMPLES = [
    ("hm", {"transcript": [{"role": "model", "text": "hm"}, {"role": "tool", "name": "search", "text": "Oslo"}]}, 1.0),
    ("hm", {"transcript": [("model", "hm"), ("tool", "Oslo", "search", "error")]}, 0.0),
    ("Oslo", {}, 0.0),
]
"""


def rollout(*turns: Turn) -> Rollout:
    text = "\n".join(t.text for t in turns) if turns else "Oslo"
    return Rollout(Prompt("1", {"prompt": "q", "answer": "Oslo"}, "<user>q", (1,)), 0, (), text, "stop", 0, turns=turns)


def sample(r: Rollout) -> Sample:
    return Sample(r.text, r.prompt.row, prompt=r.prompt.text, **sample_fields(r))


def test_transcript_roles_and_turns() -> None:
    """Tools give one message per call, an environment its observations; otherwise the completion is one turn."""
    assert built_in("transcript", sample(rollout(SEARCHED, ANSWERED)), 0, None) == [
        Message("prompt", "<user>q"),
        Message("model", SEARCHED.text),
        Message("tool", "Oslo <answer>x</answer>", "search", "ok"),
        Message("tool", "error: late", "search", "timeout"),
        Message("model", ANSWERED.text),
    ]
    played = rollout(Turn("left", reply="a wall", reward=0.0), Turn("right"))
    assert [m[:2] for m in built_in("transcript", sample(played), 0, None)[1:]] == [
        ("model", "left"), ("environment", "a wall"), ("model", "right"),
    ]  # fmt: skip
    alone = Sample("a\nb", {}, prompt="q", parts=("a\n", "b"))  # steps of one turn (scoring.split)
    assert built_in("transcript", alone, 0, None) == [Message("prompt", "q"), Message("model", "a\nb")]


def test_text_written_by_the_model_is_not_a_tool_result() -> None:
    r = rollout(SEARCHED, ANSWERED)
    text = searched_text(built_in("transcript", sample(r), 0, None))
    assert "<information>Oslo  x </information>" in text and "<written>Rome</written>" in text
    assert text.count("<information>") == 1 and "late" not in text and "<user>" not in text
    own = "<search>q</search><information>Oslo</information><answer>Rome</answer>"
    assert "<information>" not in searched_text(make_transcript("<information>Oslo</information>", own))


def test_row_of_completions_gives_the_same_transcript() -> None:
    """`posttrain pairs` grades the records of a generation with tools."""
    for turns in ((SEARCHED, ANSWERED), (Turn("left", reply="a wall", reward=0.5), Turn("right", reward=1.0)), ()):
        r = rollout(*turns)
        again = sample_fields_of_record(json.loads(json.dumps(turn_records(r))))
        first = {key: value for key, value in sample_fields(r).items() if key not in ("messages", "world_score")}
        assert again == first


def test_reward_gets_the_transcript_in_its_worker(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SCRIPT)
    rewards = [Reward(use="s.py:found"), Reward(use="qa.search_r2", weight=0)]
    wrong = rollout(SEARCHED, Turn("<information>Oslo</information><answer>Oslo</answer>"))
    with Scorer(rewards, Scoring(workers=1), tmp_path) as scorer:
        found = grade(scorer, [wrong, rollout()], scorer.failures(enough=2, unit="chunk"))
    assert [f["scores"]["found"] for f in found] == [1.0, 0.0]
    assert [f["scores"]["found/turns"] for f in found] == [2.0, 1.0] and found[0]["scores"]["found/first"] == 1.0
    assert [f["scores"]["search_r2"] for f in found] == [2.0, 0.0], "half of the evidence would be the model's own"


def test_examples_and_labelled_rows_can_hold_a_transcript(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SCRIPT)
    assert all(outcome.ok for outcome in run_examples(tmp_path / "s.py"))
    told: list[Any] = [
        {"role": "prompt", "text": "q"},
        {"role": "model", "text": "hm"},
        {"role": "tool", "text": "Oslo"},
    ]
    rows = [{"completion": "hm", "label": True, "transcript": told}, {"completion": "Oslo", "label": False}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = read_labeled(tmp_path / "rows.jsonl")
    found = try_labeled([Reward(use="s.py:found", correct=True)], Scoring(workers=1), tmp_path, read)
    assert found["rewards"]["found"]["kappa"] == 1.0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("text", "not a transcript: 'text'"),
        ([{"role": "model"}], "not a transcript"),
        ([("model", 3)], "not a transcript"),
        ([{"role": "model", "text": "a", "turn": "1"}], "not a transcript"),
        ([("modell", "a")], "no role 'modell'.*\n.*prompt, model, tool, environment"),
    ],
)
def test_invalid_transcript_is_refused(given: Any, told: str) -> None:
    with pytest.raises(RewardError, match=told) as error:
        read_transcript(given, "a", "line 3")
    assert "line 3" in str(error.value)
