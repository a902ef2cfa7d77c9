"""Each way to train on nothing, as a user sees it on the command line.

The problem is reported before or directly after the first step, the exit status is not 0, and no output looks like a
trained model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app

REWARDS = """
def digits(completion, token_count):
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def flat(completion):
    return 0.5

def silent(completion):
    return None
"""
TEACHING = {"model": {"path": "tiny"}, "optim": {"lr": 1e-3}, "run": {"steps": 3}}
ROWS = TEACHING | {"batch": {"size": 4}}
RECIPES: dict[str, dict[str, Any]] = {
    "sft": {"stage": "sft", "data": {"source": "rows.jsonl"}, **ROWS},
    "dpo": {"stage": "dpo", "algorithm": "dpo", "data": {"source": "pairs.jsonl"}, **ROWS},
    "reward-model": {"stage": "reward_model", "algorithm": "reward_model", "data": {"source": "pairs.jsonl"}, **ROWS},
    "rl": {
        "stage": "rl",
        "data": {"source": "prompts.jsonl"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
        "rewards": [{"use": "own.py:digits"}],
        "scoring": {"workers": 1},
        **TEACHING,
    },
}

KTO = "algorithm=kto"
DPO_WITH_LABELS = ("data.source=labels.jsonl", KTO)
FLAT = "rewards=[{use: 'own.py:flat'}]"
RATE = "the learning rate 1e-30 changes no weight"
NO_GRADIENT = "the gradient of every trained weight is 0"

# verb, change, message. Refused: before anything is loaded. Without rows: after rendering.
REFUSED = {
    "sft, rate 0": ("sft", ["optim.lr=0"], "optim.lr: must be greater than 0"),
    "rl, rate 0": ("rl", ["optim.lr=0"], "optim.lr: must be greater than 0"),
    "no step": ("sft", ["run.steps=0"], "run.steps: must be greater than 0"),
    "no pass": ("dpo", ["run.steps=null", "run.epochs=0"], "run.epochs: must be greater than 0"),
    "empty file": ("sft", ["data.source=empty.jsonl"], "the file is empty"),
    "all rows skipped": ("rl", ["data.skip=100"], "no rows after the first 100"),
    "no such module": ("sft", ["model.lora={targets: [nothing]}"], "no module of tiny is called `nothing`"),
    "adapter, all inputs dropped": ("rl", ["model.lora={dropout: 1.0}"], "model.lora.dropout: must be less than 1"),
    "clipped to length 0": ("dpo", ["optim.max_grad_norm=0"], "optim.max_grad_norm: must be greater than 0"),
    "dpo, beta 0": ("dpo", ["loss.beta=0"], "loss.beta: must be greater than 0"),
    "dpo, labels as often wrong": ("dpo", ["loss.label_smoothing=0.5"], "the loss prefers neither answer"),
    "kto, weights 0": (
        "dpo",
        [*DPO_WITH_LABELS, "loss.desirable_weight=0", "loss.undesirable_weight=0"],
        "no answer counts",
    ),
    "reward model, all held out": ("reward-model", ["objective.holdout=1"], "objective.holdout: must be less than 1"),
    "rewards of weight 0": ("rl", ["rewards=[{use: 'own.py:digits', weight: 0}]"], "every weight is 0"),
    "rewards clipped to one value": (
        "rl",
        ["rewards=[{use: 'own.py:digits', clip: [0, 0]}]"],
        "makes every score 0",
    ),
    "groups of one": ("rl", ["rollout.group_size=1"], "compares the completions of one prompt, and there is only 1"),
    "always the same answer": ("rl", ["rollout.temperature=0"], "the same completion every time"),
    "no token": ("rl", ["rollout.max_new_tokens=0"], "rollout.max_new_tokens: must be greater than 0"),
}
WITHOUT_ROWS = {
    "sft, all cut by the window": ("sft", ["data.max_length=2", "data.overlong=drop"], "no row is left of 12"),
    "sft, all longer than the window": ("sft", ["data.max_length=2"], "trained part alone longer than max_length: 12"),
    "sft, masked by turn": ("sft", ["data.source=masked.jsonl"], "every answer has `train: false`"),
    "sft, empty completions": ("sft", ["data.source=blank.jsonl"], "empty completion: 4"),
    "dpo, all cut by the window": ("dpo", ["data.max_length=2"], "no row is left of 12"),
    "dpo, equal sides": ("dpo", ["data.source=equal.jsonl"], "chosen and rejected are the same: 12"),
    "kto, one label": ("dpo", ["data.source=good.jsonl", KTO], "`label` is good in all 12 answers"),
    "reward model, equal sides": (
        "reward-model",
        ["data.source=equal.jsonl"],
        "chosen and rejected are the same: 12",
    ),
    "reward model, nothing left to train": ("reward-model", ["objective.holdout=0.99"], "no row is left to train on"),
    "rl, all prompts cut by the window": ("rl", ["data.max_length=1", "data.overlong=drop"], "no row is left of 12"),
}
IDLE = {
    "sft, rate under rounding": ("sft", ["optim.lr=1e-30"], RATE),
    "sft, adapter at such a rate": ("sft", ["optim.lr=1e-30", "model.lora={rank: 2}"], RATE),
    "sft, gradients clipped to nothing": ("sft", ["optim.max_grad_norm=1e-30"], "look at optim.lr, optim.max_grad_no"),
    "sft, eps swallows the update": ("sft", ["optim.eps=1e30"], "optim.max_grad_norm and optim.eps"),
    "dpo, rate under rounding": ("dpo", ["optim.lr=1e-30"], RATE),
    "dpo, beta without gradient": ("dpo", ["loss.beta=1e-30"], NO_GRADIENT),
    "reward model, rate under rounding": ("reward-model", ["optim.lr=1e-30"], RATE),
    "rl, rate under rounding": ("rl", ["optim.lr=1e-30"], RATE),
    "rl, equal rewards": ("rl", [FLAT], "no group has a signal; no answer reached scoring.correct_at (mean reward 0.5"),
    "rl, no reward returned": ("rl", ["rewards=[{use: 'own.py:silent'}]"], "silent returned None for all 16"),
    "rl, weight without gradient": ("rl", ["rewards=[{use: 'own.py:digits', weight: 1e-30}]"], NO_GRADIENT),
    "rl, idle condition": (
        "rl",
        ["rewards=[{use: 'own.py:digits', condition: {on: flat}}, {use: 'own.py:flat', weight: 0}]"],
        "answers that differ had equal rewards",
    ),
    "rl, all completions cut": (
        "rl",
        ["rollout.max_new_tokens=1", "loss.mask_truncated=true"],
        "no answer was right, and most were cut: raise rollout.max_new_tokens",
    ),
    "rl, completions cut whose rewards differ": (
        "rl",
        ["loss.mask_truncated=true", "run.seed=1", "rollout.max_new_tokens=3"],
        "no token is left of the groups whose rewards differ: see loss.mask_truncated",
    ),
    "dapo, nothing kept": (
        "rl",
        ["algorithm=dapo", "rollout.max_gen_batches=1"],
        "`keep` dropped every group whose rewards differ",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with data, rewards and a recipe for each verb."""
    sums = [(f"{i}+{i}=", f"{2 * i}.") for i in range(12)]
    masked = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2", "train": False}]
    files = {
        "rows": [{"prompt": p, "completion": c} for p, c in sums],
        "prompts": [{"prompt": p, "answer": c} for p, c in sums],
        "pairs": [{"prompt": p, "chosen": c, "rejected": "no"} for p, c in sums],
        "equal": [{"prompt": p, "chosen": c, "rejected": c} for p, c in sums],
        "labels": [{"prompt": p, "completion": c, "label": n % 2 == 0} for n, (p, c) in enumerate(sums)],
        "good": [{"prompt": p, "completion": c, "label": True} for p, c in sums],
        "masked": [{"messages": masked}] * 4,
        "blank": [{"prompt": "1+1=", "completion": ""}] * 4,
        "empty": [],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(REWARDS)
    for verb, recipe in RECIPES.items():
        (tmp_path / f"{verb}.yaml").write_text(json.dumps(recipe))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(verb: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, [verb, f"{verb}.yaml", *arguments], prog_name="posttrain")


def in_one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_loaded(case: str, folder: Path) -> None:
    verb, changes, said = REFUSED[case]
    for flags in (["--dry-run"], ["--output", "out"]):
        result = call(verb, *changes, *flags)
        assert result.exit_code == 2 and said in in_one_line(result.stderr), result.stderr
    assert not (folder / "out").exists()


@pytest.mark.parametrize("case", WITHOUT_ROWS)
def test_data_without_remaining_rows_is_refused(case: str, folder: Path) -> None:
    verb, changes, said = WITHOUT_ROWS[case]
    result = call(verb, *changes, "--output", "out")
    assert result.exit_code == 2 and said in in_one_line(result.stderr), result.stderr
    assert result.stdout == "" and not (folder / "out").exists()


@pytest.mark.parametrize("case", IDLE)
def test_run_without_any_update_fails(case: str, folder: Path) -> None:
    verb, changes, said = IDLE[case]
    result = call(verb, *changes, "--output", "out")
    told = in_one_line(result.stderr)
    assert result.exit_code == 1 and said in told, result.stderr
    first, _, rest = told.partition(said)
    assert "no update in this step: " in first and f"{verb} 3/3" in rest, "it is said after the first step"
    assert "nothing was trained: none of 3 steps made an update" in rest
    assert result.stdout == "" and not (folder / "out" / "final").exists()
    assert json.loads((folder / "out" / "status.json").read_text())["state"] == "failed"
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["updates"] for row in rows] == [0, 0, 0]


