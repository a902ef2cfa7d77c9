"""Output that rewards print during a run: written to a log of bounded size, announced once, and quoted in the error of
a worker that dies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.captured_output import OutputLog
from posttrain.verify.score import Sample, Scorer

TALKS = """
import ctypes, os, sys
def score(completion):
    print("scoring", completion)
    if completion == "flood":
        for _ in range(4000):
            print("x" * 999)
    if completion == "dies":
        print("half a thought", end="")
        sys.stdout.flush()
        os.write(2, b"\\npanic: out of cheese")
        os._exit(3)
    return 1.0
"""


@pytest.fixture
def talking(script: Callable[..., Path]) -> Callable[[OutputLog], Scorer]:
    path = script(TALKS)
    return lambda printed: Scorer([Reward(use=f"{path}:score")], Scoring(workers=2), None, printed)


def test_prints_go_to_a_log_that_is_announced_once(
    talking: Callable[[OutputLog], Scorer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    log = OutputLog(tmp_path / "logs", "rewards", told.append)
    with talking(log) as scorer:
        scores = scorer.score([Sample(text, {}) for text in ("a", "dies", "b")])
    assert scores.rewards == [1.0, None, 1.0]
    lines = (tmp_path / "logs" / "rewards.log").read_text().splitlines()
    assert {"scoring a", "scoring b", "half a thought", "panic: out of cheese"} <= set(lines)
    assert len(told) == 1 and told[0].startswith("rewards print (scoring ")
    assert told[0].endswith(f"): see {tmp_path / 'logs' / 'rewards.log'}")
    last = "the worker process ended: exit code 3; it printed last:\n"
    assert last in str(scores.first_traceback) and str(scores.first_traceback).endswith("panic: out of cheese")
    assert capfd.readouterr() == ("", "")


def test_log_size_is_bounded(talking: Callable[[OutputLog], Scorer], tmp_path: Path) -> None:
    log = OutputLog(tmp_path, "rewards", lambda _: None, most=100_000)
    with talking(log) as scorer:
        assert scorer.score([Sample("flood", {})] * 3).rewards == [1.0] * 3
    text = (tmp_path / "rewards.log").read_text()
    assert 100_000 <= len(text) < 100_100 and text.endswith("\n... the rest is left out\n")


def test_unwritable_folder_only_disables_the_log(talking: Callable[[OutputLog], Scorer], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with talking(OutputLog(tmp_path / "file", "rewards", lambda _: None)) as scorer:
        assert scorer.score([Sample("a", {})]).rewards == [1.0]


def test_each_rank_has_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    assert OutputLog(tmp_path, "tools", print).path == tmp_path / "tools-rank2.log"
