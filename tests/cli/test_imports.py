"""User scripts are imported in a separate process: whatever an import does, the command reports it and ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli import imports
from posttrain.errors import UserError

Call = Callable[..., Any]
RECIPE = """\
stage: rl
model: {path: tiny}
data: {source: rows.jsonl}
rewards:
  - {use: math.accuracy}
  - {use: "mine.py:f"}
run: {steps: 1}
"""
REWARD = "\ndef f(completion): return 1.0\n"
ENDINGS = {
    "exits": ("import os; os._exit(0)", "importing mine.py ended the importing process (exit code 0)"),
    "exits with a code": ("import os; os._exit(7)", "ended the importing process (exit code 7)"),
    "kills itself": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "process (SIGKILL (out of memory?))"),
    "kills its group": ("import os, signal; os.killpg(0, signal.SIGTERM)", "process (SIGTERM)"),
    "stops itself": (
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "importing mine.py took longer than 0.5 s",
    ),
    "crashes": ("import ctypes; ctypes.string_at(0)", "process (SIGSEGV)"),
    "never ends": ("while True: pass", "importing mine.py took longer than 0.5 s"),
    "sleeps": ("import time; time.sleep(1000)", "importing mine.py took longer than 0.5 s"),
    "sys.exit": ("import sys; sys.exit(0)", "cannot be imported: SystemExit: 0"),
    "interrupts": ("raise KeyboardInterrupt", "mine.py cannot be imported: KeyboardInterrupt"),
    "raises": ("raise ValueError('no such table')", "cannot be imported: ValueError: no such table (at mine.py:1)"),
    "a missing package": ("import no_such_package", "cannot be imported: ModuleNotFoundError"),
    "asks": ("input('name? ')", "cannot be imported: EOFError"),
    "no Python": ("def (", "cannot be imported: SyntaxError"),
    "recurses": ("def g(): g()\ng()", "cannot be imported: RecursionError"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    return tmp_path


def posttrain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "posttrain", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("what", ENDINGS)
def test_failing_import_is_a_recipe_error(what: str, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs in this process, which would end with an import of its own."""
    script, told = ENDINGS[what]
    (folder / "mine.py").write_text(script + REWARD)
    monkeypatch.chdir(folder)
    monkeypatch.setenv(imports.TIME_LIMIT_VARIABLE, "0.5" if "took longer" in told else "30")
    result = call("recipe", "validate", "r.yaml")
    assert result.exit_code == 2
    assert "r.yaml:6:11  rewards.1.use: " in result.stderr
    assert told in result.stderr
    assert "Traceback" not in result.stderr and "report it" not in result.stderr


def test_run_reports_the_same_before_torch_is_loaded(folder: Path) -> None:
    (folder / "mine.py").write_text("import os; os._exit(0)" + REWARD)
    checked, run = posttrain(folder, "recipe", "validate", "r.yaml"), posttrain(folder, "rl", "r.yaml")
    assert (run.returncode, run.stderr) == (2, checked.stderr)
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"mine.py", "r.yaml", "rows.jsonl"}


def test_output_of_an_import_is_not_part_of_the_result(folder: Path) -> None:
    (folder / "mine.py").write_text("import sys; print('loading'); sys.stdout.flush()" + REWARD)
    result = posttrain(folder, "recipe", "validate", "r.yaml", "--json")
    assert json.loads(result.stdout)["rewards"] == ["accuracy", "f"]
    assert "loading" in result.stderr


def test_child_processes_of_an_import_end_with_it(folder: Path) -> None:
    """A child that would stay alive and keep the pipes of the command open."""
    starts = "import subprocess, sys; subprocess.Popen(['sleep', '987']); print('started')"
    (folder / "mine.py").write_text(starts + REWARD)
    started = time.monotonic()
    assert posttrain(folder, "recipe", "validate", "r.yaml").returncode == 0
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "command", [["reward", "test", "mine.py"], ["tool", "test", "mine.py"], ["tool", "test", "mine.py:f"]]
)
def test_other_commands_import_a_script_elsewhere_first(
    command: list[str], folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine.py").write_text("import os; os._exit(0)" + REWARD)
    monkeypatch.chdir(folder)
    result = call(*command)
    assert result.exit_code == 2
    assert "ended the importing process (exit code 0)" in result.stderr


@pytest.mark.parametrize("part", ["tools: [{use: 'mine.py:f'}]", "environment: {use: 'mine.py:F'}"])
def test_tools_and_environments_are_imported_separately(
    part: str, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine.py").write_text("import os; os._exit(0)")
    (folder / "r.yaml").write_text(RECIPE.replace('  - {use: "mine.py:f"}\n', "") + part + "\n")
    monkeypatch.chdir(folder)
    result = call("recipe", "validate", "r.yaml")
    assert result.exit_code == 2
    assert f"{part.partition(':')[0]}" in result.stderr
    assert "importing mine.py ended the importing process (exit code 0)" in result.stderr


def test_described_reward_has_the_fields_used_by_checks(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "from posttrain.verify.contract import batched, per_turn\n"
        "@batched\ndef many(completions, answer, hint=None, *, scale: float = 1.0): return [1.0] * len(completions)\n"
        "@per_turn\ndef turns(completion, parts, correct): return [0.0] * len(parts)\n"
    )
    with imports.Importer(folder) as importer:
        many = importer.reward({"use": "mine.py:many", "params": {"scale": 2.0}}).reward
        turns = importer.reward({"use": "mine.py:turns"}).reward
        assert (many.columns, many.optional_columns, many.batched, many.batch_size) == (("answer",), ("hint",), True, 0)
        assert (turns.per_turn, turns.built_ins, turns.name) == (True, ("parts", "correct"), "turns")
        with pytest.raises(UserError, match="unknown parameter `scales`"):
            importer.reward({"use": "mine.py:many", "params": {"scales": 2.0}})


def test_non_numeric_time_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(imports.TIME_LIMIT_VARIABLE, "soon")
    with pytest.raises(UserError, match="POSTTRAIN_IMPORT_SECONDS is `soon`"):
        imports.read_time_limit()
