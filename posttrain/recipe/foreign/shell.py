"""Parser for shell scripts that start a training run. Variables are substituted; nothing is executed.

Supported: assignments (also of arrays and of `<<EOF` texts), `${NAME:-default}`, `"${ARRAY[@]}"`, integer arithmetic in
`$((...))` and `$(expr ...)`, quotes, continued lines, comments. A variable that the script does not set stays
`${NAME}`, and any other `$(command)` stays as it is.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNED = re.compile(rf"({_NAME})(\+?=)(.*)\Z", re.DOTALL)
_OPENING = ("if", "for", "while", "until", "case")
_CLOSING = ("fi", "done", "esac")
_KEYWORDS = ("if", "then", "elif", "else", "do", "while", "until", "!", "{", "export", "local", "declare", "readonly")
_BREAKS = ("\n", ";", "&", "|")


@dataclass(frozen=True)
class Word:
    """A word of a command after expansion, and the line of the script where it begins."""

    text: str
    line: int


@dataclass
class _Raw:
    """A word before expansion: fragments of text, each with whether its variables are expanded and whether it is
    quoted."""

    line: int
    fragments: list[tuple[str, bool, bool]] = field(default_factory=list)  # text, expand, quoted
    array: list[_Raw] | None = None  # entries of NAME=(...)

    @property
    def plain(self) -> str:
        return "".join(text for text, _, _ in self.fragments)


def commands(text: str) -> list[list[Word]]:
    """Return the simple commands of a script in order, with variables substituted by their values at that point.

    Assignments in front of a command remain words of it (`NPROC_PER_NODE=4 swift ...`). In branches of `if` and `case`
    a variable that has a value other than "" keeps it, because it is unknown which branch runs.
    """
    scope: dict[str, list[Word]] = {}
    commands: list[list[Word]] = []
    depth = 0
    for raw in _split(text):
        words = list(raw)
        depth -= bool(words and words[0].plain in _CLOSING)
        depth += bool(words and words[0].plain in _OPENING)
        if words and words[0].plain == "case" and "in" in [word.plain for word in words]:
            words = words[[word.plain for word in words].index("in") + 1 :]
        # The last pattern is a `case` label.
        while words and (words[0].plain in _KEYWORDS or re.fullmatch(r"[^()$]+\)", words[0].plain)):
            words.pop(0)
        if words and words[0].plain == "read" and (heredoc := _heredoc_of(words)):
            name, body = heredoc
            scope[name] = [Word(_expand(body, scope), words[0].line)]
            continue
        assigned = [(word, match) for word in words if (match := _ASSIGNED.match(word.plain))]
        if assigned and len(assigned) == len(words):
            for word, match in assigned:
                _assign(word, match, scope, keep=depth > 0)
            continue
        if expanded := [expanded_word for word in words for expanded_word in _expand_word(word, scope)]:
            commands.append(expanded)
    return commands


def _assign(word: _Raw, match: re.Match[str], scope: dict[str, list[Word]], *, keep: bool) -> None:
    """Assign a variable. keep: do not replace an existing value."""
    name, adds = match[1], match[2] == "+="
    if keep and not adds and any(word.text for word in scope.get(name, [])):
        return
    if word.array is not None:
        values = [expanded_word for entry in word.array for expanded_word in _expand_word(entry, scope)]
    else:
        value = _without_name(word, len(match[1]) + len(match[2]))
        text = "".join(expanded_word.text for expanded_word in _expand_word(value, scope, whole=True))
        values = [Word(text, word.line)]
    scope[name] = [*scope.get(name, []), *values] if adds else values


def _without_name(word: _Raw, length: int) -> _Raw:
    """Return the value of an assignment: the word without its first `length` characters."""
    fragments = []
    for text, expand, quoted in word.fragments:
        cut = min(length, len(text))
        length -= cut
        fragments.append((text[cut:], expand, quoted))
    return _Raw(word.line, fragments)


def _heredoc_of(words: Sequence[_Raw]) -> tuple[str, str] | None:
    """Return the variable and the text of `read -r -d '' NAME <<EOF`."""
    names = [word.plain for word in words[1:] if re.fullmatch(_NAME, word.plain)]
    bodies = [word.plain.removeprefix("<<") for word in words if word.plain.startswith("<<")]
    return (names[-1], bodies[0]) if names and bodies else None


def _expand_word(raw: _Raw, scope: Mapping[str, Sequence[Word]], *, whole: bool = False) -> list[Word]:
    """Expand a word: no word for an empty variable, several for an array or unquoted text.

    whole: return a single word, whatever it contains (the right side of an assignment).
    """
    words = [Word("", raw.line)]
    quoted_any = False
    for text, expand, quoted in raw.fragments:
        quoted_any |= quoted
        array = re.fullmatch(rf"\$\{{({_NAME})\[[@*]\]\}}", text) if expand else None
        if array:
            parts = list(scope.get(array[1], []))
        else:
            value = _expand(text, scope) if expand else text
            one = quoted or whole or value == text or "$(" in value
            parts = [Word(part, raw.line) for part in ([value] if one else re.split(r"\s+", value))]
        if parts:
            words = [*words[:-1], Word(words[-1].text + parts[0].text, parts[0].line), *parts[1:]]
    empty = quoted_any and len(words) == 1 and not _is_droppable(raw)
    return [word for word in words if word.text or empty]


def _is_droppable(raw: _Raw) -> bool:
    """Return whether a word is only `"$@"` or an array, which may be empty."""
    return bool(re.fullmatch(rf"\$[@*]|\$\{{{_NAME}\[[@*]\]\}}", raw.plain))


def _expand(text: str, scope: Mapping[str, Sequence[Word]]) -> str:
    """Substitute the variables and arithmetic expressions of a text, innermost first."""
    text = re.sub(r"\$[@*]", "", text)
    for _ in range(10):  # defaults may contain variables
        before = text
        text = re.sub(rf"\$\{{({_NAME}|\d)(?:(:?[-=?])([^{{}}]*))?\}}", lambda m: _value(m[1], m[3], scope, m[2]), text)
        text = re.sub(rf"\$({_NAME})", lambda m: _value(m[1], None, scope), text)
        text = re.sub(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)", lambda m: _evaluate_arithmetic(m[1], scope), text)
        text = re.sub(
            r"\$\(\s*expr ([^()]*)\)",
            lambda m: _evaluate_arithmetic(m[1].replace("$", "").replace("\\*", "*"), scope, m[0]),
            text,
        )
        if text == before:
            break
    return text.replace("\0", "${").replace("\1", "}")


def _value(name: str, default: str | None, scope: Mapping[str, Sequence[Word]], sign: str | None = None) -> str:
    """Return the value of a variable. sign: `-`, or `:-`, which also replaces an empty value by the default; `?`
    and `:?` have a message in its place."""
    value = " ".join(word.text for word in scope.get(name, []))
    if value or (scope.get(name) and not (sign or "").startswith(":")):
        return value
    if default is not None and not (sign or "").endswith("?"):
        return default.replace('"', "")
    return f"\0{name}\1"  # unset in the script: the recipe reads it from the environment


_SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
          ast.Div: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}  # fmt: skip


def _evaluate_arithmetic(text: str, scope: Mapping[str, Sequence[Word]], written: str = "") -> str:
    """Return the value of `$((...))`; its text if it is not made of +, -, *, /, % and ** over whole numbers."""
    filled = re.sub(
        rf"(?<![\w.]){_NAME}", lambda m: " ".join(word.text for word in scope.get(m[0], [Word(m[0], 0)])), text
    )
    try:
        return str(_compute(ast.parse(filled.strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError):
        return written or f"$(({text}))"


def _compute(node: ast.AST) -> int:
    """Evaluate whole-number arithmetic. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 2**63:
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = _compute(node.left), _compute(node.right)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= 64:
            raise ValueError("exponent out of range")
        return int(_SIGNS[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_compute(node.operand)
    raise ValueError("not whole-number arithmetic")


def _split(text: str) -> list[list[_Raw]]:
    """Split a script into commands, each a list of words before expansion."""
    reader = _Reader(text)
    reader.read()
    return [command for command in reader.commands if command]


class _Reader:
    """A single pass over the characters of a script."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1
        self.commands: list[list[_Raw]] = [[]]
        self.word: _Raw | None = None
        self.arrays: list[_Raw] = []  # arrays that are still open
        self.heredocs: list[tuple[_Raw, str]] = []

    def read(self) -> None:
        while self.at < len(self.text):
            self.step()
        self.end_word()

    def take(self, count: int = 1) -> str:
        found = self.text[self.at : self.at + count]
        self.at += count
        self.line += found.count("\n")
        return found

    def add(self, text: str, *, expand: bool = False, quoted: bool = False) -> None:
        if self.word is None:
            self.word = _Raw(self.line)
        fragments = self.word.fragments
        if fragments and fragments[-1][1:] == (expand, quoted) and not expand:
            fragments[-1] = (fragments[-1][0] + text, expand, quoted)
        else:
            fragments.append((text, expand, quoted))

    def end_word(self) -> None:
        if self.word is not None:
            (self.arrays[-1].array if self.arrays else self.commands[-1]).append(self.word)  # type: ignore[union-attr]
            self.word = None

    def step(self) -> None:
        """Read the next token or character."""
        char = self.text[self.at]
        if char == "\\":
            self.read_escape()
        elif char == "'":
            end = self.text.find("'", self.at + 1)
            end = len(self.text) if end < 0 else end
            body = self.take(end + 1 - self.at)
            self.add(body.strip("'") if len(body) > 1 else "", quoted=True)
        elif char == '"':
            self.read_double_quoted()
        elif char == "$":
            self.read_variable(quoted=False)
        elif char == "#" and self.word is None:
            self.take(len(re.match(r"[^\n]*", self.text[self.at :])[0]))  # type: ignore[index]
        elif char == "(" and self.word is not None and re.search(r"\+?=\Z", self.word.plain):
            self.take()
            self.word.array = []
            self.arrays.append(self.word)
            self.word = None
        elif char == ")" and self.arrays:
            self.take()
            self.end_word()
            whole = self.arrays.pop()
            self.commands[-1].append(whole)
        elif char in " \t\r" or (char == "\n" and self.arrays):
            self.take()
            self.end_word()
        elif self.text.startswith("<<", self.at) and not self.text.startswith("<<<", self.at):
            self.read_heredoc()
        elif char in _BREAKS:
            self.take()
            self.end_word()
            self.commands.append([])
            if char == "\n":
                self.read_heredoc_bodies()
        else:
            self.add(self.take())

    def read_escape(self) -> None:
        pair = self.take(2)
        if pair == "\\\r":
            self.take()
        elif pair != "\\\n":  # otherwise the line continues
            self.add(pair[1:], quoted=True)

    def read_double_quoted(self) -> None:
        """Read a double-quoted string, in which variables are expanded."""
        self.take()
        self.add("", quoted=True)
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text[self.at] == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                pair = self.take(2)
                self.add("" if pair[1] == "\n" else pair[1], quoted=True)
            elif self.text[self.at] == "$":
                self.read_variable(quoted=True)
            else:
                self.add(self.take(), quoted=True)
        self.take()

    def read_variable(self, *, quoted: bool) -> None:
        """Read `$NAME`, `${...}`, `$(...)` or `$((...))`."""
        text = self.text[self.at :]
        if text.startswith("$((") and (end := text.find("))")) > 0:
            self.add(self.take(end + 2), expand=True, quoted=quoted)
        elif text.startswith("$("):
            self.add(self.take(_closing_position(text, "(", ")")), expand=text.startswith("$(expr "), quoted=True)
        elif text.startswith("${"):
            self.add(self.take(_closing_position(text, "{", "}")), expand=True, quoted=quoted)
        elif named := re.match(rf"\$({_NAME}|[@*])", text):
            self.add(self.take(len(named[0])), expand=True, quoted=quoted)
        else:
            self.add(self.take(2), quoted=True)

    def read_heredoc(self) -> None:
        """Read the start of `<<EOF`; the text follows after the line."""
        self.end_word()
        found = re.match(r"<<-?\s*(['\"]?)(\w+)\1", self.text[self.at :])
        if not found:
            self.add(self.take(2))
            return
        self.take(len(found[0]))
        self.add("<<", quoted=True)
        word = self.word
        self.end_word()
        assert word is not None
        self.heredocs.append((word, found[2]))

    def read_heredoc_bodies(self) -> None:
        """Read the `<<EOF` texts that belong to the line that has just ended."""
        for word, mark in self.heredocs:
            end = re.search(rf"^\s*{re.escape(mark)}\s*$", self.text[self.at :], re.MULTILINE)
            body = self.take(end.start() if end else len(self.text) - self.at)
            self.take(end.end() - end.start() if end else 0)
            word.fragments = [("<<" + body.replace("\\\n", " "), False, True)]
        self.heredocs = []


def _closing_position(text: str, opening: str, closing: str) -> int:
    """Return the number of characters up to and including the bracket that closes the first one."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char == opening) - (char == closing)
        if char == closing and depth == 0:
            return position + 1
    return len(text)
