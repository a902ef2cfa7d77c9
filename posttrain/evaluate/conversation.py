"""A conversation with a model: its turns streamed as text, the calls of tools answered between them.

Sampling runs in a thread of its own, and ends when `Conversation.stop` is set. Every turn is rendered anew by the chat
template, as servers do it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain import chat
from posttrain.batch import Prompt, PromptImages, ToolCall
from posttrain.data import images
from posttrain.data.prepare import encode_with_images
from posttrain.data.turns import Piece, Text
from posttrain.errors import DataError
from posttrain.images import PLACE, Image, break_places
from posttrain.models.load import LoadedModel, load
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.stages import GenerateRecipe
from posttrain.rollout.engine import Engine
from posttrain.rollout.make_engine import check_engine, make_engine, start_note
from posttrain.seeds import derive
from posttrain.tools.calls import Caller
from posttrain.tools.formats import parse
from posttrain.tools.tool_set import ToolSet, offer_of

TURNS_IN_WINDOW = (
    8  # a conversation of so many longest turns fits vLLM's window, unless vllm.max_model_len says its size
)
CHUNK_TOKENS = 16  # tokens that an engine without a stream of its own samples at once
Message = dict[str, Any]
Emit = Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class Answer:
    """The end of one turn of the model. finish: `stop`, `length` or `interrupted`. calls: of tools, with results."""

    text: str
    tokens: int
    finish: str
    calls: tuple[ToolCall, ...] = ()


@dataclass
class Conversation:
    """One model and what was said so far. `ask` streams an answer; `reset` forgets all but the system message."""

    recipe: GenerateRecipe
    loaded: LoadedModel
    engine: Engine | None  # None: transformers' own generation
    offer: ToolSet | None
    caller: Caller | None
    seed: int
    messages: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # that the messages show, each with a PLACE: paths or data URLs
    pending: list[str] = field(default_factory=list)  # that the next message will show
    turns: int = 0  # of the model, since the start: each has a seed of its own
    stop: threading.Event = field(default_factory=threading.Event)  # set it to end the answer that is being sampled

    @property
    def name(self) -> str:
        """The model, as it was named."""
        return self.loaded.source

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
        self.images, self.pending = [], []

    def set_system(self, text: str) -> None:
        """Put a system message in front, in the place of the one that is there; an empty text removes it."""
        rest = [m for m in self.messages if m["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def prompt(self) -> str:
        """What the model is given next, as the chat template writes it. Raises DataError where the template refuses."""
        row = {"messages": images.use_template_marks(chat.clean_messages(self.messages), self._row())}
        shown = self.offer.row(row) if self.offer else row
        return chat.render(self.loaded.tokenizer, shown["messages"], tools=shown.get("tools"), generation_prompt=True)

    @property
    def opens_thought(self) -> bool:
        """Whether the next answer begins inside a thought that the template has opened."""
        return chat.prefilled_think(self.prompt())

    def _row(self) -> dict[str, Any]:
        """The conversation as a row of data."""
        return {"uid": "chat", "messages": self.messages, **({"images": self.images} if self.images else {})}

    def find_image(self, name: str) -> str:
        """A file as `pending` names it. Raises DataError for one that is no image, and for a model that sees none."""
        if self.loaded.images is None:
            raise DataError(f"{self.name} sees no images", hint="take a model that sees")
        (source,) = images.collect_images({"images": [name]}, "", Path.cwd(), self.recipe.data.image)["images"]
        self.loaded.images.read(self._image(source))
        return str(source)

    def _image(self, source: str) -> Image:
        limits = self.recipe.data.image
        return Image(source, limits.min_pixels, limits.max_pixels)

    def ask(self, text: str) -> Iterator[str | Answer]:
        """Say something: pieces of text, and an Answer after each turn of the model, more than one with tools.

        The images of `pending` stand where the text has PLACE, or before it. Raises DataError, with the message taken
        back, where the template refuses it or the window has no room for it.
        """
        self.stop.clear()
        if PLACE in text and self.loaded.images is not None and not self.pending:
            raise DataError(f"the message has {PLACE}, and no image is given with it", hint="/image FILE before it")
        before, shown, given = list(self.messages), list(self.images), list(self.pending)
        said = images.insert_placeholders({"prompt": text, "images": given}, "")["prompt"]
        self.messages.append({"role": "user", "content": said})
        self.images, self.pending = [*shown, *given], []
        try:
            for _ in range(self.recipe.sampling.max_turns):
                answer = yield from self._turn()
                yield answer
                if not answer.calls:
                    return
        except DataError:
            self.messages, self.images, self.pending = before, shown, given
            raise

    def _turn(self) -> Generator[str, None, Answer]:
        """Stream one turn of the model; returns its Answer, with the calls that it makes run."""
        prompt, tokenizer = self.prompt(), self.loaded.tokenizer
        text_of = Text("chat", (Piece(prompt, False),))
        ((ids, seen),) = encode_with_images([self._row()], [text_of], self.recipe.data, tokenizer, self.loaded.images)
        windows = [self.loaded.window, self.engine and self.engine.window]
        window = min((w for w in windows if w), default=len(ids) + self.recipe.sampling.max_new_tokens)
        room = window - len(ids)
        if room < 1:
            raise DataError(
                f"the conversation has {len(ids)} tokens and fills the window of {window}",
                hint="begin anew with /reset",
            )
        sampling = self.recipe.sampling.model_copy(
            update={"max_new_tokens": min(room, self.recipe.sampling.max_new_tokens)}
        )
        seed = derive(self.seed, "chat", self.turns)
        self.turns += 1
        made: list[int] = []
        begin = shown = written = 0  # tokens from `begin` are decoded anew, `written` characters of them are out
        asked = Prompt("chat", {}, prompt, ids, seen)
        for new in stream_tokens(lambda emit: self._sample(asked, sampling, seed, emit), self.stop):
            made += new
            text = self._decode(made[begin:], special=False)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character: the next token completes it
                yield text[written:]
                begin, shown = shown, len(made)
                written = len(self._decode(made[begin:shown], special=False))
        if left := self._decode(made[begin:], special=False)[written:]:
            yield left
        text = self._decode(made, special=False)
        ended = bool(made) and made[-1] in self.loaded.eos_ids
        finish = "stop" if ended else "interrupted" if self.stop.is_set() else "length"
        return self._record_answer(text, made, finish, opened=chat.prefilled_think(prompt))

    def _record_answer(self, text: str, made: Sequence[int], finish: str, *, opened: bool) -> Answer:
        """Keep the turn, run the calls that it makes, and keep their results."""
        raw = self._decode(made, special=True) if self.offer else text
        said = break_places(f"<think>{raw}" if opened else raw)
        self.messages.append({"role": "assistant", "content": said})
        if self.offer is None or self.caller is None or finish != "stop":
            return Answer(text, len(made), finish)
        schemas = {tool.name: tool.schema for tool in self.offer.tools}
        shown = [self._image(source) for source in self.images]
        calls = tuple(self.caller.run(parse(raw, self.offer.form, schemas), shown))
        for call in calls:
            self._record_result(call, of_user=self.offer.system is not None)  # where the template knows of no tools
        return Answer(text, len(made), finish, calls)

    def _record_result(self, call: ToolCall, *, of_user: bool) -> None:
        """Keep what a call gave, as a message of the tool or of the user, with its images."""
        reader = self.loaded.images
        if call.images and reader is None:
            raise DataError(f"the tool {call.name} returned an image, and {self.name} sees none")
        self.images += [image.source for image in call.images]
        result = call.result if call.images else break_places(call.result)
        as_user = {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
        as_tool = {"role": "tool", "name": call.name or "unknown", "content": result}
        self.messages.append(as_user if of_user else as_tool)
        if call.images and reader is not None and self.prompt().count(reader.placeholder) != len(self.images):
            self.messages[-1] = as_user  # some templates show images of the user alone

    def _decode(self, ids: Sequence[int], *, special: bool) -> str:
        kept = list(ids[:-1]) if ids and ids[-1] in self.loaded.eos_ids else list(ids)
        return str(
            self.loaded.tokenizer.decode(kept, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def _sample(self, prompt: Prompt, sampling: Sampling, seed: int, emit: Emit) -> None:
        if self.engine is None:
            sample_with_transformers(self.loaded, prompt, sampling, seed, emit, self.stop)
        else:
            sample_in_chunks(self.engine, prompt, sampling, seed, emit, self.stop)


def stream_tokens(sample: Callable[[Emit], None], stop: threading.Event) -> Iterator[Sequence[int]]:
    """The tokens that `sample(emit)` hands to `emit`, as they come; it runs in a thread, and its error is raised here.

    Whoever leaves the iteration early sets `stop`, and waits until `sample` has heard it.
    """
    tokens: queue.SimpleQueue[Sequence[int] | BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            sample(tokens.put)
        except BaseException as error:  # raised in the thread that waits
            tokens.put(error)
        else:
            tokens.put(None)

    thread = threading.Thread(target=run, name="chat", daemon=True)
    thread.start()
    found: Sequence[int] | BaseException | None = ()
    try:
        while (found := tokens.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        if found is not None:
            stop.set()
        thread.join()


def sample_with_transformers(
    loaded: LoadedModel, prompt: Prompt, sampling: Sampling, seed: int, emit: Emit, stop: threading.Event
) -> None:
    """One completion by transformers' `generate`, each token handed to `emit` as it is sampled, until EOS, the limit,
    or `stop`."""
    import torch
    from transformers import StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    class Tokens(BaseStreamer):  # type: ignore[misc]
        """The first call of `put` has the prompt."""

        begun = False

        def put(self, value: Any) -> None:
            if self.begun:
                emit(value.flatten().tolist())
            self.begun = True

        def end(self) -> None: ...

    def check_stop(input_ids: Any, scores: Any, **_: Any) -> Any:
        del scores
        return torch.full((input_ids.shape[0],), stop.is_set(), device=input_ids.device, dtype=torch.bool)

    drawn = sampling.temperature > 0
    cut = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k} if drawn else {}
    ids = torch.tensor([list(prompt.ids)], device=loaded.device)
    seen: dict[str, Any] = {}
    if loaded.images is not None:
        seen["suppress_tokens"] = sorted(loaded.images.token_ids)
        if prompt.images is not None:
            seen |= loaded.images.plain_inputs(loaded.model, prompt.images.shown, ids)
    loaded.model.eval()
    devices = [loaded.device] if loaded.device.type == "cuda" else []
    with torch.inference_mode(), loaded.autocast(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        loaded.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.max_new_tokens,
            do_sample=drawn,
            streamer=Tokens(),
            stopping_criteria=StoppingCriteriaList([check_stop]),
            **cut,
            **seen,
        )


def sample_in_chunks(
    engine: Engine,
    prompt: Prompt,
    sampling: Sampling,
    seed: int,
    emit: Emit,
    stop: threading.Event,
) -> None:
    """One completion by any engine, a few tokens at a time, each time with all before them as the prompt."""
    made: list[int] = []
    while len(made) < sampling.max_new_tokens and not stop.is_set():
        size = min(CHUNK_TOKENS, sampling.max_new_tokens - len(made))
        asked = dataclasses.replace(prompt, ids=(*prompt.ids, *made), images=_extend_images(prompt, made))
        part = sampling.model_copy(update={"max_new_tokens": size})
        (found,) = engine.generate([asked], 1, part, seed=derive(seed, len(made)), logprobs=False)
        made += found.ids
        emit(found.ids)
        if found.finish == "stop":
            return


def _extend_images(prompt: Prompt, made: Sequence[int]) -> PromptImages | None:
    """The images of a prompt that has these tokens behind it."""
    if (seen := prompt.images) is None:
        return None
    return PromptImages(seen.shown, (*seen.short_ids, *made), seen.length + len(made))


@contextlib.contextmanager
def open_conversation(recipe: GenerateRecipe, scratch: Path, note: Callable[[str], None]) -> Iterator[Conversation]:
    """The model loaded and the engine and the tools of the recipe started; all of it ends with the block.

    scratch: a folder for the engine's files. note: says a line to people. Raises what loading raises.
    """
    from posttrain.models.load import config_of, load_tokenizer

    check_engine(recipe.engine, lambda: config_of(recipe.model, recipe.base_dir), base_dir=recipe.base_dir)
    offer = offer_of(recipe, load_tokenizer(recipe.model, recipe.base_dir), recipe.base_dir)
    with contextlib.ExitStack() as stack:
        loaded = load(recipe.model, recipe.base_dir, seed=recipe.run.seed)
        engine: Engine | None = None
        if recipe.engine.engine == "vllm":
            if started := start_note(recipe.engine):
                note(started)
            longest = recipe.engine.vllm.max_model_len or TURNS_IN_WINDOW * recipe.sampling.max_new_tokens
            longest = min(longest, loaded.window or longest)
            engine = make_engine(recipe.engine, loaded, scratch=scratch, max_len=longest, base_dir=recipe.base_dir)
            stack.callback(engine.close)
        caller = stack.enter_context(Caller(offer.tools, 1, None, offer.memory_mb)) if offer and offer.tools else None
        yield Conversation(recipe, loaded, engine, offer, caller, recipe.run.seed)
