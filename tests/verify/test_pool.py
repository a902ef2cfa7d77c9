"""Rewards that fail in every way: each failure costs only its own row, is counted, and leaves no process behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RewardError, RunError

FAULTY = r"""
import os, re, signal, subprocess, sys, time

def score(completion, what):
    if what == "ok":
        return 1.0
    if what == "none":
        return None
    if what == "raise":
        raise ValueError("boom")
    if what == "exit":
        sys.exit(3)
    if what == "hard exit":
        os._exit(7)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "recursion":
        return score(completion, what) + 1
    if what == "print":
        print("x" * 1_000_000)
        return 0.5
    if what == "loop":
        while True:
            pass
    if what == "c loop":  # holds the interpreter: no thread or Python signal handler could end it
        return re.match(r"(a+)+$", "a" * 64 + "b") is None
    if what == "grandchild":
        child = subprocess.Popen(["sleep", "1000"])
        open(completion, "w").write(str(child.pid))
        time.sleep(1000)
    return what  # anything else: returned as it is
"""

Scorers = Callable[..., Any]
Samples = Callable[..., Any]
LIMIT = 2.0


def children() -> set[int]:
    """Return the live child processes of this process, without zombies."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and int(fields[1]) == os.getpid():
            found.add(int(entry.name))
    return {pid for pid in found if alive(pid)}


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@pytest.fixture
def faulty(script: Callable[..., Path], scorer: Scorers) -> Callable[..., Any]:
    path = script(FAULTY, "faulty.py")

    def make(**scoring: Any) -> Any:
        return scorer({"use": f"{path}:score", "timeout_s": LIMIT}, **{"workers": 2, "max_error_rate": 1.0, **scoring})

    return make


def test_every_fault_costs_only_its_own_row(samples: Samples, faulty: Any) -> None:
    kinds = [
        "ok",
        "raise",
        "ok",
        "exit",
        "hard exit",
        "ok",
        "segfault",
        "recursion",
        "print",
        "loop",
        "ok",
        "c loop",
        "none",
    ]
    expected = [1.0, None, 1.0, None, None, 1.0, None, None, 0.5, None, 1.0, None, None]
    with faulty() as s:
        scores = s.score(samples([{"what": kind} for kind in kinds]))
        assert scores.components["score"] == expected
        assert scores.errors == {"score": 5}
        assert scores.timeouts == {"score": 2}
        assert scores.abstained == {"score": 1}
        assert scores.first_traceback is not None and "ValueError: boom" in scores.first_traceback
        assert "worker.py" not in scores.first_traceback
        again = s.score(samples([{"what": "ok"}] * 50))  # the pool is complete again
        assert again.rewards == [1.0] * 50


CHANGES = """
def pops(completion, spec):
    return spec.pop("worth", 0.0) + len(spec["list"].pop("a"))

def clears(completions, answer, **kwargs):
    count = len(completions)
    completions.clear()
    answer.clear()
    return [1.0] * count
"""


@pytest.mark.parametrize("name", ["pops", "clears"])
def test_reward_that_mutates_its_arguments_affects_no_other_row(
    name: str, samples: Samples, script: Callable[..., Path], scorer: Scorers
) -> None:
    """The completions of a prompt share their row; each call gets the original values."""
    row = {"spec": {"worth": 0.5, "list": {"a": "xy"}}, "answer": "x"}
    made = samples([row] * 8, group_size=8)
    with scorer(f"{script(CHANGES)}:{name}", workers=1, max_error_rate=1.0) as s:
        scores = s.score(made)
        assert scores.errors == {name: 0} and scores.rewards == [2.5 if name == "pops" else 1.0] * 8
    assert row["spec"] == {"worth": 0.5, "list": {"a": "xy"}}


def test_reward_that_raises_on_one_row_in_ten(samples: Samples, faulty: Any) -> None:
    rows = [{"what": "raise" if i % 10 == 3 else "ok"} for i in range(200)]
    with faulty() as s:
        scores = s.score(samples(rows))
    assert scores.errors == {"score": 20}
    assert scores.rewards == [None if i % 10 == 3 else 1.0 for i in range(200)]
    assert scores.correct == [None if i % 10 == 3 else True for i in range(200)]


def test_run_above_the_error_rate_stops_with_the_first_traceback(samples: Samples, faulty: Any) -> None:
    rows = [{"what": "raise" if i % 10 == 3 else "ok"} for i in range(20)]
    with faulty(max_error_rate=0.1) as s:
        s.failures(enough=5).add(s.score(samples(rows)).calls)  # exactly at the limit
        with pytest.raises(RunError, match=r"(?s)score: 3 of 21 calls failed in .*on row r3:.*ValueError: boom"):
            s.failures(enough=6).add(s.score(samples([*rows, {"what": "raise"}])).calls)


@pytest.mark.parametrize(("value", "shown"), [("text", "'text'"), (float("nan"), "nan"), ([1.0], "list")])
def test_wrong_type_names_function_row_and_value(samples: Samples, faulty: Any, value: Any, shown: str) -> None:
    with faulty() as s, pytest.raises(RewardError, match=rf"reward score  row r2: .*returned .*{shown}"):
        s.score(samples([{"what": "ok"}, {"what": "ok"}, {"what": value}]))