def test_dapo_without_a_group_to_keep_reports_why(folder: Path) -> None:
    result = call("rl", "algorithm=dapo", "--output", "out")
    assert result.exit_code == 1 and not (folder / "out" / "final").exists()
    told = in_one_line(result.stderr)
    assert "none of 4 groups passed `keep` in 10 generation batches" in told and "40 had no right answer" in told


def test_long_run_without_updates_is_stopped(folder: Path) -> None:
    """Steps without an update are counted against the limit that the recipe sets."""
    result = call("rl", FLAT, "run.steps=1000", "run.max_idle_steps=2", "--output", "out")
    assert result.exit_code == 1 and "no update in the last 2 steps, 0 updates before" in result.stderr
    assert not (folder / "out" / "final").exists()


@pytest.mark.parametrize(
    ("verb", "changes"),
    [("dpo", ["loss.beta=1e-9"]), ("sft", ["optim.max_grad_norm=1e-9"])],
    ids=["dpo, tiny beta", "sft, gradients clipped to next to nothing"],
)
@pytest.mark.usefixtures("folder")
def test_negligible_updates_are_reported(verb: str, changes: list[str]) -> None:
    result = call(verb, *changes, "--output", "out")
    first, _, rest = in_one_line(result.stderr).partition("optim.eps (1e-08) takes more than 99% of each update")
    assert f"{verb} 1/3" in first and f"{verb} 3/3" in rest


