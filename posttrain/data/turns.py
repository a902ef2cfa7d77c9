"""Rendering of assistant turns: the prompt of a turn, and the text that the model must write after it.

Both are derived from renderings and positions in them, never from text search: a one-letter answer also occurs in the
template's own words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from posttrain import chat, source_locations
from posttrain.data import template_spans
from posttrain.data.template_spans import Leaf, Message, Spans
from posttrain.errors import DataError
from posttrain.images import Image
from posttrain.thoughts import closing_mark, find_empty_thoughts, opening_mark

EMPTY_COMPLETION = "empty completion"
UNWANTED = "its turns say `train: false` (or `weight: 0`)"
EARLIER_THOUGHTS = "LOOK: the chat template leaves out thoughts of earlier turns"
EARLIER_PARTS = "LOOK: the chat template leaves out parts of earlier assistant turns"
ADDED_THOUGHT = "LOOK: the chat template adds an empty thought, which is trained on"
EMPTY_TURN = "LOOK: an earlier assistant turn is empty, and not trained on"

_PLACEHOLDER = "x8answer8x"
_QUESTION = {"role": "user", "content": "x8question8x"}


@dataclass(frozen=True)
class Piece:
    """A run of text, either written by the model (trained) or given to it."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Text:
    """The text of one sequence in pieces. ids_after: the EOS if the text itself has no end-of-turn token.

    notes: what the template omits from the row or adds to it, by cause. frames: format of each trained turn, with `…`
    in place of the row's texts. drop_cause: why no piece is trained on. images: images in the text, in order.
    """

    uid: str
    pieces: tuple[Piece, ...]
    ids_after: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    drop_cause: str = EMPTY_COMPLETION
    images: tuple[Image, ...] = ()


def render_or_raise(uid: str, tokenizer: Any, messages: Sequence[Message], **how: Any) -> str:
    """Render messages with the chat template. If the template rejects them, the error names the row."""
    try:
        return chat.render(tokenizer, messages, **how)
    except DataError as error:
        raise error.at(source_locations.describe_row(uid)) from error.__cause__


def render_context(uid: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None) -> Text:
    """Return the conversation before the model's turn as one untrained piece, with notes on omitted texts."""
    text = _prompt(uid, messages, tokenizer, tools)
    return replace(text, notes=_find_omissions(uid, messages, tokenizer, tools, text.pieces[0].text))


def _prompt(uid: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None) -> Text:
    """Return the conversation with a generation prompt as one untrained piece."""
    prompt = render_or_raise(uid, tokenizer, messages, tools=tools, generation_prompt=True)
    return Text(uid, (Piece(prompt, False),))


def render_last_turn(
    uid: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None, before: Text | None = None
) -> Text:
    """Return the conversation with its last message as the trained turn.

    before: `render_context` of the preceding messages, if known. Raises DataError if the template omits a text or a
    call of the turn.
    """
    before = before or render_context(uid, messages[:-1], tokenizer, tools)
    if not any(leaf.field in _WRITTEN_FIELDS for leaf in template_spans.insert_probes(messages[-1:]).leaves):
        return before
    prompt = before.pieces[0].text
    answer = _find_answer(uid, prompt, messages, tokenizer, tools)
    added = (ADDED_THOUGHT,) if _adds_thought(prompt, answer, messages[-1]) else ()
    text = replace(before, notes=_unique((*before.notes, *answer.notes, *added)), frames=(answer.frame,))
    header = chat.generation_header(tokenizer)
    if header and answer.frame.startswith(header):  # the generation prompt lacks the header after a tool result
        text = replace(text, pieces=(Piece(prompt + header, False),))
        return _end_answer(text, chat.TurnEnd(answer.end.text[len(header) :], answer.end.id), tokenizer)
    return _end_answer(text, answer.end, tokenizer)