def test_time_out_costs_about_its_limit(samples: Samples, faulty: Any) -> None:
    """40 rows, 2 of which loop, in 2 workers: the loops run in parallel, the other rows in between."""
    rows = [{"what": "loop" if i in (5, 25) else "ok"} for i in range(40)]
    with faulty() as s:
        s.score(samples([{"what": "ok"}] * 4))
        started = time.monotonic()
        scores = s.score(samples(rows))
        took = time.monotonic() - started
    assert scores.timeouts == {"score": 2}
    assert sum(r == 1.0 for r in scores.rewards) == 38
    assert LIMIT <= took < 4 * LIMIT + 2


def test_scores_do_not_depend_on_the_number_of_workers(samples: Samples, faulty: Any) -> None:
    rows = [{"what": i / 7} for i in range(300)]
    found = []
    for workers in (1, 3):
        with faulty(workers=workers) as s:
            found.append(s.score(samples(rows)).rewards)
    assert found[0] == found[1] == [i / 7 for i in range(300)]


def test_no_process_is_left_running(samples: Samples, faulty: Any) -> None:
    before = children()
    with faulty() as s:
        assert s.score(samples([{"what": "ok"}, {"what": "loop"}])).timeouts == {"score": 1}
        assert len(children() - before) >= 1
    assert children() == before


def test_workers_that_died_between_steps_are_replaced(samples: Samples, faulty: Any) -> None:
    before = children()
    with faulty(workers=5) as s:
        s.score(samples([{"what": "ok"}] * 200))
        for pid in children() - before:
            os.kill(pid, signal.SIGKILL)
        scores = s.score(samples([{"what": "ok"}] * 20))
    assert scores.rewards == [1.0] * 20
    assert scores.errors == {"score": 0}


