"""The assistant's turns as a chat template writes them: the prompt of a turn, and what the model must write behind it.

Both come from renderings and places in them. Nothing is searched for by its text: an answer of one letter also stands
in the template's own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from posttrain import chat, source_locations
from posttrain.data import template_spans
from posttrain.data.template_spans import Leaf, Message, Spans
from posttrain.errors import DataError
from posttrain.images import Image

EMPTY_COMPLETION = "empty completion"
UNWANTED = "its turns say `train: false` (or `weight: 0`)"
EARLIER_THOUGHTS = "LOOK: the chat template leaves out thoughts of earlier turns"
EARLIER_PARTS = "LOOK: the chat template leaves out parts of earlier assistant turns"
ADDED_THOUGHT = "LOOK: the chat template adds an empty thought, which is trained on"
EMPTY_TURN = "LOOK: an earlier assistant turn is empty, and not trained on"

_PLACEHOLDER = "x8answer8x"
_QUESTION = {"role": "user", "content": "x8question8x"}
_EMPTY_THOUGHT = re.compile(r"<([a-z_:]+)>\s*</\1>")
_CLOSED_THOUGHT = re.compile(r"</think>\s*\Z")


@dataclass(frozen=True)
class Piece:
    """A run of text, written by the model (trained) or given to it."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Text:
    """The text of one sequence in pieces. ids_behind: the EOS, if the text itself has no end-of-turn token.

    losses: what of the row is not in it, and what the template adds to it, by cause. frames: of each trained turn, what
    the template wrote around the row's texts, which stand as `…`. untrained: why no piece is trained on. images: those
    in it, in order.
    """

    uid: str
    pieces: tuple[Piece, ...]
    ids_behind: tuple[int, ...] = ()
    losses: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    untrained: str = EMPTY_COMPLETION
    images: tuple[Image, ...] = ()


def render_or_raise(uid: str, tokenizer: Any, messages: Sequence[Message], **how: Any) -> str:
    """The template's text. If the template refuses the row, the error names the row."""
    try:
        return chat.render(tokenizer, messages, **how)
    except DataError as error:
        raise error.at(source_locations.row(uid)) from error.__cause__


def prompt_of(uid: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None) -> Text:
    """The conversation up to the turn that the model has to write, as one piece that is not trained on."""
    text = _prompt(uid, messages, tokenizer, tools)
    return replace(text, losses=_lost_before(uid, messages, tokenizer, tools, text.pieces[0].text))


def _prompt(uid: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None) -> Text:
    prompt = render_or_raise(uid, tokenizer, messages, tools=tools, generation_prompt=True)
    return Text(uid, (Piece(prompt, False),))


def last_turn(
    uid: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None, before: Text | None = None
) -> Text:
    """The conversation with its last message as the trained turn. before: `prompt_of` the others, if known.

    Raises DataError if a text or a call of the turn is not in what the template writes of it.
    """
    before = before or prompt_of(uid, messages[:-1], tokenizer, tools)
    if not any(leaf.field in _OF_A_TURN for leaf in template_spans.probe(messages[-1:]).leaves):
        return before
    prompt = before.pieces[0].text
    answer = _answer(uid, prompt, messages, tokenizer, tools)
    added = (ADDED_THOUGHT,) if _adds_thought(prompt, answer, messages[-1]) else ()
    text = replace(before, losses=_once((*before.losses, *answer.losses, *added)), frames=(answer.frame,))
    header = chat.cue(tokenizer)
    if header and answer.frame.startswith(header):  # written behind a tool's result, but not asked for there
        text = replace(text, pieces=(Piece(prompt + header, False),))
        return _end_answer(text, chat.TurnEnd(answer.end.text[len(header) :], answer.end.id), tokenizer)
    return _end_answer(text, answer.end, tokenizer)


