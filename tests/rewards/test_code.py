"""Code rewards for misbehaving programs, scored as in training: a bad program affects only its row, and no process
remains."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify import sandbox
from posttrain.verify.score import Sample, Scorer

pytestmark = pytest.mark.skipif(sandbox.isolation() != "namespaces", reason="this machine offers no namespaces")

MARK = "marked-program"
BAD = {
    "loops": "while True: pass",
    "eats 4 GB": "x = bytearray(4 << 30)",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "writes outside": "open('{outside}', 'w').write('gone'); print(5)",
    "opens a socket": "import socket; socket.create_connection(('127.0.0.1', 80)); print(5)",
    "exits": "import sys; sys.exit(0)",
    "prints": "print('x' * 3_000_000)",
    "raises": "raise ValueError",
}
GOOD = "print(5)"


def completion(program: str) -> str:
    return f"```python\n# {MARK}\n{program}\n```"


def processes_with_mark() -> list[str]:
    """Return the command lines of running processes that contain the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue  # it has just ended
        if MARK.encode() in line:
            found.append(line.decode(errors="replace"))
    return found


def test_misbehaving_program_fails_only_its_row(tmp_path: Path) -> None:
    outside = tmp_path / "kept"
    outside.write_text("kept")
    programs = [GOOD, *(text.replace("{outside}", str(outside)) for text in BAD.values()), GOOD]
    row = {"tests": [{"input": "", "output": "5\n"}]}
    reward = Reward(use="code.code_exec", params={"timeout_s": 1.0}, timeout_s=20.0)
    with Scorer([reward], Scoring(workers=2), None) as scorer:
        scores = scorer.score([Sample(completion(text), row) for text in programs])
    assert scores.rewards == [1.0, *[0.0] * len(BAD), 1.0]
    assert scores.errors == scores.timeouts == {"code_exec": 0}
    assert outside.read_text() == "kept"


def test_program_ends_with_its_worker() -> None:
    """The call's time limit is below the test's: the worker is killed while the program runs."""
    sleeper = (
        f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(99)  # {MARK}'])"
    )
    row = {"tests": [{"input": "", "output": "5\n"}]}
    reward = Reward(use="code.code_exec", params={"timeout_s": 60.0, "budget_s": 60.0}, timeout_s=3.0)
    with Scorer([reward], Scoring(workers=1, max_error_rate=1.0), None) as scorer:
        scores = scorer.score([Sample(completion(sleeper), row), Sample(completion(GOOD), row)])
    assert scores.rewards == [None, 1.0]
    assert scores.timeouts == {"code_exec": 1}
    give_up = time.monotonic() + 5
    while processes_with_mark() and time.monotonic() < give_up:
        time.sleep(0.02)
    assert processes_with_mark() == []
