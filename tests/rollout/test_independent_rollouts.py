"""Multi-turn rollouts on an engine with concurrent requests: no rollout waits for another, and each rollout depends
only on its seed."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.batch import Prompt, Rollout
from posttrain.errors import DataError, EngineError, ToolError
from posttrain.models.tiny import build_tokenizer
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout import loop
from posttrain.rollout.requests import Request
from posttrain.rollout.turns import TurnEngine
from posttrain.tools.environments import Environments, Reply

sys.path.append(str(Path(__file__).parents[1]))
from scripted_engines import ConcurrentScriptedEngine, MiscountingEngine, ScriptedEngine

TOKENIZER = build_tokenizer()
EOS = TOKENIZER.eos_token_id
PATIENCE = 20.0  # seconds after which a test fails
MARK = TOKENIZER.convert_tokens_to_ids("<|assistant|>")


def prompts_of(count: int) -> list[Prompt]:
    found = []
    for n in range(count):
        text = f"<bos><|user|>{n}<|assistant|>"
        found.append(Prompt(f"p{n}", {"n": n}, text, tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])))
    return found


def turn_of(request: Request) -> int:
    return request.ids.count(MARK) - 1


def write_reply(request: Request, _: int = 0) -> str:
    """Return a text that depends on the tokens so far and on the seed, as a model's text does."""
    draw = random.Random(f"{request.ids} {request.seed}")
    return "".join(draw.choice("abcdefgh") for _ in range(draw.randint(3, 9)))


class World:
    """Environment whose answers are awaited from a function of (rollout, turn); `turns` gives a rollout's number of
    turns."""

    def __init__(self, turns: Callable[[int], int], answer: Callable[[int, int], Any]) -> None:
        self.turns, self.answer = turns, answer
        self.begun, self.closed = list[int](), list[int]()

    def episode(self, number: int) -> Episode:
        return Episode(self, number)

    def close(self) -> None: ...


class Episode:
    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.turn = world, number, 0

    async def begin(self, row: Any) -> None:
        assert set(row) == {"n"}
        self.world.begun.append(self.number)

    async def value(self) -> None: ...

    async def returns(self) -> dict[str, float]:
        return {}

    async def reply(self, turn: str) -> Reply:
        self.turn += 1
        await self.world.answer(self.number, self.turn)
        if self.turn == self.world.turns(self.number):
            return Reply(ended="done")
        return Reply(({"role": "tool", "content": turn[::-1]},))

    async def score(self) -> float:
        return float(self.number)

    async def close(self) -> None:
        self.world.closed.append(self.number)


async def answer_immediately(*_: Any) -> None: ...


def engine_of(world: Any, engine: Any = None) -> TurnEngine:
    return TurnEngine(engine or ConcurrentScriptedEngine(write_reply, TOKENIZER), world, TOKENIZER, [EOS])


