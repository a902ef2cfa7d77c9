"""`rl_posttrain`'s lengths and measurement of generation alone, for engines that take a step's requests in one call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from rl_work import GROUP


def measure_alone(engine: Any, spec: dict[str, Any], result: dict[str, Any]) -> None:
    """When the engine closes, its last requests are made again, `alone` times."""
    close, complete, last = engine.close, engine.complete, list[Any]()

    def measure_and_close() -> None:
        if last:
            engine.sync(engine.loaded.model, engine.version)  # behind the last step it may sleep without its weights
            result["generate_alone_s"] = [generation_alone(complete, *last) for _ in range(spec["alone"])]
            last.clear()  # closing twice is fine
        close()

    def remembering(requests: Any, sampling: Any, **more: Any) -> Any:
        last[:] = requests, sampling
        return complete(requests, sampling, **more)

    engine.complete, engine.close = remembering, measure_and_close


def generation_alone(complete: Callable[..., Any], requests: Sequence[Any], sampling: Any) -> float:
    """Seconds of the last step's requests without log-probs, weights in place and caches empty."""
    plain = [dataclasses.replace(one, logprobs=False) for one in requests]
    started = time.perf_counter()
    complete(plain, sampling, seed=0)
    return time.perf_counter() - started


def give_lengths(engine: Any, spec: dict[str, Any]) -> None:
    """From now on every rollout has its own number of tokens: one request a rollout, EOS ignored.

    The calls of `generate` are those of the steps, in order, with their prompts numbered as `Engine.generate` says.
    """
    steps = iter(spec["lengths"])
    complete = engine.complete

    def by_row(requests: Any, sampling: Any, *, seed: int, done: Any = None) -> Any:
        of_step = next(steps)
        rows = [(place, i) for place, r in enumerate(requests) for i in range(r.n)]
        asked = [
            dataclasses.replace(
                requests[p],
                n=1,
                seed=requests[p].seed + i,
                ends=False,
                max_new_tokens=of_step[requests[p].number * GROUP + i],
            )
            for p, i in rows
        ]
        found: list[list[Any]] = [[] for _ in requests]
        for (place, _), (sample,) in zip(rows, complete(asked, sampling, seed=seed), strict=True):
            found[place].append(sample)
        for place, samples in enumerate(found):
            if done is not None:
                done(place, samples)
        return found

    engine.complete = by_row