def render_all_turns(
    uid: str,
    messages: Sequence[Message],
    turns: Sequence[int],
    wanted: Sequence[bool],
    tokenizer: Any,
    tools: list[Any] | None,
) -> list[Text]:
    """Return texts that train on every wanted assistant turn.

    There is one sequence if the template keeps earlier turns, else one per turn. turns: indices of the assistant
    messages; wanted: whether each is trained on. Messages after the last wanted turn are left out.
    """
    trained = [i for i, want in zip(turns, wanted, strict=True) if want]
    if not trained:
        return [as_untrained(render_context(uid, messages[: turns[-1]], tokenizer, tools))]
    each = []
    for i in trained:  # only the last prompt is checked for omissions: the others are prefixes of it
        before = (render_context if i == trained[-1] else _prompt)(uid, messages[:i], tokenizer, tools)
        each.append(render_last_turn(uid, messages[: i + 1], tokenizer, tools, before))
    if any(len(text.pieces) == 1 for text in each[:-1]):
        each[-1] = replace(each[-1], notes=(*each[-1].notes, EMPTY_TURN))
    last = "".join(p.text for p in each[-1].pieces)
    pieces: list[Piece] = []
    done = 0
    for text in each:
        prompt, answer = text.pieces[0].text, "".join(p.text for p in text.pieces[1:])
        if not last.startswith(prompt + answer) or len(prompt) < done or (text is not each[-1] and text.ids_after):
            return [replace(t, uid=f"{uid}.{n}") for n, t in enumerate(each)]
        pieces += [Piece(prompt[done:], False), Piece(answer, True)]
        done = len(prompt) + len(answer)
    notes = _unique(note for text in each for note in text.notes)
    frames = tuple(frame for text in each for frame in text.frames)
    return [Text(uid, tuple(pieces), each[-1].ids_after, notes, frames)]


def as_untrained(text: Text) -> Text:
    """Return a text with no trained piece, for rows whose turns are all marked `train: false`."""
    return Text(text.uid, (Piece("".join(p.text for p in text.pieces), False),), notes=text.notes, drop_cause=UNWANTED)


