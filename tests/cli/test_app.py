"""The command line as a whole: help, start-up, lazy groups."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from posttrain import __version__
from posttrain.cli.app import LAZY, PANELS, app

HEAVY = {"torch", "transformers", "trl", "datasets", "peft", "vllm"}
FIVE = "stage: sft\nmodel: {path: tiny, lora: {rank: 4.5}}\nrun: {seed: 4.7, steps: 1}\noptim: {lrr: 1}\nfoo: 1\n"


def modules_after(*arguments: str) -> tuple[int, set[str]]:
    """The exit code of a command in a fresh process, and all modules that it loaded."""
    code = (
        "import sys, json\nfrom posttrain.cli.app import app\n"
        f"try:\n    app({list(arguments)!r}, prog_name='posttrain')\nexcept SystemExit as end:\n    code = end.code\n"
        "print(); print(json.dumps([code, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    exit_code, names = json.loads(done.stdout.splitlines()[-1])
    return exit_code, set(names)


def test_help_loads_nothing_but_typer() -> None:
    """Neither torch nor what only commands need: --help is to take a third of a second."""
    code, loaded = modules_after("--help")
    assert code == 0
    assert not loaded & (HEAVY | {"pydantic", "yaml", "rich", "posttrain.recipe.load", "posttrain.cli.reward"})


def test_a_recipe_error_does_not_load_torch() -> None:
    Path("five.yaml").write_text(FIVE, encoding="utf-8")
    code, loaded = modules_after("sft", "five.yaml")
    assert code == 2
    assert "posttrain.recipe.load" in loaded
    assert not loaded & HEAVY


def test_light_commands_do_not_load_torch() -> None:
    for arguments in (["recipe", "show", "r.yaml"], ["methods", "show", "dapo"], ["sft", "r.yaml", "--dry-run"]):
        code, loaded = modules_after(*arguments)
        assert (code, loaded & HEAVY) == (0, set()), arguments


def test_help_shows_every_command_under_a_heading(call: Callable[..., Any]) -> None:
    shown = [name for names in PANELS.values() for name in names]
    assert sorted(shown) == sorted(typer.main.get_command(app).commands)
    told = call("--help").stdout
    for heading, names in PANELS.items():
        assert f"{heading}:" in told
        assert all(f"\n  {name} " in told for name in names)


def test_lazy_groups_exist(call: Callable[..., Any]) -> None:
    for name, (module, _) in LAZY.items():
        assert isinstance(importlib.import_module(module).app, typer.Typer)
        result = call(name, "--help")
        assert result.exit_code == 0
        assert "Commands:" in result.stdout


def test_version(call: Callable[..., Any]) -> None:
    assert call("--version").stdout.strip() == __version__


def test_a_mistyped_verb_is_corrected(call: Callable[..., Any]) -> None:
    result = call("evl", "r.yaml")
    assert result.exit_code == 2
    assert "Did you mean 'eval'?" in result.stderr


def test_the_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "posttrain", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__


def test_a_closed_pipe_is_no_error() -> None:
    """`posttrain methods list | head -1`: the reader goes, and no traceback comes."""
    command = f"{sys.executable} -m posttrain recipe schema | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "{\n"
    assert done.stderr == ""
