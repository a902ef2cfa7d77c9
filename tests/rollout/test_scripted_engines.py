"""The scripted engine returns the completions given to it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from posttrain.batch import Prompt
from posttrain.errors import EngineError
from posttrain.models.load import LoadedModel
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.engine import Completion, as_rollouts
from posttrain.rollout.requests import Request

sys.path.append(str(Path(__file__).parents[1]))
from scripted_engines import ConcurrentScriptedEngine, MiscountingEngine, ScriptedEngine


def test_replays_by_uid_with_eos_and_truncates_long_completions(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    engine = ScriptedEngine({"p0": ["825", "a long one"], "p1": ["17"]}, loaded.tokenizer)
    rollouts = engine.generate(prompts[:2], 2, Sampling(max_new_tokens=5), seed=3, first_group=4)
    eos = loaded.tokenizer.eos_token_id
    assert [(r.text, r.finish, r.group) for r in rollouts] == [
        ("825", "stop", 4),
        ("a lon", "length", 4),
        ("17", "stop", 5),
        ("17", "stop", 5),
    ]
    assert [r.ids[-1] == eos for r in rollouts] == [True, False, True, True]
    assert rollouts[0].logps == (-1.0,) * 4
    assert engine.calls == [{"prompts": ["p0", "p1"], "n": 2, "seed": 3, "first_group": 4}]


def test_script_can_be_a_function(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    engine = ScriptedEngine(lambda prompt, i: f"{prompt.uid}:{i}", loaded.tokenizer)
    engine.sync(None, 3)
    rollouts = engine.generate(prompts[:2], 2, Sampling(max_new_tokens=9), seed=0)
    assert [r.text for r in rollouts] == ["p0:0", "p0:1", "p1:0", "p1:1"]
    assert {r.version for r in rollouts} == {3}


def test_prompt_without_a_script_raises(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    with pytest.raises(EngineError, match="p0"):
        ScriptedEngine({"other": ["x"]}, loaded.tokenizer).generate(prompts[:1], 1, Sampling(), seed=0)


def test_requests_are_completed_concurrently(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """The first prompt's samples wait until the second prompt's are finished; the order of the results is unchanged."""
    finished, heard = asyncio.Event(), list[int]()

    async def before_token(request: Request, sample: int, token: int) -> None:
        if request.number == 0:
            await finished.wait()
        elif (sample, token) == (1, 2):
            finished.set()

    engine = ConcurrentScriptedEngine(
        lambda request, i: f"{request.number}{i}", loaded.tokenizer, before_token=before_token
    )
    rollouts = engine.generate(
        prompts[:2], 2, Sampling(max_new_tokens=9), seed=3, first_group=4, done=lambda rs: heard.append(rs[0].group)
    )
    assert [(r.text, r.finish, r.group, r.logps) for r in rollouts] == [
        (text, "stop", group, (-1.0,) * 3) for text, group in (("00", 4), ("01", 4), ("10", 5), ("11", 5))
    ]
    assert heard == [5, 4]
    assert [(r.number, r.seed, r.n) for r in engine.asked] == [(0, 3, 2), (1, 5, 2)]


def test_sync_between_two_tokens_changes_their_version(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    async def before_token(_: Request, __: int, token: int) -> None:
        if token == 2:
            engine.sync(None, 7)

    engine = ConcurrentScriptedEngine(lambda *_: "abcdef", loaded.tokenizer, before_token=before_token)
    (rollout,) = engine.generate(prompts[:1], 1, Sampling(max_new_tokens=4), seed=0, logprobs=False)
    assert (rollout.versions, rollout.version, rollout.finish) == ((0, 0, 7, 7), 0, "length")
    assert rollout.segments[0].logps is None


def test_another_number_of_completions_than_requested_raises(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """A step that got none would sample the same prompts forever."""
    engine = MiscountingEngine(lambda *_: "7", loaded.tokenizer)
    for engine.count, number in ((0, 0), (2, 16)):
        with pytest.raises(EngineError, match=rf"^the engine returned {number} of 8 completions of prompt p1$"):
            engine.generate(prompts[:2], 8, Sampling(), seed=0, share=[1])
    with pytest.raises(EngineError, match="returned 3 of 4 completions of 2 prompts"):
        as_rollouts(prompts[:2], 2, [Completion((1,), None, "stop")] * 3, loaded.tokenizer, first_group=0, version=0)
    assert engine.generate(prompts[:2], 8, Sampling(), seed=0, share=[]) == []
