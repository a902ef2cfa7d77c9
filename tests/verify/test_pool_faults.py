"""A reward that misuses memory, processes, files or sockets costs only its own row."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RewardError

GREEDY = r"""
import os, socket, time

def score(completion, what):
    if what == "memory":
        return float(len(bytearray(4 << 30)))
    if what == "pieces":
        held = []
        while True:  # of memory that is never written to: how fast a busy machine hands out pages is not asked here
            held.append(bytes(64 << 20))
    if what == "forks":
        for _ in range(5):
            if os.fork() == 0:
                open(completion, "a").write(f"{os.getpid()}\n")
                time.sleep(1000)
        time.sleep(1000)
    if what == "file":
        open("/proc/sys/kernel/nothing_of_ours", "w")
    if what == "socket":
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    if what == "megabyte":
        return "x" * 1_000_000
    return 1.0
"""


def test_each_resource_fault_costs_only_its_own_row(
    script: Callable[..., Path], scorer: Any, samples: Any, tmp_path: Path
) -> None:
    """4 GB in one allocation and in steps under a limit of 1 GB; five child processes; a denied file and a denied
    socket.
    """
    path, note = script(GREEDY), tmp_path / "children"
    kinds = ["ok", "memory", "ok", "pieces", "file", "ok", "socket", "forks", "ok"]
    reward = {"use": f"{path}:score", "timeout_s": 5.0}  # for the row that forks and sleeps
    with scorer(reward, workers=2, max_error_rate=1.0, memory_mb=1024) as s:
        scores = s.score(samples([{"what": kind} for kind in kinds], str(note)))
        assert scores.rewards == [1.0 if kind == "ok" else None for kind in kinds]
        assert scores.errors == {"score": 4} and scores.timeouts == {"score": 1}
        assert "MemoryError" in str(scores.first_traceback)
        assert s.score(samples([{"what": "ok"}] * 20)).rewards == [1.0] * 20
    children = [int(line) for line in note.read_text().split()]
    assert len(children) == 5
    give_up = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") and _runs(pid) for pid in children):
        assert time.monotonic() < give_up, "what a reward forked is still there"
        time.sleep(0.05)


def test_judge_without_a_reply_is_reported_without_a_traceback(
    script: Callable[..., Path], scorer: Any, samples: Any
) -> None:
    path = script(
        "from posttrain.verify.endpoint import Endpoint, ask\n\n"
        "async def score(completion):\n    return ask(Endpoint('ftp://judge', 'm'), [], 0).text\n"
    )
    with scorer({"use": f"{path}:score"}, workers=1, max_error_rate=1.0) as s:
        first = str(s.score(samples([{}])).first_traceback)
    assert first.endswith(":\nendpoint `ftp://judge` is not an http address; write e.g. http://127.0.0.1:8000/v1")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_huge_invalid_value_is_reported_in_one_line(script: Callable[..., Path], scorer: Any, samples: Any) -> None:
    with scorer(f"{script(GREEDY)}:score") as s, pytest.raises(RewardError, match=r"row r1: returned 'xxx") as caught:
        s.score(samples([{"what": "ok"}, {"what": "megabyte"}]))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "value",
    ["'1.0'", "b'1'", "[1.0]", "(1.0,)", "{}", "{'score': 1.0}", "{'reward': '1'}", "{'reward': 1.0, 'part': 'a'}",
     "float('nan')", "float('inf')", "1j", "object()", "lambda: 1.0", "set()", "ValueError('x')"],
)  # fmt: skip
def test_each_wrong_type_names_function_row_and_value(
    value: str, script: Callable[..., Path], scorer: Any, samples: Any
) -> None:
    path = script(f"def score(completion, what):\n    return ({value}) if what == 'bad' else 1.0")
    with scorer(f"{path}:score") as s, pytest.raises(RewardError, match=r"reward score\s+row r2: .*returned "):
        s.score(samples([{"what": "ok"}, {"what": "ok"}, {"what": "bad"}]))
