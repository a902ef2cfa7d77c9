"""Common command-line mistakes of new users, each with a hint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RL = (
    "stage: rl\nalgorithm: grpo\nmodel: {path: tiny}\ndata: {source: qa.jsonl}\n"
    "rewards:\n  - use: math.accuracy\nrun: {steps: 2}\n"
)
DPO = "stage: dpo\nmodel: {path: tiny}\ndata: {source: pairs.jsonl}\nrun: {steps: 2}\n"
ROWS = {
    "qa.jsonl": {"prompt": "1 + 1?", "answer": "2"},
    "qr.jsonl": {"question": "1 + 1?", "reply": "2"},
    "chat.jsonl": {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]},
    "pairs.jsonl": {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
}

VALUES = [  # of `posttrain recipe validate rl.yaml VALUE`
    # columns
    ("data.columns={answer: reply}", "the data has `answer` already: remove this mapping"),
    ("data.columns={answer:reply}", "a space is missing after the colon: `answer: reply`"),
    ("data.source=qr.jsonl", "name the columns, e.g. `columns: {prompt: question}`"),
    # keys
    ("loss.clip=0.3", "did you mean `clip_high` or `clip_low`?"),
    ("data.max_prompt=3", "write `data.max_length` (in rl it bounds the prompt)"),
    ("run.name=x", "write `run.output`"),
    ("model.lora.r=8", "write `model.lora.rank`"),
    ("reward=math.accuracy", "did you mean `rewards`?"),
    ("run.track=wandb", "`track` belongs to the top level"),
    # values
    ("model.dtype=fp16", "did you mean `float16`?"),
    ("model.attention=flash", "did you mean `flash_attention_2`?"),
    ("rollout.engine=vLLM", "did you mean `vllm`?"),
    ("track=wandb", "write [wandb] for a list of one"),
    ("track=[wandbb]", "did you mean `wandb`?"),
    ("optim.lr=0,0001", "write 0.0001"),
    ("run.steps=10k", "write 10000"),
    ("run.steps=1.5m", "write 1500000"),
    ("run.steps=1e3", "write 1000"),
    ("optim.betas=0.9", "write [0.9] for a list of one"),
    ("run.output=", "write run.output=null for none"),
    # sections
    ("model=tiny", "write model.path=tiny"),
    ("data=qa.jsonl", "write data.source=qa.jsonl"),
    ("kl=0.1", "write kl.coef=0.1"),
    ("model.lora=true", "write `lora: {}` for a section with its defaults"),
    # components
    ("loss=grpo", "it is an algorithm: write `algorithm: grpo`"),
    ("loss=gpso", "did you mean `gspo`?"),
    ("algorithm=grop", "did you mean `grpo`?"),
    ("loss=mine.py", "write mine.py:FUNCTION"),
    ("rewards.0.use=math.acuracy", "did you mean `accuracy`?"),
    ("run=8", "write run.steps=8"),
    ("rewards=[{use: math.accuracy, wieght: 2}]", "did you mean `weight`?"),
    # entries
    ("rewards.use=x", "write rewards.0.use=x"),
    ("rewards.accuracy.weight=2", "write rewards.0.weight=2"),
    # generators
    ("data={source: task:countdown, size: 4, params: {level: 2}}", "did you mean `levels`?"),
]

COMMANDS = [
    ("recipe validate eval.yaml sampling.n=4", "write `eval.samples`"),
    ("recipe validate eval.yaml rollout.temperature=0", "write sampling.temperature=0"),
    ("recipe validate eval.yaml batch.size=4", "write `engine.batch_size`"),
    ("recipe validate sft.yaml data.train_on=response", "did you mean `completion`?"),
    ("recipe validate merge.yaml models.0.weight=0.5", "write `parameters.weight`"),
    ("recipe validate merge.yaml models=[model]", "write {model: model} for an entry"),
    ("recipe import rl.yaml", "posttrain rl rl.yaml"),
    ("sweep optim.lr=1,2", "the recipe comes first: posttrain sweep RECIPE optim.lr=1,2"),
    ("rl optim.lr=1", "the recipe comes first: posttrain rl RECIPE optim.lr=1"),
    ("sft --sft.yaml", "the recipe comes first, without --: posttrain sft sft.yaml"),
    ("generate tiny --promt hi", "did you mean --prompt?"),
    ("generate tiny --prompt hi --n 2", "write -n 2"),
    ("report run/final", "did you mean run?"),
    ("runs --state done", "did you mean `finished`?"),
    ("track run --to wandbb", "did you mean `wandb`?"),
    ("reward test math.accurcy", "did you mean `accuracy`?"),
    ("chat tiny --temprature 0", "did you mean --temperature?"),
    ("rl rl.yaml --resum", "did you mean --resume?"),
    ("recipe show rl.yaml --jsn", "did you mean --json?"),
    ("export tiny --to merged --dtype fp16", "did you mean `float16`?"),
    ("export tiny --to merged --as merge", "did you mean `merged`?"),
    ("recipe validate rl.yaml dpo.yaml", "a command takes one recipe: give dpo.yaml to a command of its own"),
    ("recipe validate rl.yml", "did you mean `rl.yaml`?"),
    ("sweep merge.yaml dtype=float32,bfloat16", "posttrain merge RECIPE --sweep KEY=VALUES --eval RECIPE"),
    ("sweep quickstart seeds=0,1", "a pipeline has seeds of its own: posttrain run RECIPE 'seeds=[0,1,2]'"),
    ("recipe validate sfft.yaml", "did you mean `sft.yaml`?"),
    ("merge linear.yaml", "without an ending it is a shipped recipe: linear"),
    ("merge linaer.yaml", "did you mean `linear`?"),
    ("recipe vaildate rl.yaml", "did you mean `posttrain recipe validate`?"),
    ("eval tiny", "a recipe says what to do with it: posttrain eval RECIPE model.path=tiny; benchmarks need none"),
    ("eval model", "a recipe says what to do with it: posttrain eval RECIPE model.path=model; benchmarks need none"),
    ("eval run", "a recipe says what to do with it: posttrain eval RECIPE model.path=run; benchmarks need none"),
    ("sft model", "a recipe says what to do with it: posttrain sft RECIPE model.path=model"),
    ("sft run", "name the file: run/recipe.yaml"),
    ("data inspect qa.jsonl", "a recipe says what to do with it: data.source=qa.jsonl"),
    ("rl train.py", "a script of TRL becomes one: posttrain recipe import train.py"),
    ("recipe validate sft.yaml data.columns.msgs=messages", "data.columns renames `messages`, which is read under"),
    ("methods show gropo", "did you mean `grpo`?"),
]


@pytest.fixture(autouse=True)
def files(folder: Path) -> Path:
    """Recipes, rows, a model and a run."""
    for name, row in ROWS.items():
        (folder / name).write_text(json.dumps(row) + "\n", encoding="utf-8")
    (folder / "rl.yaml").write_text(RL, encoding="utf-8")
    (folder / "dpo.yaml").write_text(DPO, encoding="utf-8")
    (folder / "sft.yaml").write_text(DPO.replace("dpo", "sft").replace("pairs", "chat"), encoding="utf-8")
    (folder / "train.py").write_text("from trl import GRPOTrainer\n", encoding="utf-8")
    (folder / "eval.yaml").write_text(RL.replace("stage: rl\nalgorithm: grpo", "stage: eval").partition("run:")[0])
    (folder / "merge.yaml").write_text("merge_method: linear\nmodels: [{model: model}, {model: model}]\n")
    (folder / "run").mkdir()
    (folder / "run" / "resolved.json").write_text('{"stage": "rl"}', encoding="utf-8")
    for model in ("model", "run/final"):
        (folder / model).mkdir(parents=True)
        (folder / model / "config.json").write_text("{}", encoding="utf-8")
    (folder / "run" / "recipe.yaml").write_text(RL, encoding="utf-8")
    return folder


def _hints(ended: Any) -> list[str]:
    assert ended.exit_code == 2, ended.stderr
    assert "Value error" not in ended.stderr
    return [line.strip() for line in ended.stderr.splitlines() if line.strip().startswith("hint: ")]


@pytest.mark.parametrize(("value", "hint"), VALUES, ids=[value for value, _ in VALUES])
def test_wrong_value_gets_a_hint(value: str, hint: str, call: Callable[..., Any]) -> None:
    hints = _hints(call("recipe", "validate", "rl.yaml", value))
    assert any(one.startswith(f"hint: {hint}") for one in hints), hints


@pytest.mark.parametrize(("typed", "hint"), COMMANDS, ids=[typed for typed, _ in COMMANDS])
def test_wrong_command_gets_a_hint(typed: str, hint: str, call: Callable[..., Any]) -> None:
    hints = _hints(call(*typed.split(" ")))
    assert len(hints) == 1
    assert hints[0].startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("rl rl.yaml --gpus x", "--gpus: must be a whole number"),
        ("rl rl.yaml --gpus 0", "--gpus: must be at least 1"),
        ("chat tiny --temperature hot", "--temperature: must be a number"),
    ],
)
def test_non_numeric_options_raise(typed: str, told: str, call: Callable[..., Any]) -> None:
    assert call(*typed.split(" ")).stderr.strip() == told


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("data.prompt_template=Q: {prompt}", "Q: {prompt}"),
        ("data.prompt_template={prompt} now", "{prompt} now"),
        ('data.prompt_template="Q: {prompt}"', "Q: {prompt}"),
        ("data.prompt_template='{prompt}'", "{prompt}"),
    ],
)
def test_text_values_are_read_as_typed(typed: str, read: str, call: Callable[..., Any]) -> None:
    """YAML would read a mapping, or nothing at all; quotes of YAML still are quotes."""
    shown = json.loads(call("recipe", "show", "rl.yaml", typed, "--json").stdout)
    assert shown["recipe"]["data"]["prompt_template"] == read


def test_text_values_of_a_pipeline_stage_are_read_as_typed(files: Path, call: Callable[..., Any]) -> None:
    entry = "stage: sft, model: {path: tiny}, data: {source: chat.jsonl}, run: {steps: 1}"
    stages = "".join(f"  - {{name: {name}, {entry}}}\n" for name in ("a", "b"))
    (files / "p.yaml").write_text(f"stages:\n{stages}", encoding="utf-8")
    shown = call("recipe", "show", "p.yaml", "stages.b.data.system=You are: terse", "--json")
    stages = json.loads(shown.stdout)["recipe"]["stages"]
    assert [one["data"]["system"] for one in stages] == [None, "You are: terse"]


def test_unknown_template_field_is_named(call: Callable[..., Any]) -> None:
    ended = call("recipe", "validate", "rl.yaml", "data.prompt_template=Q: {promt}")
    assert "no column `promt`" in ended.stderr
    assert _hints(ended) == ["hint: did you mean `prompt`?"]


def test_size_larger_than_the_data_is_noted(call: Callable[..., Any]) -> None:
    noted = "`size` asks for 5,000 rows; qa.jsonl has 1, and all are used"
    assert noted in call("recipe", "validate", "rl.yaml", "data.size=5000").stderr
    assert "all are used" not in call("recipe", "validate", "rl.yaml", "data.size=1").stderr


def test_unknown_filter_key_is_named(files: Path, call: Callable[..., Any]) -> None:
    values = {"stage": "rl", "optim": {"lr": 0.0001}, "rewards": [{"use": "math.accuracy"}], "kl": {"coef": None}}
    (files / "run" / "resolved.json").write_text(json.dumps(values), encoding="utf-8")
    (files / "run" / "metrics.jsonl").write_text('{"step": 1, "entropy": 0.5}\n', encoding="utf-8")
    for word, what, hint in (
        ("optm.lr=0.1", "no recipe of these runs has the key `optm.lr`", "did you mean `optim.lr`?"),
        ("optim=1", "no recipe of these runs has the key `optim`", "`optim` is a section with optim.lr"),
        (
            "entropy=1",
            "no recipe of these runs has the key `entropy`",
            "`entropy` is a metric, and runs are not filtered",
        ),
        ("entropy>0.1", "`>` is not supported, only `=`", ""),
        ("optim.lr==1e-4", "`==` is not supported, only `=`", ""),
    ):
        told = call("runs", ".", "--filter", word)
        assert told.exit_code == 2 and told.stderr.startswith(f"--filter {word}: {what}"), word
        assert hint in told.stderr and "allowed: KEY=VALUE of a recipe value" in told.stderr
    for word in ("optim.lr=1e-4", "optim.lr=0.0001", "rewards.0.use=math.accuracy", "kl.coef=null"):
        assert [row["path"] for row in json.loads(call("runs", ".", "--filter", word, "--json").stdout)] == ["run"], (
            word
        )


def test_section_error_in_a_file_uses_file_syntax(files: Path, call: Callable[..., Any]) -> None:
    (files / "rl.yaml").write_text(RL.replace("{path: tiny}", "tiny"), encoding="utf-8")
    assert _hints(call("recipe", "validate", "rl.yaml")) == ["hint: write `model: {path: tiny}`"]
