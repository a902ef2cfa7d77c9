"""Engines without weights whose tokens encode the version that sampled them.

They generate concurrently with the trainer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from posttrain.recipe.rollout_sections import Rollout
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.engine import Completion
from posttrain.rollout.requests import Request
from posttrain.seeds import derive
from posttrain.train import data_parallel

sys.path.append(str(Path(__file__).parents[1]))
from scripted_engines import ConcurrentScriptedEngine


class VersionedEngine(ConcurrentScriptedEngine):
    """Generates digits that depend on the request's seed and on the version at its start. The log-prob of a token is
    -1 - v/8 for version v.

    slowest: maximum seconds per token, by request. drawn: the version that began each request, in order.
    """

    generates_during_updates = True

    def __init__(self, tokenizer: Any, *, slowest: float = 0.0) -> None:
        super().__init__(self._text, tokenizer, before_token=self._wait)
        self.slowest, self.closed = slowest, False
        self.drawn: list[int] = []

    def _text(self, request: Request, sample: int) -> str:
        digits = str((request.seed * 7919 + 104729 * sample + 31 * self.version) % 10**9)
        return digits[: 1 + (request.seed + sample) % 9] + "x" * (request.number % 3)

    async def _wait(self, request: Request, sample: int, token: int) -> None:
        del sample, token
        await asyncio.sleep(self.slowest * (request.seed % 5) / 4)
        if self.closed:
            raise RuntimeError("the engine is closed")

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        """See `ConcurrentEngine.complete`."""
        self.drawn.append(self.version)
        found = await super().complete(request, sampling)
        return [dataclasses.replace(c, logps=c.logps and tuple(-1 - v / 8 for v in c.versions or ())) for c in found]

    def close(self) -> None:
        self.closed = True


class LongRollouts(VersionedEngine):
    """Rollouts that continue while the trainer makes updates: token i of those that version v begins is sampled by
    version v + i // 3, or by that of the step that trains on them, if it is older. `finishing`: after the next sync
    they take the current version.

    A sync waits until all earlier requests have reached that version, so timing changes nothing. resumed: the steps
    of the checkpoint that a run resumes from.
    """

    def __init__(self, tokenizer: Any, rollout: Rollout, *, steps: int, seed: int = 0, resumed: int = 0) -> None:
        super().__init__(tokenizer)
        self.staleness, self.steps = rollout.staleness, steps
        self.step_of = {derive(seed, "rollout", step, 0): step for step in range(steps)}
        self.share = len(data_parallel.my_shard(rollout.prompts_per_step))
        self.loaded = min(resumed + self.staleness, steps) if resumed else 0  # batches that this engine does not start
        self.begun: dict[tuple[int, int], int] = {}
        self.targets: dict[tuple[int, int], int] = {}
        self.active, self.finishing, self.hurried = 0, False, False

    def _text(self, request: Request, sample: int) -> str:
        self.begun[request.seed, sample] = self.version
        return "0123456789" + "x" * (sample % 3)

    async def _wait(self, request: Request, sample: int, token: int) -> None:
        step, mine = self.step_of[request.seed - request.number * request.n], (request.seed, sample)
        self.targets[mine] = min(self.begun[mine] + token // 3, step)
        while self.version < self.targets[mine] and not self.hurried:
            await asyncio.sleep(0.001)

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        """See `ConcurrentEngine.complete`."""
        self.active += request.n
        found = await super().complete(request, sampling)
        self.active -= request.n
        for sample in range(request.n):
            del self.targets[request.seed, sample]
        return found

    def sync(self, model: Any, version: int) -> None:
        """See `Engine.sync`."""
        begun = self.share * (min(version + self.staleness, self.steps) - self.loaded)
        give_up = time.monotonic() + 20
        while len(self.drawn) < begun or sum(t > self.version for t in [*self.targets.values()]) < self.active:
            assert time.monotonic() < give_up, "rollouts were not begun"
            time.sleep(0.001)
        super().sync(model, version)
        self.hurried = self.finishing
