"""`posttrain merge --sweep`: the table, the best model and its recipe, going on after a stop. Stages are played."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import sweep as sweeping
from posttrain.errors import Interrupted
from posttrain.recipe.load import load
from posttrain.run.interrupt import GracefulStop

Call = Callable[..., Any]
Stage = Callable[..., None]

MERGE = "stage: merge\nmerge_method: linear\nmodels: [{model: ./m a}, {model: hub/b}]\n"
EVAL = "stage: eval\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrewards: [{use: math.accuracy}]\n"
SWEEP = ("merge", "m.yaml", "--sweep", "weight=0:1:0.5", "--eval", "e.yaml", "--output", "out")


@pytest.fixture(autouse=True)
def recipes(folder: Path) -> None:
    (folder / "m.yaml").write_text(MERGE)
    (folder / "e.yaml").write_text(EVAL)
    (folder / "rows.jsonl").write_text('{"prompt": "7?", "answer": "7"}\n')
    (folder / "m a").mkdir()
    (folder / "m a" / "config.json").write_text("{}")


class Played:
    """Stages that write what the real ones would: accuracy 1 - |weight of b - 0.5| on three problems."""

    def __init__(self, stop_at: str = "") -> None:
        self.ran: list[str] = []
        self.stop_at = stop_at

    def __call__(self, recipe: Any, directory: Any) -> dict[str, Any]:
        self.ran.append(f"{directory.path.parent.name}/{directory.path.name}")
        if self.ran[-1] == self.stop_at:
            raise Interrupted("stopped")
        if recipe.verb == "merge":
            directory.final.mkdir()
            weight = recipe.models[1].parameters.weight
            (directory.final / "model.safetensors").write_text(str(weight))
            summary: dict[str, Any] = {"seconds": 1.0}
        else:
            accuracy = 1 - abs(float((Path(recipe.model.path) / "model.safetensors").read_text()) - 0.5)
            rows = [{"uid": str(i), "accuracy": accuracy, "tokens": 5.0} for i in range(3)]
            (directory.path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            summary = {"accuracy": accuracy}
        (directory.path / "summary.json").write_text(json.dumps(summary))
        return summary


def test_merge_sweep_prints_the_table_and_the_best_model(call: Call, stage: Stage, folder: Path) -> None:
    stage(Played())
    result = call(*SWEEP)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"weight=0.5 +1\.000 ", result.stdout)
    assert "the best is weight=0.5 (1.000)" in result.stdout
    equal = sweeping._describe_choice("t=0", {"t=0": 0.5, "t=1": 0.5, "t=2": None})
    assert equal == "all points have the accuracy 0.500, so none is the best; the first is kept, t=0"
    assert "chosen on the problems it was evaluated on" in result.stderr
    assert not sweeping._all_equal([{"pooled": {"mean": mean}} for mean in (0.5, 0.75)])
    assert sweeping._all_equal([{"pooled": {"mean": 0.5}}] * 2), "no point was chosen, so no caveat is printed"
    assert [p.read_text() for p in (folder / "out").rglob("*.safetensors")] == ["0.5"], (
        "only the best one's weights stay"
    )
    assert (folder / "out" / "final" / "model.safetensors").is_file()


def test_best_recipe_runs_from_any_folder(call: Call, stage: Stage, folder: Path) -> None:
    stage(Played())
    call(*SWEEP)
    found: Any = load(str(folder / "out" / "best.yaml")).recipe
    assert [model.model for model in found.models] == [str(folder / "m a"), "hub/b"]
    assert [model.parameters.weight for model in found.models] == [0.5, 0.5]


def test_the_best_recipe_names_all_models_in_full(folder: Path) -> None:
    """Those of slices, and the tokenizer's, too."""
    from posttrain.cli.sweep import recipe_text

    values = {
        "merge_method": "slerp",
        "base_model": "m a",
        "slices": [{"sources": [{"model": name, "layer_range": [0, 2]} for name in ("m a", "hub/b")]}],
        "tokenizer": {"source": "union", "tokens": {"x": {"source": "m a"}}},
    }
    (folder / "sliced.yaml").write_text(json.dumps({"stage": "merge", **values}))  # JSON is YAML
    (folder / "elsewhere.yaml").write_text(recipe_text(load(str(folder / "sliced.yaml")), "t=0.5", 0.5))
    found: Any = load(str(folder / "elsewhere.yaml")).recipe
    full = str(folder / "m a")
    assert [source.model for source in found.slices[0].sources] == [full, "hub/b"]
    assert (found.base_model, found.tokenizer.source, found.tokenizer.tokens["x"].source) == (full, "union", full)


def test_stopped_sweep_resumes(call: Call, stage: Stage) -> None:
    stopped = Played(stop_at="weight=0.5/eval")
    stage(stopped)
    result = call(*SWEEP)
    assert result.exit_code == 130
    assert "--sweep=weight=0:1:0.5 --eval e.yaml --output out --resume" in result.stderr
    resumed = Played()
    stage(resumed)
    assert call(*SWEEP, "--resume").exit_code == 0
    assert resumed.ran == ["weight=0.5/eval", "weight=1/merge", "weight=1/eval"]


def test_signal_during_a_finishing_stage_stops_after_the_point(call: Call, stage: Stage) -> None:
    played = Played()

    def run(recipe: Any, directory: Any) -> dict[str, Any]:
        with GracefulStop():
            if recipe.verb == "eval":
                signal.raise_signal(signal.SIGINT)
            return played(recipe, directory)

    stage(run)
    result = call(*SWEEP)
    assert result.exit_code == 130 and played.ran == ["weight=0/merge", "weight=0/eval"]
    assert "stopped after point 1 of 3" in result.stderr and "--output out --resume" in result.stderr


def test_other_sweep_in_the_same_directory_is_refused(call: Call, stage: Stage) -> None:
    stage(Played())
    call(*SWEEP)
    result = call(*["weight=0:1:0.25" if part == "weight=0:1:0.5" else part for part in SWEEP], "--resume")
    assert result.exit_code == 2
    assert "sweep.weight" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sweep", "weight=0:1:0.5"), "needs both --sweep and --eval"),
        (("--eval", "e.yaml"), "needs both --sweep and --eval"),
        (("--sweep", "weigth=0,1", "--eval", "e.yaml"), "did you mean `weight`"),
        (("--sweep", "density=0,1", "--eval", "e.yaml"), "linear has no parameter density"),
        (("--sweep", "weight=0,1", "--eval", "m.yaml"), "not for `posttrain eval`"),
    ],
)
def test_errors_are_reported_before_any_run(
    call: Call, stage: Stage, folder: Path, arguments: tuple[str, ...], said: str
) -> None:
    stage(Played(stop_at="x"))
    result = call("merge", "m.yaml", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (folder / "runs").exists()


def test_dry_run_names_the_points(call: Call, folder: Path) -> None:
    result = call(*SWEEP, "--dry-run")
    assert result.exit_code == 0
    assert "weight=0.5: models.0.parameters.weight=0.5 models.1.parameters.weight=0.5" in result.stderr
    assert not (folder / "out").exists()
