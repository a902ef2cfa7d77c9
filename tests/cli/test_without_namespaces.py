"""Without user namespaces, a recipe whose tools or rewards run programs is refused before it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.verify import jail, system_calls

# Commands in a process to which `unshare` is denied, as in most containers.
PROGRAM = f"""
import json, runpy, sys
from posttrain.verify.system_calls import filter_program
jail = runpy.run_path({jail.__file__!r})
jail["libc"].prctl(38, 1, 0, 0, 0)
jail["filter_calls"](filter_program())
from typer.testing import CliRunner
from posttrain.cli.app import app
done = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]
print(json.dumps([[one.exit_code, one.stderr] for one in done]))
"""
CODE_REWARD = "rewards=[{use: code.code_exec}]"
PYTHON_TOOL = "tools=[{use: python}]"

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not system_calls.is_supported(), reason="needs seccomp")


REFUSED = [
    (("recipe", "validate", "debug/rl", PYTHON_TOOL), "tools.0.use"),
    (("recipe", "validate", "debug/rl", CODE_REWARD), "rewards.0.use"),
    (("rl", "debug/rl", PYTHON_TOOL, "--output", "run"), "tools.0.use"),
    (("rl", "debug/rl", CODE_REWARD, "--output", "run"), "rewards.0.use"),
    (("eval", "debug/eval", PYTHON_TOOL, "--output", "run"), "tools.0.use"),
    (("generate", "g.yaml", PYTHON_TOOL, "--output", "run"), "tools.0.use"),
]
ACCEPTED = ("recipe", "validate", "debug/rl", "tools=[{use: python, params: {allow_unsandboxed: true}}]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("denied")
    (place / "p.jsonl").write_text('{"prompt": "x"}\n')
    (place / "g.yaml").write_text("stage: generate\nmodel: {path: tiny}\ndata: {source: p.jsonl}\n")
    return place


@pytest.fixture(scope="module")
def told(folder: Path, forked_python: str) -> list[tuple[int, str]]:
    """Exit code and stderr of each command of REFUSED, and of ACCEPTED."""
    commands = json.dumps([*(words for words, _ in REFUSED), ACCEPTED])
    done = subprocess.run(
        [forked_python, "-c", PROGRAM, commands], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [(code, stderr) for code, stderr in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[" ".join(words[:3]) for words, _ in REFUSED])
def test_recipe_is_refused_with_a_hint(number: int, told: list[tuple[int, str]], folder: Path) -> None:
    code, stderr = told[number]
    assert code == 2, stderr
    assert REFUSED[number][1] in stderr and "no sandbox" in stderr and "allow_unsandboxed: true" in stderr
    assert not (folder / "run").exists()


def test_resource_limits_alone_can_be_accepted(told: list[tuple[int, str]]) -> None:
    code, stderr = told[-1]
    assert code == 0, stderr
