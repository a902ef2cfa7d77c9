"""Stage commands: what a run prints, its exit code, and the files it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import DataError, Interrupted, NothingTrained, RewardError, RunError, UserError
from posttrain.recipe.stages import STAGES
from posttrain.registry import load_module

Call = Callable[..., Any]
Stage = Callable[..., None]


def fails(error: BaseException, wrote: str = "") -> Callable[..., Any]:
    """Return a stage that writes a file (optional) and then raises."""

    def run(_recipe: Any, directory: Any) -> None:
        if wrote:
            (directory.path / wrote).write_text("{}", encoding="utf-8")
        raise error

    return run


def test_run_prints_its_summary(call: Call, stage: Stage, folder: Path) -> None:
    stage(lambda recipe, _: {"loss_last": 1.23456, "steps": recipe.run.steps, "curve": [1, 2], "good": True})
    result = call("sft", "r.yaml", "run.steps=7", "--output", "out")
    assert result.exit_code == 0
    assert result.stdout == "loss_last  1.235\nsteps      7\ngood       yes\n"
    assert "run directory: out" in result.stderr
    assert json.loads((folder / "out" / "resolved.json").read_text())["run"]["steps"] == 7
    assert (folder / "out" / "recipe.yaml").read_text() == (folder / "r.yaml").read_text()


def test_best_model_is_named(call: Call, stage: Stage) -> None:
    best = {"step": 20, "metric": "eval/loss", "value": 1.45372, "model": "out/best"}
    stage(lambda *_: {"steps": 30, "best_checkpoint": best})
    assert "best   out/best  (eval/loss 1.454 after step 20)\n" in call("sft", "r.yaml", "--output", "out").stdout
    stage(lambda *_: {"steps": 30, "best_checkpoint": {**best, "step": 0, "model": None}})
    assert call("sft", "r.yaml", "--output", "none").stdout == "steps  30\n"


@pytest.mark.parametrize(
    "value, hint",
    [
        ("model.path=tinny", "did you mean `tiny`?"),
        ("model.lora={targets: all_linear}", "did you mean `all-linear`?"),
    ],
)
def test_similar_model_or_target_name_is_suggested(value: str, hint: str, call: Call, hub: dict[str, str]) -> None:
    hub["tinny"] = "the hub has no such model"
    assert hint in call("recipe", "validate", "r.yaml", value).stderr


def test_json_is_the_whole_summary(call: Call, stage: Stage) -> None:
    stage(lambda *_: {"a": [1, {"b": None}]})
    assert json.loads(call("sft", "r.yaml", "--output", "out", "--json").stdout) == {"a": [1, {"b": None}]}


def test_recipe_can_set_the_output(call: Call, stage: Stage, folder: Path) -> None:
    stage(lambda *_: {})
    assert call("sft", "r.yaml", "run.output=there").exit_code == 0
    assert (folder / "there" / "resolved.json").is_file()
    assert call("sft", "r.yaml", "run.output=there", "--output", "here").exit_code == 0
    assert (folder / "here" / "resolved.json").is_file()


def test_dry_run_prints_origins_and_writes_nothing(call: Call, stage: Stage, folder: Path) -> None:
    stage(fails(AssertionError("must not run")))
    result = call("sft", "r.yaml", "optim.lr=1e-3", "--dry-run")
    assert result.exit_code == 0
    lines = {line.split("#")[0].strip(): line.partition("# ")[2] for line in result.stdout.splitlines()}
    assert lines["lr: 0.001"] == "command line"
    assert lines["path: tiny"] == "r.yaml:2"
    assert lines["packing: false"] == "default"
    assert "dry run: the recipe is valid" in result.stderr
    assert sorted(p.name for p in folder.iterdir()) == ["r.yaml", "rows.jsonl"]


def test_mistakes_exit_with_2(call: Call, folder: Path) -> None:
    result = call("sft", "r.yaml", "run.stepz=1", "run.seed=4.7")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "command line  run.seed: must be a whole number, not 4.7\n"
        "command line  run.stepz: unknown key\n"
        "  known here: output, seed, steps, epochs, save_every, keep_checkpoints, log_every, max_minutes,"
        " max_idle_steps, hang_minutes\n"
        "  hint: did you mean `steps`?\n\n2 problems\n"
    )
    assert sorted(p.name for p in folder.iterdir()) == ["r.yaml", "rows.jsonl"]


def test_recipe_for_another_command_raises(call: Call) -> None:
    result = call("rl", "r.yaml")
    assert result.exit_code == 2
    assert "hint: posttrain sft r.yaml" in result.stderr


def test_files_and_functions_named_in_a_recipe_must_exist(call: Call, folder: Path) -> None:
    """Rewards and data files are looked at before a directory is made, and told together with their lines."""
    (folder / "mine.py").write_text("def score(completion: str) -> float:\n    return 1.0\n", encoding="utf-8")
    (folder / "rl.yaml").write_text(
        "stage: rl\nmodel: {path: tiny}\nrun: {steps: 1}\n"
        "data:\n  mix: [{source: rows.jsonl}, {source: nope.jsonl}, {source: 'gym:dice'}, {source: 'make.py:rows'}]\n"
        "rewards:\n  - use: mine.py:scor\n  - use: mine.py:score\n    params: {tau: 1}\n  - use: maths.accuracy\n",
        encoding="utf-8",
    )
    result = call("rl", "rl.yaml")
    assert result.exit_code == 2
    told = [line for line in result.stderr.splitlines() if line.startswith("rl.yaml")]
    assert [line.partition(": ")[0] for line in told] == [
        "rl.yaml:5:40  data.mix.1.source",
        "rl.yaml:5:62  data.mix.2.source",  # a task without a size
        "rl.yaml:5:84  data.mix.3.source",
        "rl.yaml:7:10  rewards.0.use",
        "rl.yaml:8:10  rewards.1.use",
        "rl.yaml:10:10  rewards.2.use",
    ]
    assert not (folder / "runs").exists()


def test_missing_names_are_reported_with_schema_errors(call: Call, folder: Path) -> None:
    """Everything that can be told is told at once: keys, values, rewards, losses, data, in every stage."""
    (folder / "mine.py").write_text("def score(completion): return 1.0\ndef loss(batch, logp, *, width=1.0): ...\n")
    (folder / "rl.yaml").write_text(
        "stage: rl\nmodel: {path: ./model, dtyp: float32}\nrun: {steps: 1}\ndata: {source: nope.jsonl}\n"
        "rewards:\n  - {use: mine.py:scor, weigth: 2}\n  - {use: mine.py:score, params: 3}\n  - maths.accuracy\n"
        "loss: mine.py:los\nkl: {use: mine.py:loss, widht: 2}\n"
        "keep: [{use: other.py:keep}]\nselect: [{use: high_entropi}]\n",
        encoding="utf-8",
    )
    result = call("rl", "rl.yaml")
    told = [line for line in result.stderr.splitlines() if line.startswith("rl.yaml")]
    assert [line.partition(": ")[0] for line in told] == [
        "rl.yaml:2:15  model.path",
        "rl.yaml:2:24  model.dtyp",
        "rl.yaml:4:16  data.source",
        "rl.yaml:6:11  rewards.0.use",
        "rl.yaml:6:25  rewards.0.weigth",
        "rl.yaml:7:34  rewards.1.params",
        "rl.yaml:8:5  rewards.2.use",
        "rl.yaml:9:7  loss.use",
        "rl.yaml:10:32  kl.widht",
        "rl.yaml:11:14  keep.0.use",
        "rl.yaml:12:16  select.0.use",
    ]
    assert "mine.py has no function los\n  it has: loss, score\n  hint: did you mean `loss`?" in result.stderr
    (folder / "run.yaml").write_text(
        "stage: pipeline\ndefaults: {model: {path: tiny}, rewards: [{use: math.acuracy}], data: {source: no.jsonl}}\n"
        "stages:\n  - {name: a, stage: rl, run: {stepz: 1}}\n  - {name: b, stage: eval}\n",
        encoding="utf-8",
    )
    told = [line for line in call("run", "run.yaml").stderr.splitlines() if line.startswith("run.yaml")]
    assert [line.split()[0] for line in told] == ["run.yaml:2:49", "run.yaml:2:80", "run.yaml:4:32"], told


def test_error_before_the_start_leaves_no_directory(call: Call, stage: Stage, folder: Path) -> None:
    """So the same command works once the data is there."""
    stage(fails(DataError("data not found: rows.jsonl")))
    result = call("sft", "r.yaml", "--output", "out")
    assert result.exit_code == 2
    assert "data not found: rows.jsonl" in result.stderr
    assert "resume" not in result.stderr
    assert not (folder / "out").exists()


def test_error_in_a_user_script_is_reported_with_its_line(call: Call, stage: Stage, folder: Path) -> None:
    """It is not presented as a bug of posttrain."""
    (folder / "mine.py").write_text("def broken():\n    return 1 / 0\n", encoding="utf-8")
    stage(lambda *_: load_module(folder / "mine.py").broken())
    result = call("sft", "r.yaml", "--output", "out")
    assert result.exit_code == 1
    assert f"{folder}/mine.py:2  ZeroDivisionError: division by zero (traceback: out/logs/" in result.stderr
    assert "report" not in result.stderr


def test_failed_run_keeps_its_files(call: Call, stage: Stage, folder: Path) -> None:
    stage(fails(DataError("row 3 is odd"), wrote="metrics.jsonl"))
    result = call("sft", "r.yaml", "--output", "out")
    assert (folder / "out" / "metrics.jsonl").exists()
    assert result.stderr.endswith(
        "after fixing that, resume with:   posttrain sft r.yaml --output out --resume --allow-changed\n"
    )


def test_resume_of_a_pipeline_is_named_without_allow_changed(call: Call, stage: Stage, folder: Path) -> None:
    """Its error may be that the recipe of a started stage has changed, which the option does not accept."""
    model = {"path": "tiny", "lora": {"rank": 2}}
    values = {"name": "a", "stage": "sft", "model": model, "data": {"source": "rows.jsonl"}, "run": {"steps": 1}}
    (folder / "p.yaml").write_text(json.dumps({"stage": "pipeline", "stages": [values]}), encoding="utf-8")
    stage(fails(UserError("made with another recipe"), wrote="metrics.jsonl"))
    result = call("run", "p.yaml", "--output", "out")
    assert json.loads((folder / "out" / "inputs.json").read_text())
    assert result.stderr.endswith(
        "after fixing that, resume with:   posttrain run p.yaml --output out --resume\n"
        "(add --allow-changed if rewards, tools or data have changed; it does not accept another recipe)\n"
    )


def test_a_run_without_files_to_compare_is_resumed_as_it_is(call: Call, stage: Stage) -> None:
    def fail(_: Any, directory: Any) -> None:
        (directory.path / "inputs.json").write_text("{}", encoding="utf-8")
        (directory.path / "metrics.jsonl").touch()
        raise DataError("row 3 is odd")

    stage(fail)
    assert call("sft", "r.yaml", "--output", "out").stderr.endswith("--output out --resume\n")


def test_run_without_training_is_not_called_resumable(call: Call, stage: Stage) -> None:
    """All of its steps are done: the command that was named failed in the same way."""
    stage(fails(NothingTrained("nothing was trained"), wrote="metrics.jsonl"))
    result = call("sft", "r.yaml", "--output", "out")
    assert (result.exit_code, "run directory: out" in result.stderr) == (1, True)
    assert "resume" not in result.stderr


@pytest.mark.parametrize("number", [(), (15,)])
def test_ctrl_c_before_the_start_leaves_no_run(number: tuple[int, ...], call: Call, stage: Stage, folder: Path) -> None:
    """The next start, without --resume, was refused: the output directory is in use."""
    stage(fails(KeyboardInterrupt(*number)))
    result = call("sft", "r.yaml", "--output", "out")
    assert result.exit_code == 128 + (number or (2,))[0]
    assert "interrupted\nno step was made: the run directory held no results and was removed\n" in result.stderr
    assert "resume" not in result.stderr and not (folder / "out").exists()
    stage(lambda *_: {"steps": 1})
    assert call("sft", "r.yaml", "--output", "out").exit_code == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunError("the disk is full"), 1),
        (Interrupted("stopped after step 3"), 130),
        (Interrupted("stopped after step 3", number=15), 143),
        (Interrupted("stopped after step 3", number=1), 129),
        (KeyboardInterrupt(), 130),
        (KeyboardInterrupt(15), 143),
    ],
)
def test_a_run_that_stops_can_be_resumed(error: BaseException, code: int, call: Call, stage: Stage) -> None:
    stage(fails(error, wrote="metrics.jsonl"))
    result = call("sft", "r.yaml", "run.seed=3", "--output", "my out")
    assert result.exit_code == code
    said = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error).splitlines()[0]
    assert said in result.stderr
    assert "resume with:   posttrain sft r.yaml run.seed=3 --output 'my out' --resume\n" in result.stderr
    stage(lambda _, directory: {"attempt": directory.attempt})
    assert call("sft", "r.yaml", "run.seed=3", "--output", "my out", "--resume").stdout == "attempt  2\n"


def test_ctrl_c_during_an_import_is_reported_as_ctrl_c(call: Call, stage: Stage) -> None:
    """Python 3.11 makes a RuntimeError of what `__set_name__` raises, and libraries have many dataclasses."""
    wrapped = RuntimeError("Error calling __set_name__ on 'Field' instance 'arguments' in 'Call'")
    wrapped.__cause__ = KeyboardInterrupt()
    stage(fails(wrapped))
    result = call("sft", "r.yaml", "--output", "out")
    assert result.exit_code == 130
    assert "interrupted\n" in result.stderr and "unexpected" not in result.stderr


def test_unexpected_error_prints_one_line_and_writes_a_file(call: Call, stage: Stage, folder: Path) -> None:
    stage(fails(KeyError("oops")))
    result = call("sft", "r.yaml", "--output", "out")
    assert result.exit_code == 1
    assert "unexpected KeyError: 'oops'" in result.stderr
    assert "run with --debug" in result.stderr
    assert "Traceback" not in result.stderr
    assert "KeyError: 'oops'" in (folder / "out" / "logs" / "attempt_1" / "traceback.txt").read_text()


def test_error_is_printed_if_its_traceback_cannot_be_written(call: Call, stage: Stage) -> None:
    def fail(_: Any, directory: Any) -> Any:
        (directory.logs / "traceback.txt").mkdir()  # a full disk raises an OSError as well
        raise KeyError("oops")

    stage(fail)
    result = call("sft", "r.yaml", "--output", "out")
    assert result.exit_code == 1
    assert "unexpected KeyError: 'oops'\n" in result.stderr
    assert "resume with:" in result.stderr


@pytest.mark.parametrize("arguments", [("sft", "r.yaml", "--debug"), ("--debug", "sft", "r.yaml")])
def test_debug_shows_the_traceback(arguments: tuple[str, ...], call: Call, stage: Stage) -> None:
    stage(fails(KeyError("oops")))
    assert "Traceback" in call(*arguments, "--output", "out").stderr


def test_used_directory_is_not_changed(call: Call, stage: Stage, folder: Path) -> None:
    stage(lambda *_: {})
    (folder / "out").mkdir()
    (folder / "out" / "thesis.txt").write_text("years of work")
    result = call("sft", "r.yaml", "--output", "out")
    assert result.exit_code == 2
    assert "not empty, and holds no run" in result.stderr and "rm -r" not in result.stderr
    assert [p.name for p in (folder / "out").iterdir()] == ["thesis.txt"]


def test_every_stage_has_a_command_with_the_same_options(call: Call) -> None:
    for verb in STAGES:
        told = call(verb, "--help").stdout
        assert all(f"--{name}" in told for name in ("dry-run", "resume", "output", "json", "debug")), verb


RL = """stage: rl
model: {path: tiny}
data: {source: rows.jsonl}
rewards: [{use: mine.py:one}]
tools: [{use: tool.py:look}]
tool_prompt: none
run: {steps: 1}
"""


@pytest.mark.parametrize(
    ("file", "key"), [("mine.py", "rewards[0].use"), ("tool.py", "tools[0].use"), ("rows.jsonl", "data.source")]
)
def test_resume_with_changed_files(file: str, key: str, call: Call, stage: Stage, folder: Path) -> None:
    """Refused with the keys that name them; if allowed, it is reported and recorded, and the next resume compares with
    it."""
    (folder / "rl.yaml").write_text(RL)
    (folder / "mine.py").write_text("def one(completion):\n    return 1.0\n")
    (folder / "tool.py").write_text('def look(x: str) -> str:\n    """Look x up."""\n    return x\n')
    command = ("rl", "rl.yaml", "--output", "out")
    stage(fails(RunError("the disk is full")))
    assert call(*command).exit_code == 1
    with (folder / file).open("a") as changed:
        changed.write("\n")
    refused = call(*command, "--resume")
    assert refused.exit_code == 2
    assert "files have changed since the run in out was last started" in refused.stderr
    assert f"{key} was " in refused.stderr and "--resume --allow-changed" in refused.stderr
    stage(lambda _, directory: {"attempt": directory.attempt})
    allowed = call(*command, "--resume", "--allow-changed")
    assert allowed.exit_code == 0, allowed.stderr
    assert f"continues with a changed file: {key} was " in allowed.stderr
    logs = folder / "out" / "logs"
    before, after = (json.loads((logs / f"attempt_{n}" / "inputs.json").read_text()) for n in (1, 2))
    assert before[key] != after[key]
    assert {k for k in before if before[k] != after[k]} == {key}
    assert call(*command, "--resume").exit_code == 0


def test_allow_changed_needs_resume(call: Call) -> None:
    result = call("sft", "r.yaml", "--allow-changed")
    assert result.exit_code == 2 and "add --resume" in result.stderr


def test_starting_adapter_must_have_the_same_shape(call: Call, folder: Path) -> None:
    """Said before anything is loaded."""
    result = call("sft", "r.yaml", "model.lora={continue: true}", "--dry-run")
    assert result.exit_code == 2
    assert "model.path: model.lora.continue: tiny is not an adapter" in result.stderr
    (folder / "old").mkdir()
    config = {"base_model_name_or_path": "tiny", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "peft_type": "LORA"}
    (folder / "old" / "adapter_config.json").write_text(json.dumps(config))
    wrong = call("sft", "r.yaml", "model.path=old", "model.lora={continue: true, rank: 8}", "--dry-run")
    assert "model.lora.rank is 8, but the adapter" in wrong.stderr and "has 4" in wrong.stderr
    null = call("sft", "r.yaml", "model.path=old", "model.lora={continue: true, rank: null}", "--dry-run")
    assert null.exit_code == 2 and "model.lora.rank: must be a whole number, not null" in null.stderr
    (folder / "both" / "adapter").mkdir(parents=True)
    (folder / "both" / "config.json").write_text("{}")
    (folder / "both" / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    both = call("sft", "r.yaml", "model.path=both", "model.lora={continue: true}", "--dry-run")
    assert "both is not an adapter" in both.stderr and "a base with its adapter merged in" in both.stderr
    right = call("sft", "r.yaml", "model.path=old", "model.lora={continue: true, rank: 4}", "--dry-run")
    assert right.exit_code == 0, right.stderr


def test_missing_hub_ids_raise_before_loading(call: Call, hub: dict[str, str]) -> None:
    hub["org/gone"] = "the hub has no such model"
    for words in (("--dry-run",), ()):
        result = call("sft", "r.yaml", "model.path=org/gone", *words)
        assert result.exit_code == 2
        assert "model.path: model not found: org/gone; the hub has no such model" in result.stderr
        data = call("sft", "r.yaml", "data.source=org/gone", *words)
        assert "data.source: data not found: org/gone; the hub has no such model" in data.stderr
    noted = call("recipe", "validate", "r.yaml", "model.path=org/gone")
    assert noted.exit_code == 0 and "note: command line  model.path: model not found: org/gone" in noted.stderr


@pytest.mark.parametrize("hidden", [True, False])
def test_missing_gpu_raises_before_loading(call: Call, monkeypatch: pytest.MonkeyPatch, hidden: bool) -> None:
    monkeypatch.setattr("posttrain.cli.existence.DEVICES", ("/dev/null",) if hidden else ("/dev/no_gpu*",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "" if hidden else "0")
    why = "CUDA_VISIBLE_DEVICES hides all GPUs" if hidden else "this machine has no GPU"
    result = call("sft", "r.yaml", "model.device=cuda", "--dry-run")
    assert result.exit_code == 2
    assert f"model.device: cuda, but {why}" in result.stderr
    assert call("recipe", "validate", "r.yaml", "model.device=cuda").exit_code == 0  # it may run elsewhere


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["model.device=cuda"], "model.device: cuda, but this machine has no GPU"),
        (["optim.use=paged_adamw_8bit"], "optim.use: paged_adamw_8bit needs a GPU, but this machine has no GPU"),
        (["model.half_weights=true"], "model.half_weights: needs matmuls in bfloat16, and `dtype: auto` is float32"),
    ],
)
def test_what_needs_a_gpu_is_refused_by_runs_only(
    call: Call, monkeypatch: pytest.MonkeyPatch, changes: list[str], told: str
) -> None:
    """`recipe validate` notes it. `plan`, `data inspect` and job files are for a run that may be elsewhere."""
    monkeypatch.setattr("posttrain.cli.existence.DEVICES", ("/dev/no_gpu*",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    refused = call("sft", "r.yaml", *changes)
    assert refused.exit_code == 2 and told in refused.stderr
    noted = call("recipe", "validate", "r.yaml", *changes)
    assert noted.exit_code == 0 and f"note: command line  {told}" in noted.stderr
    planned = call("plan", "r.yaml", *changes)
    assert planned.exit_code == 0, planned.stderr
    assert f"a run of the recipe would be refused: {told}" in planned.stderr
    assert "would be refused" not in call("plan", "r.yaml", "--card", "h100", *changes).stderr
    assert call("data", "inspect", "r.yaml", *changes).exit_code == 0
    assert call("sft", "r.yaml", "--slurm", "nodes=1,gpus=1", "--output", "run", *changes).exit_code == 0


def test_paged_moments_of_a_model_on_the_cpu_are_refused_anywhere(call: Call) -> None:
    result = call("recipe", "validate", "r.yaml", "optim.use=paged_adamw_8bit", "model.device=cpu")
    assert result.exit_code == 2 and "optim.use: there is no GPU memory to page out" in result.stderr


def test_adapter_targets_missing_in_the_model_raise(call: Call, folder: Path) -> None:
    result = call("sft", "r.yaml", "model.lora={targets: [q_prj, v_proj]}", "--dry-run")
    assert result.exit_code == 2
    assert "model.lora.targets: no module of tiny is called `q_prj`" in result.stderr
    assert "did you mean `q_proj`?" in result.stderr
    here = folder / "m"
    here.mkdir()
    (here / "config.json").write_text("{}")
    weights = {"weight_map": {"model.layers.0.attn.c_attn.weight": "x", "model.wte.weight": "x"}}
    (here / "model.safetensors.index.json").write_text(json.dumps(weights))
    wrong = call("sft", "r.yaml", "model.path=m", "model.lora={targets: [q_proj]}", "--dry-run")
    assert "no module of m is called `q_proj`" in wrong.stderr and "modules: c_attn, lm_head, wte" in wrong.stderr
    assert call("sft", "r.yaml", "model.path=m", "model.lora={targets: [c_attn]}", "--dry-run").exit_code == 0


def test_errors_are_json_with_their_position(call: Call, folder: Path) -> None:
    (folder / "wrong.yaml").write_text("stage: sft\nmodel: {pth: tiny}\ndata: {source: rows.jsonl}\n")
    result = call("sft", "wrong.yaml", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["exit_code"]) == (2, 2)
    first = next(one for one in told["problems"] if "pth" in one["what"])
    assert (first["file"], first["line"], first["column"], first["key"]) == ("wrong.yaml", 2, 9, "model.pth")
    assert first["hint"] == "did you mean `path`?"
    assert "did you mean `path`?" in result.stderr  # and for people


def test_usage_errors_are_json_too(call: Call) -> None:
    told = json.loads(call("sft", "--json").stdout)
    assert told["problems"][0]["what"].startswith("Missing argument")


def test_run_errors_are_json_with_the_resume_command(call: Call, stage: Stage) -> None:
    stage(fails(RunError("the engine is gone"), wrote="metrics.jsonl"))
    told = json.loads(call("sft", "r.yaml", "--json", "--output", "out").stdout)
    assert told["exit_code"] == 1 and told["problems"][0]["what"] == "the engine is gone"
    assert told["run"] == "out" and told["resume"].startswith("posttrain sft r.yaml")


def test_reward_error_names_the_line_of_that_reward(call: Call, stage: Stage, folder: Path) -> None:
    """The second reward breaks its contract while the run goes on: the error is not given the first one's line."""
    (folder / "a.py").write_text("def good(completion): return 1.0\ndef bad(completion): return 'x'\n")
    (folder / "rl.yaml").write_text(
        "stage: rl\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrun: {steps: 1}\nrewards:\n"
        "  - use: ./a.py:good\n  - use: ./a.py:bad\n"
    )
    stage(fails(RewardError("returned 'x'", where="reward bad  rows.jsonl:1"), wrote="metrics.jsonl"))
    told = json.loads(call("rl", "rl.yaml", "--json", "--output", "out").stdout)["problems"][0]
    assert (told["file"], told["line"], told["key"]) == ("rl.yaml", 7, "rewards.1")
    assert "rows.jsonl:1" in told["what"]
    stage(fails(RunError("reward bad: 8 of 8 calls failed", where=f"{folder}/a.py:bad"), wrote="metrics.jsonl"))
    assert call("rl", "rl.yaml", "--output", "more").stderr.count(f"rl.yaml:7:10  rewards.1: {folder}/a.py:bad: ") == 1