def eos(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokenizer's EOS as a tuple. Raises DataError if it has none."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token, so a model could not learn to stop")
    return (int(tokenizer.eos_token_id),)


def _end_answer(text: Text, end: chat.TurnEnd, tokenizer: Any) -> Text:
    """Append the answer piece. If the template has no end-of-turn token, the tokenizer's EOS follows the answer."""
    if end.id is not None:
        return replace(text, pieces=(*text.pieces, Piece(end.text, True)))
    return replace(text, pieces=(*text.pieces, Piece(end.text.rstrip(), True)), ids_after=eos(tokenizer))


def _adds_thought(prompt: str, answer: _Answer, turn: Message) -> bool:
    """Return whether the template wrote an empty thought into a turn that has none of its own."""
    opened = opening_mark(prompt)
    own = find_empty_thoughts(str(turn.get("content"))) or any(turn.get(name) == "" for name in template_spans.THOUGHTS)
    return not own and bool(find_empty_thoughts(opened + answer.frame))


def _unique(causes: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct causes in order."""
    return tuple(dict.fromkeys(causes))


# --- one turn


# Message fields that the model writes; other keys are metadata.
_WRITTEN_FIELDS = ("content", "tool_calls", *template_spans.THOUGHTS)


@dataclass(frozen=True)
class _Answer:
    """Text that the model has to write for a turn; `frame`: its format with `…` for the row's texts."""

    end: chat.TurnEnd
    frame: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _RenderedTurn:
    """A rendering that ends with the turn, and the same with probes. real[start:] is the text of the turn."""

    real: str
    marked: str
    start: int
    own: list[Leaf]
    spans: Spans | None

    @property
    def omitted_texts(self) -> list[Leaf]:
        """Texts of the turn that the template omits."""
        return template_spans.find_missing(self.own, self.real, self.spans, self.start)


def _find_answer(
    uid: str, prompt: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None
) -> _Answer:
    """Return the text that the template writes for the last message after the prompt.

    Most templates write a finished turn exactly as it is generated. If the template omits part of its content (the
    thought), or the prompt already opens `<think>`, the turn is rendered with a placeholder as content, which is then
    replaced by the content.
    """
    turn = messages[-1]
    view = _render_turn(uid, prompt, messages, tokenizer, tools)
    if view is not None:
        lost = [leaf for leaf in view.omitted_texts if leaf.field in _WRITTEN_FIELDS]
        if not lost:
            others = _unique(_omission_note(leaf, turn) for leaf in view.omitted_texts)
            return _Answer(_extract_answer(view, tokenizer), _format_frame(view, turn, tokenizer), others)
        if other := [leaf for leaf in lost if leaf.field != "content"]:
            raise _not_written_error(uid, other[0], turn)
    if (mark := opening_mark(prompt)) and not _thinks(turn):
        raise DataError(
            f"the chat template opens {mark} before the model's turn, but the answer never closes it",
            where=source_locations.describe_row(uid),
            hint="give answers with their thinking, or another `model.chat_template`",
        )
    if not str(turn.get("content") or "").strip():
        raise _rewritten_turn_error(uid)
    return _fill_turn(uid, prompt, messages, tokenizer, tools)


def _render_turn(
    uid: str, prompt: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None
) -> _RenderedTurn | None:
    """Return the rendering of the turn after its own context; None if it does not begin as the turn is generated.

    Some templates leave out an empty thought with which the prompt ends (Gemma 4). Some rewrite the context once the
    turn is present (gpt-oss drops the thoughts of calls that led to an answer); the turn is then rendered after a plain
    question, and the result must also be the end of the whole conversation.
    """
    context: Sequence[Message] = messages[:-1]
    real = whole = render_or_raise(uid, tokenizer, messages, tools=tools)
    before = prompt if _thinks(messages[-1]) else _skip_empty_thought(prompt, whole)
    if not whole.startswith(before):
        context = [_QUESTION]
        try:
            before, real = _render_alone(messages[-1], prompt, tokenizer, tools)
        except DataError:
            return None
    if not real.startswith(before) or not whole.endswith(real[len(before) :]):
        return None
    turn = template_spans.insert_probes([messages[-1]])
    marked = template_spans.render_probes(
        tokenizer, template_spans.Probed([*map(dict, context), *turn.messages], tools, turn.leaves)
    )
    return _RenderedTurn(real, marked, len(before), turn.leaves, template_spans.locate_spans(turn.leaves, marked, real))


def _skip_empty_thought(prompt: str, whole: str) -> str:
    """Return the prompt without the empty thought at its end, or without its opening mark, if `whole` lacks it."""
    closed, shown = closing_mark(prompt), prompt.rstrip()
    if not closed or whole.startswith(prompt):
        return prompt
    starts = [match.start() for match in find_empty_thoughts(shown) if match.end() == len(shown)]
    before = shown[: starts[0]] if starts else shown.removesuffix(closed)
    return before + closed if whole.startswith(before + closed) else before


def _render_alone(turn: Message, prompt: str, tokenizer: Any, tools: list[Any] | None) -> tuple[str, str]:
    """Return (prompt, whole) of the turn after a plain question. Raises DataError if that prompt ends differently."""
    read = chat.render(tokenizer, [_QUESTION], tools=tools)
    before = chat.render(tokenizer, [_QUESTION], tools=tools, generation_prompt=True)
    if not before.startswith(read) or not prompt.endswith(before[len(read) :]):
        raise DataError("the generation prompt depends on the context")
    return before, chat.render(tokenizer, [_QUESTION, turn], tools=tools)


def _tail(view: _RenderedTurn) -> str:
    """Return the text that the template writes after the turn's last text."""
    ends = [view.marked.rfind(leaf.probe) + len(leaf.probe) for leaf in view.own if leaf.probe in view.marked]
    tail = view.marked[max(ends, default=0) :]
    return tail if view.real.endswith(tail) else view.real[view.start :]


def _extract_answer(view: _RenderedTurn, tokenizer: Any) -> chat.TurnEnd:
    """Return the turn's text up to its end-of-turn token."""
    tail = _tail(view)
    end = chat.find_turn_end(tokenizer, tail)
    return chat.TurnEnd(view.real[view.start : len(view.real) - len(tail)] + end.text, end.id)


def _format_frame(view: _RenderedTurn, turn: Message, tokenizer: Any) -> str:
    """Return the turn as the template wrote it, with `…` for each of the row's texts; "" if their spans are unknown."""
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
    """Return the turn with its content inserted at the position where the template writes a placeholder."""
    turn, content = messages[-1], str(messages[-1]["content"])
    plain = {**turn, "content": _PLACEHOLDER}
    asked_for = [*messages[:-1], plain]
    view = _render_turn(uid, prompt, asked_for, tokenizer, tools)
    closed, opened = closing_mark(prompt), opening_mark(prompt)
    if closed and _thinks(turn):
        raise DataError(
            "the chat template's generation prompt leaves no room for the thought of this answer",
            where=source_locations.describe_row(uid),
            hint="give `model.chat_template` one that lets the model think, or take the thoughts out of the rows",
        )
    if view is not None:
        if any(leaf.field in _WRITTEN_FIELDS for leaf in view.omitted_texts):
            raise _not_written_error(uid, template_spans.insert_probes([turn]).leaves[0], turn)
        end = _extract_answer(view, tokenizer)
        return _Answer(
            chat.TurnEnd(end.text.replace(_PLACEHOLDER, content, 1), end.id), _format_frame(view, plain, tokenizer)
        )
    if any(turn.get(name) for name in ("tool_calls", *template_spans.THOUGHTS)) or not (opened or closed):
        raise _rewritten_turn_error(uid)
    if opened:
        content = content.lstrip().removeprefix(opened).lstrip("\n")
    _, found, tail = render_or_raise(uid, tokenizer, asked_for, tools=tools).rpartition(_PLACEHOLDER)
    if not found:
        raise _not_written_error(uid, template_spans.insert_probes([turn]).leaves[0], turn)
    end = chat.find_turn_end(tokenizer, tail)
    return _Answer(chat.TurnEnd(content + end.text, end.id), "…" + end.text)


def _thinks(turn: Message) -> bool:
    """Return whether the turn has a thought."""
    return any(leaf.thought for leaf in template_spans.insert_probes([turn]).leaves)


# --- texts that the template omits


def _find_omissions(
    uid: str, messages: Sequence[Message], tokenizer: Any, tools: list[Any] | None, prompt: str
) -> tuple[str, ...]:
    """Return the causes of texts that the prompt omits. Raises DataError for an omission that is not allowed."""
    probed = template_spans.insert_probes(messages, tools)
    marked = template_spans.render_probes(tokenizer, probed, generation_prompt=True)
    spans = template_spans.locate_spans(probed.leaves, marked, prompt)
    lost = template_spans.find_missing(probed.leaves, prompt, spans)
    kept = {leaf.message for leaf in probed.leaves if leaf.field == "content" and leaf not in lost}
    return _unique(_classify_omission(uid, leaf, messages, kept) for leaf in lost)


def _classify_omission(uid: str, leaf: Leaf, messages: Sequence[Message], kept: Set[int]) -> str:
    """Return the cause under which an omitted text is counted. kept: messages of which some text is written."""
    if leaf.thought:
        return EARLIER_THOUGHTS
    if leaf.field not in ("content", "tool_calls"):
        return _omission_note(leaf, messages[leaf.message])
    message = messages[leaf.message]
    if leaf.field == "content" and message["role"] == "assistant" and leaf.message in kept:
        return EARLIER_PARTS
    raise _not_written_error(uid, leaf, message)


def _omission_note(leaf: Leaf, message: Message) -> str:
    """Return the note for an omitted field or tools."""
    if leaf.message == template_spans.TOOLS:
        return "LOOK: the chat template does not write the row's `tools`"
    return f"the chat template does not write `{leaf.field}` of {message['role']} messages"


def _not_written_error(uid: str, leaf: Leaf, message: Message) -> DataError:
    """Return the error for a text that does not occur in the rendering."""
    role, text = message.get("role"), str(leaf.value)
    hint = "give `model.chat_template` a Jinja file that writes it"
    if leaf.field == "tool_calls":
        hint = (
            "use a `model.chat_template` that supports tool calls, or write the call into `content` as the model should"
        )
    elif leaf.thought:
        hint = f"write the thought into `content` as <think>...</think>, or {hint}"
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return DataError(
        f"the chat template does not write `{leaf.field}` of this {role} message ({shown!r})",
        where=source_locations.describe_row(uid),
        hint=hint,
    )


def _rewritten_turn_error(uid: str) -> DataError:
    """Return the error for a turn whose finished form differs from its generated form."""
    return DataError(
        "the chat template writes this turn differently from how it is generated, so there is no text to train on",
        where=source_locations.describe_row(uid),
        hint="give `model.chat_template` a Jinja file whose finished turns begin with its generation prompt",
    )
