"""When failing reward calls stop a run: after failures on enough prompts, and immediately if no call succeeds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from posttrain.errors import RunError
from posttrain.verify.failures import Calls, Failures, combine_calls


def step(number: int, prompts: int, calls: int, errors: int = 0, timeouts: int = 0, first: str = "") -> Calls:
    return Calls(number, prompts, calls, {"r": errors}, {"r": timeouts}, {"r": first} if first else {})


def failures(limit: float = 0.1, **more: object) -> Failures:
    return Failures({"r": "mine.py:r"}, limit, **more)  # type: ignore[arg-type]


def draws(rate: float, *, by_row: bool) -> Iterator[Calls]:
    """Yield steps of 2 prompts with 8 calls each; with by_row all calls of a prompt fail together."""
    draw = random.Random(3)
    for number in range(400):
        rows = [8 * (draw.random() < rate) if by_row else sum(draw.random() < rate for _ in range(8)) for _ in "ab"]
        yield step(number, 2, 16, sum(rows))


@pytest.mark.parametrize("by_row", [True, False])
def test_five_percent_failures_never_stop_a_run_and_a_third_does(by_row: bool) -> None:
    seen = failures()
    for calls in draws(0.05, by_row=by_row):
        seen.add(calls)
    assert sum(calls.prompts for calls in seen.history) == 400  # older steps are dropped
    broken = failures()
    with pytest.raises(RunError, match=r"in the last \d+ steps .*: more than scoring.max_error_rate 0.1 of 400"):
        for calls in draws(0.33, by_row=by_row):
            broken.add(calls)
    assert 30 < len(broken.history) < 100


def test_reward_that_always_fails_stops_the_run_in_the_first_step() -> None:
    told = r"(?s)reward r: 16 of 16 calls failed in this step \(14 errors, 2 time-outs, 2 prompts\): no call succeeded"
    with pytest.raises(RunError, match=told + r".*the first error, on row x"):
        failures().add(step(0, 2, 16, 14, 2, "the first error, on row x"))
    seen = failures()
    for number in range(20):
        seen.add(step(number, 2, 16))
    seen.add(step(20, 2, 16, 16))  # two bad rows in one step are not enough evidence
    with pytest.raises(RunError, match=r"32 of 32 calls failed in the last 2 steps .* 4 prompts\): no call succeeded"):
        seen.add(step(21, 2, 16, 16))


def test_large_step_is_judged_without_history() -> None:
    seen = failures()
    seen.add(step(0, 512, 4096))
    seen.add(step(1, 512, 4096, 409))
    with pytest.raises(RunError, match=r"410 of 4096 calls failed in this step .*max_error_rate 0.1\n"):
        seen.add(step(2, 512, 4096, 410))


def test_failure_of_all_rows_of_a_small_evaluation_stops_it() -> None:
    seen = failures(enough=20, unit="chunk")
    seen.add(step(0, 10, 10, 2))
    with pytest.raises(RunError, match=r"3 of 20 calls failed in the last 2 chunks .*max_error_rate 0.1"):
        seen.add(step(1, 10, 10, 1))


@pytest.mark.parametrize(("limit", "stops"), [(0.0, True), (1.0, False)])
def test_error_rate_limits_of_zero_and_one(limit: float, stops: bool) -> None:
    seen = failures(limit)
    if not stops:
        seen.add(step(0, 8, 8, 8))
        return
    seen.add(step(0, 8, 8))
    with pytest.raises(RunError, match="1 of 16 calls failed in the last 2 steps"):
        seen.add(step(1, 8, 8, 1))


def test_counts_are_summed_over_ranks_and_the_history_is_json() -> None:
    now = combine_calls([step(3, 1, 8, 2, 0, "a"), step(3, 1, 8, 1, 1, "b")])
    assert now == step(3, 2, 16, 3, 1, "a")
    seen = failures()
    seen.add(now)
    assert failures(history=json.loads(json.dumps(seen.history))).history == seen.history == [now]
    seen.add(step(4, 2, 16))
    assert seen.history == [now._replace(first={}), step(4, 2, 16)]  # the message is kept for its own step only
