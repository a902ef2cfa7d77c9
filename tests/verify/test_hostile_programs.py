"""No hostile program escapes, outlives its run or earns a score, for root and for an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from posttrain.verify import sandbox
from posttrain.verify.code import passes
from posttrain.verify.code_tests import ProgramTest
from posttrain.verify.sandbox import Limits
from tests.verify import hostile_programs
from tests.verify.hostile_programs import PROGRAMS, ended, expected, source

pytestmark = pytest.mark.skipif(sandbox.isolation() != "namespaces", reason="this machine offers no namespaces")
LIMITS = Limits(seconds=1.0, memory_mb=200)
NOBODY = 65534


def left_running(mark: str = "hostile-mark") -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_program_is_contained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = sandbox.run_python(source(name), limits=LIMITS)
    assert "escaped" not in done.stdout + done.stderr
    assert ended(done.status, done.exit_code) in expected(name).split("|"), done
    assert done.seconds < LIMITS.seconds + sandbox.GRACE_SECONDS
    assert left_running() == []
    assert list(tmp_path.iterdir()) == []


_AS_USER = """
import json, sys
from posttrain.verify.sandbox import Limits, describe, isolation, run_python
if isolation() != "namespaces":
    print(json.dumps(describe())); sys.exit()
found = {}
for name, code in json.load(sys.stdin).items():
    done = run_python(code, limits=Limits(seconds=1.5, memory_mb=200))
    found[name] = [done.status, done.exit_code, done.stdout + done.stderr]
print(json.dumps(found))
"""
_BY_USER = [  # cases in which the program having the user id of the starting process matters
    "its process group is killed", "its process group is stopped", "everything is killed", "everything is stopped",
    "it stops itself", "its parent is killed", "its grandparents are killed", "signals are ignored", "a daemon",
    "memory by /proc", "environment of its parent", "descriptors of its parent", "the session keyring", "a new key",
    "System V segments", "memfd", "memory of a double fork", "the report is written by number", "ptrace of its parent",
]  # fmt: skip


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests run as an ordinary user")
def test_hostile_programs_of_an_ordinary_user_are_contained() -> None:
    """With a Python that the user can execute, and the same files."""
    python = next(
        (p for p in ("/usr/bin/python3.11", "/usr/bin/python3.12", "/usr/bin/python3.13") if shutil.which(p)), ""
    )
    if not python:
        pytest.skip("no Python of the system that is new enough")
    done = subprocess.run(
        [python, "-B", "-c", _AS_USER],
        input=json.dumps({name: source(name) for name in _BY_USER}),
        capture_output=True,
        text=True,
        cwd="/",
        env={"PYTHONPATH": str(Path(hostile_programs.__file__).resolve().parents[2]), "PATH": os.environ["PATH"]},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )
    if "ermission denied" in done.stderr or (done.returncode == 0 and isinstance(json.loads(done.stdout), str)):
        pytest.skip(f"an ordinary user has no sandbox here: {done.stdout}{done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    for name, (status, code, text) in json.loads(done.stdout).items():
        assert "escaped" not in text, name
        assert ended(status, code) in expected(name).split("|"), (name, status, code, text)


FORGED = {
    "an exit before the answer": "print(41)\nimport os; os._exit(0)",
    "equal to everything": "class A(str):\n    def __eq__(self, other): return True\nprint(A('41'))",
    "the comparison is replaced": "import builtins\nbuiltins.str = lambda x: '42'\nprint(41)",
    "print is replaced": "import builtins\nbuiltins.print = lambda *a: True\nprint(42)",
    "the answer is an error": "import sys\nsys.stderr.write('42')",
    "the answer, then a failure": "print(42)\nraise SystemExit(1)",
    "the answer, then it is killed": "import os\nprint(42, flush=True)\nos.kill(os.getpid(), 9)",
    "the answer, then its group is killed": "import os\nprint(42, flush=True)\nos.killpg(0, 9)",
    "the answer, then it stops": "import os, signal\nprint(42, flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)",
    "the answer, then no end": "print(42, flush=True)\nwhile True: pass",
    "the answer, and closed outputs": "import os\nprint(42, flush=True)\nos.close(1); os.close(2)\nwhile True: pass",
    "the answer among others": "for n in range(100): print(n)",
    "the answer with a terminal code": "print('\\x1b[2K42')",
    "the answer behind a carriage return": "print('41\\r42')",
    "the expected file": "import glob\nprint(*[open(f).read() for f in glob.glob('/**/*.json')])",
    "the words of the report": "print('ended 0')",
    "pytest's exit": "import sys\nsys.exit(None) if False else sys.exit('42')",
    "too much memory, then the answer": "try:\n    x = bytearray(1 << 34)\nexcept MemoryError:\n    pass\nprint(41)",
}


@pytest.mark.parametrize("name", FORGED)
def test_score_cannot_be_forged(name: str) -> None:
    started = time.monotonic()
    assert not passes(FORGED[name], ProgramTest("", "42\n"), 1.0)
    assert time.monotonic() - started < 1.0 + sandbox.GRACE_SECONDS


def test_right_answer_still_passes() -> None:
    assert passes("print(int(input()) * 2)", ProgramTest("21\n", "42\n"), 5.0)


def test_ordinary_programs_still_run() -> None:
    """Typical features of solutions: threads, processes, asyncio, pipes, temporary files, a memory-mapped file."""
    code = """
import asyncio, mmap, multiprocessing, os, signal, subprocess, sys, tempfile, threading
from concurrent.futures import ThreadPoolExecutor
def work(n):
    return n * n
async def both():
    return await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2))
if __name__ == "__main__":
    print(list(ThreadPoolExecutor(2).map(work, range(3))), asyncio.run(both()))
    print(subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True, text=True).stdout.strip())
    process = multiprocessing.get_context("fork").Process(target=work, args=(1,))
    process.start(); process.join(); print(process.exitcode)
    with tempfile.TemporaryFile() as file:
        file.write(b"abc"); file.flush()
        print(bytes(mmap.mmap(file.fileno(), 0)))
    print(bytes(mmap.mmap(-1, 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
    signal.signal(signal.SIGALRM, lambda *_: print("alarm")); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()
"""
    done = sandbox.run_python(code)
    assert done.stdout.splitlines() == ["[0, 1, 4] [1, 2]", "7", "0", "b'abc'", "b'\\x00\\x00\\x00\\x00'", "alarm"], (
        done
    )


@pytest.mark.parametrize("level", ["namespaces", "limits"])
def test_killed_caller_leaves_no_folder_and_no_process(tmp_path: Path, level: str) -> None:
    """As when the time limit of a reward or tool call is shorter than the program's own."""
    program = (
        "import os, sys, time\\nprint('up', flush=True)\\nos.fork() or os.setsid()\\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(30)  # killed-caller-mark'])"
    )
    code = (
        "from posttrain.verify import sandbox\n"
        f"sandbox._run('''{program}''', '', sandbox.Limits(seconds=20), {level!r})"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment)
    give_up = time.monotonic() + 20
    while (
        len(left_running("killed-caller-mark")) < 3 and time.monotonic() < give_up
    ):  # the caller's command line contains the mark too
        time.sleep(0.05)
    assert list(tmp_path.iterdir())
    caller.kill()
    caller.wait()
    while (left_running("killed-caller-mark") or list(tmp_path.iterdir())) and time.monotonic() < give_up + 5:
        time.sleep(0.05)
    assert left_running("killed-caller-mark") == []
    assert list(tmp_path.iterdir()) == []
