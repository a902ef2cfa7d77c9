"""Interactive conversation with a model: streams each turn as text and runs tool calls between turns.

Sampling runs in its own thread, and ends when `Conversation.stop` is set. Every turn is rendered again by the chat
template, as servers do.
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
from posttrain.data.template_spans import adapt_messages
from posttrain.data.turns import Piece, Text
from posttrain.errors import DataError
from posttrain.images import PLACEHOLDER, Image, escape_placeholders
from posttrain.models.load import LoadedModel, load
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.stages import GenerateRecipe
from posttrain.rollout.engine import Engine
from posttrain.rollout.make_engine import check_engine, make_engine, start_note
from posttrain.seeds import derive
from posttrain.thoughts import (
    STANDARD,
    THINK_END,
    THINK_START,
    ThoughtStream,
    decode,
    opening_mark,
    thought_format,
    written_format,
)
from posttrain.tools.calls import Caller
from posttrain.tools.formats import parse_calls
from posttrain.tools.tool_set import ToolSet, load_tool_set

TURNS_IN_WINDOW = 8  # vLLM's default window, in turns of max_new_tokens; vllm.max_model_len overrides it
CHUNK_TOKENS = 16  # tokens sampled per call of an engine without streaming
Message = dict[str, Any]
Emit = Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class Answer:
    """End of one turn of the model. finish: `stop`, `length` or `interrupted`. calls: tool calls with results."""

    text: str
    tokens: int
    finish: str
    calls: tuple[ToolCall, ...] = ()


@dataclass
class Conversation:
    """A model and the messages so far. `ask` streams an answer; `reset` removes all but the system message."""

    recipe: GenerateRecipe
    loaded: LoadedModel
    engine: Engine | None  # None: transformers' own generation
    offer: ToolSet | None
    caller: Caller | None
    seed: int
    messages: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # paths or data URLs of images in the messages, each with a PLACE
    pending: list[str] = field(default_factory=list)  # images of the next message
    turns: int = 0  # turns of the model since the start; each has its own seed
    stop: threading.Event = field(default_factory=threading.Event)  # set to end the answer being sampled

    @property
    def name(self) -> str:
        """Source of the model, as the recipe names it."""
        return self.loaded.source

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
        self.images, self.pending = [], []

    def set_system(self, text: str) -> None:
        """Set the first message to a system message, replacing an existing one; an empty text removes it."""
        others = [m for m in self.messages if m["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *others]

    def prompt(self) -> str:
        """Return the next prompt, rendered by the chat template. Raises DataError if the template refuses it."""
        row = {"messages": images.use_template_marks(chat.clean_messages(self.messages), self._row())}
        shown = self.offer.row(row) if self.offer else row
        messages = adapt_messages(self.loaded.tokenizer, shown["messages"], shown.get("tools"))
        return chat.render(self.loaded.tokenizer, messages, tools=shown.get("tools"), generation_prompt=True)

    @property
    def opens_thought(self) -> bool:
        """Whether the next answer begins inside a thought that the template has opened."""
        return opening_mark(self.prompt()) != ""

    def _row(self) -> dict[str, Any]:
        """Return the conversation as a data row."""
        return {"uid": "chat", "messages": self.messages, **({"images": self.images} if self.images else {})}

    def find_image(self, name: str) -> str:
        """Return the source of an image file for `pending`.

        Raises DataError for a file that is not an image, and for a text-only model.
        """
        if self.loaded.images is None:
            raise DataError(f"{self.name} sees no images", hint="load a vision-language model")
        (source,) = images.collect_images({"images": [name]}, "", Path.cwd(), self.recipe.data.image)["images"]
        self.loaded.images.read(self._image(source))
        return str(source)

    def _image(self, source: str) -> Image:
        limits = self.recipe.data.image
        return Image(source, limits.min_pixels, limits.max_pixels)

    def ask(self, text: str) -> Iterator[str | Answer]:
        """Send a message and yield pieces of text, and an Answer after each turn of the model.

        With tools there may be several turns.

        The images of `pending` replace PLACE in the text, or come before it. Raises DataError, after removing the
        message again, if the template refuses it or the window has no room for it.
        """
        self.stop.clear()
        if PLACEHOLDER in text and self.loaded.images is not None and not self.pending:
            raise DataError(
                f"the message has {PLACEHOLDER}, and no image is given with it", hint="/image FILE before it"
            )
        messages, shown, pending = list(self.messages), list(self.images), list(self.pending)
        content = images.insert_placeholders({"prompt": text, "images": pending}, "")["prompt"]
        self.messages.append({"role": "user", "content": content})
        self.images, self.pending = [*shown, *pending], []
        try:
            for _ in range(self.recipe.sampling.max_turns):
                answer = yield from self._turn()
                yield answer
                if not answer.calls:
                    return
        except DataError:
            self.messages, self.images, self.pending = messages, shown, pending
            raise

    def _turn(self) -> Generator[str, None, Answer]:
        """Stream one turn of the model, run its tool calls and return its Answer."""
        prompt, tokenizer = self.prompt(), self.loaded.tokenizer
        text_of = Text("chat", (Piece(prompt, False),))
        ((ids, seen),) = encode_with_images([self._row()], [text_of], self.recipe.data, tokenizer, self.loaded.images)
        windows = [self.loaded.window, self.engine and self.engine.window]
        window = min((w for w in windows if w), default=len(ids) + self.recipe.sampling.max_new_tokens)
        room = window - len(ids)
        if room < 1:
            raise DataError(
                f"the conversation has {len(ids)} tokens and fills the window of {window}",
                hint="start again with /reset",
            )
        sampling = self.recipe.sampling.model_copy(
            update={"max_new_tokens": min(room, self.recipe.sampling.max_new_tokens)}
        )
        seed = derive(self.seed, "chat", self.turns)
        self.turns += 1
        sampled: list[int] = []
        # Tokens from `begin` on are decoded again with each new token; `written` characters of them were yielded.
        begin = shown = written = 0
        request = Prompt("chat", {}, prompt, ids, seen)
        thought = ThoughtStream(thought_format(tokenizer))
        for new in stream_tokens(lambda emit: self._sample(request, sampling, seed, emit), self.stop):
            sampled += new
            (text,) = decode(tokenizer, [self._without_end(sampled[begin:])], standard=False)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # part of a character: the next token completes it
                yield thought.add(text[written:])
                begin, shown = shown, len(sampled)
                written = len(decode(tokenizer, [self._without_end(sampled[begin:shown])], standard=False)[0])
        (text,) = decode(tokenizer, [self._without_end(sampled[begin:])], standard=False)
        if remaining := thought.add(text[written:]) + thought.end():
            yield remaining
        (text,) = decode(tokenizer, [self._without_end(sampled)])
        ended = bool(sampled) and sampled[-1] in self.loaded.eos_ids
        finish = "stop" if ended else "interrupted" if self.stop.is_set() else "length"
        return self._record_answer(text, sampled, finish, opened=opening_mark(prompt) != "")

    def _record_answer(self, text: str, sampled: Sequence[int], finish: str, *, opened: bool) -> Answer:
        """Append the turn to the messages, run its tool calls, and append their results."""
        raw = self._decode_turn(sampled) if self.offer else text
        content = escape_placeholders(f"{THINK_START}{raw}" if opened else raw)
        message: Message = {"role": "assistant", "content": content}
        if written_format(self.loaded.tokenizer) is not STANDARD and THINK_END in content:
            thought, _, answer = content.rpartition(THINK_END)  # the template writes other marks than <think>
            message = {**message, "content": answer, "reasoning_content": thought.removeprefix(THINK_START)}
        self.messages.append(message)
        if self.offer is None or self.caller is None or finish != "stop":
            return Answer(text, len(sampled), finish)
        schemas = {tool.name: tool.schema for tool in self.offer.tools}
        shown = [self._image(source) for source in self.images]
        calls = tuple(self.caller.run(parse_calls(raw, self.offer.form, schemas), shown))
        for call in calls:
            self._record_result(call, as_user=self.offer.system is not None)  # the template has no tool role then
        return Answer(text, len(sampled), finish, calls)

    def _record_result(self, call: ToolCall, *, as_user: bool) -> None:
        """Append the result of a tool call, with its images, as a message of the tool or of the user."""
        reader = self.loaded.images
        if call.images and reader is None:
            raise DataError(f"the tool {call.name} returned an image, and {self.name} sees none")
        self.images += [image.source for image in call.images]
        result = call.result if call.images else escape_placeholders(call.result)
        user_message = {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
        tool_message = {"role": "tool", "name": call.name or "unknown", "content": result}
        self.messages.append(user_message if as_user else tool_message)
        if call.images and reader is not None and self.prompt().count(reader.placeholder) != len(self.images):
            self.messages[-1] = user_message  # some templates render images in user messages only

    def _without_end(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens without a final EOS."""
        return list(ids[:-1]) if ids and ids[-1] in self.loaded.eos_ids else list(ids)

    def _decode_turn(self, ids: Sequence[int]) -> str:
        """Return a turn's text with special tokens, which may mark a call, but without a final EOS."""
        tokenizer, kept = self.loaded.tokenizer, self._without_end(ids)
        text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return thought_format(tokenizer).standardize(text)

    def _sample(self, prompt: Prompt, sampling: Sampling, seed: int, emit: Emit) -> None:
        """Sample one completion with the engine, or with transformers if there is none."""
        if self.engine is None:
            sample_with_transformers(self.loaded, prompt, sampling, seed, emit, self.stop)
        else:
            sample_in_chunks(self.engine, prompt, sampling, seed, emit, self.stop)


