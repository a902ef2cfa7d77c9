"""Best of n: expectations by hand and by enumerating all draws, the table of an evaluation, best.jsonl of a
generation.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.evaluate import generate
from posttrain.evaluate.best_of import best_of, candidate_counts, expected_pick, pick_best_records, pick_weights
from posttrain.recipe.load import load_dict
from posttrain.run.directory import RunDirectory
from posttrain.run.jsonl import read_rows


def test_best_of_n_by_hand():
    """Two of 3, 1, 2 are drawn: {3,1} and {3,2} give 3, {1,2} gives 2. Equal scores share the weight."""
    assert pick_weights([3, 1, 2], 2) == pytest.approx([2 / 3, 0, 1 / 3])
    assert pick_weights([1, 1, 0], 1) == pytest.approx([1 / 3] * 3)
    assert pick_weights([1, 1, 0], 2) == pytest.approx([1 / 2, 1 / 2, 0])
    assert expected_pick([3, 1, 2], [0, 1, 1], 3) == 0
    with pytest.raises(ValueError, match="n must be"):
        pick_weights([1.0], 2)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_best_of_n_matches_enumeration_of_all_draws(n):
    draw = random.Random(n)
    scores = [draw.randrange(4) for _ in range(6)]
    values = [draw.random() for _ in range(6)]
    total = 0.0
    draws = list(itertools.combinations(range(6), n))
    for picked in draws:
        best = [i for i in picked if scores[i] == max(scores[j] for j in picked)]
        total += sum(values[i] for i in best) / len(best)
    assert expected_pick(scores, values, n) == pytest.approx(total / len(draws))


def test_best_of_n_sizes():
    assert [candidate_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def record(
    problem: int, sample: int, score: float | None, correct: bool | None, finish: str = "stop"
) -> dict[str, Any]:
    scores = {"rm": score}
    return {
        "problem": problem,
        "sample": sample,
        "scores": scores,
        "reward": score,
        "correct": correct,
        "finish": finish,
    }


def test_best_of_n_table():
    """Problem 0: the right answer scores best of two: 1/2, then 1.

    Problem 1: it scores worst: 1/2, then 0. A completion without a score or without a verdict is not a candidate; a
    truncated one is wrong.
    """
    records = [
        *(record(0, 0, 2.0, True), record(0, 1, 1.0, False), record(0, 2, None, True), record(0, 3, 5.0, None)),
        *(record(1, 0, 3.0, True, "length"), record(1, 1, 0.0, True)),
    ]
    rows = best_of(records, "rm", resamples=100)
    assert [row["n"] for row in rows] == [1, 2]
    assert [row["accuracy"]["mean"] for row in rows] == pytest.approx([0.5, 0.5])
    assert [row["score"]["mean"] for row in rows] == pytest.approx([1.5, 2.5])
    assert [r["sample"] for r in pick_best_records(records)] == [3, 0]


def test_best_of_n_in_an_evaluation(scripted, evaluate, folder, capsys):
    """Longer answers score higher, and the longest of the four is right for every other problem."""
    (folder / "long.py").write_text("def long(completion):\n    return float(len(completion))\n")

    def script(prompt: str, sample: int) -> str:
        right = f"<answer>{sum(map(int, prompt.split('+')))}</answer>"
        return "." * sample + (right if (sample == 3) == (int(prompt[-1]) % 2 == 0) else "<answer>0</answer>")

    scripted(script)
    rewards = [{"use": "score.py:exact"}, {"use": "long.py:long", "weight": 0.0}]
    summary = evaluate(rewards=rewards, eval={"samples": 4, "best_of": "long", "bootstrap": 100})
    rows = summary["best_of"]["rows"]
    assert summary["best_of"]["by"] == "long" and [row["n"] for row in rows] == [1, 2, 4]
    assert rows[0]["accuracy"]["mean"] == pytest.approx(summary["accuracy"])
    assert rows[-1]["accuracy"]["mean"] == pytest.approx(0.5)
    assert "Best of n by long" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="did you mean `long`"):
        evaluate(rewards=rewards, eval={"samples": 4, "best_of": "lon"}, name="other")


def test_best_of_n_in_a_generation(scripted, folder):
    """Sample 1 is the longest: it is in best.jsonl, and all samples are in completions.jsonl with their scores."""
    (folder / "long.py").write_text("def long(completion):\n    return float(len(completion))\n")
    scripted(lambda _, sample: "ab"[sample] * (1 + sample))
    recipe = {
        "stage": "generate", "model": {"path": "tiny"}, "data": {"source": "problems.jsonl"}, "samples": 2,
        "best_of": {"rewards": [{"use": "long.py:long"}], "scoring": {"workers": 1}},
    }  # fmt: skip
    loaded = load_dict(recipe, base_dir=folder, where="test")
    with RunDirectory.open(folder / "run", name="g", text="", resolved=loaded.resolved) as directory:
        summary = generate.run(loaded.recipe, directory)
    assert [r["completion"] for r in read_rows(folder / "run" / "best.jsonl")] == ["bb"] * 6
    assert json.loads((folder / "run" / "completions.jsonl").read_text().splitlines()[0])["scores"] == {"long": 1.0}
    assert [row["score"]["mean"] for row in summary["best_of"]["rows"]] == [1.5, 2.0]
    with pytest.raises(RecipeError, match="best_of picks among"):
        load_dict({**recipe, "samples": 1}, base_dir=folder, where="test")
