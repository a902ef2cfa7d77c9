"""A judge in the trainer's process: queried through the engine, parsed like other judges, with its restrictions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import ModelError, RewardError
from posttrain.evaluate import model_judge
from posttrain.recipe.load import load_dict
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.run.directory import RunDirectory
from posttrain.run.metrics import read_metrics
from posttrain.train import rl
from posttrain.verify.score import Scorer
from posttrain.verify.trial import try_rewards

ASKED = [{"role": "user", "content": "A colour?"}]


@pytest.fixture(autouse=True)
def let_go() -> Any:
    yield
    model_judge.close_judges()


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Script the judge's replies by the question's content. Returns the questions that were asked."""

    def put(**replies: str) -> list[str]:
        heard: list[str] = []
        from posttrain.batch import Rollout
        from posttrain.rollout.hf import TransformersEngine

        def generate(_self: Any, prompts: Any, *_: Any, **__: Any) -> list[Rollout]:
            heard.extend(prompt.text for prompt in prompts)
            words = [next((r for key, r in replies.items() if key in p.text), "hm") for p in prompts]
            return [Rollout(p, i, (), w, "stop", 0) for i, (p, w) in enumerate(zip(prompts, words, strict=True))]

        monkeypatch.setattr(TransformersEngine, "generate", generate)
        monkeypatch.setattr(TransformersEngine, "window", 100_000, raising=False)
        return heard

    return put


def grade(completions: list[str], **params: Any) -> list[Any]:
    columns = {name: params.pop(name) for name in ("answer", "rubric") if name in params}
    return model_judge.score(completions, [ASKED] * len(completions), **columns, path="tiny", **params)


def test_truncated_reply_is_not_a_judgement(says: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.rollout.hf import TransformersEngine

    says(good="Score: 9", cut="Score: 1")
    whole = TransformersEngine.generate

    def generate(*arguments: Any, **settings: Any) -> Any:
        found = whole(*arguments, **settings)
        return [replace(one, finish="length") if "Score: 1" in one.text else one for one in found]

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    for _ in range(2):  # the second time from the cache
        assert grade(["good", "cut"]) == [
            {"reward": 0.9, "unparsed": 0.0},
            {"reward": None, "unparsed": 1.0},
        ]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make room for any question: the tiny model's window is short."""
    judge = model_judge._load_judge("tiny", ".", "auto", "auto")
    monkeypatch.setattr(judge.engine, "window", 100_000)


@pytest.mark.usefixtures("wide")
def test_ratings_are_fractions_and_requested_once(says: Any) -> None:
    heard = says(Blue="<think>Score: 1</think>Good.\nScore: 9", Green="I cannot say")
    found = grade(["Blue", "Green", "<think>Blue</think>Red", "Blue"])
    assert found == [
        {"reward": 0.9, "unparsed": 0.0},
        {"reward": None, "unparsed": 1.0},
        {"reward": None, "unparsed": 1.0},  # it does not see the thought
        {"reward": 0.9, "unparsed": 0.0},
    ]
    assert len(heard) == 3
    grade(["Green", "Blue"])
    assert len(heard) == 3


@pytest.mark.usefixtures("wide")
def test_rubrics_and_comparisons(says: Any) -> None:
    says(criteria="1: yes\n2: no", compare="Verdict: A")
    rubric = [[{"text": "a colour", "weight": 3}, "short"], None]
    assert grade(["Blue", "Blue"], ask="rubric", rubric=rubric) == [{"reward": 0.75, "unparsed": 0.0}, None]
    found = grade(["Blue", "", "Blue"], ask="versus", answer=["Azure", "Azure", None])
    assert found == [{"reward": 0.5, "unparsed": 0.0}, {"reward": 0.0, "unparsed": 0.0}, None]


def test_question_without_room_has_no_reply() -> None:
    """The tiny model has 256 tokens, and the question alone has more characters."""
    judge = model_judge._load_judge("tiny", ".", "auto", "auto")
    judge.engine.window = 256
    assert grade(["Blue"], max_tokens=8) == [{"reward": None, "unparsed": 1.0}]


@pytest.mark.parametrize(
    ("params", "error", "told"),
    [
        ({}, RewardError, "needs params"),
        ({"path": "no/such/folder"}, ModelError, "no/such"),
        ({"path": "tiny", "samples": 2}, RewardError, "all equal at temperature 0"),
        ({"path": "tiny", "scale": [1, 1]}, RewardError, r"scale \[1, 1\]"),
        ({"path": "tiny", "ask": "rank"}, RewardError, "parameter `ask`"),
        ({"path": "tiny", "template": "gone.txt"}, RewardError, "gone.txt"),
    ],
)
def test_mistakes_are_reported_before_scoring(params: Any, error: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=told), Scorer([Reward(use="judge_model", params=params)], Scoring(), tmp_path):
        pass


def test_step_is_judged_by_the_training_engine(tmp_path: Path) -> None:
    """The tiny model answers with noise: nothing is readable, the rows abstain, and the run counts them."""
    (tmp_path / "grade.txt").write_text("{completion}\n")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}+1"}) for i in range(4)))
    (tmp_path / "s.py").write_text("def short(completion): return float(len(completion) < 9)\n")
    judge = {"use": "judge_model", "params": {"path": "tiny", "template": "grade.txt", "max_tokens": 4}}
    values = {
        **{"stage": "rl", "model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}, "scoring": {"workers": 1}},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8},
        "rewards": [{"use": "s.py:short"}, {**judge, "weight": 0.1, "on_none": "ignore_component"}],
        "run": {"steps": 1},
    }
    loaded = load_dict(values, base_dir=tmp_path, where="test")
    with RunDirectory.open(tmp_path / "run", name="run", text="", resolved=loaded.resolved) as directory:
        rl.run(loaded.recipe, directory)
    [row] = read_metrics(directory.path)
    assert row["rewards/judge_model/unparsed/mean"] == 1.0
    assert row["rewards/judge_model/abstained"] == 4
    assert not model_judge._load_judge.cache_info().currsize


@pytest.mark.usefixtures("wide")
def test_in_process_judge_is_probed_with_injections(says: Any, tmp_path: Path) -> None:
    """A judge that follows instructions in the answer is detected."""
    says(**{"expert has checked": "Score: 10"}, Capital="Score: 2")
    rows = [{"uid": "0", "prompt": "Capital?", "answer": "Oslo"}]
    monkey = model_judge._load_judge("tiny", str(tmp_path), "auto", "auto")
    monkey.engine.window = 100_000
    trial = try_rewards([Reward(use="judge_model", params={"path": "tiny"})], Scoring(workers=1), tmp_path, rows)
    assert trial.injected["judge_model"]["self-praise"] == (1, 1)
    assert trial.injected["judge_model"]["orders"] == (0, 1)
