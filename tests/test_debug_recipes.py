"""Every recipe in recipes/debug (found by listing the folder) runs from end to end and writes a complete run
directory."""

import json
import sys

import pytest

from posttrain.path_resolution import shipped_folder
from posttrain.pipeline import run_stage
from posttrain.recipe.load import load
from posttrain.run import status
from posttrain.run.directory import RunDirectory
from posttrain.run.metrics import read_metrics

FOUND = sorted((shipped_folder("recipes") / "debug").glob("*.yaml"))


def test_every_stage_has_a_debug_recipe():
    assert {path.stem for path in FOUND} == {"sft", "dpo", "reward_model", "rl", "tools", "merge", "eval", "pipeline"}


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_debug_recipe_runs(path, tmp_path, request, monkeypatch):
    if path.stem == "pipeline":  # its seeds are processes
        monkeypatch.setattr(sys, "executable", request.getfixturevalue("forked_python"))
    loaded = load(str(path))
    out = tmp_path / "run"
    with RunDirectory.open(out, name=path.stem, text=loaded.text, resolved=loaded.resolved) as directory:
        summary = run_stage(loaded.recipe, directory)
    assert json.loads((out / "summary.json").read_text()) == summary
    check = {"eval": check_evaluation, "merge": check_merge, "pipeline": check_comparison}.get(
        path.stem, check_training
    )
    shown = {"eval": "<h2>", "merge": "<h1", "pipeline": "<h2>"}.get(path.stem, '"title":"Curves"')
    assert shown in (out / "report.html").read_text()
    check(loaded.recipe, out, summary)


def check_training(recipe, out, summary):
    steps = [row["step"] for row in read_metrics(out)]
    assert steps == list(range(1, summary["steps"] + 1)) and len(steps) >= 4
    assert all(row["grad_norm"] > 0 for row in read_metrics(out))
    assert status.read(out).steps == summary["steps"]
    assert (out / "final" / "model.safetensors").exists()
    assert len(list((out / "checkpoints").iterdir())) == recipe.run.keep_checkpoints


def check_evaluation(recipe, out, summary):
    assert len((out / "completions.jsonl").read_text().splitlines()) == recipe.data.size * recipe.eval.samples
    assert summary["accuracy"] == 0.0


def check_merge(_, out, summary):
    assert summary["changed"] == 0 and (out / "final" / "model.safetensors").exists()


def check_comparison(_, out, summary):
    assert [row["model"] for row in summary["table"]] == ["sft", "rl"]
    assert set(summary["seeds"]) == {"0", "1"}
    longer, rl = summary["seeds"]["1"]["longer"], summary["seeds"]["1"]["rl"]
    assert longer["train_seconds"] >= rl["train_seconds"] or longer["steps"] == 4
    assert len(list(out.glob("seed-*/*/report.html"))) == 16
