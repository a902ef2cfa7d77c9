"""Runs stopped at random moments, by kill -9 (once within a save) or by a handled signal: after resuming, the metrics
equal those of an unbroken run bit for bit."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics

STEPS, SAVE_EVERY = 14, 3
RECIPES = {
    # dropout: random numbers must resume too. Warm-up and cosine: so must the schedule.
    "sft": {
        "stage": "sft",
        "model": {"path": "tiny", "lora": {"rank": 4, "dropout": 0.2}},
        "data": {"source": "rows.jsonl"},
        "batch": {"size": 6, "micro_size": 2},
        "optim": {"lr": 3e-3, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
        "run": {"steps": STEPS, "save_every": SAVE_EVERY, "seed": 7},
    },
    "dpo": {
        "stage": "dpo",
        "model": {"path": "tiny"},
        "data": {"source": "pairs.jsonl"},
        "batch": {"size": 6, "micro_size": 2},
        "optim": {"lr": 1e-3, "schedule": "linear", "warmup_steps": 3},
        "run": {"steps": STEPS, "save_every": SAVE_EVERY, "seed": 7},
    },
    # a KL term, two updates a step, refilled groups: the reference, the minibatches and the prompt stream must resume
    "rl": {
        "stage": "rl",
        "algorithm": "dapo",
        "model": {"path": "tiny"},
        "data": {"source": "pairs.jsonl"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 10, "max_gen_batches": 20},
        "rewards": [{"use": "digits.py:digits"}],
        "scoring": {"workers": 1, "correct_at": 0.15},
        "kl": {"coef": 0.05},
        "batch": {"minibatches": 2},
        "optim": {"lr": 2e-3, "schedule": "linear", "warmup_steps": 3},
        "run": {"steps": STEPS, "save_every": SAVE_EVERY, "seed": 7},
    },
}

DIGITS = """
def digits(completion, token_count):
    return sum(c.isdigit() for c in completion) / max(token_count, 1)
"""


@pytest.mark.parametrize("stage", ["sft", "dpo", "rl"])
def test_run_killed_five_times_resumes_exactly(
    train: Any, stage: str, sft_recipe: Any, dpo_recipe: Any, tmp_path: Path
) -> None:
    del sft_recipe, dpo_recipe  # they write the rows
    (tmp_path / "digits.py").write_text(DIGITS)
    recipe = RECIPES[stage]
    assert train(recipe, tmp_path / "unbroken") == 0
    expected = rows_of(tmp_path / "unbroken")
    pace = sum(row["time/step"] for row in read_metrics(tmp_path / "unbroken")) / STEPS
    draw = random.Random(STEPS + len(stage))
    # Rows after which each process is killed, and the delay: within the next two steps.
    later = [{"rows": rows, "delay": draw.random() * 2 * pace} for rows in draw.sample((1, 2, 4, 5), 4)]
    broken = tmp_path / "broken"
    for number, kill in enumerate([later[0], "in save", *later[1:]]):
        assert train(recipe, broken, resume=number > 0, kill=kill) == -signal.SIGKILL, kill
        written = rows_of(broken)
        assert written == expected[: len(written)], kill
        if kill == "in save":
            newest = checkpoints.latest(broken / "checkpoints", hashes=True)
            dead = len(written) + 1  # the saved step: its row is written afterwards
            assert newest is not None and checkpoints.step_of(newest) == dead - SAVE_EVERY
    assert train(recipe, broken, resume=True) == 0
    assert rows_of(broken) == expected
    assert (broken / "final").is_dir()
    assert {p.name for p in (broken / "checkpoints").iterdir()} == {"step-00000012", "step-00000014"}


SIGNALS = {"sft": signal.SIGHUP, "dpo": signal.SIGINT, "rl": signal.SIGTERM}  # the other pairs run with the slow tests


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        pytest.param(stage, number, marks=() if usual == number else pytest.mark.slow)
        for stage, usual in SIGNALS.items()
        for number in SIGNALS.values()
    ],
)
def test_signals_save_the_step_and_the_run_resumes_exactly(
    train: Any, stage: str, number: int, sft_recipe: Any, dpo_recipe: Any, tmp_path: Path
) -> None:
    """The step in which the signal arrives is finished and saved, due or not; the exit code is a shell's."""
    del sft_recipe, dpo_recipe
    (tmp_path / "digits.py").write_text(DIGITS)
    recipe = {**RECIPES[stage], "run": {"steps": 8, "save_every": 3, "seed": 7}}
    assert train(recipe, tmp_path / "unbroken") == 0
    expected = rows_of(tmp_path / "unbroken")
    broken, done = tmp_path / "broken", 0
    for rows in (1, 3):
        kill = {"rows": rows, "delay": 0.0, "number": number}
        assert train(recipe, broken, resume=done > 0, kill=kill) == 128 + number
        newest = checkpoints.latest(broken / "checkpoints", hashes=True)
        assert newest is not None
        step = checkpoints.step_of(newest)
        assert done + rows <= step < 8 and len(rows_of(broken)) == step
        assert rows_of(broken) == expected[:step]
        done = step
    assert train(recipe, broken, resume=True) == 0
    assert rows_of(broken) == expected


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(output)]
