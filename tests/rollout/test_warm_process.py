"""A warm process becomes the next engine core that is started, with the environment of that start."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.rollout import engine_process, warm_process

SPAWN = multiprocessing.get_context("spawn")
SETTING = "POSTTRAIN_TEST_SETTING"


@pytest.fixture(autouse=True)
def warm_processes() -> Iterator[dict[Any, Any]]:
    yield warm_process._waiting
    with warm_process.use():
        pass


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`warm_process.start` as if vLLM were installed; without vLLM a process has nothing to import."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "vllm" or found(name))
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", engine_process.LOG):
        monkeypatch.delenv(name, raising=False)
    return warm_process.start


def write_state(file: Path, more: Any = None) -> None:
    """Write what the process sees as JSON. more: something only a new process can be given; gets an answer."""
    name = multiprocessing.current_process().name
    state = {"pid": os.getpid(), "name": name, "environment": dict(os.environ)}
    file.write_text(json.dumps(state))
    if more is not None:
        more.send("here")


def state_of(name: str, file: Path, *more: Any) -> dict[str, Any]:
    process = SPAWN.Process(target=write_state, args=(file, *more), name=name)
    process.start()
    process.join()
    assert process.exitcode == 0
    return dict(json.loads(file.read_text()))


def test_engine_core_runs_in_the_warm_process(
    start: Any, warm_processes: dict[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the environment of its start: vLLM gets settings by environment variables that are unknown when the warm
    process starts."""
    monkeypatch.setenv("POSTTRAIN_TEST_OLD", "1")
    start(2)
    pids = {warm.pid for warm in warm_processes}
    start(2)
    assert len(pids) == 2 and {warm.pid for warm in warm_processes} == pids, "there are two already"
    monkeypatch.delenv("POSTTRAIN_TEST_OLD")
    monkeypatch.setenv(SETTING, "new")
    monkeypatch.setenv(engine_process.PARENT, str(os.getpid()))
    with warm_process.use():
        assert state_of("Reward", tmp_path / "other")["pid"] not in pids, "no process of vLLM"
        core = state_of("EngineCore_DP0", tmp_path / "core")
    assert core["pid"] in pids and core["name"] == "EngineCore_DP0"
    assert core["environment"][SETTING] == "new" and "POSTTRAIN_TEST_OLD" not in core["environment"]
    assert not warm_processes and not any(Path(f"/proc/{pid}").exists() for pid in pids), "the other one has ended"
    with warm_process.use():
        assert state_of("EngineCore_DP0", tmp_path / "again")["pid"] not in pids


def test_unusable_warm_process_is_replaced(
    start: Any, warm_processes: dict[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed, before or after it was chosen; or the engine gets open files, which only a new process
    inherits."""
    start(1)
    gone = next(iter(warm_processes)).pid
    os.kill(gone, 9)
    while Path(f"/proc/{gone}/status").read_text().split("State:")[1].split()[0] != "Z":
        time.sleep(0.01)
    with warm_process.use():
        assert state_of("EngineCore", tmp_path / "first")["pid"] != gone
    start(1)
    dies = next(iter(warm_processes)).pid
    dump = warm_process._dump

    def kill_and_dump(core: Any) -> bytes:
        os.kill(dies, signal.SIGKILL)
        os.waitid(os.P_PID, dies, os.WEXITED | os.WNOWAIT)
        return dump(core)

    with warm_process.use(), monkeypatch.context() as patch:
        patch.setattr(warm_process, "_dump", kill_and_dump)
        assert state_of("EngineCore", tmp_path / "dies")["pid"] != dies
    start(1)
    waits = next(iter(warm_processes)).pid
    ours, theirs = SPAWN.Pipe()
    with warm_process.use():
        assert state_of("EngineCore", tmp_path / "second", theirs)["pid"] != waits
    assert ours.recv() == "here" and not Path(f"/proc/{waits}").exists()


def test_killed_warm_process_reports_its_exit(start: Any, warm_processes: dict[Any, Any]) -> None:
    """A warm process ignores Ctrl-C, which a terminal sends to all processes, as long as it waits."""
    start(1)
    pid = next(iter(warm_processes)).pid
    waiting = Path(f"/proc/{pid}/status")
    while not int(waiting.read_text().split("SigIgn:")[1].split()[0], 16) & 1 << signal.SIGINT - 1:
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    with warm_process.use():
        process = SPAWN.Process(target=time.sleep, args=(60,), name="EngineCore")
        process.start()
    assert process.pid == pid and process.is_alive()
    process.kill()
    process.join()
    assert process.exitcode == -9


def test_no_warm_process_without_vllm(warm_processes: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    warm_process.start(1)
    assert not warm_processes


@pytest.mark.parametrize(
    ("section", "count"),
    [
        ({"engine": "vllm"}, 1),
        ({"engine": "vllm", "vllm": {"engines": 2}}, 2),
        ({"engine": "vllm", "vllm": {"server": {"devices": [1]}}}, 0),
        ({}, 0),
    ],
)
def test_number_of_warm_processes_per_stage(section: dict[str, Any], count: int) -> None:
    from posttrain.pipeline import count_engine_processes  # true here: the processes of this file import it
    from posttrain.recipe.engine_sections import EngineSection

    engine = EngineSection.model_validate(section)
    recipe: Any = SimpleNamespace(rollout=engine)
    assert count_engine_processes(recipe) == count and count_engine_processes(SimpleNamespace(engine=engine)) == count  # type: ignore[arg-type]
    assert count_engine_processes(SimpleNamespace()) == 0  # type: ignore[arg-type]


def test_first_rank_of_a_group_starts_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.pipeline import count_engine_processes
    from posttrain.recipe.engine_sections import EngineSection

    recipe: Any = SimpleNamespace(
        rollout=EngineSection.model_validate({"engine": "vllm", "vllm": {"tensor_parallel": 2}})
    )
    for rank, count in enumerate((1, 0, 1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        assert count_engine_processes(recipe) == count


PARENT = """
import importlib.util, sys, time
importlib.util.find_spec = lambda _: True
from posttrain.rollout import warm_process
warm_process.start(1)
print(next(iter(warm_process._waiting)).pid, flush=True)
time.sleep(60)
"""


def test_warm_processes_end_with_a_killed_trainer() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        status = Path(f"/proc/{pid}/status").read_text()
        masks = [int(status.split(f"{kind}:")[1].split()[0], 16) for kind in ("SigBlk", "SigIgn")]
        assert (masks[0] | masks[1]) & 1 << signal.SIGINT - 1, "Ctrl-C would end it with a traceback"
        trainer.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)


def test_ended_warm_process_is_not_signaled(
    start: Any, warm_processes: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process id may belong to another process by then."""
    start(1)
    (warm,) = warm_processes
    os.kill(warm.pid, signal.SIGKILL)
    os.waitid(os.P_PID, warm.pid, os.WEXITED | os.WNOWAIT)
    assert not warm.is_alive()
    monkeypatch.setattr(os, "kill", lambda *given: pytest.fail(f"a signal to {given}"))
    warm_process.close()
    assert not warm_processes
