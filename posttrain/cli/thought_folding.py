"""Splitting of streamed text into a model's thoughts and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"
Kind = Literal["thought", "answer"]


class ThoughtSplitter:
    """Splits streamed text at <think> and </think>. A possible beginning of a tag is buffered until the next text
    arrives.

    inside: whether the text begins inside a thought that the prompt has opened.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self.inside, self._buffer = inside, ""

    def add(self, text: str) -> Iterator[tuple[Kind, str]]:
        """Yield the parts of the text that are complete; an empty thought part marks the beginning of a thought."""
        self._buffer += text
        while True:
            tag = CLOSE if self.inside else OPEN
            before, found, after = self._buffer.partition(tag)
            if not found:
                break
            yield from self._part(before)
            self.inside, self._buffer = not self.inside, after
            if self.inside:
                yield "thought", ""
        partial = next((n for n in range(len(tag) - 1, 0, -1) if self._buffer.endswith(tag[:n])), 0)
        ready, self._buffer = self._buffer[: len(self._buffer) - partial], self._buffer[len(self._buffer) - partial :]
        yield from self._part(ready)

    def end(self) -> Iterator[tuple[Kind, str]]:
        """Yield the buffered text at the end of the stream."""
        rest, self._buffer = self._buffer, ""
        yield from self._part(rest)

    def _part(self, text: str) -> Iterator[tuple[Kind, str]]:
        if text:
            yield ("thought" if self.inside else "answer"), text
