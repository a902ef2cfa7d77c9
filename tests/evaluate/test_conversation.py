"""Conversations: what is streamed is what was sampled, tools answer, a turn can be stopped, and the window is kept."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from posttrain.batch import Prompt, Rollout
from posttrain.errors import DataError, EngineError
from posttrain.evaluate.conversation import Answer, Conversation, open_conversation, sample_in_chunks, stream_tokens
from posttrain.models.load import LoadedModel, load
from posttrain.recipe.load import load_dict
from posttrain.recipe.rollout_sections import Sampling
from posttrain.recipe.sections import Model
from posttrain.recipe.stages import GenerateRecipe
from posttrain.rollout.engine import Completion, StatelessEngine, as_rollouts
from posttrain.tools.calls import Caller
from posttrain.tools.tool_set import offer_of


class Written(StatelessEngine):
    """An engine that samples these texts, one a turn, however many tokens it is asked for at a time."""

    window = 1 << 30

    def __init__(self, tokenizer: Any, texts: list[str], on_chunk: Any = None) -> None:
        self.tokenizer, self.on_chunk = tokenizer, on_chunk
        self.turns = [[*tokenizer.encode(t, add_special_tokens=False), tokenizer.eos_token_id] for t in texts]
        self.prompts: list[str] = []
        self.given = 0

    def generate(self, prompts: list[Prompt], n: int, sampling: Sampling, **_: Any) -> list[Rollout]:
        if self.on_chunk:
            self.on_chunk()
        if not self.given:
            self.prompts.append(prompts[0].text)
        part = self.turns[0][self.given : self.given + sampling.max_new_tokens]
        self.given += len(part)
        ended = part[-1] == self.tokenizer.eos_token_id
        if ended:
            self.turns, self.given = self.turns[1:], 0
        made = [Completion(tuple(part), None, "stop" if ended else "length")]
        return as_rollouts(prompts, n, made, self.tokenizer, first_group=0, version=0)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(Model(path="tiny"), Path.cwd())


def recipe(**changes: Any) -> GenerateRecipe:
    values = {"stage": "generate", "model": {"path": "tiny"}, "data": {"source": "x.jsonl"}, **changes}
    return load_dict(values, base_dir=Path.cwd(), where="test").require(GenerateRecipe)


def talk(loaded: LoadedModel, texts: list[str], on_chunk: Any = None, **changes: Any) -> Conversation:
    engine: Any = Written(loaded.tokenizer, texts, on_chunk)
    return Conversation(recipe(**changes), loaded, engine, None, None, 0)


def test_what_is_streamed_is_the_answer_and_later_turns_see_it(loaded: LoadedModel) -> None:
    long = "<think>12+34=46</think><answer>46</answer> " + "9" * 40
    one = talk(loaded, [long, "ok"])
    one.set_system("be good")
    *pieces, answer = one.ask("12+34=?")
    assert "".join(map(str, pieces)) == long == answer.text and len(pieces) > 2 and answer.finish == "stop"
    assert [str(p) for p in one.ask("and?")][:1] == ["ok"]
    assert (
        one.engine.prompts[1]
        == f"<bos><|system|>be good<|user|>12+34=?<|assistant|>{long}<eos><|user|>and?<|assistant|>"
    )
    one.reset()
    assert one.messages == [{"role": "system", "content": "be good"}]
    one.set_system("")
    assert one.messages == []


def test_a_stopped_answer_is_kept_as_far_as_it_went(loaded: LoadedModel) -> None:
    chunks = itertools.count()
    one = talk(loaded, ["7" * 100, "8"], lambda: one.stop.set() if next(chunks) == 1 else None)
    answer = list(one.ask("go"))[-1]
    assert isinstance(answer, Answer) and (answer.finish, answer.text) == ("interrupted", "7" * 32)
    assert one.messages[-1] == {"role": "assistant", "content": "7" * 32}
    one.engine.turns, one.engine.given = one.engine.turns[1:], 0
    assert list(one.ask("again"))[-1].finish == "stop"  # the stop was for the answer before


def test_tools_answer_and_the_model_goes_on(loaded: LoadedModel) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    with_tools = recipe(tools=[{"use": "calculator"}])
    offer = offer_of(with_tools, loaded.tokenizer, Path.cwd())
    assert offer is not None
    engine: Any = Written(loaded.tokenizer, [call, "42"])
    with Caller(offer.tools, 1) as caller:
        one = Conversation(with_tools, loaded, engine, offer, caller, 0)
        answers = [piece for piece in one.ask("6*7=?") if isinstance(piece, Answer)]
    assert [(c.name, c.result, c.kind) for c in answers[0].calls] == [("calculator", "42", "ok")]
    assert answers[1].text == "42" and answers[1].calls == ()
    assert "42" in engine.prompts[1] and engine.prompts[1].endswith("<|assistant|>")


def test_a_full_window_and_errors_of_the_engine_are_told(loaded: LoadedModel) -> None:
    one = talk(loaded, ["1"])
    with pytest.raises(DataError, match="fills the window of 2048"):
        list(one.ask("9" * 3000))
    assert one.messages == []
    one.engine.window = 20
    with pytest.raises(DataError, match="fills the window of 20"):
        list(one.ask("9" * 30))
    assert list(one.ask("9" * 10))[-1].finish == "stop"

    def broken() -> None:
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        list(talk(loaded, ["1"], broken).ask("1"))


def test_transformers_streams_the_same_answer_for_a_seed(tmp_path: Path) -> None:
    found = []
    for seed in (0, 0, 1):
        asked = recipe(sampling={"max_new_tokens": 12}, run={"seed": seed})
        with open_conversation(asked, tmp_path, print) as one:
            *pieces, answer = one.ask("12+34=?")
            assert "".join(map(str, pieces)) == answer.text and answer.tokens <= 12
            found.append(answer.text)
    assert found[0] == found[1] != found[2]


def test_leaving_a_stream_early_ends_its_thread() -> None:
    stop = threading.Event()

    def sample(emit: Any) -> None:
        while not stop.is_set():
            emit([1])

    before = threading.active_count()
    stream = stream_tokens(sample, stop)
    assert next(stream) == [1]
    stream.close()
    assert stop.is_set() and threading.active_count() == before


def test_chunks_end_at_the_limit(loaded: LoadedModel) -> None:
    made: list[int] = []
    engine: Any = Written(loaded.tokenizer, ["5" * 100])
    sample_in_chunks(engine, "p", [1], Sampling(max_new_tokens=40), 0, made.extend, threading.Event())
    assert len(made) == 40
