"""`posttrain sweep`: its runs, its table, failures, and resuming. Runs are simulated; one test trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.grid import visible_gpus
from posttrain.errors import RecipeError
from posttrain.evaluate.setting_ranks import seed_interval, summarize_settings
from posttrain.recipe.grid import grid, split_values

Call = Callable[..., Any]
AXES = ("optim.lr=1e-3,1e-2", "run.seed=0,1")


def test_commas_inside_brackets_and_quotes_do_not_split() -> None:
    assert split_values("1e-5,3e-5") == ["1e-5", "3e-5"]
    assert split_values("[1,2],{a: 1, b: 2}") == ["[1,2]", "{a: 1, b: 2}"]
    assert split_values("'a,b',c") == ["'a,b'", "c"]


def test_every_combination_is_a_run_and_seeds_are_repetitions() -> None:
    fixed, points = grid(["run.steps=3", "optim.lr=1,2", "run.seed=0,1", "batch.size=4,8"])
    assert fixed == ["run.steps=3"]
    assert len(points) == 8
    assert points[1].overrides == ("optim.lr=1", "batch.size=4", "run.seed=1")
    assert points[1].setting == "optim.lr=1,batch.size=4" and points[1].folder == "optim.lr=1,batch.size=4/seed-1"
    assert len({point.folder for point in points}) == 8
    _, paths = grid(["model.path=org/a,./b c", "data.size=1"])
    assert [point.folder for point in paths] == ["model.path=org_a", "model.path=._b_c"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optim.lr=1"], "no key has several values"),
        (["optim.lr=1,1"], "a value twice"),
        (["optim.lr=1,,2"], "an empty value"),
        (["optim.lr=1,2", "optim.lr=3,4"], "given twice"),
        ([f"run.seed={','.join(map(str, range(1001)))}"], "1001 runs"),
    ],
)
def test_invalid_sweeps_raise(words: Sequence[str], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        grid(words)


def test_interval_over_seeds_is_students() -> None:
    """Of 1, 2, 3: mean 2, deviation 1, 4.303 / sqrt(3) to each side."""
    found = seed_interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0 and found["high"] == pytest.approx(2 + 4.303 / 3**0.5)
    assert found["low"] == pytest.approx(2 - 4.303 / 3**0.5)
    assert seed_interval([5.0]) == {"mean": 5.0, "low": None, "high": None, "runs": 1}
    assert seed_interval([])["mean"] is None


def test_failed_runs_are_excluded_from_their_row() -> None:
    rows = summarize_settings({"a": {"0": {"loss_last": 1.0}, "1": None}}, ["loss_last"])
    assert (rows[0]["runs"], rows[0]["of"], rows[0]["loss_last"]["mean"]) == (1, 2, 1.0)


class Played:
    """Simulated children that write a run's files: loss_last = lr + seed; those in `broken` fail."""

    def __init__(self, broken: Sequence[str] = ()) -> None:
        self.ran: list[str] = []
        self.broken = broken
        self.environments: list[dict[str, str]] = []

    def __call__(self, children: Any, parallel: int, *, keep_going: bool, after_each: Any) -> dict[str, str]:
        assert keep_going and parallel in (1, 2)
        for child in children:
            self.ran.append(child.name)
            self.environments.append(dict(child.env))
            words = list(child.command)
            folder = Path(words[words.index("--output") + 1])
            if child.name in self.broken:
                continue
            values = dict(word.split("=", 1) for word in words if "=" in word)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "final").mkdir(exist_ok=True)
            summary: dict[str, Any] = {"loss_last": float(values.get("optim.lr", 0)) + int(values.get("run.seed", 0))}
            if words[3] == "eval":
                rows = [{"uid": str(i), "accuracy": 1.0, "tokens": 5.0} for i in range(3)]
                (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
                summary = {"accuracy": 1.0}
            (folder / "summary.json").write_text(json.dumps(summary))
            after_each()
        return {name: "it broke" for name in self.broken if name in self.ran}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    one = Played()
    monkeypatch.setattr("posttrain.run.children.run_children", one)
    return one


def test_sweep_runs_every_combination_and_prints_the_table(call: Call, folder: Path, played: Played) -> None:
    result = call("sweep", "r.yaml", *AXES, "--output", "out")
    assert result.exit_code == 0, result.stderr
    assert played.ran == [f"optim.lr={lr}/seed-{seed}" for lr in ("1e-3", "1e-2") for seed in (0, 1)]
    summary = json.loads((folder / "out" / "summary.json").read_text())
    first = summary["settings"][0]
    assert (first["setting"], first["runs"], first["loss_last"]["mean"]) == ("optim.lr=1e-3", 2, pytest.approx(0.501))
    assert first["loss_last"]["low"] == pytest.approx(0.501 - 12.706 * 0.5)
    assert "optim.lr=1e-3" in result.stdout and "2 of 2" in result.stdout and "0.501 [" in result.stdout
    assert "Ranked by loss last of the summaries, lowest first; 95% intervals are over seeds" in result.stdout
    assert "Models of optim.lr=1e-3: out/optim.lr=1e-3/seed-0/final, out/optim.lr=1e-3/seed-1/final." in result.stdout
    assert [row["rank"] for row in summary["settings"]] == [1, 2]
    table = (folder / "out" / "table.md").read_text()
    assert table.startswith(
        "| rank | setting | runs | loss last |\n| --- | --- | --- | --- |\n| 1 | optim.lr=1e-3 | 2 of 2 |"
    )
    page = (folder / "out" / "report.html").read_text()
    assert "<h2>Settings</h2>" in page and "Ranked by loss last of the summaries" in page


def test_resumed_sweep_runs_missing_and_added_runs(call: Call, played: Played) -> None:
    played.broken = ["optim.lr=1e-2/seed-0"]
    result = call("sweep", "r.yaml", *AXES, "--output", "out")
    assert result.exit_code == 1
    assert "failed: optim.lr=1e-2/seed-0: it broke" in result.stderr and "1 run of 4 failed" in result.stderr
    (listed,) = json.loads(call("runs", ".", "--json").stdout)
    assert (listed["path"], listed["state"], listed["message"]) == ("out", "failed", "1 run of 4 failed")
    assert "posttrain sweep r.yaml optim.lr=1e-3,1e-2 run.seed=0,1 --parallel 1 --output out --resume" in result.stderr
    played.ran, played.broken = [], []
    again = call("sweep", "r.yaml", "optim.lr=1e-3,1e-2", "run.seed=0,1,2", "--output", "out", "--resume")
    assert again.exit_code == 0, again.stderr
    assert [one["state"] for one in json.loads(call("runs", ".", "--json").stdout)] == ["finished"]
    assert played.ran == ["optim.lr=1e-3/seed-2", "optim.lr=1e-2/seed-0", "optim.lr=1e-2/seed-2"]


def test_each_model_is_evaluated(call: Call, folder: Path, played: Played) -> None:
    (folder / "e.yaml").write_text(
        "stage: eval\nmodel: {path: tiny}\ndata: {source: q.jsonl}\nrewards: [{use: math.accuracy}]\n"
    )
    (folder / "q.jsonl").write_text('{"prompt": "7?", "answer": "7"}\n')
    result = call("sweep", "r.yaml", "optim.lr=1e-3,1e-2", "--eval", "e.yaml", "--output", "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert played.ran[2:] == ["optim.lr=1e-3/eval", "optim.lr=1e-2/eval"]
    table = json.loads(result.stdout)["table"]
    assert [(row["model"], row["pooled"]["mean"]) for row in table] == [("optim.lr=1e-3", 1.0), ("optim.lr=1e-2", 1.0)]
    found = json.loads(result.stdout)
    assert found["ranking"]["criterion"] == "accuracy on the problems of the evaluation, highest first"
    assert [row["ranked"]["over"] for row in found["settings"]] == ["problems", "problems"]
    assert found["ranking"]["says"][0].endswith("without intervals, because the values of each setting are all equal.")
    equal = "optim.lr=1e-2 and optim.lr=1e-3 are equally often right on every problem."
    assert found["findings"] == [equal] and equal in (folder / "out" / "table.md").read_text()


def test_wrong_value_raises_before_the_first_run(call: Call, played: Played) -> None:
    result = call("sweep", "r.yaml", "optim.lr=1e-3,fast", "--output", "out")
    assert result.exit_code == 2 and "optim.lr: must be a number" in result.stderr
    assert played.ran == []
    dry = call("sweep", "r.yaml", *AXES, "--dry-run")
    assert dry.stderr.count("would run posttrain sft r.yaml") == 4 and played.ran == []


def test_parallel_runs_have_a_gpu_and_a_share_of_cores(
    call: Call, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert visible_gpus() == ["2", "5"]
    assert call("sweep", "r.yaml", *AXES, "--parallel", "2", "--output", "out").exit_code == 0
    assert [one["CUDA_VISIBLE_DEVICES"] for one in played.environments] == ["2", "5", "2", "5"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    call("sweep", "r.yaml", *AXES, "--output", "other")
    assert {one["OMP_NUM_THREADS"] for one in played.environments[4:]} == {"3"}


@pytest.mark.slow
def test_sweep_of_real_training_runs(call: Call) -> None:
    words = ("run.seed=0,1", "run.steps=2", "batch.size=1", "model.device=cpu")
    result = call("sweep", "r.yaml", *words, "--output", "out", "--json")
    assert result.exit_code == 0, result.stderr
    row = json.loads(result.stdout)["settings"][0]
    assert (row["setting"], row["runs"]) == ("all runs", 2)
    assert row["loss_last"]["low"] < row["loss_last"]["mean"] < row["loss_last"]["high"]