def stream_tokens(sample: Callable[[Emit], None], stop: threading.Event) -> Iterator[Sequence[int]]:
    """Run `sample(emit)` in a thread and yield the tokens that it passes to `emit`, as they come.

    An error of `sample` is raised here. Leaving the iteration early sets `stop` and waits until `sample` has returned.
    """
    tokens: queue.SimpleQueue[Sequence[int] | BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            sample(tokens.put)
        except BaseException as error:  # raised again in the consuming thread
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
    """Sample one completion with transformers' `generate`, passing each token to `emit`.

    Ends at EOS, the limit, or `stop`.
    """
    import torch
    from transformers import StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    class Tokens(BaseStreamer):  # type: ignore[misc]
        """Streamer that forwards sampled tokens; the first call of `put` has the prompt."""

        prompt_seen = False

        def put(self, value: Any) -> None:
            if self.prompt_seen:
                emit(value.flatten().tolist())
            self.prompt_seen = True

        def end(self) -> None: ...

    def check_stop(input_ids: Any, scores: Any, **_: Any) -> Any:
        del scores
        return torch.full((input_ids.shape[0],), stop.is_set(), device=input_ids.device, dtype=torch.bool)

    do_sample = sampling.temperature > 0
    settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    ids = torch.tensor([list(prompt.ids)], device=loaded.device)
    image_inputs: dict[str, Any] = {}
    if loaded.images is not None:
        image_inputs["suppress_tokens"] = sorted(loaded.images.token_ids)
        if prompt.images is not None:
            image_inputs |= loaded.images.plain_inputs(loaded.model, prompt.images.shown, ids)
    loaded.model.eval()
    with torch.inference_mode(), loaded.autocast(), loaded.fork_rng():
        torch.manual_seed(seed)
        loaded.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.max_new_tokens,
            do_sample=do_sample,
            streamer=Tokens(),
            stopping_criteria=StoppingCriteriaList([check_stop]),
            **(settings if do_sample else {}),
            **image_inputs,
        )


