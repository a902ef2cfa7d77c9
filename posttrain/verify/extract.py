"""Extraction of the answer from a completion. Pure functions of text; each returns None if it finds nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from posttrain.thoughts import THINK_END as THINK_END
from posttrain.thoughts import THINK_START as THINK_START
from posttrain.thoughts import end_in
from posttrain.verify.anchors import DENIED, VERB_BEHIND, find_anchors
from posttrain.verify.box_context import is_denied, unwrap_boxes, visible_text, whole_expression
from posttrain.verify.numerals import changes_number, value_of

Extractor = Literal["boxed", "answer_tag", "hash", "anchor", "last_number"]

MAX_BOXES = 50  # in one list answer

_BOX = r"\\(?:boxed|fbox)\s{0,9}\{"  # TeX skips blanks after a command: `\boxed {42}`
_BRACES = re.compile(rf"(?P<box>{_BOX})|\\(?={_BOX})|\\.|(?P<open>\{{)|(?P<close>\}})", re.DOTALL)
# Text allowed between two boxes of one answer: `$\boxed{1}$ and $x_2 = \boxed{-2}$`; no blank line and no other word.
_BETWEEN_BOXES = re.compile(
    r"(?!\s*\n\s*\n)(?:[\s$,;.&*~{}/|()]|\\[ ,;!]|\\[()\[\]]|\\(?:q?quad|lor|vee|land|wedge)\b"
    r"|\b(?:and|or|else|also|oder|maybe|perhaps|possibly|otherwise|alternatively|if\s+not)\b"
    r"|\\(?:text|mbox|mathrm)\s*\{[\s,;]*(?:(?:and|or|else|also)[\s,;]*)*\}|\b[A-Za-z](?:_\{?\w\}?)?\s*=)*"
)
_BARE = re.compile(r"\\(?:boxed|fbox) +([^\s{}$\\,;]+)")  # `\boxed 42`, as in old data sets
_MAX_GAP_CHARS = 60  # characters
_HASH = re.compile(r"####[ \t]*((?:(?!####)[^\n])+)")
_CLAUSE = re.compile(r"[.,;:!?\n，。；：！？]|\b(?:then|so|thus|hence|therefore|but|because)\b", re.IGNORECASE)
_CONJUNCTION = re.compile(
    r"\b(?:or|and)(?:\s+(?:maybe|perhaps|possibly|else|also|the|final|my))*[\s,*_$]*$", re.IGNORECASE
)
_CONTINUATION = re.compile(
    r"[ \t]*\n[ \t]*(?:or|and)\b[^\n]*|[ \t]*\n[ \t$]*[-+]?[0-9][0-9.,/]*[ \t$]*(?=\n|$)", re.IGNORECASE
)
_DISPLAYED = re.compile(r"\s*(?:\\\[(.*?)\\\]|\$\$(.*?)\$\$|\\\((.*?)\\\))", re.DOTALL)
_MARKUP = " \t\r*_`$「」"
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
# Remarks after the answer that add nothing: `72 (seventy-two)`, `12. I hope it is correct.`
_HEDGE = (
    r"(?!.*\b(?i:or|not|and|but|nor|wrong|maybe|perhaps|possibly|alternatively|wait|actually|might|may|could|instead|too"
    r"|either|equally|although|though|however|unless|unsure|doubt|incorrect|false|guess\w*)\b)"
)
_MAX_LINE_CHARS = 500  # characters; remarks are not stripped from longer lines
_IN_WORDS = re.compile(rf"(?<=\S)\s+{_HEDGE}\([A-Za-z]{{2,}}(?:[\s,-]+[A-Za-z]{{2,}})*\)[.!]?$", re.IGNORECASE)
_REASON = re.compile(rf",?\s+{_HEDGE}(?:since|because)\b.*$", re.IGNORECASE)
_SENTENCE = re.compile(rf"[.!][*$]*\s+{_HEDGE}[A-Z][a-z']*(?:,?\s+[A-Za-z'-]+){{2,}}[.!]?$")
_SENTENCE_ELSEWHERE = re.compile(r"。(?!.*[不或也错錯非])[^0-9。]+。?$")
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+−–])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?:(?<![\w.)])[-+−–])?\.\d+")


def after_think(text: str, delimiter: str = THINK_END) -> str:
    """Return the text after the last `delimiter`; the whole text if there is none.

    A mark such as `[/THINK]` also finds `</think>`, as which completions are decoded.
    """
    return text.rpartition(end_in(text, delimiter))[2]


def outside_thoughts(text: str) -> str:
    """Remove the closed thoughts from a text with several thoughts: text inside a thought is no answer.

    A closing mark before any opening mark ends a thought that the prompt opened. An unclosed thought stays, as in
    `after_think`.
    """
    parts: list[str] = []
    end = text.find(THINK_END)
    position = 0 if end < 0 or 0 <= text.find(THINK_START) < end else end + len(THINK_END)
    while (start := text.find(THINK_START, position)) >= 0 and (end := text.find(THINK_END, start)) >= 0:
        parts.append(text[position:start])
        position = end + len(THINK_END)
    return "".join(parts) + text[position:]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{..}` or `\fbox{..}`. Nested braces count, `\{` and `\}` do not.

    An unclosed last box falls back to the previous closed one. Takes one pass over any text.
    """
    last = max(_boxes(text), default=None)
    return text[last[0] : last[1]] if last else None


