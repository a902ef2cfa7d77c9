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
Rewrite = Callable[[re.Match[str]], str]
# Tokens that decoding keeps even if the tokenizer says that they are special.
_KEPT = (THINK_START, THINK_END, "<answer>", "</answer>")


def _rewrite_pair() -> Rewrite:
    return lambda mark: THINK_START if mark["start"] else THINK_END


@dataclass(frozen=True)
class ThoughtFormat:
    """How a model family marks its thoughts.

    opening, closing: text before and after a thought. tokens: tokens that the marks consist of. marks: regex of
    everything that is replaced in a text. rewriter: returns a function that is called with the matches of one text, in
    order, and returns what stands in their place. variants: other marks that the regex finds.
    """

    opening: str
    closing: str
    tokens: tuple[str, ...]
    marks: re.Pattern[str]
    rewriter: Callable[[], Rewrite] = _rewrite_pair
    variants: tuple[str, ...] = ()

    def is_in(self, template: str) -> bool:
        """Return whether the source of a chat template has these marks."""
        return all(text in template for text in self.tokens or (self.opening, self.closing))

    def edits(self, text: str) -> list[Edit]:
        """Find the replacements that turn a text into one with `<think>` and `</think>`."""
        rewrite = self.rewriter()
        return [(mark.start(), mark.end(), rewrite(mark)) for mark in self.marks.finditer(text)]

    def standardize(self, text: str) -> str:
        """Return a text of the model with its thoughts as `<think>...</think>`."""
        return self.marks.sub(self.rewriter(), text)

    def localize(self, text: str) -> str:
        """Return a text with `<think>` and `</think>` as the model writes them."""
        return text.replace(THINK_START, self.opening).replace(THINK_END, self.closing)


def _pair(
    opening: str, closing: str, pattern: str = "", tokens: tuple[str, ...] = (), variants: tuple[str, ...] = ()
) -> ThoughtFormat:
    """Return the format of an opening and a closing mark. pattern: regex with the groups `start` and `end`."""
    marks = re.compile(pattern or f"(?P<start>{re.escape(opening)})|(?P<end>{re.escape(closing)})")
    return ThoughtFormat(opening, closing, tokens or (opening, closing), marks, variants=variants)


_HARMONY = re.compile(
    r"<\|start\|>(?P<role>[^<]*)|<\|channel\|>(?P<channel>[^<]*)(?P<open><\|message\|>)?|<\|(?P<end>end|return|call|message)\|>"
)


def _rewrite_harmony() -> Rewrite:
    """Return the rewriter of the harmony format of gpt-oss: messages in the channels analysis, commentary and final.

    A message in the channel analysis is a thought. The header of a call (`to=functions.NAME`) stays, because it belongs
    to the call. A text before any header that `<|end|>` ends is a thought that the prompt opened.
    """
    inside: bool | None = None  # a thought; None: before the first header
    called = False

    def rewrite(mark: re.Match[str]) -> str:
        nonlocal inside, called
        ends = inside or (inside is None and mark["end"] == "end")
        header = mark["role"] or mark["channel"] or ""
        called = "to=" in header or (called and mark["role"] is None and mark["end"] != "end")
        inside = bool(mark["open"] and header.startswith("analysis") and not called)
        return (THINK_END if ends else "") + (THINK_START if inside else mark[0] if called else "")

    return rewrite


STANDARD = ThoughtFormat(THINK_START, THINK_END, (), re.compile("(?!)"))
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
        _HARMONY,
        _rewrite_harmony,
        variants=("<|call|>", "<|return|>"),
    ),
)
# Formats whose marks are recognized in prompts and in arguments of rewards: the table, and those of `model.thoughts` of
# this process's recipes. Processes of rewards and tools get the latter when they start.
KNOWN_FORMATS = list(FORMATS)


def add_format(opening: str, closing: str) -> ThoughtFormat:
    """Recognize a recipe's marks in this process; return their format."""
    form = next((form for form in KNOWN_FORMATS if (form.opening, form.closing) == (opening, closing)), None)
    if form is None:
        form = _pair(opening, closing)
        KNOWN_FORMATS.append(form)
    return form


def list_declared() -> list[tuple[str, str]]:
    """Return the marks that recipes have added in this process."""
    return [(form.opening, form.closing) for form in KNOWN_FORMATS[len(FORMATS) :]]


def declare_format(tokenizer: Any, opening: str, closing: str) -> None:
    """Set the marks that the model of this tokenizer writes, in place of those that would be detected."""
    tokenizer.thought_format = add_format(opening, closing)
    _detect.cache_clear()


def is_declared(tokenizer: Any) -> bool:
    """Return whether the recipe gives the marks of this tokenizer's model."""
    return getattr(tokenizer, "thought_format", None) is not None


