"""Chat templates: rendered text, the token that ends an assistant turn, and tags that the template opens.

Uses any tokenizer with transformers' interface; imports no heavy library.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import DataError
from posttrain.images import MARK

Message = Mapping[str, Any]

_PROBE = "x8PROBE8x"

RENDER_SECONDS = 10.0  # CPU time limit; one conversation takes milliseconds


@dataclass(frozen=True)
class TurnEnd:
    """End of an assistant turn: `text` up to and including the token `id`; None if there is no such token."""

    text: str
    id: int | None


def render(
    tokenizer: Any, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, generation_prompt: bool = False
) -> str:
    """Render a conversation with the chat template. Raises DataError with the template's error message."""
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template",
            hint="give `model.chat_template: FILE.jinja`, or write `data.chat: false` for plain text",
        )
    try:
        with _limit_cpu_time(RENDER_SECONDS):
            marked = any(MARK in str(m.get("content")) for m in messages)
            in_parts = marked or _reads_parts(tokenizer, str(tokenizer.chat_template))
            shown = _split_messages(messages) if in_parts else list(messages)
            return tokenizer.apply_chat_template(
                shown, tools=list(tools) if tools else None, add_generation_prompt=generation_prompt, tokenize=False
            )
    except _RenderTimeout:
        raise DataError(
            f"the chat template has not ended after {RENDER_SECONDS:g} s of processor time",
            hint="a loop of it may have no end; give `model.chat_template` another one",
        ) from None
    except Exception as cause:
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise DataError(
            f"the chat template refuses the messages ({roles}): {type(cause).__name__}: {cause}",
            hint="the system message comes from the row's messages, its column `system`, `data.system` or `tools`"
            if "system" in roles
            else "",
        ) from cause


class _RenderTimeout(BaseException):
    """Time limit of a render. Not an Exception, so that code which probes templates for errors does not swallow it."""


