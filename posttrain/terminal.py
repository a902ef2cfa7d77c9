"""What is printed for people. Texts come from models, tools, servers and file names, so control characters are escaped:
none of them reaches the terminal as a command (colours, titles, links, clipboard, rewritten lines, reversed text).

Files (samples.jsonl, outputs) hold texts exactly. The escapes are those of JSON, so JSON on stdout stays exact too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # all of C0 but tab and line feed, DEL, all of C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that change the direction of text
    "\xad\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # what takes no room
    "\ud800-\udfff]"  # halves of characters: they cannot be printed at all
)


def escape_control_characters(text: str) -> str:
    """The text with control characters as `\\u001b`; tabs and line feeds stay.

    Also escaped: marks that change the direction of text, characters without a width that no script or emoji needs
    (text can be hidden in them), and halves of characters.
    """
    return _CONTROLS.sub(lambda found: _escape(found[0]), text)


def _escape(character: str) -> str:
    """As in JSON: four digits, two times four beyond the first plane."""
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def say(text: object = "", *, end: str = "\n") -> None:
    """Print on stdout: a command's result."""
    print(escape_control_characters(str(text)), end=end, flush=True)


def note(text: object = "") -> None:
    """Print on stderr: what a person should know."""
    print(escape_control_characters(str(text)), file=sys.stderr, flush=True)


def note_escaped(text: str) -> None:
    """`note` for a text whose parts are escaped, or `bold`."""
    print(text, file=sys.stderr, flush=True)


def bold(text: str) -> str:
    """The text, escaped; bold where stderr is a terminal, unless NO_COLOR is set."""
    escaped = escape_control_characters(text)
    return f"\x1b[1m{escaped}\x1b[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else escaped


def console(**options: Any) -> Console:
    """A rich console that escapes control characters in all that it shows; its own colours and moves stay."""
    from rich.console import Console
    from rich.segment import Segment

    class Escaping(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(escape_control_characters(text), style)

    return Escaping(**options)