def test_child_processes_of_a_reward_end_with_its_worker(samples: Samples, faulty: Any, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with faulty() as s:
        assert s.score(samples([{"what": "grandchild"}], str(note))).timeouts == {"score": 1}
    assert _becomes_true(lambda: not alive(int(note.read_text())), 10)


def test_ctrl_c_during_a_hanging_reward_leaves_no_process_and_a_usable_scorer(samples: Samples, faulty: Any) -> None:
    before = children()
    with faulty() as s:
        s.score(samples([{"what": "ok"}]))
        old = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            with pytest.raises(KeyboardInterrupt):
                s.score(samples([{"what": "loop"}] * 2))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert children() == before
        assert s.score(samples([{"what": "ok"}])).rewards == [1.0]
    assert children() == before


def test_workers_end_when_their_parent_is_killed(script: Callable[..., Path], tmp_path: Path) -> None:
    """One worker is idle and one loops without handling signals when the parent gets SIGKILL."""
    script(
        """
        import os, re
        def score(completion, what):
            open(f"{what}.pid", "w").write(str(os.getpid()))
            if what == "hang":
                re.match(r"(a+)+$", "a" * 64 + "b")
            return 1.0
        """
    )
    program = """
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.score import Sample, Scorer
with Scorer([Reward(use="./mine.py:score", timeout_s=3.0)], Scoring(workers=2), None) as s:
    s.score([Sample("x", {"what": "hang"}), Sample("x", {"what": "quick"})])
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    pids = []
    for name in ("hang.pid", "quick.pid"):
        assert _becomes_true(functools.partial(_has_text, tmp_path / name), 60)
        pids.append(int((tmp_path / name).read_text()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert _becomes_true(lambda: not any(map(alive, pids)), 30)


def _has_text(path: Path) -> bool:
    return path.exists() and path.read_text() != ""


def _becomes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether the condition holds within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_reward_prints_never_reach_stdout(script: Callable[..., Path], tmp_path: Path) -> None:
    script("import os\ndef score(completion):\n print('talk')\n os.write(1, b'raw talk')\n return 1.0")
    program = """
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.score import Sample, Scorer
with Scorer([Reward(use="./mine.py:score")], Scoring(workers=1), None) as s:
    print(s.score([Sample("x", {})]).rewards)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == "[1.0]\n"
    assert "raw talk" in run.stderr


def test_script_named_math_does_not_break_import_random(script: Callable[..., Path], tmp_path: Path) -> None:
    """In a worker whose working directory contains the script: `import random` needs the standard math."""
    script(
        """
        import random, math, sys
        def score(completion):
            assert math.sqrt(4) == 2 and 0 <= random.random() < 1
            return float("torch" not in sys.modules)
        """,
        "math.py",
    )
    program = """
import sys
sys.path[:] = [p for p in sys.path if p]  # as the `posttrain` command runs
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.score import Sample, Scorer
with Scorer([Reward(use="./math.py:score")], Scoring(workers=1), None) as s:
    print(s.score([Sample("x", {})]).rewards)
"""
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[1.0]\n"


def test_workers_import_neither_torch_nor_pydantic(
    samples: Samples, script: Callable[..., Path], scorer: Scorers
) -> None:
    path = script(
        "import sys\ndef score(completion): return float(not {'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    )
    with scorer(f"{path}:score") as s:
        assert s.score(samples([{}])).rewards == [1.0]


def test_setup_runs_once_per_worker_outside_the_time_limit(
    samples: Samples, script: Callable[..., Path], scorer: Scorers
) -> None:
    path = script(
        """
        import time
        ready = []
        def setup():
            time.sleep(1.5)
            ready.append(1)
        def score(completion):
            return float(len(ready))
        """
    )
    with scorer({"use": f"{path}:score", "timeout_s": 1.0}) as s:
        assert s.score(samples([{}] * 20)).rewards == [1.0] * 20


def test_failing_setup_is_reported(samples: Samples, script: Callable[..., Path], scorer: Scorers) -> None:
    path = script("def setup(): raise OSError('no model here')\ndef score(completion): return 1.0")
    with scorer(f"{path}:score") as s, pytest.raises(RewardError, match=r"(?s)cannot be loaded.*no model here"):
        s.score(samples([{}]))


def test_unpicklable_reward_is_loaded_by_path(samples: Samples, script: Callable[..., Path], scorer: Scorers) -> None:
    path = script(
        """
        import functools, threading
        class Counter:
            def __init__(self): self.lock = threading.Lock()
            def __call__(self, completion, answer): return float(completion == answer)
        counter = Counter()
        half = functools.partial(lambda completion, answer, scale: scale * (completion == answer), scale=0.5)
        """
    )
    with scorer(f"{path}:counter", f"{path}:half") as s:
        scores = s.score(samples([{"answer": "x"}, {"answer": "y"}]))
    assert scores.components == {"counter": [1.0, 0.0], "half": [0.5, 0.0]}


def test_unpicklable_column_is_reported(samples: Samples, scorer: Scorers) -> None:
    with scorer("math.accuracy") as s, pytest.raises(RewardError, match="cannot be sent to its worker"):
        s.score(samples([{"answer": lambda: 1}]))


ASYNC = """
import asyncio, sys, time
async def judge(completion, what):
    if what == "raise":
        raise ValueError("boom")
    if what == "exit":
        sys.exit(1)
    if what == "block":
        time.sleep(1000)
    if what == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    await asyncio.sleep(1000 if what == "slow" else 0.2)
    return 1.0
"""


def test_coroutines_run_concurrently(samples: Samples, script: Callable[..., Path], scorer: Scorers) -> None:
    """60 calls of 0.2 s: 12 s sequentially, 6 s in two workers, about 0.4 s concurrently."""
    path = script(ASYNC)
    with scorer({"use": f"{path}:judge"}, workers=2) as s:
        s.score(samples([{"what": "ok"}] * 2))
        started = time.monotonic()
        scores = s.score(samples([{"what": "ok"}] * 60))
        assert time.monotonic() - started < 4
    assert scores.rewards == [1.0] * 60


def test_coroutine_faults_cost_only_their_own_row(
    samples: Samples, script: Callable[..., Path], scorer: Scorers
) -> None:
    path = script(ASYNC)
    kinds = ["ok", "raise", "slow", "ok", "exit", "block", "ok", "stubborn", "ok", "ok"]
    with scorer({"use": f"{path}:judge", "timeout_s": 1.5}, workers=2, max_error_rate=1.0) as s:
        scores = s.score(samples([{"what": kind} for kind in kinds]))
    assert scores.rewards == [1.0 if kind == "ok" else None for kind in kinds]
    assert scores.errors == {"judge": 2}
    assert scores.timeouts == {"judge": 3}


def test_the_list_form_is_called_with_one_row_and_checked(
    samples: Samples, script: Callable[..., Path], scorer: Scorers
) -> None:
    path = script(
        """
        def good(completions, answer, prompts, **columns):
            assert len(completions) == len(answer) == len(prompts) == len(columns["level"]) == 1
            return [float(c == a) for c, a in zip(completions, answer)]
        def one_number(completions, **columns):
            return 1.0
        """
    )
    rows = [{"answer": "x", "level": 1}, {"answer": "y", "level": 2}]
    with scorer(f"{path}:good") as s:
        assert s.score(samples(rows)).rewards == [1.0, 0.0]
    with (
        scorer(f"{path}:one_number") as s,
        pytest.raises(RewardError, match=r"one_number  row r0: returned 1\.0 for one"),
    ):
        s.score(samples(rows))


def test_workers_that_die_outside_calls_stop_the_run(
    samples: Samples, script: Callable[..., Path], scorer: Scorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of a class whose module a worker cannot import: it dies while it reads, before any call begins."""
    module = types.ModuleType("known_only_here")
    monkeypatch.setitem(sys.modules, "known_only_here", module)
    exec("class Value: pass", module.__dict__)
    path = script("def score(completion, answer): return 1.0")
    with scorer(f"{path}:score") as s, pytest.raises(RunError, match="end before they begin a call: exit code 1"):
        s.score(samples([{"answer": module.Value()}]))
