r"""Context of a box: math that changes its value, words that deny it, markup that hides it.

Pure functions of text. Only what touches a box is examined (`whole_expression`), and a few plain phrases right before
or after it (`is_denied`). Irony, or a denial two sentences later, is not detected.
"""

from __future__ import annotations

import re

_THOUGHT_ENDS = re.compile(r"</(?:think|thinking|thought|thoughts|reasoning)>", re.IGNORECASE)
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\})*+\}"
_HIDDEN = re.compile(rf"\\[hv]?phantom\s*{_GROUP}|(?<!~)~~(?=[^\s~])[^~\n]*+~~(?!~)")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BOX_BRACE = re.compile(r"(?P<box>\\?\\(?:boxed|fbox)\s*)\{|(?<!\\)[{}]")
_DECIMAL = re.compile(r"\d+")
_POWER = re.compile(r"\s*[\^_!]")

# Markup between the box and what changes it.
_FACE = r"math(?:bf|rm|it|sf|tt|cal)|text(?:bf|it|rm|sf|tt|color|normal)?|boldsymbol|bm|emph|color|colorbox|underline"
_IGNORED = r"\s|\\[ ,;:!]|~|\\(?:left|right|displaystyle|textstyle|bf|rm|it|big|Big|large|Large|huge|Huge)(?![A-Za-z])"
_IGNORED_BEFORE = re.compile(rf"(?:{_IGNORED}|\\(?:{_FACE})\s*(?:\{{\w+\}}\s*)?\{{|(?<![\\^_}}\]A-Za-z])\{{)+$")
_IGNORED_AFTER = re.compile(rf"(?:{_IGNORED}|\}})*")
_ORDER = (
    r"\\(?:ne|neq|not|lt|gt|leq?|geq?|leqslant|geqslant|leqq|geqq|ll|gg|notin|nleq|ngeq)(?![A-Za-z])|\\not\s*=|[≤≥≠]"
)
_SIGN = r"\\(?:pm|mp|cdot|times|div|ast|circ)(?![A-Za-z])|[−±×÷·√^/+]"
_APPLIED = (
    r"\\(?:[dtc]?frac|sqrt|sin|cos|tan|cot|ln|log|lg|exp|binom|lfloor|lceil|neg|lnot)(?![A-Za-z])"
    r"|(?<!\w)(?:sqrt|ln|log|exp|sin|cos|tan)\(?"
)
_CHANGED_BEFORE = re.compile(rf"(?:{_ORDER}|{_SIGN}|{_APPLIED}|(?<=[\w)}}])\s*\*|[0-9]|-|(?<![-=~])[<>]=?|!=)$")
_CHANGED_AFTER = re.compile(
    rf"\s*(?:{_ORDER}|{_SIGN}|!|_|\\%|%|[<>]=?\s*[0-9\\A-Za-z.](?![^<>\n]{{0,30}}>)|\*\s*(?=[0-9A-Za-z(\\])|-"
    r"|\\(?:pi|sqrt|[dtc]?frac|ln|log|sin|cos|bmod|pmod|mod)(?![A-Za-z]))|[0-9]"
)
_WRAPPED = re.compile(
    r"(?:\\(?:[dtc]?frac|sqrt|binom|overline|bar|x?b?cancel|sout|st|not|ln|log|sin|cos|tan|exp)|[\^_]|\\sqrt\[[^\]]*\])\s*$"
)
_SCALE = re.compile(
    r"(?:[\s$*~}]|\\[ ,;:!)\]]|\\(?:text|mathrm|mbox)\s*\{)*"
    r"((?:hundred|thousand|million|billion|trillion|dozen|lakh|crore)(?!s\s+of\b)s?"
    r"|factorial|squared|cubed)\b"
)
# Where an expression ends: relations that only name its value, punctuation, words, and math delimiters.
_RELATION = (
    r"(?<![<>!\\])(?<!\\not)=(?!=)|\\(?:approx|equiv|simeq|cong|in|to|colon|therefore|because|quad|qquad|tag|blacksquare|square|checkmark"
    r"|(?:long|Long)?(?:left)?(?:right|Right)arrow|implies|iff)(?![A-Za-z])|[≈≡→⇒∴]"
)
_EDGE = re.compile(
    rf"{_RELATION}|\$+|\\[()\[\]]|\\\\(?!boxed|fbox)|[,;:&\n]|\\(?:text|mbox|textrm)\s*\{{[^{{}}]*\}}|\\(?:begin|end)\s*\{{\w+\*?\}}"
    r"|(?<![\\A-Za-z])(?!sqrt|ln|log|exp|sin|cos|tan)[A-Za-z]{2,}|\.(?![0-9])|\*\*"
)
MAX_CONTEXT_CHARS = 300  # characters on each side of a box to examine

