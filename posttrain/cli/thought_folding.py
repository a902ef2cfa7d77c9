"""Splitting of streamed text into a model's thoughts and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"
Kind = Literal["thought", "said"]


class Divided:
    """Splits streamed text at <think> and </think>. A possible beginning of a tag is buffered until the next text
    arrives.

    inside: whether the text begins inside a thought that the prompt has opened.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self.inside, self._held = inside, ""

    def add(self, piece: str) -> Iterator[tuple[Kind, str]]:
        """Yield the parts of the text that are complete; an empty thought part marks the beginning of a thought."""
        self._held += piece
        while True:
            tag = CLOSE if self.inside else OPEN
            before, found, behind = self._held.partition(tag)
            if not found:
                break
            yield from self._part(before)
            self.inside, self._held = not self.inside, behind
            if self.inside:
                yield "thought", ""
        kept = next((n for n in range(len(tag) - 1, 0, -1) if self._held.endswith(tag[:n])), 0)
        ready, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        yield from self._part(ready)

    def end(self) -> Iterator[tuple[Kind, str]]:
        """Yield the buffered text at the end of the stream."""
        left, self._held = self._held, ""
        yield from self._part(left)

    def _part(self, text: str) -> Iterator[tuple[Kind, str]]:
        if text:
            yield ("thought" if self.inside else "said"), text
