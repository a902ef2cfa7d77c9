"""Scripts of examples/: their output, that they learn, and that they stay short."""

from __future__ import annotations

import os
import re
import resource
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.models.load import load
from posttrain.recipe.sections import Model
from posttrain.registry import load_module

SCRIPT = Path(__file__).parents[1] / "examples" / "grpo_minimal.py"


def test_example_is_one_short_file() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 200


def test_example_steps_raise_the_reward_from_random_weights(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Reward: the share of digits in the completion, about a tenth of the tokens at first. Three steps raise it."""
    script = load_module(SCRIPT)

    def by_digits(rollouts):
        return [replace(r, reward=sum(c.isdigit() for c in r.text) / max(len(r.text), 1)) for r in rollouts]

    monkeypatch.setattr(script, "score", by_digits)
    monkeypatch.setattr(script, "SAMPLING", script.SAMPLING.model_copy(update={"max_new_tokens": 12}))
    loaded = load(Model(path="tiny"), Path.cwd(), training=True)
    gained = script.train(loaded, 6, prompts_per_step=4, lr=3e-3, tested=32)
    steps = re.findall(r"step +\d+  reward ([\d.]+)  with signal ([\d.]+)", capsys.readouterr().out)
    assert len(steps) == 6 and all(float(signal) > 0.5 for _, signal in steps)
    assert gained > 0.1


def test_equal_rewards_leave_the_weights_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rewards 0: every advantage and every gradient is 0, and AdamW has no weight decay."""
    script = load_module(SCRIPT)
    monkeypatch.setattr(script, "SAMPLING", script.SAMPLING.model_copy(update={"max_new_tokens": 4}))
    loaded = load(Model(path="tiny"), Path.cwd(), training=True)
    before = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    script.train(loaded, 1, prompts_per_step=2, tested=2)
    assert all(bool((before[name] == p).all()) for name, p in loaded.model.named_parameters())


def test_example_warm_up_and_options(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """In this process, which has imported the libraries; the test below starts the script as its reader does."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--sft-steps", "2", "--steps", "1", "--tested", "4"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["accuracy", "step", "accuracy"]
    assert re.fullmatch(r"\d+ s", lines[3]) and len(lines) == 4


@pytest.mark.slow
def test_example_script_learns_the_quickstart_task() -> None:
    started = cpu_seconds()
    lines = run(timeout=1200)
    before, after = (float(re.search(r"[\d.]+", line)[0]) for line in (lines[0], lines[-2]))  # type: ignore[index]
    assert 0.35 < before < 0.6 and after > 0.85
    assert cpu_seconds() - started < 120, "with one thread; the clock says more where the machine is busy"


def cpu_seconds() -> float:
    """Return the CPU seconds of the child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(*options: str, timeout: float = 300) -> list[str]:
    """Run the script and return the printed lines."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
