"""On a machine that offers no namespaces, a recipe whose tools or rewards run programs is refused before it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.verify import jail, system_calls

# The command in a process to which `unshare` is denied, as in most containers.
PROGRAM = f"""
import runpy, sys
from posttrain.verify.system_calls import filter_program
jail = runpy.run_path({jail.__file__!r})
jail["libc"].prctl(38, 1, 0, 0, 0)
jail["filter_calls"](filter_program())
from posttrain.__main__ import main
main()
"""
CODE_REWARD = "rewards=[{use: code.code_exec}]"
PYTHON_TOOL = "tools=[{use: python}]"

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not system_calls.is_supported(), reason="needs seccomp")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("recipe", "validate", "debug/rl", PYTHON_TOOL), "tools.0.use"),
        (("recipe", "validate", "debug/rl", CODE_REWARD), "rewards.0.use"),
        (("rl", "debug/rl", PYTHON_TOOL, "--output", "run"), "tools.0.use"),
        (("rl", "debug/rl", CODE_REWARD, "--output", "run"), "rewards.0.use"),
        (("eval", "debug/eval", PYTHON_TOOL, "--output", "run"), "tools.0.use"),
        (("generate", "g.yaml", PYTHON_TOOL, "--output", "run"), "tools.0.use"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else value,
)
def test_it_is_refused_with_what_to_do(words: tuple[str, ...], key: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "g.yaml").write_text("stage: generate\nmodel: {path: tiny}\ndata: {source: p.jsonl}\n")
    done = run(tmp_path, *words)
    assert done.returncode == 2, done
    assert key in done.stderr and "no sandbox" in done.stderr and "allow_unsandboxed: true" in done.stderr
    assert not (tmp_path / "run").exists()


def test_limits_alone_can_be_accepted(tmp_path: Path) -> None:
    done = run(tmp_path, "recipe", "validate", "debug/rl", "tools=[{use: python, params: {allow_unsandboxed: true}}]")
    assert done.returncode == 0, done.stderr
