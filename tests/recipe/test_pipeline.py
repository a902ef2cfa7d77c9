"""Pipelines: each stage is checked with its lines, defaults apply to the stages that accept them, references name
earlier models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.recipe.load import Loaded, load_dict

PIPELINE = """
stage: pipeline
defaults:
  model: {path: tiny, lora: {rank: 4}}
  run: {steps: 5, log_every: 2}
  optim: {lr: 1e-3}
stages:
  - name: sft
    stage: sft
    data: {source: rows.jsonl}
    optim: {warmup_steps: 3}
  - name: rl
    stage: rl
    algorithm: dapo
    model: {path: "stage:sft"}
    data: {source: rows.jsonl}
    rewards: [{use: math.accuracy}]
  - name: longer
    stage: sft
    data: {source: rows.jsonl}
    run: {steps: 900, max_minutes: "stage:rl"}
  - name: measured
    stage: eval
    model: {path: "stage:rl"}
    data: {source: "stage:rl/rows.jsonl"}
    rewards: [{use: math.accuracy}]
table: [measured]
"""


def test_defaults_apply_to_the_stages_that_accept_them(loads: Callable[..., Loaded]) -> None:
    """eval has no optimizer, adapter or steps, so those defaults do not apply to it."""
    loaded = loads(PIPELINE)
    sft, rl, longer, measured = loaded.recipe.stages
    assert sft["optim"] == {"lr": 1e-3, "warmup_steps": 3}
    assert rl["model"] == {"path": "stage:sft", "lora": {"rank": 4}}
    assert longer["run"] == {"steps": 900, "log_every": 2, "max_minutes": "stage:rl"}
    assert measured["model"] == {"path": "stage:rl"}
    assert "optim" not in measured and not measured["run"]
    assert loaded.recipe.defaults == {}, "merged once, not again by whoever runs the stages"


def test_resolved_stages_are_complete_and_have_origins(loads: Callable[..., Loaded]) -> None:
    loaded = loads(PIPELINE, "stages.rl.rollout.group_size=4", "stages.0.optim.lr=0.5")
    sft, rl, longer, _ = loaded.resolved["stages"]
    assert (sft["name"], sft["optim"]["lr"], sft["optim"]["eps"]) == ("sft", 0.5, 1e-8)
    assert rl["rollout"]["group_size"] == 4
    assert rl["loss"]["clip_high"] == 0.28
    assert longer["run"]["max_minutes"] == "stage:rl"
    assert str(loaded.origins["stages.0.optim.lr"]) == "command line"
    assert str(loaded.origins["stages.0.run.steps"]) == "r.yaml:4"
    assert str(loaded.origins["stages.1.rollout.prompts_per_step"]) == "default"
    assert str(loaded.origins["stages.1.loss.clip_high"]) == "preset dapo"


def test_errors_of_all_stages_are_reported_together_with_their_lines(errors: Callable[..., str]) -> None:
    text = (
        PIPELINE.replace("lr: 1e-3", "lrr: 1e-3")
        .replace("warmup_steps: 3", "warmup_steps: 3.5")
        .replace("name: longer", "name: rl")
        .replace('model: {path: "stage:sft"}', 'model: {path: "stage:sftt"}')
        .replace("table: [measured]", "table: [measurd, sft]\nrun: {steps: 1}")
    )
    assert errors(text) == "\n".join(
        [
            "r.yaml:5:11  defaults.optim.lrr: unknown key",
            "  known here: use, lr, betas, momentum, eps, weight_decay, schedule, decay_steps, min_lr, warmup_steps,"
            " max_grad_norm, offload",
            "  hint: did you mean `lr`?",
            "r.yaml:10:27  stages.0.optim.warmup_steps: must be a whole number of steps or a share below 1, not 3.5",
            "r.yaml:14:19  stages.1.model.path: there is no stage `sftt` before this one",
            "  earlier stages with a model: sft",
            "  hint: did you mean `stage:sft`?",
            "r.yaml:17:11  stages.2.name: `rl` is already the name of an earlier stage",
            "r.yaml:26:9  table.0: `measurd` is not an eval stage of this pipeline",
            "  eval stages: measured",
            "r.yaml:26:18  table.1: `sft` is not an eval stage of this pipeline",
            "  eval stages: measured",
            "r.yaml:27:7  run.steps: not used by stage pipeline: this stage does not train",
            "  hint: remove it",
        ]
    )


def test_references_must_name_an_earlier_model(errors: Callable[..., str]) -> None:
    text = PIPELINE.rstrip() + "\n"
    text = text.replace("table:", "  - name: last\n    stage: sft\n    model: {path: 'stage:measured'}\n"
                        "    data: {source: 'stage:measured/completions.jsonl'}\ntable:")  # fmt: skip
    assert errors(text) == (
        "r.yaml:28:19  stages.4.model.path: stage `measured` (eval) does not produce a model\n"
        "  earlier stages with a model: sft, rl, longer"
    )


def test_invalid_stages_and_defaults_are_reported_with_positions(errors: Callable[..., str]) -> None:
    head = "stage: pipeline\ndefaults: {optimm: {}, run: {seed: 1}}\nstages:\n"
    told = errors(head + "  - stage: sft\n  - {name: a/b, stage: rll}\n  - 3\n")
    assert "r.yaml:4:5  stages.0.name: is missing" in told
    assert "r.yaml:4:5  stages.0.data: is missing" in told
    assert "r.yaml:5:12  stages.1.name: `a/b` cannot be a stage's name" in told
    assert "r.yaml:5:24  stages.1.stage: unknown stage `rll`" in told
    assert "r.yaml:6:5  stages.2: must be a section" in told
    assert "r.yaml:2:30  defaults.run.seed: set by the pipeline's `seeds`" in told


def test_default_accepted_by_no_stage_raises(errors: Callable[..., str]) -> None:
    told = errors(PIPELINE.replace("  optim: {lr: 1e-3}", "  optimm: {lr: 1e-3}"))
    assert told.startswith("r.yaml:5:3  defaults.optimm: no stage of this pipeline takes it\n  they take: advantage,")
    assert told.endswith("hint: did you mean `optim`?")


def test_pipeline_stage_with_extends_raises(errors: Callable[..., str]) -> None:
    told = errors(PIPELINE.replace("  - name: sft", "  - extends: debug/sft\n    name: sft"))
    assert "stages.0.extends: a stage of a pipeline takes the pipeline's `defaults` alone" in told
    assert "stages.0.extends" in errors(PIPELINE, "stages.sft.extends=debug/sft")


def test_eval_defaults_apply_to_eval_stages_or_training_evaluations(tmp_path: Path) -> None:
    """`eval` configures the measurement of an eval stage, and the evaluations during a training stage."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2", "answer": "2"}\n')
    stages = [
        {"name": "warm", "stage": "sft", "run": {"steps": 1}},
        {"name": "check", "stage": "eval", "rewards": [{"use": "math.accuracy"}]},
    ]
    common = {"model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}}

    def of(defaults: dict[str, Any]) -> dict[str, Any]:
        values = {"stage": "pipeline", "defaults": {**common, "eval": defaults}, "stages": stages}
        found = load_dict(values, base_dir=tmp_path, where="test").resolved["stages"]
        return {stage["name"]: stage["eval"] for stage in found}

    measured = of({"samples": 4})
    assert measured["check"]["samples"] == 4 and measured["warm"] is None
    while_training = of({"every": 5, "data": {"source": "rows.jsonl"}})
    assert while_training["warm"]["every"] == 5 and while_training["check"]["samples"] == 1
    with pytest.raises(RecipeError, match=r"defaults\.eval\.sampels"):
        of({"sampels": 4})