def all_turns(
    uid: str,
    messages: Sequence[Message],
    turns: Sequence[int],
    wanted: Sequence[bool],
    tokenizer: Any,
    tools: list[Any] | None,
) -> list[Text]:
    """Train on every wanted assistant turn: in one sequence if the template keeps earlier turns, else one a turn.

    turns: places of the assistant's messages; wanted: of each, whether it is trained on. What stands behind the last
    wanted one is left out.
    """
    places = [i for i, want in zip(turns, wanted, strict=True) if want]
    if not places:
        return [only_read(prompt_of(uid, messages[: turns[-1]], tokenizer, tools))]
    each = []
    for i in places:  # what the last of the prompts has lost is asked once: the others are its beginnings
        before = (prompt_of if i == places[-1] else _prompt)(uid, messages[:i], tokenizer, tools)
        each.append(last_turn(uid, messages[: i + 1], tokenizer, tools, before))
    if any(len(text.pieces) == 1 for text in each[:-1]):
        each[-1] = replace(each[-1], losses=(*each[-1].losses, EMPTY_TURN))
    last = "".join(p.text for p in each[-1].pieces)
    pieces: list[Piece] = []
    done = 0
    for text in each:
        prompt, answer = text.pieces[0].text, "".join(p.text for p in text.pieces[1:])
        if not last.startswith(prompt + answer) or len(prompt) < done or (text is not each[-1] and text.ids_behind):
            return [replace(t, uid=f"{uid}.{n}") for n, t in enumerate(each)]
        pieces += [Piece(prompt[done:], False), Piece(answer, True)]
        done = len(prompt) + len(answer)
    losses = _once(loss for text in each for loss in text.losses)
    frames = tuple(frame for text in each for frame in text.frames)
    return [Text(uid, tuple(pieces), each[-1].ids_behind, losses, frames)]


def only_read(text: Text) -> Text:
    """A text of whose turns the row wants none to be trained on."""
    return Text(text.uid, (Piece("".join(p.text for p in text.pieces), False),), losses=text.losses, untrained=UNWANTED)


