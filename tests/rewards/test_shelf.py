"""Every shipped reward script: its examples hold, and it is an ordinary script."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.path_resolution import shipped_folder
from posttrain.verify.examples import read_examples, run_examples
from posttrain.verify.load import first_argument_is_completion, load_script

pytestmark = pytest.mark.usefixtures("forked_workers")

SCRIPTS = sorted(shipped_folder("rewards").glob("*.py"))
BORROWED = {"reasoning_gym"}  # declared dependencies that a script may import


def test_reward_scripts_are_found() -> None:
    assert {"math", "format", "length", "tools", "gym"} <= {path.stem for path in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_examples_give_their_expected_rewards(path: Path) -> None:
    outcomes = run_examples(path)
    assert len(outcomes) >= 4
    assert [f"{o.function}({o.example.completion!r}) gave {o.outcome}" for o in outcomes if not o.ok] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_examples_cover_right_wrong_and_empty_completions(path: Path) -> None:
    for name, examples in read_examples(path).items():
        values = {_total(e.expected) for e in examples}
        assert len(values - {None}) >= 2, f"{name}: all examples score the same"
        assert any(e.completion == "" for e in examples), f"{name}: no empty completion"


def _total(expected: Any) -> Any:
    if isinstance(expected, list):
        return sum(expected)
    return expected["reward"] if isinstance(expected, dict) else expected


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_every_reward_has_examples_and_a_docstring(path: Path) -> None:
    module = load_script(path)
    rewards = {
        name: value
        for name, value in module.items()
        if first_argument_is_completion(value)
        and value.__module__ == module["__name__"]
        and name in read_examples(path)
    }
    assert rewards
    assert module["__doc__"] and "rewards:" in module["__doc__"], "the head says how to use it"
    assert all(value.__doc__ for value in rewards.values())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_scripts_import_only_the_standard_library_verify_and_declared_packages(path: Path) -> None:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    foreign = {m for m in found if m.partition(".")[0] not in sys.stdlib_module_names and m not in BORROWED}
    assert all(m.startswith("posttrain.verify") for m in foreign), foreign
