"""Cursor over the tokens of an answer. `reading.Reader` extends it with a grammar."""

from __future__ import annotations

from posttrain.verify.math_values import Unreadable
from posttrain.verify.tokens import Token

CLOSING = {"(": (")", "]"), "[": ("]", ")"), "\\{": ("\\}",), "{": ("}",), "langle": ("rangle",)}
OPENERS = frozenset([*CLOSING, "lfloor", "lceil"])
CLOSERS = frozenset([")", "]", "\\}", "}", "rangle", "rfloor", "rceil"])
SEPARATORS = frozenset([",", ";", "and", "or", "\\"])
END = Token("end", "")


def opens(token: Token) -> bool:
    """Return whether a token opens a bracket or an environment."""
    return token.kind in ("sign", "command") and (token.text in OPENERS or token.text.startswith("begin:"))


def closes(token: Token) -> bool:
    """Return whether a token closes a bracket or an environment."""
    return token.kind in ("sign", "command") and (token.text in CLOSERS or token.text.startswith("end:"))


class Cursor:
    """Tokens and the position of the next token."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.position = 0

    def peek(self, ahead: int = 0) -> Token:
        """Return the next token without consuming it, or END."""
        position = self.position + ahead
        return self.tokens[position] if 0 <= position < len(self.tokens) else END

    def at(self, *texts: str) -> bool:
        token = self.peek()
        return token.kind in ("sign", "command") and token.text in texts

    def take(self, *texts: str) -> bool:
        found = self.at(*texts)
        self.position += found
        return found

    def expect(self, *texts: str) -> str:
        if not self.take(*texts):
            raise Unreadable(f"{texts[0]} is missing")
        return self.tokens[self.position - 1].text

    def next(self) -> Token:
        token = self.peek()
        if token is END:
            raise Unreadable("the text ends too soon")
        self.position += 1
        return token

    def closing_position(self) -> int:
        """Return the position of the bracket that closes the bracket just before the current position."""
        depth = 1
        for position in range(self.position, len(self.tokens)):
            depth += opens(self.tokens[position]) - closes(self.tokens[position])
            if depth == 0:
                return position
        raise Unreadable("a bracket does not close")

    def outer(self, end: int) -> list[int]:
        """Return the positions from here to `end` that are not inside further brackets."""
        positions, depth = [], 0
        for position in range(self.position, end):
            depth -= closes(self.tokens[position])
            if depth == 0:
                positions.append(position)
            depth += opens(self.tokens[position])
        return positions

    def is_list(self, end: int) -> bool:
        outer = (self.tokens[position] for position in self.outer(end))
        return any(token.kind in ("sign", "command") and token.text in SEPARATORS for token in outer)