def test_error_located_by_a_key_gets_the_line_of_the_key(call: Any, stage: Any) -> None:
    """As components raise it when they are made, behind the checks of the recipe."""

    def refuse(*_: Any) -> None:
        raise UserError("no such thing", where="run.steps", allowed="another")

    stage(refuse)
    told = call("sft", "r.yaml", "--output", "out").stderr
    assert "r.yaml:4:14  run.steps: no such thing\n  another" in told


def test_run_whose_output_cannot_be_written_is_complete(tmp_path: Path) -> None:
    """The summary is printed last: a closed pipe or a full disk then loses nothing, and the exit code is 0."""
    code = "from pathlib import Path; from posttrain.cli.run_messages import print_run_summary as show"
    read_end, closed = os.pipe()
    os.close(read_end)
    with open("/dev/full", "w") as full:
        for stdout, reason in ((closed, "Broken pipe"), (full, "No space left on device")):
            done = subprocess.run(
                [sys.executable, "-c", f"{code}; show({{'steps': 4}}, Path({str(tmp_path)!r}), False)"],
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
            )
            told = f"the run is complete; its summary cannot be written to stdout: {reason}\n"
            assert (done.returncode, done.stderr) == (0, f"{told}run directory: {tmp_path}\n")
    os.close(closed)
