"""Multi-turn rollouts on a real vLLM, also with the CPU build (make test-vllm)."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt, Rollout
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import EngineSection, Vllm
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.hf import eval_mode
from posttrain.rollout.make_engine import make_engine
from posttrain.rollout.turns import TurnEngine
from posttrain.tools.environments import Reply

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SAMPLING = Sampling(temperature=0.7, max_new_tokens=120, turn_tokens=30, max_turns=4, stop=list("aeiounrst0123 "))


class Delayed:
    """Environment that repeats each turn backwards after a delay; rollout `last` waits until all others have ended; one
    rollout fails."""

    def __init__(self, delays: int | None, last: int | None = None, of: int = 0, fails: int | None = None) -> None:
        self.fails = fails
        self.draw = None if delays is None else random.Random(delays)
        self.last, self.left, self.alone = last, of, asyncio.Event()
        self.ended: list[int] = []

    def episode(self, number: int) -> Any:
        world = self

        class Episode:
            async def begin(self, row: Any) -> None: ...

            async def value(self) -> None: ...

            async def returns(self) -> dict[str, float]:
                return {}

            async def reply(self, turn: str) -> Reply:
                if world.draw is not None:
                    await asyncio.sleep(world.draw.uniform(0, 0.05))
                if number == world.fails:
                    raise ValueError("of the world")
                if number == world.last:
                    await asyncio.wait_for(world.alone.wait(), 60)
                return Reply(({"role": "tool", "content": turn[::-1]},))

            async def score(self) -> None: ...

            async def close(self) -> None:
                world.ended.append(number)
                if len(world.ended) == world.left - 1:
                    world.alone.set()

        return Episode()

    def close(self) -> None: ...


def run_with_delay(rollouts: list[Rollout]) -> list[Any]:
    return [(r.group, [s.ids for s in r.segments], r.ended, [t.text for t in r.turns]) for r in rollouts]


def largest_gap(model: Any, rollouts: list[Rollout], temperature: float) -> float:
    """Return the largest |engine - trainer| log-prob difference of a sampled token in any turn."""
    gaps = []
    for r in rollouts:
        ids = torch.tensor([r.prompt.ids + r.ids])
        with torch.no_grad(), eval_mode(model):
            logp = (model(input_ids=ids).logits[0, :-1].float() / temperature).log_softmax(-1)
        start = len(r.prompt.ids) - 1
        expected = logp[start:].gather(-1, ids[0, start + 1 :, None]).squeeze(-1)
        gaps += (torch.tensor(r.logps) - expected).abs()[torch.tensor(r.loss_mask)].tolist()
    return max(gaps)


def test_rollouts_are_independent_and_do_not_depend_on_timing(
    loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path
) -> None:
    section = EngineSection(engine="vllm", vllm=Vllm(enforce_eager=True))
    engine = make_engine(section, loaded, scratch=tmp_path, max_len=160)
    try:

        def generate(world: Delayed, **more: Any) -> list[Rollout]:
            turning = TurnEngine(engine, world, loaded.tokenizer, loaded.eos_ids)
            return turning.generate(prompts[:4], 2, SAMPLING, seed=3, **more)

        many = [Prompt(str(n), {}, "", tuple((n + i) % 90 + 8 for i in range(120))) for n in range(100)]
        found = engine.generate(many, 1, Sampling(max_new_tokens=3), seed=0)  # more than vLLM prefills in one step
        assert len(found) == 100 and largest_gap(loaded.model, found, 1.0) < 1e-3
        every = generate(Delayed(None))
        assert max(len(r.turns) for r in every) == 4 and len({r.ids for r in every}) == 8
        assert largest_gap(loaded.model, every, SAMPLING.temperature) < 1e-3
        assert run_with_delay(generate(Delayed(1))) == run_with_delay(every)
        assert run_with_delay(generate(Delayed(2), share=[1, 3])) == run_with_delay(every[2:4] + every[6:8])
        with pytest.raises(ValueError, match="of the world"):  # the requests of the other rollouts are aborted
            generate(Delayed(None, fails=0))
        longest = max(range(8), key=lambda n: len(every[n].turns))
        told: list[list[Rollout]] = []
        world = Delayed(None, last=longest, of=8)
        assert run_with_delay(generate(world, done=told.append)) == run_with_delay(every)
        assert world.ended[-1] == longest and told[-1][0].group == longest // 2 and len(told) == 4
    finally:
        engine.close()
