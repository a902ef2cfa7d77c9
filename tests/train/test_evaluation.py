"""Evaluation during training: it changes no training result, its losses equal training losses, and the best weights,
early stopping and resuming are exact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.errors import RecipeError, RewardError
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import Stage
from posttrain.run import checkpoints
from posttrain.train import evaluation, preference, rl, sft
from posttrain.train.checkpoint import State
from posttrain.train.evaluation import Completions, batches_of, completion_metrics, early_stop_message, update_best
from posttrain.train.held_out import evaluate_step

Values = dict[str, Any]
REWARDS = """
def digits(completion, token_count):
    return sum(c.isdigit() for c in completion) / max(token_count, 1)
"""
RL: Values = {
    "stage": "rl",
    "model": {"path": "tiny"},
    "data": {"source": "rows.jsonl"},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
    "rewards": [{"use": "rewards.py:digits"}],
    "scoring": {"workers": 1, "correct_at": 0.3},
    "optim": {"lr": 5e-3},
    "run": {"steps": 4, "save_every": 2},
}
EVAL: Values = {"every": 2, "data": {"source": "rows.jsonl", "size": 6}, "n": 2}


@pytest.fixture
def rl_recipe(sft_recipe: Any, tmp_path: Path) -> Callable[..., Stage]:
    del sft_recipe  # writes rows.jsonl
    (tmp_path / "rewards.py").write_text(REWARDS)
    return lambda **changes: load_dict({**RL, **changes}, base_dir=tmp_path, where="test").recipe


def split(rows: list[Values]) -> tuple[list[Values], list[Values]]:
    """Return a run's metrics of steps, and of evaluations."""
    steps = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows if row["step"]]
    return steps, [
        {k: v for k, v in row.items() if k == "step" or k.startswith("eval/")} for row in rows if "eval/reward" in row
    ]


# --- pure functions ---


def test_best_evaluation_and_evaluations_since() -> None:
    state = State()
    found = []
    for step, value in enumerate([0.2, 0.5, 0.5, None, 0.4, 0.6]):
        state.step = step
        found.append((update_best(state, "accuracy", value), state.since_best))
    assert found == [(True, 0), (True, 0), (False, 1), (False, 2), (False, 3), (True, 0)]
    assert state.best == {"step": 5, "metric": "eval/accuracy", "value": 0.6}
    state = State()
    assert [update_best(state, "loss", value) for value in (2.0, 2.1, 1.9)] == [True, False, True]
    assert not update_best(State(), "accuracy", None)


def test_early_stop_message() -> None:
    state = State(step=40, since_best=2, best={"step": 20, "metric": "eval/loss", "value": 1.25})
    said = "stopped after step 40: 2 evaluations in a row not better than eval/loss 1.25 after step 20 (eval.patience)"
    assert early_stop_message(state) == said


def record(problem: int, correct: bool | None, finish: str = "stop") -> Values:
    return {"problem": problem, "correct": correct, "finish": finish, "reward": 1.0, "tokens": 4}


def test_metrics_of_completions_by_prompt() -> None:
    """Prompt 0 has 1 of 2 right (the truncated one is wrong), prompt 1 has 1 of 1 scored, prompt 2 has none."""
    records = [
        *(record(0, True), record(0, True, "length")),
        *(record(1, True), record(1, None)),
        *(record(2, None), record(2, None)),
    ]
    found = completion_metrics(records, 2, 0)
    assert found["accuracy"] == pytest.approx(0.75)
    assert found["accuracy/low"] == pytest.approx(0.5) and found["accuracy/high"] == pytest.approx(1.0)
    assert found["unscored"] == 3 and found["clipped_ratio"] == pytest.approx(1 / 6) and found["mean_length"] == 4
    assert found["pass@2"] is None, "a prompt has one judged sample"
    alone = completion_metrics(records[:2], 2, 0)
    assert alone["pass@2"] == 1.0 and alone["accuracy/low"] is None, "one prompt has no interval"
    assert completion_metrics([record(0, None)], 1, 0)["accuracy"] is None


