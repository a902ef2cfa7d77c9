"""Tokens that a chat template writes between two turns of the model, and a check that it leaves earlier turns
unchanged.

The model's tokens are kept as sampled and never re-tokenized from text. A template that renders an earlier turn
differently from how it was written (most drop its thoughts) would show the model another context at its next turn than
the one that it is trained on; `rewrites` detects this before anything is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from posttrain import chat, thoughts
from posttrain.batch import PromptImages, Segment
from posttrain.errors import DataError, ToolError, count_noun
from posttrain.images import MARK, PLACEHOLDER

if TYPE_CHECKING:
    from posttrain.models.images import ImageReader

Message = Mapping[str, Any]

_PROBE = "x8PROBE8x"
_START: list[Message] = [{"role": "user", "content": "x8question"}]
_CALL = {"type": "function", "function": {"name": "x8", "arguments": {}}}


class TurnSeparator:
    """Computes the tokens from the end of a turn of the model to the start of its next turn."""

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int] | None = None, reader: ImageReader | None = None) -> None:
        """eos_ids: by default those of the tokenizer. reader: of a vision model."""
        self.tokenizer, self.reader = tokenizer, reader
        self.eos_ids = frozenset(chat.eos_ids(tokenizer) if eos_ids is None else eos_ids)
        self.special = sorted(chat.special_texts(tokenizer), key=len, reverse=True)

    def tokens(self, last: int, reply: Sequence[Message], limit: int) -> tuple[int, ...]:
        """Return the tokens between the model's token `last` and its next turn. limit: maximum number of tokens of each
        message's text.

        If the turn ended with an end-of-sequence token, no other is added; after a stop string the turn is closed here.
        Special tokens in the texts are neutralized: a tool cannot write a turn of another role.
        """
        return self._encode(self._render_reply(last, reply, limit))

    def segment(self, last: int, reply: Sequence[Message], limit: int) -> Segment:
        """Return the same tokens as a segment, with the images of the messages (their `images`, each of which has a
        PLACE in the content) and as many image tokens as the model has features. Raises ToolError for a model without
        vision."""
        images = tuple(image for message in reply for image in message.get("images", ()))
        text = self._render_reply(last, reply, limit)
        ids = self._encode(text)
        if not images:
            return Segment("tool", ids)
        assert self.reader is not None  # otherwise `_render_reply` has raised
        first, *others = text.split(self.reader.placeholder)
        seen = (self.reader.read(image).text + rest for image, rest in zip(images, others, strict=True))
        whole = self._encode(first + "".join(seen))
        return Segment("tool", whole, images=PromptImages(images, ids, len(whole)))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render_reply(self, last: int, reply: Sequence[Message], limit: int) -> str:
        """Return the text between the two turns. Raises ToolError if the model, or its chat template, cannot show the
        images."""
        shown = [{**m, "content": self._render_content(m, limit)} for m in reply]
        count = sum(len(m.get("images", ())) for m in reply)
        if count and self.reader is None:
            raise ToolError("a tool returned an image, and the model takes no images", hint="use a vision model")
        tail = _tail(self.tokenizer, shown)
        if count and self.reader is not None and tail.count(self.reader.placeholder) != count:
            tail = _tail(self.tokenizer, [_as_user(m) for m in shown])  # some templates show only the user's images
            if (places := tail.count(self.reader.placeholder)) != count:
                raise ToolError(
                    f"the chat template has {count_noun(places, 'place')} for {count_noun(count, 'image')} of a reply",
                    hint="give `model.chat_template` one that shows images after a turn",
                )
        end = chat.turn_end(self.tokenizer)  # may consist of several tokens
        if end.id is None or not tail.startswith(end.text):
            end = chat.first_special(self.tokenizer, tail)
        if last in self.eos_ids and end.id is not None:
            tail = tail[len(end.text) :]
        return tail

    def _render_content(self, message: Message, limit: int) -> str:
        """Return a message's text of at most `limit` tokens, with MARK in place of its images."""
        text = str(message["content"])
        if not message.get("images"):
            return self._neutralize(text, limit)
        parts = []
        for part in text.split(PLACEHOLDER):
            parts.append(self._neutralize(part, limit))
            limit = max(0, limit - len(self._encode(parts[-1])))
        return MARK.join(parts)

    def _neutralize(self, text: str, limit: int) -> str:
        """Return the text with its special tokens broken up, truncated to `limit` tokens."""
        for special in self.special:
            if len(special) > 1:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return text if len(ids) <= limit else self.tokenizer.decode(ids[:limit], skip_special_tokens=True)


def _tail(tokenizer: Any, reply: Sequence[Message]) -> str:
    """Return everything that the template writes after the text of the assistant's turn, including the generation
    prompt."""
    for turn in ({}, {"tool_calls": [_CALL]}):  # some templates accept a tool's answer only after a call
        try:
            return _render_messages(tokenizer, [{"role": "assistant", "content": _PROBE, **turn}, *reply])
        except DataError as error:
            refused = error
    if all(m["role"] == "user" for m in reply):
        raise refused
    return _tail(tokenizer, [_as_user(m) for m in reply])


def _render_messages(tokenizer: Any, messages: Sequence[Message]) -> str:
    _, found, tail = chat.render(tokenizer, [*_START, *messages], generation_prompt=True).rpartition(_PROBE)
    if not found:
        raise DataError("the chat template does not write the content of the assistant's turns")
    return tail


def _as_user(message: Message) -> Message:
    """Return a tool's answer as a user message, for a template without a tool role."""
    if message["role"] == "user":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def rewrites(tokenizer: Any, role: Literal["tool", "user"]) -> str:
    """Return how the template changes a turn once a message of `role` follows; "" if the turn stays as written."""
    prompt = chat.render(tokenizer, _START, generation_prompt=True)
    thought = "x8thought</think>x8answer" if thoughts.opening_mark(prompt) else "<think>x8thought</think>x8answer"
    thought = thoughts.written_format(tokenizer).localize(thought)
    for content, what in (("x8answer", "writes it differently"), (thought, "drops or rewrites its thought")):
        turn = {"role": "assistant", "content": content}
        reply: Message = {"role": role, "content": "x8reply"}
        try:
            whole = chat.render(tokenizer, [*_START, turn, reply], generation_prompt=True)
        except DataError:
            whole = chat.render(tokenizer, [*_START, turn, _as_user(reply)], generation_prompt=True)
        if not whole.startswith(prompt + content):
            return what
    return ""


def check_template(tokenizer: Any, role: Literal["tool", "user"], earlier_turns: str) -> None:
    """Raise DataError for a template that rewrites earlier turns, unless the recipe says `as_sampled`."""
    what = rewrites(tokenizer, role)
    if what and earlier_turns == "refuse":
        raise DataError(
            f"the chat template does not keep the model's earlier turns: once a message follows a turn, it {what}",
            allowed="earlier_turns: as_sampled goes on with the tokens that were sampled, in training and evaluation",
            hint="or give `model.chat_template` one that keeps them; whoever serves the model must do the same",
        )