_OPENERS = r"(?:[\s$*(:{\"'`]|\\[\[(]|\\(?:text|mathbf|textbf|mathrm)\s*\{)*$"
_FILLER = (
    r"(?:(?:the|a|an|my|be|equals?|to|simply|just|really|actually|necessarily|think|believe|say|that|it|is"
    r"|answer|final|correct|right)\s+)"
)
_DENIED_BEFORE = re.compile(
    rf"(?:(?:\bnot|n['’]t|\bnever|\bnor|\brather\s+than|\binstead\s+of|\bother\s+than|\bexcept)\s+{_FILLER}{{0,6}}"
    rf"|(?:\bdoubt|\bdeny|\bunlikely|\b(?:false|wrong|incorrect|untrue))\s+(?:that|if|whether)\s+{_FILLER}{{0,6}}"
    rf"|\bdoubt\s+{_FILLER}{{1,6}}"
    r"|\b(?:wrong|incorrect|mistaken)\s+(?:final\s+)?(?:answer|result|solution)s?\s*(?:(?:is|was|are|would\s+be)\b)?\s*)"
    + _OPENERS,
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"(?:[\s$*}.]|\\[)\]])*(?:(?:is|was|would\s+be)\s+)?\(?(?:wrong|incorrect|false|not\s+(?:it|right|correct|true|valid|(?:the|an?|my)\s+"
    r"(?:final\s+|correct\s+|right\s+)?answer)|(?:is|was)n['’]t\s+(?:it|right|correct|true|the\s+\w*\s*answer))\b",
    re.IGNORECASE,
)


def visible_text(text: str) -> str:
    r"""Remove thoughts in other tags (`<thinking>`, `<THINK>`), comments, `\phantom` and ~~struck~~ text.

    Text before the last closing tag of a thought is no answer, as in `extract.after_think`.
    """
    for match in _THOUGHT_ENDS.finditer(text):
        last = match.end()
    text = text[last:] if _THOUGHT_ENDS.search(text) else text
    if "<!--" in text:
        text = _without_comments(text)
    if "%" in text and _BOX.search(text):
        text = "\n".join(map(_before_comment, text.split("\n")))
    return _HIDDEN.sub(" ", text) if "phantom" in text or "~~" in text else text


def _without_comments(text: str) -> str:
    """Remove `<!-- .. -->`; an unclosed comment stays."""
    parts, position = [], 0
    while (start := text.find("<!--", position)) >= 0 and (end := text.find("-->", start)) >= 0:
        parts.append(text[position:start])
        position = end + 3
    return "".join(parts) + text[position:]


def _before_comment(line: str) -> str:
    """Strip a LaTeX comment that contains a box: `%` at the start of a line or after a box, but not `50% of`."""
    position = line.find("%")
    before = line[:position].rstrip()
    if position < 0 or not _BOX.search(line, position) or before.endswith("\\") or before[-1:].isdigit():
        return line
    return before if not before or _BOX.search(before) else line


def whole_expression(text: str, start: int, end: int) -> str | None:
    r"""Return the expression that contains the box, unwrapped: `-42` for `-\boxed{42}`; None if there is none.

    start, end: span of the box including its command and braces. Relations that name its value end the expression (`x
    =`); other relations belong to it (`x > \boxed{42}`).
    """
    before, after = text[max(0, start - MAX_CONTEXT_CHARS) : start], text[end : end + MAX_CONTEXT_CHARS]
    scale = _SCALE.match(after)
    outer = _wrapping_command(before)
    if scale is None and outer is None and not _changes_before(before) and not _changes_after(before, after):
        return None
    inner = before if outer is None else before[:outer]
    left = max((match.end() for match in _EDGE.finditer(inner)), default=0)
    right = next((match.start() for match in _EDGE.finditer(after)), len(after))
    tail = rf"\text{{ {scale[1]}}}" if scale else after[:right]
    return unwrap_boxes(before[left:] + text[start:end] + tail).strip()


