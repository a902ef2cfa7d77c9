"""The pairs stage on outputs of eval and generate runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain import thoughts
from posttrain.data.rows import load_rows
from posttrain.errors import DataError, RecipeError
from posttrain.evaluate import pairs
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Data
from posttrain.run.directory import RunDirectory

PROMPT = [{"role": "user", "content": "1+1"}]


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def left_behind(folder: Path, texts: dict[str, bool], *, graded: bool = True, row: Any = None) -> None:
    folder.mkdir()
    lines(folder / "problems.jsonl", [{"uid": "1", "prompt": PROMPT, **({"row": row} if row else {"accuracy": 0.5})}])
    base = {"step": 0, "problem": 0, "uid": "1", "prompt": "1+1", "finish": "stop"}
    rows = [{**base, "sample": n, "completion": text, "tokens": len(text)} for n, text in enumerate(texts)]
    marks = [{"reward": float(right), "correct": right} if graded else {} for right in texts.values()]
    lines(folder / "completions.jsonl", [{**r, **m} for r, m in zip(rows, marks, strict=True)])


def make(tmp_path: Path, name: str = "run", **values: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    recipe: Any = load_dict({"stage": "pairs", **values}, base_dir=tmp_path, where="test").recipe
    with RunDirectory.open(tmp_path / name, name=name, text="", resolved={}) as directory:
        summary = pairs.run(recipe, directory)
    return summary, [json.loads(line) for line in (tmp_path / name / "pairs.jsonl").read_text().splitlines()]


def test_pairs_of_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_behind(tmp_path / "answers", {"2": True, "two": True, "3": False})
    summary, rows = make(tmp_path, completions="answers/completions.jsonl")
    assert (summary["pairs"], summary["completions"], summary["dropped"]) == (2, 3, {})
    assert summary["right"] == pytest.approx(2 / 3) and summary["score_gap"] == 1
    assert [(r["prompt"], r["chosen"], r["rejected"]) for r in rows] == [(PROMPT, "2", "3"), (PROMPT, "two", "3")]
    assert "2 pairs from 3 completions, 50% with a longer chosen side" in capsys.readouterr().err
    loaded = load_rows(Data(source=str(tmp_path / "run" / "pairs.jsonl")), tmp_path)
    assert len(loaded) == 2


def test_rounds_never_repeat_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_behind(tmp_path / "answers", {"2": True, "3": False, "4": False})
    make(tmp_path, "first", completions="answers", max_pairs=1)
    capsys.readouterr()
    summary, rows = make(tmp_path, "second", completions="answers", not_in=["first"])
    assert [(r["chosen"], r["rejected"]) for r in rows] == [("2", "4")]
    assert summary["dropped"] == {"pairs: repeated": 1}
    assert "left out: pairs: repeated: 1 (row 1)" in capsys.readouterr().err


def test_completions_of_a_generation_are_graded(tmp_path: Path) -> None:
    row = {"uid": "1", "prompt": "1+1", "answer": "2"}
    texts = {"<answer>2</answer>": True, "<answer>3</answer>": True}
    left_behind(tmp_path / "texts", texts, graded=False, row=row)
    rewards = [{"use": "math.accuracy", "params": {"extract": ["answer_tag"]}}]
    _, rows = make(tmp_path, completions="texts", rewards=rewards, scoring={"workers": 1})
    assert [(r["chosen"], r["rejected"], r["answer"]) for r in rows] == [(*texts, "2")]
    with pytest.raises(DataError, match="needs `correct` of every completion"):
        make(tmp_path, "ungraded", completions="texts")


def test_rewards_recognize_the_marks_of_the_model_that_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`model.thoughts` of the generation; the stage pairs itself has no model."""
    monkeypatch.setattr(thoughts, "KNOWN_FORMATS", list(thoughts.FORMATS))
    texts = {r"<think>1+1</think>\boxed{2}": True, r"<think>1+1</think>\boxed{3}": True}
    left_behind(tmp_path / "texts", texts, graded=False, row={"uid": "1", "prompt": "1+1", "answer": "2"})
    resolved = {"stage": "generate", "model": {"path": "x", "thoughts": ["<reason>", "</reason>"]}}
    (tmp_path / "texts" / "resolved.json").write_text(json.dumps(resolved))
    params = {"think_delimiter": "</reason>", "require_think": True}
    rewards = [{"use": "math.accuracy", "params": params}]
    _, rows = make(tmp_path, completions="texts", rewards=rewards, scoring={"workers": 1})
    assert [(r["chosen"], r["rejected"]) for r in rows] == [tuple(texts)]


def test_sides_separable_by_style_give_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "answers"
    left_behind(folder, {})
    problems = [{"uid": str(n), "prompt": f"{n}?", "accuracy": 0.5} for n in range(8)]
    lines(folder / "problems.jsonl", problems)
    sides = [("surely it is", 1.0), ("hmm no idea", 0.0)]
    base = {"finish": "stop", "tokens": 4}
    records = [
        {**base, "uid": str(n), "completion": f"{text} {n}", "reward": reward, "correct": reward == 1}
        for n in range(8)
        for text, reward in sides
    ]
    lines(folder / "completions.jsonl", records)
    summary, _ = make(tmp_path, completions="answers")
    assert summary["style_accuracy"] == 1
    assert "LOOK: letter trigrams alone predict 100% of held-out pairs" in capsys.readouterr().err
    make(tmp_path, "quiet", completions="answers", separability=None)
    assert "LOOK" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"past": "x"}, "past: does nothing with builder right_wrong"),
        ({"builder": "temporal"}, "builder: temporal needs `past`"),
        ({"builder": "best_worst", "max_pairs": 3}, "max_pairs: does nothing with builder best_worst"),
    ],
)
def test_keys_that_the_builder_does_not_accept_are_refused(tmp_path: Path, values: Any, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        load_dict({"stage": "pairs", "completions": "x", **values}, base_dir=tmp_path, where="test")


def test_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="not the run of a finished eval or generate"):
        make(tmp_path, completions="empty")
    with pytest.raises(DataError, match="completions not found: nowhere"):
        make(tmp_path, "other", completions="nowhere")


def test_gold_vs_own_reads_gold_from_an_evaluation(scripted: Any, evaluate: Any, folder: Path) -> None:
    """An eval run's output holds the rows of its data, including the `completion` that gold_vs_own prefers."""
    rows = [{"prompt": "1+1", "answer": "2", "completion": "it is 2"}, {"prompt": "1+2", "answer": "3"}]
    lines(folder / "problems.jsonl", rows)
    scripted(lambda _, i: f"<answer>{i}</answer>")
    evaluate("answers", eval={"samples": 2, "k": [1], "bootstrap": 200})
    summary, made = make(folder, "pairs", completions="answers", builder="gold_vs_own")
    assert [(r["answer"], r["chosen"], r["rejected"], r["chosen_source"]) for r in made] == [
        ("2", "it is 2", "<answer>0</answer>", "gold"),
        ("2", "it is 2", "<answer>1</answer>", "gold"),
    ]
    assert summary["dropped"] == {"prompts: no `completion` in the row": 1}
