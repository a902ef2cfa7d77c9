"""Clocks around code that the benchmarks do not own, used to time the steps of a side."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Context manager in which `owner.name`, of a module or class, is `by`."""
    original = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def clocked(owner: Any, name: str, result: dict[str, Any], key: str) -> Iterator[None]:
    """Context manager that stores the seconds of the last call of `owner.name` in the result."""
    original = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = original(*args, **kwargs)
        synchronise()
        result[key] = time.perf_counter() - started
        return found

    with replaced(owner, name, timed):
        yield


@contextmanager
def metric_times(at_end: Callable[[list[float]], None] = lambda _: None) -> Iterator[list[float]]:
    """Record the times at which posttrain writes its metrics, one per step. at_end: called with them after each
    step."""
    from posttrain.run.metrics import MetricsLog

    times: list[float] = []
    write = MetricsLog.write

    def timed(self: MetricsLog, step: int, values: Any) -> None:
        write(self, step, values)
        synchronise()
        times.append(time.perf_counter())
        at_end(times)

    with replaced(MetricsLog, "write", timed):
        yield times


def posttrain_steps(rows: Sequence[dict[str, Any]], times: Sequence[float]) -> dict[str, Any]:
    """Return `step_s` and `tokens` by step, computed from the metrics and their times; `began`, the start of the first
    step."""
    return {
        "began": times[0] - rows[0]["time/step"],
        "step_s": [rows[0]["time/step"], *(b - a for a, b in itertools.pairwise(times))],
        "tokens": by_step([row["num_tokens"] for row in rows]),
    }


def by_step(totals: Sequence[int]) -> list[int]:
    """Return the increase of a running total in each step."""
    return [b - a for a, b in itertools.pairwise([0, *totals])]
