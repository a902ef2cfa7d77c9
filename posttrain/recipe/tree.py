"""A recipe as a tree of values that know where they were written. Layers of it are merged; the later one wins."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Scalar = str | int | float | bool | None
Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Origin:
    """Who gave a value. `where` is the preset's name, `file:line:column`, or the override as typed."""

    kind: Literal["default", "preset", "file", "command line"]
    where: str = ""

    def __str__(self) -> str:
        if self.kind == "preset":
            return f"preset {self.where}"
        return re.sub(r"(:\d+):\d+$", r"\1", self.where) if self.kind == "file" else self.kind

    @property
    def mark(self) -> str:
        """What stands at the start of an error line: `file:line:column`, `preset NAME`, or `command line`."""
        return self.where if self.kind == "file" else str(self)


DEFAULT = Origin("default")


@dataclass
class Node:
    """A scalar, a mapping of nodes or a list of nodes. `origin` is the value's place, `key_origin` its key's."""

    value: Scalar | dict[str, Node] | list[Node]
    origin: Origin
    key_origin: Origin | None = None
    quoted: bool = field(default=False, compare=False)  # written in quotes: text, whatever it looks like

    @property
    def mapping(self) -> dict[str, Node]:
        """The entries of a mapping; empty for anything else."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def at_key(self) -> Origin:
        """Where the key stands, or the value if it has none (list entries, the whole file)."""
        return self.key_origin or self.origin


def plain(node: Node) -> Any:
    """The values alone."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def from_plain(value: Any, origin: Origin) -> Node:
    """A tree of values that all have one origin (presets, dictionaries made in code)."""
    if isinstance(value, dict):
        return Node({str(k): from_plain(v, origin) for k, v in value.items()}, origin, origin)
    if isinstance(value, list | tuple):
        return Node([from_plain(v, origin) for v in value], origin, origin)
    return Node(str(value) if isinstance(value, Path) else value, origin, origin)


def child(node: Node, part: str | int) -> Node | None:
    """One step down; None where there is nothing."""
    if isinstance(node.value, dict):
        return node.value.get(str(part))
    if isinstance(node.value, list) and isinstance(part, int) and 0 <= part < len(node.value):
        return node.value[part]
    return None


def follow(node: Node, path: Sequence[str | int]) -> tuple[Node, int]:
    """The deepest node on `path`, and how many parts of the path lead to it."""
    for depth, part in enumerate(path):
        below = child(node, part)
        if below is None:
            return node, depth
        node = below
    return node, len(path)


def leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """(path, value) of every scalar, list of scalars and empty mapping below `value`, in order."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for position, below in enumerate(value):
            yield from leaves(below, (*path, position))
    else:
        yield path, value


def format_path(path: Sequence[str | int]) -> str:
    """`("rewards", 0, "weight")` -> `rewards.0.weight`."""
    return ".".join(str(part) for part in path)
