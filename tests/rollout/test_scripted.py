"""The scripted engine replays what it is given."""

from __future__ import annotations

import pytest

from posttrain.batch import Prompt
from posttrain.errors import EngineError
from posttrain.models.load import LoadedModel
from posttrain.recipe.rollout_sections import Sampling
from posttrain.rollout.scripted import ScriptedEngine


def test_replays_by_uid_with_eos_and_cuts_what_is_too_long(loaded: LoadedModel, prompts: list[Prompt]) -> None:
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


def test_a_function_may_write_the_script(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    engine = ScriptedEngine(lambda prompt, i: f"{prompt.uid}:{i}", loaded.tokenizer)
    engine.sync(None, 3)
    rollouts = engine.generate(prompts[:2], 2, Sampling(max_new_tokens=9), seed=0)
    assert [r.text for r in rollouts] == ["p0:0", "p0:1", "p1:0", "p1:1"]
    assert {r.version for r in rollouts} == {3}


def test_a_prompt_without_a_script_is_an_error(loaded: LoadedModel, prompts: list[Prompt]) -> None:
    with pytest.raises(EngineError, match="p0"):
        ScriptedEngine({"other": ["x"]}, loaded.tokenizer).generate(prompts[:1], 1, Sampling(), seed=0)
