"""Shell completion: commands, options, recipes, keys, values, methods; and the scripts, run in bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.completion import SCRIPTS

Call = Callable[..., Any]


@pytest.fixture
def offered(call: Call) -> Callable[..., list[str]]:
    def complete(*words: str) -> list[str]:
        result = call("__complete", "--", *words)
        assert result.exit_code == 0, result.stderr
        return list(result.stdout.split())

    return complete


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (("",), {"sft", "rl", "recipe", "methods", "sweep", "completion"}),
        (("rec",), {"recipe"}),
        (("recipe", ""), {"list", "show", "import", "validate"}),
        (("reward", ""), {"test"}),
        (("rl", "--o"), {"--output"}),
        (("rl", "debug/"), {"debug/rl"}),
        (("rl", "r.yaml", "optim.l"), {"optim.lr="}),
        (("rl", "r.yaml", "optim.schedule="), {"optim.schedule=cosine", "optim.schedule=linear"}),
        (("rl", "r.yaml", "algorithm=da"), {"algorithm=dapo"}),
        (("rl", "r.yaml", "loss.use=gs"), {"loss.use=gspo"}),
        (("sft", "r.yaml", "batch.packing="), {"batch.packing=true", "batch.packing=false"}),
        (("sweep", "r.yaml", "optim.be"), {"optim.betas="}),
        (("recipe", "show", "r.yaml", "model.pa"), {"model.path="}),
        (("recipe", "import", "x.yaml", "--from", "ax"), {"axolotl"}),
        (("export", "m", "--to", "g"), {"gguf"}),
        (("track", "r", "--to", "t"), {"tensorboard", "trackio"}),
        (("recipe", "keys", "r"), {"rl", "reward_model"}),
        (("methods", "show", "dap"), {"dapo"}),
        (("completion", ""), {"bash", "zsh", "fish"}),
    ],
)
def test_completion_candidates(words: tuple[str, ...], some: set[str], offered: Callable[..., list[str]]) -> None:
    found = offered(*words)
    assert some <= set(found)
    assert all(one.startswith(words[-1]) for one in found)


def test_only_matching_candidates_are_offered(offered: Callable[..., list[str]]) -> None:
    assert "rollout.engine=" not in offered("sft", "r.yaml", "r")  # a key of another stage
    assert "debug/rl" not in offered("sft", "debug/")  # a recipe of another stage
    assert offered("sft", "r.yaml", "xyz") == [] and offered("nothing", "x") == []
    assert "__complete" not in offered("")


def test_unknown_shell_raises(call: Call) -> None:
    result = call("completion", "fsh")
    assert result.exit_code == 2 and "did you mean `fish`?" in result.stderr


@pytest.mark.parametrize("shell", SCRIPTS)
def test_script_has_the_syntax_of_its_shell(shell: str, call: Call, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(call("completion", shell).stdout)
    assert "posttrain __complete" in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(script)], check=True)


def test_bash_completes(call: Call, tmp_path: Path) -> None:
    """The script itself, with a `posttrain` on the PATH: also after `=`, where bash starts a new word."""
    command = tmp_path / "posttrain"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m posttrain "$@"\n')
    command.chmod(0o755)
    script = call("completion", "bash").stdout + (
        'ask() { COMP_LINE="$1"; COMP_POINT=${#1}; _posttrain; echo "${COMPREPLY[*]}"; }\n'
        'ask "posttrain rl r.yaml algorithm=dap"\nask "posttrain rl r.yaml optim.warm"\n'
    )
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": root}
    told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env, check=True, cwd=tmp_path)
    assert told.stdout.split() == ["dapo", "optim.warmup_steps="]