def _changes_before(before: str) -> bool:
    bare = _IGNORED_BEFORE.sub("", before)
    bare = re.sub(r"(?:^|(?<=[^<]))<[/\w][^<>\n]{0,40}>\s*$", "", bare)
    found = _CHANGED_BEFORE.search(bare)
    if found is None:
        return False
    line = bare.rpartition("\n")[2]
    mark = found[0]
    if mark in "-+>" and not line[: -len(mark)].strip() and before.endswith((" ", "\n")):
        return _in_maths(before)  # a bullet, or a quotation
    if mark.isdigit():
        return before.endswith(mark)  # not the 2 of `Step 2 \boxed{..}`
    if mark == "-" and before[-1:].isspace() and re.search(r"[A-Za-z.)*]\s+-$", line):
        return _in_maths(before)  # a dash
    return True


def _changes_after(before: str, after: str) -> bool:
    rest = after[_IGNORED_AFTER.match(after).end() :]  # type: ignore[union-attr]
    found = _CHANGED_AFTER.match(rest)
    if found is None:
        return False
    mark = found[0].strip()
    in_maths = _in_maths(before)
    if mark[:1].isdigit():
        return after.startswith(mark)
    if mark == "!" and not in_maths:
        return not re.search(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", "", before.rpartition("\n")[2]))
    if mark == "-" and not in_maths:
        return re.match(r"-\s*[0-9\\(]|-[A-Za-z]\b", rest) is not None and not rest.startswith(("--", "- \\("))
    if mark == "_" and not in_maths:
        return re.match(r"_[{0-9]", rest) is not None
    if mark in ("+", "/") and not in_maths:
        return re.match(r"[+/]\s*(?:[0-9\\({$]|[A-Za-z]\b)", rest) is not None
    return True


def _in_maths(before: str) -> bool:
    """Return whether math mode is open at the end of a text: an odd `$`, or an unclosed delimiter."""
    paragraph = before.rpartition("\n\n")[2]
    if len(re.findall(r"(?<!\\)\$\$?", paragraph)) % 2:
        return True
    opened = [match[0] for match in re.finditer(r"\\[\[\]()]|\\(?:begin|end)(?=\{)", before)]
    return bool(opened) and opened[-1] in (r"\[", r"\(", r"\begin")


def _wrapping_command(before: str) -> int | None:
    r"""Return the start of the command that has the box as argument and changes it: `\sqrt{`, `2^{`; else None."""
    depth, found = 0, None
    for position in range(len(before) - 1, -1, -1):
        character = before[position]
        if character not in "{}" or before[position - 1 : position] == "\\":
            continue
        depth += 1 if character == "}" else -1
        if depth < 0:
            depth = 0
            command = _WRAPPED.search(re.sub(rf"(?:\s*{_GROUP})+$", "", before[:position]))
            found = found if command is None else command.start()
    return found


def unwrap_boxes(text: str) -> str:
    r"""Replace the boxes in a text by their contents, in parentheses if a power or index follows."""
    opened: list[re.Match[str]] = []  # every open brace, or the box that it belongs to
    edits: dict[int, tuple[int, str]] = {}  # start -> end, new text
    for mark in _BOX_BRACE.finditer(text):
        if mark[0] != "}":
            opened.append(mark)
        elif opened and (box := opened.pop())["box"] is not None:
            content = box.end(), mark.start()
            alone = content[1] - content[0] <= 1 or _DECIMAL.fullmatch(text, *content)
            grouped = not alone and _POWER.match(text, mark.end())
            edits[box.start()] = box.end(), "(" if grouped else ""
            edits[mark.start()] = mark.end(), ")" if grouped else ""
    edits |= {box.start(): (box.end(), "") for box in opened if box["box"] is not None}
    parts, at = [], 0
    for start, (end, new) in sorted(edits.items()):
        parts += [text[at:start], new]
        at = end
    return "".join(parts) + text[at:]


def is_denied(text: str, start: int, end: int) -> bool:
    r"""Return whether words right before or after a box deny that it is the answer: `It is not \boxed{42}`."""
    before = text[max(0, start - 120) : start]
    return _DENIED_BEFORE.search(before) is not None or _DENIED_AFTER.match(text[end : end + 80]) is not None
