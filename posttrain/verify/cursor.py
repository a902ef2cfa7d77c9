"""A place in the tokens of an answer, and what can be asked of it. `reading.Reader` is one with a grammar."""

from __future__ import annotations

from posttrain.verify.math_values import Unreadable
from posttrain.verify.tokens import Token

CLOSING = {"(": (")", "]"), "[": ("]", ")"), "\\{": ("\\}",), "{": ("}",), "langle": ("rangle",)}
OPENERS = frozenset([*CLOSING, "lfloor", "lceil"])
CLOSERS = frozenset([")", "]", "\\}", "}", "rangle", "rfloor", "rceil"])
SEPARATORS = frozenset([",", ";", "and", "or", "\\"])
END = Token("end", "")


def opens(token: Token) -> bool:
    """Whether a token opens a bracket or an environment."""
    return token.kind in ("sign", "command") and (token.text in OPENERS or token.text.startswith("begin:"))


def closes(token: Token) -> bool:
    """Whether a token closes a bracket or an environment."""
    return token.kind in ("sign", "command") and (token.text in CLOSERS or token.text.startswith("end:"))


class Cursor:
    """Tokens and the place of the next one."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.place = 0

    def peek(self, ahead: int = 0) -> Token:
        """The token to come, or END."""
        place = self.place + ahead
        return self.tokens[place] if 0 <= place < len(self.tokens) else END

    def at(self, *texts: str) -> bool:
        token = self.peek()
        return token.kind in ("sign", "command") and token.text in texts

    def take(self, *texts: str) -> bool:
        found = self.at(*texts)
        self.place += found
        return found

    def expect(self, *texts: str) -> str:
        if not self.take(*texts):
            raise Unreadable(f"{texts[0]} is missing")
        return self.tokens[self.place - 1].text

    def next(self) -> Token:
        token = self.peek()
        if token is END:
            raise Unreadable("the text ends too soon")
        self.place += 1
        return token

    def closing_place(self) -> int:
        """Where the bracket closes that opens at the place before this one."""
        depth = 1
        for place in range(self.place, len(self.tokens)):
            depth += opens(self.tokens[place]) - closes(self.tokens[place])
            if depth == 0:
                return place
        raise Unreadable("a bracket does not close")

    def outer(self, end: int) -> list[int]:
        """The places from here to `end` that stand in no further bracket."""
        found, depth = [], 0
        for place in range(self.place, end):
            depth -= closes(self.tokens[place])
            if depth == 0:
                found.append(place)
            depth += opens(self.tokens[place])
        return found

    def is_list(self, end: int) -> bool:
        outer = (self.tokens[place] for place in self.outer(end))
        return any(one.kind in ("sign", "command") and one.text in SEPARATORS for one in outer)