@pytest.mark.usefixtures("folder")
def test_warm_up_longer_than_the_run_is_reported() -> None:
    result = call("sft", "optim.warmup_steps=100", "--output", "out")
    assert "the learning rate rises to 2.97e-05 and never reaches optim.lr 0.001" in result.stderr
    assert "never reaches" not in call("sft", "optim.warmup_steps=2", "--output", "other").stderr


def test_working_run_triggers_none_of_these_checks(folder: Path) -> None:
    result = call("sft", "--output", "out", "--json")
    summary = json.loads(result.stdout)
    assert result.exit_code == 0 and (summary["updates"], summary["steps_without_update"]) == (3, 0)
    assert "no update" not in result.stderr and "optim.eps" not in result.stderr
    assert summary["trainable_parameters"] == 113856 and (folder / "out" / "final").is_dir()


def test_ledger_accounts_for_every_token_of_a_run(folder: Path) -> None:
    """Includes groups that `keep` drops and that others replace."""
    changes = ["keep=dynamic_sampling", "rollout.max_gen_batches=8", "scoring.correct_at=0.12"]
    result = call("rl", *changes, "--output", "out", "--json")
    found = json.loads(result.stdout)["ledger"]
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    in_steps = sum(round(row["completions/mean_length"] * row["rollout/rows"]) for row in rows)
    replaced = sum(row.get("rollout/replaced_tokens", 0) for row in rows)
    assert found["tokens"].get("replaced", 0) == replaced
    assert sum(found["tokens"].values()) == in_steps + replaced and found["tokens"]["trained"] > 0
    assert {"rollout", "update", "checkpoints"} <= found["seconds"].keys()
    outside = ("checkpoints", "final_save")
    phases = sum(seconds for name, seconds in found["seconds"].items() if name not in outside)
    assert phases == pytest.approx(sum(row["time/step"] for row in rows), rel=0.05)
