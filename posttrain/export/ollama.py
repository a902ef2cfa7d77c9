"""Ollama Modelfile for a GGUF file, with the chat template translated to Go if the translation is exact.

Ollama uses Go templates, models use Jinja. Supported are templates that write each turn as a prefix, the content and a
suffix, with an optional default system message: prefixes and suffixes are found by rendering, and the translation is
then compared with the template on conversations of many forms.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain import chat
from posttrain.errors import DataError

MARKS = ("x8ONE8x", "x8TWO8x", "x8THREE8x", "x8FOUR8x")
CONTENTS = (  # message texts for the comparison; templates may strip whitespace or remove thoughts
    "plain",
    "  blanks and a line\n",
    "two\n\nlines",
    "<think>\nso\n</think>\n\n4",
    "a {{ brace }} <b>",
)


@dataclass(frozen=True)
class Turns:
    """A chat template as fixed texts around the contents. opening: written first if there is no system message."""

    opening: str
    before_system: str
    after_system: str
    before_user: str
    after_user: str
    before_assistant: str
    after_assistant: str

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the prompt for these messages, as the Go template writes it."""
        written = "" if messages[0]["role"] == "system" else self.opening
        for message in messages:
            before, after = {
                "system": (self.before_system, self.after_system),
                "user": (self.before_user, self.after_user),
                "assistant": (self.before_assistant, self.after_assistant),
            }[message["role"]]
            written += before + message["content"] + after
        return written + self.before_assistant

    def to_go_template(self) -> str:
        """Return the template in Go's template language."""

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
    """Return (translated template, ""), or (None, reason why it cannot be translated).

    add_bos: Ollama prepends BOS to the prompt, so the template must not.
    """
    if not tokenizer.chat_template:
        return None, "the model has no chat template"
    bos = tokenizer.bos_token if add_bos else ""
    try:
        turns = _extract_turns(tokenizer, bos)
        if turns is None:
            return None, "it does not write turns one after the other"
        for talk in build_conversations():
            if chat.render(tokenizer, talk, generation_prompt=True) != bos + turns.render(talk):
                return None, "it changes what stands in a message, or treats earlier turns otherwise than the last"
    except DataError as error:
        return None, f"it refuses a conversation: {str(error).splitlines()[0]}"
    if any(mark in piece for piece in vars(turns).values() for mark in ("{{", "}}", '"""')):
        return None, "it writes braces or quotes that a Modelfile cannot hold"
    return turns, ""


def _extract_turns(tokenizer: Any, bos: str) -> Turns | None:
    """Return the texts between the contents of two conversations, one with a system message and one without."""
    one, two, three, four = MARKS
    talk = [
        {"role": "user", "content": two},
        {"role": "assistant", "content": three},
        {"role": "user", "content": four},
    ]
    whole = chat.render(tokenizer, [{"role": "system", "content": one}, *talk], generation_prompt=True)
    short = chat.render(tokenizer, talk, generation_prompt=True)
    parts, head = _split_at_marks(whole, MARKS), _split_at_marks(short, MARKS[1:])
    if parts is None or head is None or parts[2] != parts[4] or not (whole.startswith(bos) and short.startswith(bos)):
        return None
    start, system_user, user_assistant, assistant_user, _ = parts
    before_user = _common_suffix((system_user, assistant_user, head[0][len(bos) :]))
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
    """Return the start of a turn's prefix that closes the turn before it: the end-of-turn token and a line break.

    Returns "" if user and assistant turns end differently.
    """
    if not end or not all(text.startswith(end) for text in (before_user, before_assistant)):
        return ""
    line = all(text.startswith(f"{end}\n") for text in (before_user, before_assistant))
    return f"{end}\n" if line else end


def _split_at_marks(text: str, marks: Sequence[str]) -> list[str] | None:
    """Return the texts before, between and after the marks; None unless each mark occurs once, in order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        parts.append(before)
    return [*parts, text]


def _common_suffix(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    size = next((n for n in range(len(shortest), 0, -1) if all(t.endswith(shortest[-n:]) for t in texts)), 0)
    return shortest[-size:] if size else ""


def build_conversations() -> list[list[dict[str, str]]]:
    """Return conversations of one to three rounds, with and without a system message, over all of CONTENTS."""
    conversations = []
    for number, content in enumerate(CONTENTS):
        other = CONTENTS[(number + 1) % len(CONTENTS)]
        for rounds in (1, 2, 3):
            talk = [{"role": "user", "content": content}]
            for _ in range(rounds - 1):
                talk += [{"role": "assistant", "content": other}, {"role": "user", "content": content}]
            conversations += [talk, [{"role": "system", "content": other}, *talk]]
    return conversations


def build_modelfile(file: str, turns: Turns | None, why: str, stops: Sequence[str], template: str | None) -> str:
    """Return the text of a Modelfile.

    file: name of the GGUF file in the same folder. why: reason why the template was not translated. stops: texts that
    end an answer. template: the model's chat template, to detect tool support.
    """
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
        lines += [f'TEMPLATE """{turns.to_go_template()}"""']
    if tools:
        lines += ["# Tools: the model's template can offer tools, which this Modelfile does not."]
    lines += ["", *(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops)]
    return "\n".join(lines) + "\n"
