"""Rounds of answers, pairs and DPO on `tiny`: kill -9 between and inside stages changes nothing; the report."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from posttrain.run import rounds
from posttrain.run.metrics import read_metrics

DIGITS = """
def digit(completion):
    return float(any(c.isdigit() for c in completion[:3]))
"""
ROWS = {"source": "rows.jsonl"}
GRADED = {"data": ROWS, "rewards": [{"use": "digits.py:digit"}], "scoring": {"workers": 1}}
RECIPE: dict[str, Any] = {
    "stage": "pipeline",
    "seeds": [3],
    "stages": [
        {
            "name": "start", "stage": "sft", "model": {"path": "tiny"}, "data": ROWS,
            "batch": {"size": 8}, "optim": {"lr": 3e-3}, "run": {"steps": 4},
        },
        {
            "name": "up", "rounds": 2, "start": "stage:start", "reference": "initial", "history": 2,
            "stages": [
                {
                    "name": "answers", "stage": "eval", "model": {"path": "round:policy"}, **GRADED,
                    "sampling": {"max_new_tokens": 6}, "engine": {"batch_size": 40}, "eval": {"samples": 4},
                },
                {
                    "name": "pairs", "stage": "pairs", "builder": "best_worst",
                    "completions": "stage:answers/completions.jsonl",
                },
                {
                    "name": "train", "stage": "dpo", "loss": {"use": "mnpo", "eta": 0.5},
                    "model": {"path": "round:policy"}, "data": {"source": "stage:pairs/pairs.jsonl"},
                    "batch": {"size": 4}, "optim": {"lr": 1e-3}, "run": {"steps": 5, "save_every": 2},
                },
            ],
        },
    ],
}  # fmt: skip
KILLS = [
    "seed-3/up.1.answers/completions.jsonl",  # inside sampling
    "seed-3/up.1.pairs/summary.json",  # between stages
    "seed-3/up.2.train/checkpoints/step-00000002/MANIFEST.json",  # inside training, after the pass of other policies
]


@pytest.fixture
def base(sft_recipe: Any, tmp_path: Path) -> Path:
    """A folder with rows.jsonl and the reward."""
    del sft_recipe
    (tmp_path / "digits.py").write_text(DIGITS)
    return tmp_path


def results_of(out: Path) -> dict[str, Any]:
    """Return everything that a run of rounds computes, without times."""
    stages = [p.parent for p in sorted(out.glob("seed-3/*/summary.json"))]
    files = {f"{s.name}/{n}": (s / n).read_text() for s in stages for n in ("completions.jsonl", "pairs.jsonl")
             if (s / n).exists()}  # fmt: skip
    metrics = {
        s.name: [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(s)] for s in stages
    }
    weights = {s.name: (s / "final" / "model.safetensors").read_bytes() for s in stages if (s / "final").exists()}
    return {"files": files, "metrics": metrics, "weights": weights}


def test_run_killed_between_and_inside_stages_resumes_exactly(train: Any, base: Path) -> None:
    assert train(RECIPE, base / "unbroken") == 0
    expected = results_of(base / "unbroken")
    assert set(expected["weights"]) == {"start", "up.1.train", "up.2.train"}
    check_report(base / "unbroken")
    broken = base / "broken"
    for number, file in enumerate(KILLS):
        assert train(RECIPE, broken, resume=number > 0, kill={"file": file}) == -signal.SIGKILL, file
    assert not (broken / "seed-3" / "up.2.train" / "summary.json").exists()
    assert train(RECIPE, broken, resume=True) == 0
    assert results_of(broken) == expected


def check_report(out: Path) -> None:
    """Check the table by round, and which other policies the last round's training used."""
    summary = json.loads((out / "summary.json").read_text())
    rows, stages = summary["rounds"]["up"], summary["seeds"]["3"]
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[0]["pairs/pairs"] == stages["up.1.pairs"]["pairs"]
    assert rows[1]["answers/accuracy"] == stages["up.2.answers"]["accuracy"]
    assert "up by round" in (out / "report.html").read_text()
    resolved = json.loads((out / "seed-3" / "up.2.train" / "resolved.json").read_text())
    models = [str(out.resolve() / "seed-3" / s / "final") for s in ("up.1.train", "start")]
    assert (resolved["anchors"]["history"], resolved["anchors"]["reference"]) == (models, models[1])
    assert resolved["run"]["seed"] == rounds.seed(3, "up.2.train") != rounds.seed(3, "up.1.train")


def test_finished_round_is_reported_after_its_last_stage() -> None:
    names = ["start", "up.1.a", "up.1.b", "up.2.a", "up.2.b"]
    done: dict[str, Any] = {"start": {}, "up.1.a": {"accuracy": 0.25}}
    assert rounds.milestones(names, done) == []
    done["up.1.b"] = {"loss_first": 1.0, "loss_last": 0.5}
    assert rounds.milestones(names, done) == ["up: round 1 of 2 is done  a accuracy 0.25  b loss last 0.5"]


def test_sampling_stages_of_a_round_have_different_seeds() -> None:
    """The first samples as if it were the only one; for other stages, and for training stages, names change nothing."""
    samplers = ["before", "up.1.answers", "up.1.past", "up.2.answers", "up.2.past", "after"]
    alone = {name: rounds.seed(3, name) for name in [*samplers, "up.1.train"]}
    found = {name: rounds.seed(3, name, samplers) for name in [*samplers, "up.1.train"]}
    assert {name for name in found if found[name] != alone[name]} == {"up.1.past", "up.2.past"}
    assert len({found[f"up.{n}.{name}"] for n in (1, 2) for name in ("answers", "past")}) == 4
    assert found["before"] == found["after"] == 3


def test_names_of_rounds() -> None:
    """A dot and a number in a name make rounds, whatever the other characters are."""
    assert rounds.seed(3, "start") == 3
    found = rounds.progress([{"a.1.x": {"pairs": 4}, "a.1.half.y": {"loss_last": 1.0}, "b": {"pairs": 1}},
                             {"a.1.x": {"pairs": 6}, "a.2.x": None}])  # fmt: skip
    assert found == {"a": [{"round": 1, "x/pairs": 5.0, "half.y/loss_last": 1.0}]}
    assert rounds.table(found["a"]) == (["round", "x pairs", "half.y loss last"], [["1", "5", "1"]])