def eos(tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's EOS. Raises DataError if it has none."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token, so a model could not learn to stop")
    return (int(tokenizer.eos_token_id),)


def _end_answer(text: Text, end: chat.TurnEnd, tokenizer: Any) -> Text:
    """Prompt and answer. If the template has no end-of-turn token, the tokenizer's EOS follows the answer."""
    if end.id is not None:
        return replace(text, pieces=(*text.pieces, Piece(end.text, True)))
    return replace(text, pieces=(*text.pieces, Piece(end.text.rstrip(), True)), ids_behind=eos(tokenizer))


def _adds_thought(prompt: str, answer: _Answer, turn: Message) -> bool:
    """Whether the template wrote an empty thought into a turn that has none of its own."""
    opened = "<think>" if chat.prefilled_think(prompt) else ""
    own = _EMPTY_THOUGHT.search(str(turn.get("content"))) or any(
        turn.get(name) == "" for name in template_spans.THOUGHTS
    )
    return not own and _EMPTY_THOUGHT.search(opened + answer.frame) is not None


def _once(causes: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(causes))


# --- one turn


_OF_A_TURN = (
    "content",
    "tool_calls",
    *template_spans.THOUGHTS,
)  # what a model writes; other keys say something about it


@dataclass(frozen=True)
class _Answer:
    """What the model has to write: the text up to the end of the turn, in `frame` with the row's texts as `…`."""

    end: chat.TurnEnd
    frame: str
    losses: tuple[str, ...] = ()


@dataclass(frozen=True)
class _View:
    """A rendering that ends with the turn, and the same with probes. real[start:] is what the template writes of it."""

    real: str
    marked: str
    start: int
    own: list[Leaf]
    spans: Spans | None

    @property
    def lost(self) -> list[Leaf]:
        return template_spans.find_missing(self.own, self.real, self.spans, self.start)


def _answer(uid: str, prompt: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None) -> _Answer:
    """What the template writes of the last message behind the prompt.

    Most templates write a finished turn as it is generated. If they drop a part of its content (its thought), or the
    prompt has opened `<think>` already, the turn is rendered with a word in place of its content, which then takes its
    place.
    """
    turn = messages[-1]
    view = _view(uid, prompt, messages, tokenizer, tools)
    if view is not None:
        lost = [leaf for leaf in view.lost if leaf.field in _OF_A_TURN]
        if not lost:
            others = _once(_unwritten(leaf, turn) for leaf in view.lost)
            return _Answer(_cut(view, tokenizer), _frame(view, turn, tokenizer), others)
        if other := [leaf for leaf in lost if leaf.field != "content"]:
            raise _not_written(uid, other[0], turn)
    if chat.prefilled_think(prompt) and not _thinks(turn):
        raise DataError(
            "the chat template opens <think> before the model's turn, but the answer never closes it",
            where=source_locations.row(uid),
            hint="give answers with their thinking, or another `model.chat_template`",
        )
    if not str(turn.get("content") or "").strip():
        raise _rewritten_turn_error(uid)
    return _fill_turn(uid, prompt, messages, tokenizer, tools)


def _view(uid: str, prompt: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None) -> _View | None:
    """The turn behind its own context. A template that writes the context in another way once the turn is there
    (gpt-oss drops the thoughts of calls that led to an answer) is asked for the turn behind a plain question; what it
    then writes must be the end of the whole conversation, too. None if neither begins as the turn is generated."""
    context: Sequence[Message] = messages[:-1]
    before, real = prompt, (whole := render_or_raise(uid, tokenizer, messages, tools=tools))
    if not whole.startswith(prompt):
        context = [_QUESTION]
        try:
            before, real = _alone(messages[-1], prompt, tokenizer, tools)
        except DataError:
            return None
    if not real.startswith(before) or not whole.endswith(real[len(before) :]):
        return None
    turn = template_spans.probe([messages[-1]])
    marked = template_spans.mark(
        tokenizer, template_spans.Probed([*map(dict, context), *turn.messages], tools, turn.leaves)
    )
    return _View(real, marked, len(before), turn.leaves, template_spans.place(turn.leaves, marked, real))


def _alone(turn: Message, prompt: str, tokenizer: Any, tools: list[Any] | None) -> tuple[str, str]:
    """(prompt, whole) of the turn behind a plain question. Raises DataError if that prompt ends in another way."""
    read = chat.render(tokenizer, [_QUESTION], tools=tools)
    before = chat.render(tokenizer, [_QUESTION], tools=tools, generation_prompt=True)
    if not before.startswith(read) or not prompt.endswith(before[len(read) :]):
        raise DataError("the turn is generated behind another cue")
    return before, chat.render(tokenizer, [_QUESTION, turn], tools=tools)


def _tail(view: _View) -> str:
    """What the template writes behind the turn's last text."""
    ends = [view.marked.rfind(leaf.probe) + len(leaf.probe) for leaf in view.own if leaf.probe in view.marked]
    tail = view.marked[max(ends, default=0) :]
    return tail if view.real.endswith(tail) else view.real[view.start :]


def _cut(view: _View, tokenizer: Any) -> chat.TurnEnd:
    tail = _tail(view)
    end = chat.find_turn_end(tokenizer, tail)
    return chat.TurnEnd(view.real[view.start : len(view.real) - len(tail)] + end.text, end.id)


def _frame(view: _View, turn: Message, tokenizer: Any) -> str:
    """The turn as the template wrote it, with `…` for each of the row's texts; "" where their places are not known."""
    if view.spans is None:
        return ""
    groups: dict[str, tuple[int, int]] = {}
    for leaf in view.own:
        if leaf in view.spans:
            (start, end), before = view.spans[leaf], groups.get(leaf.field)
            groups[leaf.field] = (start, end) if before is None else (min(start, before[0]), max(end, before[1]))
    frame, at = "", view.start
    for field, (start, end) in sorted(groups.items(), key=lambda group: group[1]):
        around = str(turn.get(field) or "") if field != "tool_calls" else ""
        first = view.real[start:end]
        lead, _, trail = around.strip().partition(first) if first in around else ("", "", "")
        begin = start - len(lead) if lead and view.real.endswith(lead, at, start) else start
        frame += view.real[at:begin] + "…"
        at = end + len(trail) if trail and view.real.startswith(trail, end) else end
    close = chat.find_turn_end(tokenizer, view.real[at:])
    return frame + (close.text.rstrip() if close.id is None else close.text)


def _fill_turn(uid: str, prompt: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None) -> _Answer:
    """The turn with its content put where the template writes one."""
    turn, content = messages[-1], str(messages[-1]["content"])
    plain = {**turn, "content": _PLACEHOLDER}
    asked_for = [*messages[:-1], plain]
    view = _view(uid, prompt, asked_for, tokenizer, tools)
    closed, opened = _CLOSED_THOUGHT.search(prompt), chat.prefilled_think(prompt)
    if closed and _thinks(turn):
        raise DataError(
            "the chat template's generation prompt leaves no room for the thought of this answer",
            where=source_locations.row(uid),
            hint="give `model.chat_template` one that lets the model think, or take the thoughts out of the rows",
        )
    if view is not None:
        if any(leaf.field in _OF_A_TURN for leaf in view.lost):
            raise _not_written(uid, template_spans.probe([turn]).leaves[0], turn)
        end = _cut(view, tokenizer)
        return _Answer(chat.TurnEnd(end.text.replace(_PLACEHOLDER, content, 1), end.id), _frame(view, plain, tokenizer))
    if any(turn.get(name) for name in ("tool_calls", *template_spans.THOUGHTS)) or not (opened or closed):
        raise _rewritten_turn_error(uid)
    if opened:
        content = content.lstrip().removeprefix("<think>").lstrip("\n")
    _, found, tail = render_or_raise(uid, tokenizer, asked_for, tools=tools).rpartition(_PLACEHOLDER)
    if not found:
        raise _not_written(uid, template_spans.probe([turn]).leaves[0], turn)
    end = chat.find_turn_end(tokenizer, tail)
    return _Answer(chat.TurnEnd(content + end.text, end.id), "…" + end.text)


def _thinks(turn: Message) -> bool:
    return any(leaf.thought for leaf in template_spans.probe([turn]).leaves)


# --- what is lost


def _lost_before(
    uid: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None, prompt: str
) -> tuple[str, ...]:
    """What the prompt does not hold of the messages, by cause. Raises DataError for a text or a call."""
    probed = template_spans.probe(messages, tools)
    marked = template_spans.mark(tokenizer, probed, generation_prompt=True)
    spans = template_spans.place(probed.leaves, marked, prompt)
    lost = template_spans.find_missing(probed.leaves, prompt, spans)
    kept = {leaf.message for leaf in probed.leaves if leaf.field == "content" and leaf not in lost}
    return _once(_loss(uid, leaf, messages, kept) for leaf in lost)


def _loss(uid: str, leaf: Leaf, messages: Sequence[Message], kept: Set[int]) -> str:
    """The cause under which a lost text is counted. kept: the messages of which some text is written."""
    if leaf.thought:
        return EARLIER_THOUGHTS
    if leaf.field not in ("content", "tool_calls"):
        return _unwritten(leaf, messages[leaf.message])
    message = messages[leaf.message]
    if leaf.field == "content" and message["role"] == "assistant" and leaf.message in kept:
        return EARLIER_PARTS
    raise _not_written(uid, leaf, message)


def _unwritten(leaf: Leaf, message: Message) -> str:
    if leaf.message == template_spans.TOOLS:
        return "LOOK: the chat template does not write the row's `tools`"
    return f"the chat template does not write `{leaf.field}` of {message['role']} messages"


def _not_written(uid: str, leaf: Leaf, message: Message) -> DataError:
    """The error for a text that is nowhere in the rendering."""
    role, text = message.get("role"), str(leaf.value)
    hint = "give `model.chat_template` a Jinja file that writes it"
    if leaf.field == "tool_calls":
        hint = (
            "give `model.chat_template` one that knows tool calls, or write the call into `content` as the model should"
        )
    elif leaf.thought:
        hint = f"write the thought into `content` as <think>...</think>, or {hint}"
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return DataError(
        f"the chat template does not write `{leaf.field}` of this {role} message ({shown!r})",
        where=source_locations.row(uid),
        hint=hint,
    )


def _rewritten_turn_error(uid: str) -> DataError:
    return DataError(
        "the chat template writes this turn differently from how it is generated, so there is no text to train on",
        where=source_locations.row(uid),
        hint="give `model.chat_template` a Jinja file whose finished turns begin with its generation prompt",
    )