@contextlib.contextmanager
def _limit_cpu_time(seconds: float) -> Iterator[None]:
    """Raise _TooLong in the enclosed code after this many seconds of the thread's CPU time.

    CPU time, because on a busy machine milliseconds of work take seconds. Outside the main thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    started = time.thread_time()

    def stop(*_: object) -> None:
        more = seconds - (time.thread_time() - started)
        if more <= 0:
            raise _RenderTimeout
        signal.setitimer(signal.ITIMER_REAL, max(more, 0.01))

    before = signal.signal(signal.SIGALRM, stop)
    left, every = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left, every)


def _split_messages(messages: Sequence[Message]) -> list[Message]:
    return [
        {**m, "content": _split_content(m["content"])} if isinstance(m.get("content"), str) else m for m in messages
    ]


def _split_content(content: str) -> list[dict[str, str]]:
    """Split a content into text parts and image parts, one for each MARK."""
    first, *others = content.split(MARK)
    parts = [{"type": "text", "text": first}] if first or not others else []
    for text in others:
        parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    return parts


@functools.lru_cache(maxsize=4)
def _reads_parts(tokenizer: Any, template: str) -> bool:
    """Return whether the template renders a list of parts but not a string, as templates of vision models do."""
    del template
    messages = [{"role": "user", "content": _PROBE}]
    return not _writes_probe(tokenizer, messages) and _writes_probe(tokenizer, _split_messages(messages))


def _writes_probe(tokenizer: Any, messages: Sequence[Message]) -> bool:
    """Return whether the template renders the text of these messages; False if it raises.

    Errors may be the template's own or caused by its operations on values; `render` reports them when it is called.
    """
    from jinja2 import TemplateError  # here: importing posttrain does not need it

    try:
        return _PROBE in tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False


def generation_header(tokenizer: Any) -> str:
    """Return the header of the assistant turn, which a generation prompt adds after a question."""
    return _generation_header(tokenizer, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=4)
def _generation_header(tokenizer: Any, template: str) -> str:
    del template
    question = [{"role": "user", "content": _PROBE}]
    before, prompt = (render(tokenizer, question, generation_prompt=asked) for asked in (False, True))
    return prompt[len(before) :] if prompt.startswith(before) else ""


def turn_end(tokenizer: Any) -> TurnEnd:
    """Return the end of an assistant turn: the rendered text after its content, through the first special token.

    Special tokens that follow directly belong to it as well (Cohere2 closes the answer and then the turn).
    """
    return _turn_end(tokenizer, len(tokenizer), str(tokenizer.chat_template))


@functools.lru_cache(maxsize=4)
def _turn_end(tokenizer: Any, size: int, template: str) -> TurnEnd:
    """Implement `turn_end`. size, template: cache keys, because the result depends on them and they may change."""
    del size, template
    text = render(tokenizer, [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}])
    _, found, tail = text.rpartition(_PROBE)
    if not found:
        raise DataError("the chat template does not write the content of the last assistant message")
    end = first_special(tokenizer, tail)
    while end.id is not None and (match := _match_any(special_texts(tokenizer)).match(tail, len(end.text))):
        end = TurnEnd(tail[: match.end()], tokenizer.convert_tokens_to_ids(match[0]))
    return end


def first_special(tokenizer: Any, tail: str) -> TurnEnd:
    """Return `tail` up to and including its first special token."""
    found = _match_any(special_texts(tokenizer)).search(tail)
    if found is None:
        return TurnEnd(tail, None)
    return TurnEnd(tail[: found.end()], tokenizer.convert_tokens_to_ids(found[0]))


def find_turn_end(tokenizer: Any, tail: str) -> TurnEnd:
    """Return `tail`, the text after the last content of a final turn, up to and including the turn's end.

    The end is the last token that ends the template's answers, or the last special token if the template ends this turn
    in another way (gpt-oss ends a call with `<|call|>`). id None: the template writes no such token.
    """
    end = turn_end(tokenizer)
    if end.id is None:
        return TurnEnd(tail, None)
    positions = [
        (m.end(), tokenizer.convert_tokens_to_ids(m[0])) for m in _match_any(special_texts(tokenizer)).finditer(tail)
    ]
    usual = [place for place, token in positions if token == end.id]
    if usual:
        return TurnEnd(tail[: usual[-1]], end.id)
    return TurnEnd(tail[: positions[-1][0]], positions[-1][1]) if positions else TurnEnd(tail, None)


def special_texts(tokenizer: Any) -> frozenset[str]:
    """Return the texts of all special tokens: the named ones and every added token marked as special."""
    return _special_texts(tokenizer, len(tokenizer), tuple(tokenizer.all_special_tokens))


@functools.lru_cache(maxsize=4)
def _special_texts(tokenizer: Any, size: int, named: tuple[str, ...]) -> frozenset[str]:
    """Implement `special_texts`, cached because it is called per row and some vocabularies have thousands of tokens.

    size: of the vocabulary; it changes when tokens are added.
    """
    del size
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return frozenset({*named, *(t.content for t in added if t.special)})


@functools.lru_cache(maxsize=4)
def _match_any(texts: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern that finds the first of these texts.

    Of two texts that start at the same position (`<|im_end|>`, `<|im_end|>x`) it matches the longer.
    """
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True) if t) or "(?!)")


def eos_ids(tokenizer: Any, *configs: Any) -> tuple[int, ...]:
    """Return all token ids that end a completion, for generation, masks and metrics alike.

    The tokenizer's EOS comes first, then those of the configs (generation config, model config), then the token that
    ends the chat template's turns.
    """
    ids: list[int | None] = [tokenizer.eos_token_id]
    for config in configs:
        value = getattr(config, "eos_token_id", None)
        ids += value if isinstance(value, list | tuple) else [value]
    if tokenizer.chat_template:
        ids.append(turn_end(tokenizer).id)
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def clean_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a template: without null fields, and with tool arguments parsed from JSON text."""
    return [_clean_message(m) for m in messages]


def _clean_message(message: Message) -> dict[str, Any]:
    """Return one message without null fields, with content and tool calls in the form that templates expect."""
    clean = {k: v for k, v in message.items() if v is not None}
    clean.setdefault("content", "")
    if isinstance(clean.get("tool_calls"), str):
        clean["tool_calls"] = json.loads(clean["tool_calls"] or "[]")
    if not clean.get("tool_calls", True):  # some templates only check that the list exists
        del clean["tool_calls"]
    if "tool_calls" in clean:
        clean["tool_calls"] = [_clean_call(c) for c in clean["tool_calls"]]
    return clean


def _clean_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or call)
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function} if "function" in call else function
