"""A Griffe extension: docstrings of posttrain are plain text, and are made Markdown before they become pages."""

from __future__ import annotations

from typing import Any

import griffe
from reference import as_markdown


class PlainDocstrings(griffe.Extension):
    """Escapes what Markdown would read as HTML or emphasis, and keeps lines with columns as they are."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
