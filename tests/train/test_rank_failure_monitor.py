"""RankFailureMonitor over an in-process store; with several processes: test_distributed.py."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from posttrain.run import ranks
from posttrain.train import rank_failure_monitor
from posttrain.train.rank_failure_monitor import RankFailureMonitor


@pytest.fixture(autouse=True)
def rank_1_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_failure_monitor, "POLL_S", 0.01)


Two = tuple[RankFailureMonitor, RankFailureMonitor, threading.Event, threading.Event]


@pytest.fixture
def two_monitors(monkeypatch: pytest.MonkeyPatch) -> Two:
    """Two monitors on one store with a short grace period, and an event for each that is set when it stops its
    process."""
    monkeypatch.setattr(rank_failure_monitor, "EXIT_GRACE_S", 0.1)
    store, ends = dist.HashStore(), (threading.Event(), threading.Event())
    first, second = (RankFailureMonitor(store, stop=end.set) for end in ends)
    return first, second, *ends


def test_waiting_rank_is_aborted_with_rank_and_reason(two_monitors: Two, capsys: pytest.CaptureFixture[str]) -> None:
    failing, waiting, *ends = two_monitors
    with failing, waiting:
        failing.report_failure("no column `answer`")
        assert ends[1].wait(5)
        assert waiting.failure == "rank 1 failed: no column `answer`"
    assert capsys.readouterr().err.startswith("rank 1 failed: no column `answer`\nrank 1 was waiting for it")
    assert not ends[0].is_set(), "it ends by itself"


def test_exiting_rank_is_not_aborted_and_the_first_failure_is_kept(two_monitors: Two) -> None:
    first, second, *ends = two_monitors
    with first, second:
        first.report_failure("the first")
        assert second.wait_for_failure(5) == "rank 1 failed: the first"
        second.report_failure("the second")
        time.sleep(0.2)
        assert second.failure == "rank 1 failed: the first"
    assert not any(end.is_set() for end in ends)


def test_checkpoint_in_progress_is_finished(two_monitors: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    failing, saving, _, ended = two_monitors
    with failing, saving:
        failing.report_failure("broken")
        monkeypatch.setenv("RANK", "0")
        with ranks.defer_shutdown():
            assert not ended.wait(0.3)
        assert ended.wait(5)


def test_lost_store_means_that_rank_0_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def check(self, _: Any) -> bool:
            raise RuntimeError("Connection reset by peer")

        add = check

    monkeypatch.setattr(rank_failure_monitor, "EXIT_GRACE_S", 0.05)
    ended = threading.Event()
    with RankFailureMonitor(Gone(), stop=ended.set) as waiting:
        assert ended.wait(5) and waiting.failure == "rank 0 is gone"
