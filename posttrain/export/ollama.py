"""A Modelfile for Ollama beside a GGUF file, with the chat template in Ollama's language where that is exact.

Ollama's templates are Go's, those of models are Jinja. What is translated are templates that write each turn as a text
before, the content, and a text behind, with an optional default system message: the pieces are found by rendering, and
the translation is then held against the template on conversations of many forms.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain import chat
from posttrain.errors import DataError

MARKS = ("x8ONE8x", "x8TWO8x", "x8THREE8x", "x8FOUR8x")
CONTENTS = (  # what users and models write; templates strip some of it, or leave thoughts out
    "plain",
    "  blanks and a line\n",
    "two\n\nlines",
    "<think>\nso\n</think>\n\n4",
    "a {{ brace }} <b>",
)


@dataclass(frozen=True)
class Turns:
    """A chat template as pieces of text. opening: before everything where no system message is given."""

    opening: str
    before_system: str
    after_system: str
    before_user: str
    after_user: str
    before_assistant: str
    after_assistant: str

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt for these messages, as `go` writes it."""
        written = "" if messages[0]["role"] == "system" else self.opening
        for message in messages:
            before, after = {
                "system": (self.before_system, self.after_system),
                "user": (self.before_user, self.after_user),
                "assistant": (self.before_assistant, self.after_assistant),
            }[message["role"]]
            written += before + message["content"] + after
        return written + self.before_assistant

    def go(self) -> str:
        """The template in Go's language."""

        def turn(before: str, after: str) -> str:
            return f"{before}{{{{ .Content }}}}{after}"

        return (
            "{{ if .Messages }}"
            f'{{{{ if ne (index .Messages 0).Role "system" }}}}{self.opening}{{{{ end }}}}'
            "{{ range .Messages }}"
            f'{{{{ if eq .Role "system" }}}}{turn(self.before_system, self.after_system)}'
            f'{{{{ else if eq .Role "user" }}}}{turn(self.before_user, self.after_user)}'
            f'{{{{ else if eq .Role "assistant" }}}}{turn(self.before_assistant, self.after_assistant)}'
            "{{ end }}{{ end }}"
            f"{self.before_assistant}{{{{ end }}}}"
        )


def translate(tokenizer: Any, *, add_bos: bool) -> tuple[Turns | None, str]:
    """(the template in pieces, ""), or (None, why it is not translated).

    add_bos: Ollama puts BOS before the prompt itself, so the template must not.
    """
    if not tokenizer.chat_template:
        return None, "the model has no chat template"
    bos = tokenizer.bos_token if add_bos else ""
    try:
        turns = _pieces(tokenizer, bos)
        if turns is None:
            return None, "it does not write turns one after the other"
        for talk in conversations():
            if chat.render(tokenizer, talk, generation_prompt=True) != bos + turns.render(talk):
                return None, "it changes what stands in a message, or treats earlier turns otherwise than the last"
    except DataError as error:
        return None, f"it refuses a conversation: {str(error).splitlines()[0]}"
    if any(mark in piece for piece in vars(turns).values() for mark in ("{{", "}}", '"""')):
        return None, "it writes braces or quotes that a Modelfile cannot hold"
    return turns, ""


def _pieces(tokenizer: Any, bos: str) -> Turns | None:
    """The pieces between the contents of two conversations, one with a system message and one without."""
    one, two, three, four = MARKS
    talk = [
        {"role": "user", "content": two},
        {"role": "assistant", "content": three},
        {"role": "user", "content": four},
    ]
    whole = chat.render(tokenizer, [{"role": "system", "content": one}, *talk], generation_prompt=True)
    short = chat.render(tokenizer, talk, generation_prompt=True)
    parts, head = _between(whole, MARKS), _between(short, MARKS[1:])
    if parts is None or head is None or parts[2] != parts[4] or not (whole.startswith(bos) and short.startswith(bos)):
        return None
    start, system_user, user_assistant, assistant_user, _ = parts
    before_user = _common_end((system_user, assistant_user, head[0][len(bos) :]))
    shared = len(before_user)
    closing = _closing_text(before_user, user_assistant, chat.turn_end(tokenizer).text)

    def rest(text: str) -> str:
        return text[: len(text) - shared] + closing

    return Turns(
        opening=rest(head[0][len(bos) :]),
        before_system=start[len(bos) :],
        after_system=rest(system_user),
        before_user=before_user[len(closing) :],
        after_user=closing,
        before_assistant=user_assistant[len(closing) :],
        after_assistant=rest(assistant_user),
    )


def _closing_text(before_user: str, before_assistant: str, end: str) -> str:
    """What of the text before a turn closes the turn before it, whoever's that was: the token that ends turns, and a
    line break. "" where turns of users and models end otherwise."""
    if not end or not all(text.startswith(end) for text in (before_user, before_assistant)):
        return ""
    line = all(text.startswith(f"{end}\n") for text in (before_user, before_assistant))
    return f"{end}\n" if line else end


def _between(text: str, marks: Sequence[str]) -> list[str] | None:
    """The texts before, between and behind the marks; None where they do not stand there once each, in order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        parts.append(before)
    return [*parts, text]


def _common_end(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    size = next((n for n in range(len(shortest), 0, -1) if all(t.endswith(shortest[-n:]) for t in texts)), 0)
    return shortest[-size:] if size else ""


def conversations() -> list[list[dict[str, str]]]:
    """Conversations of one to three rounds, with and without a system message, over all of CONTENTS."""
    found = []
    for number, content in enumerate(CONTENTS):
        other = CONTENTS[(number + 1) % len(CONTENTS)]
        for rounds in (1, 2, 3):
            talk = [{"role": "user", "content": content}]
            for _ in range(rounds - 1):
                talk += [{"role": "assistant", "content": other}, {"role": "user", "content": content}]
            found += [talk, [{"role": "system", "content": other}, *talk]]
    return found


def modelfile(file: str, turns: Turns | None, why: str, stops: Sequence[str], template: str | None) -> str:
    """The text of a Modelfile. file: the GGUF file beside it. why: the template was not translated. stops: texts that
    end an answer. template: the model's own, to see whether it offers tools."""
    lines = [f"FROM ./{file}", ""]
    tools = bool(template and "tools" in template)
    if turns is None:
        lines += [
            f"# No TEMPLATE: the chat template was not translated, because {why}.",
            "# Ollama then takes one of its own that is like the GGUF's chat template, or the prompt alone. Compare:",
            "#   posttrain chat FILE.gguf, then /prompt        what the model was trained on",
            "#   OLLAMA_DEBUG=1 ollama serve                   what Ollama sends",
        ]
    else:
        lines += [f'TEMPLATE """{turns.go()}"""']
    if tools:
        lines += ["# Tools: the model's template can offer tools, which this Modelfile does not."]
    lines += ["", *(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops)]
    return "\n".join(lines) + "\n"