def _boxes(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of the content of every closed box, ordered by end."""
    opened: list[tuple[bool, int]] = []  # (is a box, start of its content) for every open brace
    boxes: list[tuple[int, int]] = []
    for match in _BRACES.finditer(text):
        if match["box"] or match["open"]:
            opened.append((match["box"] is not None, match.end()))
        elif match["close"] and opened:
            is_box, start = opened.pop()
            if is_box:
                boxes.append((start, match.start()))
    return boxes


def boxed_answer(text: str, count: int = 1) -> str | None:
    r"""Return the last box, or the boxes of one answer as a list: `1, -2` for `\boxed{1} and \boxed{-2}`.

    Boxes belong together if only blanks, `,`, `and`, `or` or a variable name stand between them; equal contents count
    once. A right box beside a wrong box thus forms a list, which is wrong. A box that is part of an expression gives
    the whole expression (`-42` for `-\boxed{42}`). A box denied by words does not count ('' if no other box remains).
    count: number of values in the answer; if fewer boxes stand together, boxes before them are included.
    """
    boxes = _answer_spans(text)[-MAX_BOXES:]
    accepted = [span for span in boxes if not is_denied(text, *_with_command(text, *span))]
    taken: list[tuple[int, int]] = []
    for start, end in reversed(accepted):
        if taken and len(_contents(text, taken)) >= count and not _are_one_answer(text, end + 1, taken[-1][0]):
            break
        taken.append((start, end))
    if not boxes or not taken:
        return "" if boxes else None
    whole = whole_expression(text, *_with_command(text, *taken[0]))
    return ", ".join(_contents(text, taken[::-1])) if whole is None else whole


def _with_command(text: str, start: int, end: int) -> tuple[int, int]:
    r"""Return (start, end) of a whole box given the span of its content: of `\\boxed{..}` or `\\boxed 5`."""
    begin = text.rindex("\\", 0, start)
    return begin - (text[begin - 1 : begin] == "\\"), end + (text[start - 1] == "{")


def _are_one_answer(text: str, end: int, start: int) -> bool:
    """Return whether the box that ends at `end` and the box whose content begins at `start` belong to one answer."""
    if start - end > _MAX_GAP_CHARS:
        return False
    between = text[end:start].rpartition("\\")[0].removesuffix("\\")  # without the next `\boxed{` or `\\boxed{`
    return _BETWEEN_BOXES.fullmatch(between) is not None


def every_box(text: str) -> list[str]:
    """Return the contents of all boxes in order, without duplicates."""
    return _contents(text, _answer_spans(text))


def _answer_spans(text: str) -> list[tuple[int, int]]:
    """Return (start, end) of the content of every outermost box, in order, including boxes without braces."""
    bare = [(match.start(1), match.start(1) + len(match[1].rstrip("."))) for match in _BARE.finditer(text)]
    return _outermost(sorted([*_boxes(text), *bare], key=lambda span: (span[0], -span[1])))


def _outermost(boxes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the boxes that lie in no other box, in order: the outer box shows everything inside it."""
    outermost: list[tuple[int, int]] = []
    for start, end in boxes:  # sorted by start, so an outer box precedes the boxes inside it
        if not outermost or outermost[-1][1] <= start:
            outermost.append((start, end))
    return outermost


def _contents(text: str, boxes: Sequence[tuple[int, int]]) -> list[str]:
    return list(dict.fromkeys(_BARE.sub(r"\1", unwrap_boxes(text[start:end])) for start, end in boxes))


def last_thought(text: str) -> str | None:
    """Return the last thought, including one that the prompt opened; None if there is none."""
    closed = last_tag(text, "think")
    return text.rpartition(THINK_END)[0] if closed is None and THINK_END in text else closed


def tag_contents(text: str, tag: str) -> list[str]:
    """Return the contents of all complete `<tag>..</tag>` pairs; an opening tag pairs with the next closing tag."""
    contents, position = [], 0
    opening, closing = f"<{tag}>", f"</{tag}>"
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        contents.append(text[start + len(opening) : end])
        position = end + len(closing)
    return contents


def last_tag(text: str, tag: str) -> str | None:
    """Return the last of `tag_contents`; None if there is none."""
    found = tag_contents(text, tag)
    return found[-1] if found else None


def answer_tag(text: str) -> str | None:
    r"""Return the content of the last `<answer>` block, or of the last `\boxed{..}` inside it."""
    content = last_tag(text, "answer")
    if content is None:
        return None
    box = boxed_answer(content)
    alone = box is None or _NUMBER.fullmatch(content.partition("\\boxed")[0].strip())  # `43 \boxed{42}` has two answers
    return content if alone else box


def hash_line(text: str) -> str | None:
    """Return x of the last `#### x` (GSM8K's format) without markup: `**#### 72 (seventy-two)**` gives 72."""
    found = _HASH.findall(text)
    if not found:
        return None
    line = found[-1]
    found_anchor = anchor(line)
    return answer_alone(line if found_anchor is None else found_anchor)


def anchor(text: str) -> str | None:
    """Return x of the last `answer is x` or `Answer: x`, without markup.

    A match denied by the words before it (`Wrong answer: 5`) does not count. x ends at the end of its line, but a
    following line that begins with `or` belongs to x. Bold, a heading (`### Final Answer:`) and a line break after the
    colon are skipped.
    """
    matches = [match for match in find_anchors(text) if not _is_denied_before(text, match.start())]
    if not matches:
        return None
    last = len(matches) - 1
    while last and _CONJUNCTION.search(text, matches[last - 1].end(), matches[last].start()):
        last -= 1  # `Answer: 6 or Answer: 5` is two answers
    rest = text[matches[last].end() :]
    displayed = _DISPLAYED.match(rest)
    end = len(rest[: displayed.end() if displayed else 0]) + len(
        rest[displayed.end() if displayed else 0 :].partition("\n")[0]
    )
    further = _CONTINUATION.match(rest, end)
    return answer_alone(rest[:end] + (" , " + further[0].strip() if further else ""))


def _is_denied_before(text: str, start: int) -> bool:
    """Return whether the clause before `start` denies what follows; checks at most its last 100 characters."""
    before = text[max(0, start - 100) : start]
    return DENIED.search(_CLAUSE.split(before)[-1]) is not None


def answer_alone(line: str) -> str:
    r"""Return an answer without surrounding markup, final full stop and verbal remark: `**12.** I hope so` gives 12.

    A possible second answer stays, so that the answer is wrong: `5 (or 6)`, `5. Not 6`.
    """
    text = _strip_marks(line)
    if len(text) > _MAX_LINE_CHARS:
        return text
    for pattern in (_REASON, _SENTENCE, _SENTENCE_ELSEWHERE):
        text = _strip_marks(pattern.sub("", text))
    remark = _IN_WORDS.search(text)
    if remark and _adds_nothing(remark[0].strip(" ().!"), text[: remark.start()]):
        text = _strip_marks(text[: remark.start()])
    return text


def _adds_nothing(remark: str, answer: str) -> bool:
    """Return whether a remark in brackets is the number in words, or words that do not change the number."""
    words = remark.casefold().split()
    named = next((count for count in range(len(words), 0, -1) if value_of(" ".join(words[:count])) is not None), 0)
    if named and re.sub(r"[^0-9-]", "", answer) != str(value_of(" ".join(words[:named]))):
        return False
    return not any(changes_number(word) for word in re.findall(r"[a-z]+", " ".join(words[named:])))


def _strip_marks(text: str) -> str:
    text = text.strip()
    text = (_BOLD.sub(r"\1", text) if text.startswith("**") else text).strip(_MARKUP)
    text = VERB_BEHIND.sub("", text).strip(_MARKUP)
    if text.endswith((".", "。", "．", "।")):
        text = text[:-1].strip(_MARKUP)
    displayed = _DISPLAYED.fullmatch(text)
    return next(part for part in displayed.groups() if part is not None).strip() if displayed else text


def last_number(text: str) -> str | None:
    """Return the last integer or decimal, with sign and thousands commas: `cost 1,234.50 in all` -> `1,234.50`."""
    found = _NUMBER.findall(text)
    return found[-1].replace("−", "-").replace("–", "-") if found else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed_answer,
    "answer_tag": answer_tag,
    "hash": hash_line,
    "anchor": anchor,
    "last_number": last_number,
}


def extract(text: str, order: Sequence[Extractor]) -> str | None:
    """Return the result of the first extractor in `order` that finds something; None if none does.

    Raises ValueError for an unknown extractor.
    """
    text = visible_text(text)
    for name in order:
        if name not in EXTRACTORS:
            raise ValueError(f"unknown extractor {name!r}; known: {', '.join(EXTRACTORS)}")
        found = EXTRACTORS[name](text)
        if found is not None:
            return found
    return None
