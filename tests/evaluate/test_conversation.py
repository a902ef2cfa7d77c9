"""Conversations: streamed text equals the sample, tools answer, a turn can be stopped, and the context window is
respected.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow
from tokenizers import AddedToken

from posttrain.batch import Prompt, Rollout
from posttrain.errors import DataError, EngineError
from posttrain.evaluate.conversation import Answer, Conversation, open_conversation, sample_in_chunks, stream_tokens
from posttrain.images import open_image
from posttrain.models.images import probe_image
from posttrain.models.load import LoadedModel, load
from posttrain.models.tiny import build_tokenizer
from posttrain.recipe.load import load_dict
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Model
from posttrain.recipe.stages import GenerateRecipe
from posttrain.rollout.engine import Completion, StatelessEngine, as_rollouts
from posttrain.rollout.hf import TransformersEngine
from posttrain.tools.calls import Caller
from posttrain.tools.tool_set import load_tool_set

from ..train.vision_families import save_seeing


class Written(StatelessEngine):
    """An engine that returns these texts, one per turn, regardless of how many tokens are requested at a time."""

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


def test_streamed_text_is_the_answer_and_visible_to_later_turns(loaded: LoadedModel) -> None:
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


def test_thoughts_in_special_tokens_are_streamed_as_think_and_rendered_as_the_model_writes_them(
    loaded: LoadedModel,
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(t, special=True) for t in ("[THINK]", "[/THINK]")], special_tokens=True)
    template = str(tokenizer.chat_template)
    tokenizer.chat_template = template.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    one = talk(dataclasses.replace(loaded, tokenizer=tokenizer), ["[THINK]12+34=46[/THINK]46", "ok"])
    *pieces, answer = one.ask("12+34=?")
    assert "".join(map(str, pieces)) == answer.text == "<think>12+34=46</think>46"
    assert one.messages[-1] == {"role": "assistant", "content": "46", "reasoning_content": "12+34=46"}
    list(one.ask("and?"))
    assert one.engine.prompts[1] == (
        "<bos><|user|>12+34=?<|assistant|>[THINK]12+34=46[/THINK]46<eos><|user|>and?<|assistant|>"
    )


def test_stopped_answer_is_kept_up_to_the_stop(loaded: LoadedModel) -> None:
    chunks = itertools.count()
    one = talk(loaded, ["7" * 100, "8"], lambda: one.stop.set() if next(chunks) == 1 else None)
    answer = list(one.ask("go"))[-1]
    assert isinstance(answer, Answer) and (answer.finish, answer.text) == ("interrupted", "7" * 32)
    assert one.messages[-1] == {"role": "assistant", "content": "7" * 32}
    one.engine.turns, one.engine.given = one.engine.turns[1:], 0
    assert list(one.ask("again"))[-1].finish == "stop"  # the stop applied to the previous answer


def test_model_continues_after_tool_results(loaded: LoadedModel) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
    with_tools = recipe(tools=[{"use": "calculator"}])
    offer = load_tool_set(with_tools, loaded.tokenizer, Path.cwd())
    assert offer is not None
    engine: Any = Written(loaded.tokenizer, [call, "42"])
    with Caller(offer.tools, 1) as caller:
        one = Conversation(with_tools, loaded, engine, offer, caller, 0)
        answers = [piece for piece in one.ask("6*7=?") if isinstance(piece, Answer)]
    assert [(c.name, c.result, c.kind) for c in answers[0].calls] == [("calculator", "42", "ok")]
    assert answers[1].text == "42" and answers[1].calls == ()
    assert "42" in engine.prompts[1] and engine.prompts[1].endswith("<|assistant|>")


def test_full_window_and_engine_errors_are_reported(loaded: LoadedModel) -> None:
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
    prompt = Prompt("0", {}, "p", (1,))
    sample_in_chunks(engine, prompt, Sampling(max_new_tokens=40), 0, made.extend, threading.Event())
    assert len(made) == 40


@pytest.mark.parametrize("kind", ["tiny-vision", "qwen2_5_vl"])
def test_pictures_are_seen_in_their_turn_and_later(kind: str, tmp_path: Path) -> None:
    """transformers' own generation, token by token, and the engine of trainings, which is checked against the trainer,
    give the same greedy answers to two turns with a picture each. Without one they are others."""
    path = kind if kind == "tiny-vision" else str(save_seeing(kind, tmp_path / kind))
    seeing = load(Model(path=path), tmp_path)
    Pillow.new("RGB", (40, 24), "red").save(tmp_path / "red.png")
    open_image(probe_image()).save(tmp_path / "frame.png")
    names = [str(tmp_path / name) for name in ("red.png", "frame.png")]

    def answers(engine: Any, *, blind: bool = False) -> list[Any]:
        one = Conversation(recipe(sampling={"max_new_tokens": 6, "temperature": 0}), seeing, engine, None, None, 0)
        found = []
        for name, text in zip(names, ("what?", "and <image> this?"), strict=True):
            one.pending = [] if blind else [one.find_image(name)]
            found.append(list(one.ask(text.replace("<image>", "") if blind else text))[-1])
        said = [message["content"] for message in one.messages[::2]]
        assert blind or (one.images, one.pending, said) == (names, [], ["<image>what?", "and <image> this?"])
        return found

    seen = answers(None)
    assert seen == answers(TransformersEngine(seeing, batch_size=1)) != answers(None, blind=True)


def test_unreadable_picture_leaves_the_conversation_unchanged(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tiny sees no images"):
        talk(loaded, []).find_image("photo.png")
    one = talk(load(Model(path="tiny-vision"), tmp_path), ["1"])
    (tmp_path / "text.png").write_text("no image")
    for name, what in (("missing.png", "is not there"), ("text.png", "text.png"), ("http://a/b.png", "on the network")):
        with pytest.raises(DataError, match=what):
            one.find_image(str(tmp_path / name) if name[0] != "h" else name)
    with pytest.raises(DataError, match="no image is given with it"):
        list(one.ask("<image>?"))
    Pillow.new("RGB", (40, 24), "red").save(tmp_path / "red.png")
    one.pending = [one.find_image(str(tmp_path / "red.png"))]
    with pytest.raises(DataError, match="2 places"):
        list(one.ask("<image><image>"))
    assert (one.messages, one.images, len(one.pending)) == ([], [], 1)
    assert list(one.ask("what?"))[-1].text == "1"
    one.reset()
    assert one.images == []


def test_tool_returns_a_crop_of_a_picture(tmp_path: Path) -> None:
    """The next turn sees the crop after the picture from which the tool cut it."""
    call = '<tool_call>{"name": "crop", "arguments": {"bbox_2d": [0, 0, 500, 500]}}</tool_call>'
    seeing = load(Model(path="tiny-vision"), tmp_path)
    with_tools = recipe(tools=[{"use": "crop"}])
    offer = load_tool_set(with_tools, seeing.tokenizer, Path.cwd())
    assert offer is not None
    engine: Any = Written(seeing.tokenizer, [call, "ok"])
    open_image(probe_image()).save(tmp_path / "frame.png")
    with Caller(offer.tools, 1) as caller:
        one = Conversation(with_tools, seeing, engine, offer, caller, 0)
        one.pending = [one.find_image(str(tmp_path / "frame.png"))]
        answers = [piece for piece in one.ask("look") if isinstance(piece, Answer)]
    assert [c.kind for c in answers[0].calls] == ["ok"] and answers[1].text == "ok"
    assert len(one.images) == 2 and one.images[1].startswith("data:image")
    assert engine.prompts[1].count("<image>") == 2
