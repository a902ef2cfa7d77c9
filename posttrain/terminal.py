"""Terminal output with control characters escaped.

Texts come from models, tools, servers and file names. No control character reaches the terminal as a command (colors,
titles, links, clipboard, rewritten lines, reversed text). Files (samples.jsonl, outputs) hold texts exactly. The
escapes are those of JSON, so JSON on stdout stays exact too.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that change the text direction
    "\xad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # characters without width
    "\ud800-\udfff]"  # surrogates, which cannot be printed
)


def escape_control_characters(text: str) -> str:
    """Return the text with control characters as `\\u001b`; tabs and line feeds are unchanged.

    Also escaped: marks that change the text direction, zero-width characters that no script or emoji needs (text can be
    hidden in them), and surrogates.
    """
    return _CONTROLS.sub(lambda match: _escape(match[0]), text)


def _escape(character: str) -> str:
    """Return the JSON escape of a character: four hex digits, or a surrogate pair beyond the first plane."""
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def say(text: object = "", *, end: str = "\n") -> None:
    """Print a command's result to stdout."""
    print(escape_control_characters(str(text)), end=end, flush=True)


def note(text: object = "") -> None:
    """Print a message for the user to stderr; dropped if its reader has exited, so that a run goes on."""
    with contextlib.suppress(BrokenPipeError):
        print(escape_control_characters(str(text)), file=sys.stderr, flush=True)


def note_escaped(text: str) -> None:
    """Print a text to stderr whose parts are already escaped, e.g. by `bold`."""
    print(text, file=sys.stderr, flush=True)


def bold(text: str) -> str:
    """Return the escaped text, in bold if stderr is a terminal and NO_COLOR is not set."""
    escaped = escape_control_characters(text)
    return f"\x1b[1m{escaped}\x1b[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else escaped


def console(**options: Any) -> Console:
    """Return a rich console that escapes control characters in texts; its own colors and cursor moves still work."""
    from rich.console import Console
    from rich.segment import Segment

    class Escaping(Console):
        def on_broken_pipe(self) -> None:
            """Let the BrokenPipeError through, which ends a run's display and not the run; rich would exit."""
            raise  # rich calls this in its `except BrokenPipeError`

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(escape_control_characters(text), style)

    return Escaping(**options)