class ThoughtStream:
    """Rewrites a text that arrives in pieces with `<think>` and `</think>`; a possible beginning of a mark is held back
    until the next piece arrives. Each character is read once."""

    def __init__(self, form: ThoughtFormat) -> None:
        self.form, self._marks = form, (form.opening, form.closing, *form.tokens, *form.variants)
        self._rewrite, self._longest = form.rewriter(), max(map(len, self._marks))
        self._held = ""

    def add(self, piece: str) -> str:
        """Return the text that the piece completes."""
        if self.form is STANDARD:
            return piece
        text = self._held + piece
        tails = (n for n in range(min(self._longest - 1, len(text)), 0, -1))
        tail = next((n for n in tails if any(m[:n] == text[-n:] and n < len(m) for m in self._marks)), 0)
        return self._show(text, len(text) - tail)

    def end(self) -> str:
        """Return the text that was held back."""
        return self._show(self._held, len(self._held), last=True)

    def _show(self, text: str, end: int, *, last: bool = False) -> str:
        """Return the rewritten text up to `end`, and hold back the rest. A mark there that more text would make longer
        is held back too, unless the text is the last."""
        shown, at = "", 0
        for mark in self.form.marks.finditer(text, 0, end):
            if not last and mark.end() == end and self._grows(mark[0]):
                end = mark.start()
                break
            shown += text[at : mark.start()] + self._rewrite(mark)
            at = mark.end()
        self._held = text[end:]
        return shown + text[at:end]

    def _grows(self, mark: str) -> bool:
        longer = self.form.marks.match(f"{mark}x")
        return longer is not None and longer.end() > len(mark)


def thought_format(tokenizer: Any) -> ThoughtFormat:
    """Return the format that the recipe declares (`model.thoughts`), else the one whose marks the chat template writes,
    else the one whose marks are tokens of the vocabulary."""
    return _detect(tokenizer, len(tokenizer), str(getattr(tokenizer, "chat_template", "")))[0]


def written_format(tokenizer: Any) -> ThoughtFormat:
    """Return the format in which texts for the model are written: the recipe's or that of its chat template, else
    `<think>`.

    Tokens of the vocabulary do not suffice: a model that was never trained to use them may have learned `<think>`.
    """
    form = thought_format(tokenizer)
    return form if is_declared(tokenizer) or form.is_in(str(getattr(tokenizer, "chat_template", ""))) else STANDARD


@functools.lru_cache(maxsize=4)
def _detect(tokenizer: Any, size: int, template: str) -> tuple[ThoughtFormat, frozenset[int] | None]:
    """Return the format, and the ids of the special tokens that decoding drops; None: all special tokens.

    size, template: those of the tokenizer now; cache keys, because both may change.
    """
    del size
    added = getattr(tokenizer, "added_tokens_decoder", {})
    vocabulary = {token.content for token in added.values()}

    def evidence(form: ThoughtFormat) -> tuple[bool, bool]:
        return form.is_in(template), vocabulary.issuperset(form.tokens or (form.opening, form.closing))

    best = getattr(tokenizer, "thought_format", None) or max(FORMATS, key=evidence)  # the first of equals
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


def find_empty_thoughts(text: str) -> list[re.Match[str]]:
    """Find the thoughts without content, in any format."""
    return list(_empty_thoughts(tuple(KNOWN_FORMATS)).finditer(text))


@functools.lru_cache(maxsize=4)
def _empty_thoughts(formats: tuple[ThoughtFormat, ...]) -> re.Pattern[str]:
    pairs = (rf"{re.escape(form.opening)}\s*{re.escape(form.closing)}" for form in formats)
    return re.compile("|".join((r"<([a-z_:]+)>\s*</\1>", *pairs)))


def opening_mark(prompt: str) -> str:
    """Return the mark with which a rendered prompt opens a thought, so that completions can only close it; else ""."""
    shown = prompt.rstrip()
    return next((mark for form in KNOWN_FORMATS if shown.endswith(mark := form.opening.rstrip())), "")


def closing_mark(prompt: str) -> str:
    """Return the mark with which a rendered prompt ends a thought, so that completions have none; else ""."""
    shown = prompt.rstrip()
    return next((mark for form in KNOWN_FORMATS if shown.endswith(mark := form.closing.rstrip())), "")


def ends_in_thought(prompt: str, completion: str) -> bool:
    """Return whether a completion ends inside a thought, opened by itself or by the prompt."""
    opened, closed = completion.rfind(THINK_START), completion.rfind(THINK_END)
    return opened > closed or (closed < 0 and opening_mark(prompt) != "")


def end_in(text: str, mark: str) -> str:
    """Return the text that ends the thoughts of a decoded completion: `mark`, or `</think>` for the mark of any format
    that the text lacks, because decoding replaces it."""
    closings = [form.closing for form in KNOWN_FORMATS]
    return THINK_END if mark not in text and mark in closings else mark
