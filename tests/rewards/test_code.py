"""Programs that misbehave, scored as training scores them: each costs its own row, and nothing is left running."""

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


def marked() -> list[str]:
    """Command lines of running processes that hold the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue  # it has just ended
        if MARK.encode() in line:
            found.append(line.decode(errors="replace"))
    return found


def test_every_kind_of_program_costs_its_own_row(tmp_path: Path) -> None:
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


def test_a_program_ends_with_the_worker_that_waits_for_it() -> None:
    """The call's limit is below the test's: the worker is killed while the program runs."""
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
    while marked() and time.monotonic() < give_up:
        time.sleep(0.02)
    assert marked() == []