def test_slow_tool_delays_no_other_rollout() -> None:
    """The first call of rollout 2 is answered once all others, including the other rollout of its group, are
    finished."""
    finished, others = list[int](), asyncio.Event()

    class Counting(World):
        def episode(self, number: int) -> Episode:
            world = self

            class Counted(Episode):
                async def close(self) -> None:
                    await super().close()
                    finished.append(number)
                    if len(finished) == 7:
                        others.set()

            return Counted(world, number)

    async def answer(number: int, turn: int) -> None:
        if (number, turn) == (2, 1):
            await asyncio.wait_for(others.wait(), PATIENCE)

    world = Counting(lambda number: 2 + number % 3, answer)
    found = engine_of(world).generate(prompts_of(4), 2, Sampling(max_new_tokens=400), seed=1)
    assert finished[-1] == 2 and sorted(finished) == list(range(8))
    assert [(r.group, len(r.turns), r.world_score) for r in found] == [(n // 2, 2 + n % 3, float(n)) for n in range(8)]
    assert {r.ended for r in found} == {"done"}


def test_slow_generation_delays_no_other_rollout() -> None:
    """The last token of one rollout's first turn comes when all others have ended."""
    ended, world = asyncio.Event(), World(lambda _: 3, answer_immediately)

    async def before_token(request: Request, _: int, token: int) -> None:
        if (request.number, turn_of(request), token) == (1, 0, 2):
            while len(world.closed) < 3:
                await asyncio.sleep(0.001)
            ended.set()

    engine = ConcurrentScriptedEngine(write_reply, TOKENIZER, before_token=before_token)
    found = engine_of(world, engine).generate(prompts_of(2), 2, Sampling(max_new_tokens=400), seed=1)
    assert ended.is_set() and world.closed[-1] == 1 and [len(r.turns) for r in found] == [3] * 4


def test_finished_group_is_reported_while_others_continue() -> None:
    """Group 0 ends after the others were reported; each group is reported once, complete, in the caller's thread."""
    told, others = list[list[Rollout]](), asyncio.Event()

    async def answer(number: int, _: int) -> None:
        if number == 1:
            await asyncio.wait_for(others.wait(), PATIENCE)

    def done(group: list[Rollout]) -> None:
        assert threading.current_thread() is threading.main_thread()
        told.append(group)
        if len(told) == 2:
            loop.submit(_set(others))

    found = engine_of(World(lambda _: 2, answer)).generate(
        prompts_of(3), 2, Sampling(max_new_tokens=400), seed=1, first_group=5, done=done
    )
    assert [group[0].group for group in told[2:]] == [5] and {group[0].group for group in told} == {5, 6, 7}
    for group in told:
        start = 2 * (group[0].group - 5)
        assert [id(r) for r in group] == [id(r) for r in found[start : start + 2]]


async def _set(event: asyncio.Event) -> None:
    event.set()


def run_with_delays(delays: int | None, share: list[int] | None = None, **more: Any) -> list[tuple[Any, ...]]:
    """Return the rollouts for random latencies of engine and tools."""
    draw = random.Random(delays)

    async def wait(*_: Any) -> None:
        if delays is not None:
            await asyncio.sleep(draw.choice([0, 0, 0.001, 0.004]))

    async def before_token(request: Request, sample: int, token: int) -> None:
        if token == 0:
            await wait(request, sample)

    engine = ConcurrentScriptedEngine(write_reply, TOKENIZER, before_token=before_token)
    found = engine_of(World(lambda number: 1 + number % 4, wait), engine).generate(
        prompts_of(5), 3, Sampling(max_new_tokens=300), seed=7, share=share, **more
    )
    return [(r.group, r.segments, r.turns, r.ended, r.version) for r in found]


def test_rollouts_do_not_depend_on_timing_or_ranks() -> None:
    every = run_with_delays(None)
    assert len({segments for _, segments, *_ in every}) == 15
    assert all(run_with_delays(delays) == every for delays in range(4))
    assert run_with_delays(3, share=[1, 4]) == every[3:6] + every[12:15]
    assert run_with_delays(3, share=[]) == []


def test_batching_engine_gets_one_call_for_all_live_rollouts() -> None:
    """The rollouts have 1, 2 and 3 turns: three calls, each with the remaining rollouts."""
    shares: list[Any] = []

    class Watched(ScriptedEngine):
        def generate(self, prompts: Any, n: int, sampling: Any, **more: Any) -> list[Rollout]:
            shares.append((n, more.get("share"), threading.current_thread() is threading.main_thread()))
            return super().generate(prompts, n, sampling, **more)

    async def answer(number: int, turn: int) -> None:
        await asyncio.sleep(0.002 * (number + turn) % 3)

    engine = Watched(lambda prompt, _: prompt.uid, TOKENIZER)
    found = engine_of(World(lambda number: 1 + number % 3, answer), engine).generate(
        prompts_of(2), 3, Sampling(max_new_tokens=400), seed=1
    )
    assert shares == [(1, [0, 1, 2, 3, 4, 5], True), (1, [1, 2, 4, 5], True), (1, [2, 5], True)]
    assert [len(r.turns) for r in found] == [1, 2, 3] * 2


@pytest.mark.parametrize("turn_tokens", [None, 7, 1000])
def test_turn_requests_the_remaining_tokens(turn_tokens: int | None) -> None:
    engine = ConcurrentScriptedEngine(lambda *_: "abcdefgh", TOKENIZER)
    sampling = Sampling(max_new_tokens=50, max_turns=9, turn_tokens=turn_tokens)
    (start,) = prompts_of(1)
    found = engine_of(World(lambda _: 9, answer_immediately), engine).generate([start], 2, sampling, seed=0)
    assert len(engine.asked) == sum(len(r.turns) for r in found) >= 2
    for request in engine.asked:
        assert request.n == 1
        assert request.max_new_tokens == min(turn_tokens or 50, len(start.ids) + 50 - len(request.ids)) > 0
    assert all(len(r.ids) <= 50 and r.ended == "tokens" for r in found)


def test_log_probs_are_requested_for_the_given_prompts() -> None:
    """Log-probs are requested for the first prompt's rollouts in each turn, and for none if vLLM could only report
    those of a truncated distribution."""
    for cut, wanted in (({}, {0, 1}), ({"top_p": 0.5}, set())):
        engine = ConcurrentScriptedEngine(write_reply, TOKENIZER)
        sampling = Sampling(max_new_tokens=200, **cut)
        engine_of(World(lambda _: 2, answer_immediately), engine).generate(
            prompts_of(2), 2, sampling, seed=0, logprobs=1
        )
        assert {r.number for r in engine.asked if r.logprobs} == wanted
        assert len([r for r in engine.asked if r.logprobs]) == 2 * len(wanted)


def test_another_number_of_completions_than_requested_raises() -> None:
    engine = MiscountingEngine(write_reply, TOKENIZER)
    for engine.count in (0, 2):
        with pytest.raises(
            EngineError, match=rf"^the engine returned {engine.count} of 1 completions of prompt p1\nin turn 1 of"
        ):
            engine_of(World(lambda _: 2, answer_immediately), engine).generate(
                prompts_of(2), 2, Sampling(max_new_tokens=50), seed=0, share=[1]
            )


def test_too_long_prompt_raises_before_any_rollout_starts() -> None:
    world = World(lambda _: 2, answer_immediately)
    engine = ConcurrentScriptedEngine(write_reply, TOKENIZER, window=20)
    with pytest.raises(DataError, match="row p0"):
        engine_of(world, engine).generate(prompts_of(1), 1, Sampling(max_new_tokens=30), seed=0)
    assert world.begun == []


def test_tokens_have_the_weight_version_of_their_sync() -> None:
    """One sync between the two turns, and one within the second turn."""

    async def before_token(request: Request, _: int, token: int) -> None:
        if turn_of(request) == 1 and token in (0, 2):
            engine.sync(None, 4 + token)

    engine = ConcurrentScriptedEngine(lambda *_: "abc", TOKENIZER, before_token=before_token)
    (found,) = engine_of(World(lambda _: 2, answer_immediately), engine).generate(
        prompts_of(1), 1, Sampling(max_new_tokens=90), seed=0
    )
    assert [s.versions for s in found.segments] == [None, None, (4, 4, 6, 6)]
    assert found.version == 0 and set(found.versions) == {0, 4, 6}


def test_error_of_a_rollout_cancels_the_others_and_names_the_row() -> None:
    """Rollout 3 fails in its second turn while the others wait for an answer that never comes."""
    waiting = []

    async def answer(number: int, _: int) -> None:
        if number != 3:
            waiting.append(number)
            await asyncio.Event().wait()

    async def before_token(request: Request, *_: int) -> None:
        if turn_of(request) == 1:
            while len(waiting) < 3:
                await asyncio.sleep(0.001)
            raise EngineError("lost")

    world = World(lambda _: 4, answer)
    engine = ConcurrentScriptedEngine(write_reply, TOKENIZER, before_token=before_token)
    with pytest.raises(EngineError, match="lost") as told:
        engine_of(world, engine).generate(prompts_of(2), 2, Sampling(max_new_tokens=300), seed=0)
    assert told.value.__notes__ == ["in turn 2 of a rollout of row p1"]
    assert sorted(world.closed) == [0, 1, 2, 3]


def test_invalid_environment_result_raises_with_its_row() -> None:
    class Endless(Stuck):
        def step(self, _: str) -> Any:
            return "", True, float("inf")

    with pytest.raises(ToolError, match=r"^row p0  an environment's step returned inf"):
        engine_of(Environments(Endless, 1, 60.0)).generate(prompts_of(1), 1, Sampling(max_new_tokens=99), seed=0)


def test_error_in_the_group_callback_ends_the_rollouts() -> None:
    async def answer(number: int, _: int) -> None:
        if number:
            await asyncio.Event().wait()

    def done(_: list[Rollout]) -> None:
        raise ValueError("no")

    world = World(lambda _: 1, answer)
    with pytest.raises(ValueError, match="no"):
        engine_of(world).generate(prompts_of(3), 1, Sampling(max_new_tokens=300), seed=0, done=done)
    assert sorted(world.closed) == [0, 1, 2]


class Stuck:
    """An environment whose step interrupts the main thread and never ends."""

    made, closed, over = 0, 0, threading.Event()

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, row: Any) -> None: ...

    def step(self, text: str) -> Any:
        del text
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.over.wait(PATIENCE)

    def close(self) -> None:
        type(self).closed += 1


def test_ctrl_c_closes_every_environment() -> None:
    try:
        with pytest.raises(KeyboardInterrupt):
            engine_of(Environments(Stuck, 1, 60.0)).generate(prompts_of(3), 1, Sampling(max_new_tokens=99), seed=0)
        assert 1 <= Stuck.made == Stuck.closed
    finally:
        Stuck.over.set()


def test_rollout_time_limit_counts_from_its_own_start() -> None:
    """Rollout 1 waits for its environment longer than its time limit."""

    class Late(World):
        def episode(self, number: int) -> Episode:
            class LateEpisode(Episode):
                async def begin(self, row: Any) -> None:
                    await asyncio.sleep(2.2 * self.number)
                    await super().begin(row)

            return LateEpisode(self, number)

    sampling = Sampling(max_new_tokens=200, rollout_seconds=2.0)
    found = engine_of(Late(lambda _: 2, answer_immediately)).generate(prompts_of(2), 1, sampling, seed=0)
    assert [r.ended for r in found] == ["done", "done"]
