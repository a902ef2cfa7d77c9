"""Thoughts in completions: detects how a model marks its reasoning, and decodes it as `<think>...</think>` for all.

Rewards, evaluations, metrics and records read texts in which a thought is `<think>...</think>`, whatever the model
itself writes: `[THINK]`, channels, a sentence. The tokens of a completion stay as sampled.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

THINK_START, THINK_END = "<think>", "</think>"
# A replacement in a text: start, end, new text. Edits of a text are in order and do not overlap.
Edit = tuple[int, int, str]
# Tokens that decoding keeps even if the tokenizer says that they are special.
_KEPT = (THINK_START, THINK_END, "<answer>", "</answer>")


@dataclass(frozen=True)
class ThoughtFormat:
    """How a model family marks its thoughts.

    opening, closing: text before and after a thought. tokens: tokens that the marks consist of. edits: finds the
    replacements that turn a text into one with `<think>` and `</think>`. variants: other marks that `edits` finds.
    """

    opening: str
    closing: str
    tokens: tuple[str, ...]
    edits: Callable[[str], list[Edit]]
    variants: tuple[str, ...] = ()

    def is_in(self, template: str) -> bool:
        """Return whether the source of a chat template has these marks."""
        return all(text in template for text in self.tokens or (self.opening, self.closing))

    def standardize(self, text: str) -> str:
        """Return a text of the model with its thoughts as `<think>...</think>`."""
        parts, at = [], 0
        for start, end, new in self.edits(text):
            parts += [text[at:start], new]
            at = end
        return "".join(parts) + text[at:]

    def localize(self, text: str) -> str:
        """Return a text with `<think>` and `</think>` as the model writes them."""
        return text.replace(THINK_START, self.opening).replace(THINK_END, self.closing)


def _pair(
    opening: str, closing: str, pattern: str = "", tokens: tuple[str, ...] = (), variants: tuple[str, ...] = ()
) -> ThoughtFormat:
    """Return the format of an opening and a closing mark. pattern: regex with the groups `start` and `end`."""
    marks = re.compile(pattern or f"(?P<start>{re.escape(opening)})|(?P<end>{re.escape(closing)})")

    def edits(text: str) -> list[Edit]:
        return [(m.start(), m.end(), THINK_START if m["start"] else THINK_END) for m in marks.finditer(text)]

    return ThoughtFormat(opening, closing, tokens or (opening, closing), edits, variants)


_HARMONY = re.compile(
    r"<\|start\|>(?P<role>[^<]*)|<\|channel\|>(?P<channel>[^<]*)(?P<open><\|message\|>)?|<\|(?P<end>end|return|call|message)\|>"
)


def _harmony_edits(text: str) -> list[Edit]:
    """Find the marks of the harmony format of gpt-oss: messages in the channels analysis, commentary and final.

    A message in the channel analysis is a thought. The header of a call (`to=functions.NAME`) stays, because it belongs
    to the call. A text before any header that `<|end|>` ends is a thought that the prompt opened.
    """
    found: list[Edit] = []
    inside: bool | None = None  # a thought; None: before the first header
    called = False
    for match in _HARMONY.finditer(text):
        ends = inside or (inside is None and match["end"] == "end")
        header = match["role"] or match["channel"] or ""
        called = "to=" in header or (called and match["role"] is None and match["end"] != "end")
        inside = bool(match["open"] and header.startswith("analysis") and not called)
        new = (THINK_END if ends else "") + (THINK_START if inside else match[0] if called else "")
        found.append((match.start(), match.end(), new))
    return found


STANDARD = ThoughtFormat(THINK_START, THINK_END, (), lambda _: [])
FORMATS = (
    STANDARD,
    _pair("[THINK]", "[/THINK]"),  # Magistral, Ministral
    _pair("<seed:think>", "</seed:think>"),  # Seed-OSS
    _pair("<mm:think>", "</mm:think>"),  # MiniMax-M3
    _pair("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    _pair("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning, Command R7B
    _pair("◁think▷", "◁/think▷"),  # Kimi-VL-Thinking
    _pair(  # Gemma 4
        "<|channel>thought\n",
        "<channel|>",
        r"(?P<start><\|channel>(?:thought\n?)?)|(?P<end><channel\|>)",
        ("<|channel>", "<channel|>"),
    ),
    _pair(  # Granite 3.0 to 3.2
        "Here is my thought process:",
        "Here is my response:",
        "(?P<start>Here(?:'s| is) my thought process:)|(?P<end>Here(?:'s| is) my response:)",
        variants=("Here's my thought process:", "Here's my response:"),
    ),
    ThoughtFormat(  # gpt-oss
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        _harmony_edits,
    ),
)


class ThoughtStream:
    """Rewrites a text that arrives in pieces with `<think>` and `</think>`; a possible beginning of a mark is held back
    until the next piece arrives."""

    def __init__(self, form: ThoughtFormat) -> None:
        self.form, self._marks = form, (form.opening, form.closing, *form.tokens, *form.variants)
        self._raw = self._shown = ""

    def add(self, piece: str) -> str:
        """Return the text that the piece completes."""
        if self.form is STANDARD:
            return piece
        self._raw += piece
        longest = max(map(len, self._marks))
        tails = (n for n in range(min(longest - 1, len(self._raw)), 0, -1))
        held = next((n for n in tails if any(m[:n] == self._raw[-n:] and n < len(m) for m in self._marks)), 0)
        return self._show(self._raw[: len(self._raw) - held])

    def end(self) -> str:
        """Return the text that was held back."""
        return self._show(self._raw)

    def _show(self, raw: str) -> str:
        before, self._shown = self._shown, self.form.standardize(raw)
        return self._shown[len(before) :]


def thought_format(tokenizer: Any) -> ThoughtFormat:
    """Return the format whose marks the chat template writes, else the one whose marks are tokens of the vocabulary."""
    return _detect(tokenizer, len(tokenizer), str(getattr(tokenizer, "chat_template", "")))[0]


def written_format(tokenizer: Any) -> ThoughtFormat:
    """Return the format in which texts for the model are written: that of its chat template, else `<think>`.

    Tokens of the vocabulary do not suffice: a model that was never trained to use them may have learned `<think>`.
    """
    form = thought_format(tokenizer)
    return form if form.is_in(str(getattr(tokenizer, "chat_template", ""))) else STANDARD


@functools.lru_cache(maxsize=4)
def _detect(tokenizer: Any, size: int, template: str) -> tuple[ThoughtFormat, frozenset[int] | None]:
    """Return the format, and the ids of the special tokens that decoding drops; None: all special tokens.

    size, template: cache keys, because the result depends on them and they may change.
    """
    del size
    added = getattr(tokenizer, "added_tokens_decoder", {})
    vocabulary = {token.content for token in added.values()}

    def evidence(form: ThoughtFormat) -> tuple[bool, bool]:
        return form.is_in(template), vocabulary.issuperset(form.tokens or (form.opening, form.closing))

    best = max(FORMATS, key=evidence)  # the first of equals
    special = {i: token.content for i, token in added.items() if token.special}
    dropped = frozenset(i for i, text in special.items() if text not in (*best.tokens, *_KEPT))
    return best, dropped if len(dropped) < len(special) else None


def decode(tokenizer: Any, rows: Sequence[Any], *, standard: bool = True) -> list[str]:
    """Return the texts of completions without special tokens, except those that mark a thought or an answer.

    rows: token ids of each completion, as lists or arrays. standard: whether thoughts become `<think>...</think>`.
    """
    if not rows:  # batch_decode returns one text for an empty list
        return []
    form, dropped = _detect(tokenizer, len(tokenizer), str(getattr(tokenizer, "chat_template", "")))
    kept = rows if dropped is None else [[i for i in row if i not in dropped] for row in rows]
    texts = tokenizer.batch_decode(kept, skip_special_tokens=dropped is None, clean_up_tokenization_spaces=False)
    return [form.standardize(text) for text in texts] if standard and form is not STANDARD else list(texts)


def move_offsets(offsets: Sequence[int], edits: Sequence[Edit]) -> list[int]:
    """Return the positions in a text after edits of ascending positions before them."""
    moved: list[int] = []
    number = shift = 0
    for offset in offsets:
        while number < len(edits) and edits[number][1] <= offset:
            start, end, new = edits[number]
            shift += len(new) - (end - start)
            number += 1
        within = number < len(edits) and edits[number][0] < offset
        start = edits[number][0] if within else offset
        moved.append(start + shift + (min(offset - start, len(edits[number][2])) if within else 0))
    return moved


OPENINGS = tuple(form.opening.rstrip() for form in FORMATS)
_CLOSINGS = tuple(form.closing for form in FORMATS)
EMPTY_THOUGHT = re.compile(
    "|".join((r"<([a-z_:]+)>\s*</\1>", *(rf"{re.escape(f.opening)}\s*{re.escape(f.closing)}" for f in FORMATS)))
)


def opening_mark(prompt: str) -> str:
    """Return the mark with which a rendered prompt opens a thought, so that completions can only close it; else ""."""
    return _last_mark(prompt, OPENINGS)


def closing_mark(prompt: str) -> str:
    """Return the mark with which a rendered prompt ends a thought, so that completions have none; else ""."""
    return _last_mark(prompt, _CLOSINGS)


def _last_mark(prompt: str, marks: Sequence[str]) -> str:
    shown = prompt.rstrip()
    return next((mark for mark in marks if shown.endswith(mark)), "")


def end_in(text: str, mark: str) -> str:
    """Return the text that ends the thoughts of a decoded completion: `mark`, or `</think>` for the mark of any format
    that the text lacks, because decoding replaces it."""
    return THINK_END if mark not in text and mark in _CLOSINGS else mark
