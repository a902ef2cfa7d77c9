"""`posttrain preflight`: its predictions match the run, and its advice follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from posttrain.batch import RolloutBatch
from posttrain.cli.app import app
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.load import load, load_dict
from posttrain.train.preflight import advice, generation_rounds, larger_groups, pass_rates, probability_mixed

RECIPE = {
    "stage": "rl",
    "algorithm": "grpo",
    "model": {"path": "tiny"},
    "data": {"source": str(shipped_folder("recipes") / "quickstart_data.py:problems"), "size": 32},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 12},
    "rewards": [
        {"use": str(shipped_folder("recipes") / "quickstart_random.py:coin")},
        {"use": "math.accuracy", "params": {"extract": ["last_number"]}, "weight": 0, "correct": True},
    ],
    "scoring": {"workers": 1},
    "optim": {"lr": 1e-5},
    "run": {"steps": 6, "seed": 1},
}


def call(folder: Path, *arguments: str) -> Any:
    (folder / "rl.yaml").write_text(json.dumps(RECIPE), encoding="utf-8")
    return CliRunner().invoke(app, [arguments[0], str(folder / "rl.yaml"), *arguments[1:]], prog_name="posttrain")


def test_signal_and_tokens_equal_the_runs_first_steps(tmp_path: Path) -> None:
    result = call(tmp_path, "preflight", "--prompts", "24", "--json")
    report = json.loads(result.stdout)
    assert (report["prompts"], report["rollouts"], report["steps"]) == (24, 96, 6)
    assert call(tmp_path, "rl", "--output", str(tmp_path / "run")).exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    signal = sum(row["signal/share"] for row in rows) / len(rows)
    assert 0 < signal < 1 and report["signal"]["signal/share"] == pytest.approx(signal, rel=0.2)
    assert report["tokens"]["run"] == pytest.approx(rows[-1]["num_tokens"], rel=0.2)
    assert report["cut"] == pytest.approx(sum(r["completions/clipped_ratio"] for r in rows) / len(rows), abs=0.1)
    assert sum(groups for _, _, groups in report["pass_rates"]) == 24
    assert not list(tmp_path.glob("runs")) and report["hours"] > 0


def test_page_gives_advice_and_other_stages_are_refused(tmp_path: Path) -> None:
    result = call(tmp_path, "preflight", "--prompts", "4", "rollout.max_new_tokens=2")
    assert result.exit_code == 0 and "completions are cut: rollout.max_new_tokens=4 or" in result.stdout
    assert "pass rate of the groups" in result.stdout and "the run: 6 steps" in result.stdout
    refused = CliRunner().invoke(app, ["preflight", "debug/sft"], prog_name="posttrain")
    assert refused.exit_code == 2 and "`preflight` needs an rl recipe" in refused.stderr


def test_probability_of_a_group_with_mixed_rewards() -> None:
    """1 of 2 right: Beta(3/2, 3/2), E[p^2] = (3/2 * 5/2) / (3 * 4) = 5/16, so 1 - 2 * 5/16 = 3/8."""
    assert probability_mixed(1, 2, 2) == pytest.approx(3 / 8)
    assert probability_mixed(0, 8, 1) == pytest.approx(0)  # a group of one answer is never mixed
    assert probability_mixed(0, 8, 8) < probability_mixed(0, 8, 32) < probability_mixed(4, 8, 32)


def batch(correct: list[float], groups: list[int], keep: list[bool] | None = None) -> RolloutBatch:
    n = len(correct)
    return RolloutBatch(
        group_ids=torch.tensor(groups),
        mask=torch.ones(n, 1, dtype=torch.bool),
        correct=torch.tensor(correct),
        keep=None if keep is None else torch.tensor(keep),
    )


def test_pass_rates_are_counted_by_group() -> None:
    found = pass_rates(batch([0, 0, 1, 0, 1, 1, float("nan"), 1], [0, 0, 1, 1, 2, 2, 3, 3]))
    assert {(low, high): n for low, high, n in found if n} == {(0, 0): 1, (0.4, 0.6): 1, (1, 1): 2}


def test_refill_rounds_follow_from_the_share_of_kept_groups() -> None:
    groups = [0, 0, 1, 1, 2, 2]
    one_of_three = batch([1, 0, 1, 1, 0, 0], groups, [True, True, False, False, False, False])
    assert generation_rounds(one_of_three, 8) == 3 and generation_rounds(one_of_three, 2) == 2
    assert generation_rounds(batch([0] * 6, groups, [False] * 6), 4) == 4
    assert generation_rounds(batch([0] * 6, groups), 4) == 1


def test_larger_groups_are_not_estimated_from_the_prior_alone() -> None:
    """With 4 answers, all wrong, it promised both kinds in four groups of ten if there were 8."""
    groups = [0, 0, 1, 1]
    assert larger_groups(batch([0] * 4, groups), 2) == larger_groups(batch([1] * 4, groups), 2) == {}
    found = larger_groups(batch([1, 0, 0, 0], groups), 2)
    assert found[2] < found[4] and 0 < found[2] < 1


def report(**changes: Any) -> dict[str, Any]:
    signal = dict.fromkeys(("share", "too_easy", "too_hard", "unscored", "dropped"), 0.0) | changes.pop("signal", {})
    found = {"cut": 0.0, "generation_rounds": 1.0, "larger_groups": {}, **changes}
    return {**found, "signal": {f"signal/{name}": share for name, share in signal.items()}}


def test_advice_follows_from_the_measurements() -> None:
    recipe: Any = load_dict(RECIPE, base_dir=Path.cwd(), where="test").recipe
    assert advice(report(signal={"share": 0.9}), recipe) == []
    hard = report(signal={"share": 0.2, "too_hard": 0.8}, larger_groups={4: 0.2, 8: 0.45, 16: 0.6})
    assert "rollout.group_size=8 about 45%" in advice(hard, recipe)[0] and "warm up with SFT" in advice(hard, recipe)[0]
    easy = advice(report(signal={"share": 0.3, "too_easy": 0.7}), recipe)
    assert "use harder prompts" in easy[0] and "70% of the groups are all right" in easy[1]
    refilled = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_gen_batches": 3})})
    assert "the run would stop" in advice(report(signal={"share": 0.9}, generation_rounds=3.0), refilled)[0]


@pytest.mark.slow
def test_first_ten_steps_of_the_quickstart_are_predicted(tmp_path: Path) -> None:
    """Within 20%, with the model of its sft stage: signal and tokens per step."""
    stages = {stage["name"]: stage for stage in load("quickstart", stage="run").resolved["stages"]}
    for name in ("sft", "rl"):
        values = {key: value for key, value in stages[name].items() if key != "name"}
        values["data"] = {**values["data"], "source": str(shipped_folder("recipes") / values["data"]["source"])}
        if name == "rl":
            values |= {"model": {**values["model"], "path": str(tmp_path / "sft" / "final")}}
            values["run"] = {**values["run"], "steps": 10}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(values), encoding="utf-8")

    def posttrain(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments), prog_name="posttrain")
        assert result.exit_code == 0, result.stderr
        return result.stdout

    posttrain("sft", str(tmp_path / "sft.yaml"), "--output", str(tmp_path / "sft"))
    report = json.loads(posttrain("preflight", str(tmp_path / "rl.yaml"), "--json"))
    posttrain("rl", str(tmp_path / "rl.yaml"), "--output", str(tmp_path / "rl"))
    rows = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert report["signal"]["signal/share"] == pytest.approx(sum(r["signal/share"] for r in rows) / 10, rel=0.2)
    assert report["tokens"]["a_step"] == pytest.approx(rows[-1]["num_tokens"] / 10, rel=0.2)