def sample_in_chunks(
    engine: Engine,
    prompt: Prompt,
    sampling: Sampling,
    seed: int,
    emit: Emit,
    stop: threading.Event,
) -> None:
    """Sample one completion with any engine, CHUNK_TOKENS at a time; each call has all earlier tokens in its prompt."""
    sampled: list[int] = []
    while len(sampled) < sampling.max_new_tokens and not stop.is_set():
        size = min(CHUNK_TOKENS, sampling.max_new_tokens - len(sampled))
        extended = dataclasses.replace(prompt, ids=(*prompt.ids, *sampled), images=_extend_images(prompt, sampled))
        chunk = sampling.model_copy(update={"max_new_tokens": size})
        (found,) = engine.generate([extended], 1, chunk, seed=derive(seed, len(sampled)), logprobs=False)
        sampled += found.ids
        emit(found.ids)
        if found.finish == "stop":
            return


def _extend_images(prompt: Prompt, sampled: Sequence[int]) -> PromptImages | None:
    """Return the images of a prompt that is extended by these tokens."""
    if (seen := prompt.images) is None:
        return None
    return PromptImages(seen.shown, (*seen.short_ids, *sampled), seen.length + len(sampled))


@contextlib.contextmanager
def open_conversation(recipe: GenerateRecipe, scratch: Path, note: Callable[[str], None]) -> Iterator[Conversation]:
    """Load the model and start the engine and tools of the recipe; all are closed at the end of the block.

    scratch: a folder for the engine's files. note: prints a line for the user. Raises the errors of loading.
    """
    from posttrain.models.load import config_of, load_tokenizer

    check_engine(recipe.engine, lambda: config_of(recipe.model, recipe.base_dir), base_dir=recipe.base_dir)
    offer = load_tool_set(recipe, load_tokenizer(recipe.model, recipe.base_dir), recipe.base_dir)
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