def test_batches_contain_every_row_once_longest_first() -> None:
    assert batches_of([3, 9, 9, 1, 5], 2) == [[1, 2], [4, 0], [3]]


# --- rl ---


def test_evaluation_does_not_change_training(rl_recipe: Any, rows_of: Any, tmp_path: Path) -> None:
    plain = rows_of(rl.run, rl_recipe(), "plain")
    rows = rows_of(rl.run, rl_recipe(eval=EVAL), "evaluated")
    steps, evaluations = split(rows)
    assert steps == plain
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert evaluations[0]["eval/reward"] != evaluations[2]["eval/reward"], "the weights differ, the draws do not"
    for row in evaluations:
        low, mean, high = (row[f"eval/accuracy{end}"] for end in ("/low", "", "/high"))
        assert (low, high) == (None, None) or 0 <= low <= mean <= high <= 1
    samples = [json.loads(line) for line in (tmp_path / "evaluated" / "samples.jsonl").read_text().splitlines()]
    assert sum(sample.get("eval", False) for sample in samples) == 3 * 4


def test_resumed_run_has_the_evaluations_and_best_model_of_an_unbroken_run(
    rl_recipe: Any, rows_of: Any, tmp_path: Path
) -> None:
    settings = {**EVAL, "keep_best": True, "metric": "reward"}
    whole = rows_of(rl.run, rl_recipe(eval=settings), "whole")
    rows_of(rl.run, rl_recipe(eval=settings, run={"steps": 2, "save_every": 2}), "parts")
    assert rows_of(rl.run, rl_recipe(eval=settings), "parts", resume=True) == whole
    best = [json.loads((tmp_path / name / "best.json").read_text()) for name in ("whole", "parts")]
    assert best[0] == best[1]
    values = {row["step"]: row["eval/reward"] for row in whole if "eval/reward" in row}
    assert best[0] == {"step": best[0]["step"], "metric": "eval/reward", "value": max(values.values())}
    weights = [load_file(tmp_path / name / "best" / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    state = checkpoints.latest(tmp_path / "parts" / "checkpoints")
    assert state is not None and json.loads((state / "state.json").read_text())["best"] == best[0]


def test_run_stops_early_if_evaluations_do_not_improve(
    rl_recipe: Any, opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No completion is right before or after: two evaluations later the run ends, is saved, and stays finished."""
    changes = {
        "scoring": {"workers": 1, "correct_at": 2.0},
        "eval": {**EVAL, "every": 1, "patience": 2},
        "run": {"steps": 9},
    }
    with opened("run") as directory:
        summary = rl.run(rl_recipe(**changes), directory)
    assert summary["steps"] == 2 and summary["stopped_early"].startswith("stopped after step 2: 2 evaluations in a row")
    assert summary["best_checkpoint"]["step"] == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "evaluation: 6 of 6 rows ask the same as training rows" in told
    assert told.index("evaluation after step 2:") < told.index("(eval.patience)"), "first the number, then what follows"
    assert (tmp_path / "run" / "final").is_dir()
    with opened("run", resume=True) as directory:
        assert rl.run(rl_recipe(**changes), directory)["steps"] == 2
    changes["run"] = {"steps": 1}
    with opened("parts") as directory:
        assert rl.run(rl_recipe(**changes), directory)["steps"] == 1
    changes["run"] = {"steps": 9}
    with opened("parts", resume=True) as directory:  # an evaluation before and after the resume
        assert rl.run(rl_recipe(**changes), directory)["stopped_early"] == summary["stopped_early"]


def test_failed_evaluation_is_repeated_on_resume(
    rl_recipe: Any, opened: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows_of(rl.run, rl_recipe(eval=EVAL), "whole")
    measure = Completions.measure

    def failing(self: Completions, step: int) -> Any:
        if step == 2:
            raise RuntimeError("the reward server has gone")
        return measure(self, step)

    monkeypatch.setattr(Completions, "measure", failing)
    with pytest.raises(RuntimeError, match="has gone"), opened("broken") as directory:
        rl.run(rl_recipe(eval=EVAL), directory)
    assert checkpoints.latest(directory.checkpoints) is not None
    monkeypatch.setattr(Completions, "measure", measure)
    rows = rows_of(rl.run, rl_recipe(eval=EVAL), "broken", resume=True)
    assert split(rows)[1] == split(whole)[1]
    assert [row["loss"] for row in rows if "loss" in row] == [row["loss"] for row in whole if "loss" in row]


def test_evaluation_rewards_and_unscorable_rows(rl_recipe: Any, rows_of: Any, tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text("def length(completion, answer):\n    return float(len(completion))\n")
    with pytest.raises(RewardError, match="has no column `answer`"):
        rows_of(rl.run, rl_recipe(eval={**EVAL, "rewards": [{"use": "length.py:length"}]}), "refused")
    (tmp_path / "size.py").write_text("def size(completion):\n    return float(len(completion))\n")
    rows = rows_of(rl.run, rl_recipe(eval={**EVAL, "rewards": [{"use": "size.py:size"}]}), "run")
    assert rows[0]["eval/reward"] > 1 > rows[1]["reward"]


def test_stored_completions_are_trained_on_and_evaluation_samples_new_ones(rl_recipe: Any, rows_of: Any) -> None:
    stored = {**RL["rollout"], "engine": "stored", "group_size": 1}
    recipe = rl_recipe(rollout=stored, advantage={"use": "reward"}, eval={**EVAL, "max_new_tokens": 6})
    rows = rows_of(rl.run, recipe, "run")
    assert rows[0]["eval/mean_length"] <= 6 and rows[0]["eval/mean_length"] > 1


def test_evaluation_waits_for_rollouts_of_later_steps() -> None:
    """The engine serves one call at a time."""
    calls: list[str] = []
    source: Any = SimpleNamespace(finish=lambda *_: calls.append("waited"))
    settings: Any = SimpleNamespace(every=2)
    made = evaluation.Evaluation(settings, Any, Any, [])  # type: ignore[arg-type]
    made.evaluate = lambda _: calls.append("measured") or ({}, [])  # type: ignore[method-assign,assignment,func-returns-value]
    for step in (1, 2):
        evaluate_step(made, Any, State(step=step, evaluated=0), source, last=False)  # type: ignore[arg-type]
    assert calls == ["waited", "measured"]


# --- sft and dpo ---


@pytest.mark.parametrize("packing", [False, True])
def test_validation_loss_equals_the_training_loss_of_the_same_rows(
    sft_recipe: Any, rows_of: Any, packing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"every": 3, "data": {"source": "rows.jsonl"}}
    rows = rows_of(sft.run, sft_recipe(batch={"size": 20, "micro_size": 4, "packing": packing}, eval=same))
    assert "evaluation: 20 of 20 rows ask the same as training rows, so it also measures" in capsys.readouterr().err
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 3, 6]
    assert rows[0]["eval/loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    assert rows[3]["eval/loss"] == pytest.approx(rows[4]["loss"], rel=1e-5)
    assert rows[3]["eval/mean_token_accuracy"] == pytest.approx(rows[4]["mean_token_accuracy"], abs=1e-6)


def test_validation_loss_of_pairs(
    dpo_recipe: Any, rows_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"every": 3, "data": {"source": "pairs.jsonl"}, "keep_best": True}
    recipe = dpo_recipe(batch={"size": 20, "micro_size": 4}, eval=same)
    rows = rows_of(preference.run, recipe)
    assert "evaluation: 20 of 20 rows ask the same as training rows" in capsys.readouterr().err
    for name in ("loss", "rewards/margins", "rewards/accuracies"):
        assert rows[3][f"eval/{name}"] == pytest.approx(rows[4][name], rel=1e-4, abs=1e-6), name
    assert json.loads((tmp_path / "run" / "best.json").read_text())["step"] == 6
    final, best = (load_file(tmp_path / "run" / name / "model.safetensors") for name in ("final", "best"))
    assert all(torch.equal(final[key], best[key]) for key in final)
    plain = rows_of(preference.run, dpo_recipe(batch={"size": 20, "micro_size": 4}), "plain")
    assert [row["loss"] for row in rows[1:]] == [row["loss"] for row in plain]


def test_resumed_pair_run_uses_the_reference_of_its_start(dpo_recipe: Any, rows_of: Any) -> None:
    settings = {"every": 2, "data": {"source": "pairs.jsonl", "size": 6}}
    whole = rows_of(preference.run, dpo_recipe(eval=settings), "whole")
    rows_of(preference.run, dpo_recipe(eval=settings, run={"steps": 2, "save_every": 2}), "parts")
    assert rows_of(preference.run, dpo_recipe(eval=settings), "parts", resume=True) == whole


def test_evaluations_at_steps_that_are_not_logged(sft_recipe: Any, rows_of: Any) -> None:
    recipe = sft_recipe(
        run={"steps": 6, "log_every": 5}, eval={"every": 2, "data": {"source": "rows.jsonl", "size": 4}}
    )
    rows = rows_of(sft.run, recipe)
    assert [row["step"] for row in rows] == [0, 2, 4, 5, 6]


def test_sft_evaluates_completions(sft_recipe: Any, rows_of: Any, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    settings = {
        "every": 6,
        "data": {"source": "rows.jsonl", "size": 4},
        "n": 2,
        "rewards": [{"use": "rewards.py:digits"}],
        "max_new_tokens": 6,
        "temperature": 0,
    }
    plain = rows_of(sft.run, sft_recipe(), "plain")
    rows = rows_of(sft.run, sft_recipe(eval=settings), "run")
    assert [row["loss"] for row in rows[1:]] == [row["loss"] for row in plain]
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert rows[-1]["eval/reward"] > rows[0]["eval/reward"], "it learns to write sums"
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {0, 6} and samples[0]["prompt"]


def test_losses_that_need_more_than_pairs_are_validated_by_rewards_only(
    dpo_recipe: Any, rows_of: Any, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    labeled = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 == 0} for i, r in enumerate(rows)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labeled))
    settings = {"every": 3, "data": {"source": "pairs.jsonl", "size": 4}}
    with pytest.raises(RecipeError, match="kto reads more than pairs"):
        rows_of(preference.run, dpo_recipe(loss={"use": "kto"}, eval=settings), "refused")
    (tmp_path / "rewards.py").write_text(REWARDS)
    with_rewards = {**settings, "n": 1, "rewards": [{"use": "rewards.py:digits"}], "max_new_tokens": 4}
    found = rows_of(preference.run, dpo_recipe(loss={"use": "kto"}, eval=with_rewards), "run")
    assert "eval/reward" in found[0] and "eval/loss" not in found[0]


# --- recipes ---

ROWS: Values = {"every": 2, "data": {"source": "rows.jsonl"}}


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        ("rl", {**EVAL, "metric": "reward"}, "eval.metric: does nothing: neither `keep_best` nor `patience`"),
        ("rl", {**EVAL, "metric": "loss", "patience": 2}, "rl computes no validation loss"),
        ("rl", {**EVAL, "n": 0}, "eval.n: "),
        ("rl", {"data": EVAL["data"]}, "eval.every: "),
        ("rl", {"every": 2, "data": {"source": "rows.jsonl", "weight": 2.0}}, "eval.data.weight"),
        ("sft", {**ROWS, "n": 1}, "eval.rewards: the completions need rewards"),
        ("sft", {**ROWS, "rewards": [{"use": "rewards.py:digits"}]}, "nothing is generated: n is 0"),
        ("sft", {**ROWS, "metric": "accuracy", "keep_best": True}, "write `metric: loss`"),
    ],
)
def test_invalid_settings_raise(stage: str, settings: Values, message: str, rl_recipe: Any, sft_recipe: Any) -> None:
    make = {"rl": rl_recipe, "sft": sft_recipe}[stage]
    with pytest.raises(RecipeError, match=re.escape(message)):
        make(eval=settings)
