"""A recipe as a tree of values that carry their source location. Layers are merged; the later layer wins."""

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
    """Source of a value. `where` is the preset's name, `file:line:column`, or the override as typed."""

    kind: Literal["default", "preset", "file", "command line"]
    where: str = ""

    def __str__(self) -> str:
        if self.kind == "preset":
            return f"preset {self.where}"
        return re.sub(r"(:\d+):\d+$", r"\1", self.where) if self.kind == "file" else self.kind

    @property
    def mark(self) -> str:
        """Prefix of an error line: `file:line:column`, `preset NAME`, or `command line`."""
        return self.where if self.kind == "file" else str(self)


DEFAULT = Origin("default")


@dataclass
class Node:
    """A scalar, a mapping of nodes or a list of nodes. `origin`: source of the value; `key_origin`: source of its
    key."""

    value: Scalar | dict[str, Node] | list[Node]
    origin: Origin
    key_origin: Origin | None = None
    quoted: bool = field(default=False, compare=False)  # written in quotes, so always text

    @property
    def mapping(self) -> dict[str, Node]:
        """Entries of a mapping; empty for any other node."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def at_key(self) -> Origin:
        """Source of the key, or of the value if it has no key (list entries, the whole file)."""
        return self.key_origin or self.origin


def plain(node: Node) -> Any:
    """Return the values of a tree without their origins."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def from_plain(value: Any, origin: Origin) -> Node:
    """Build a tree of values that all have one origin (presets, dictionaries made in code)."""
    if isinstance(value, dict):
        return Node({str(k): from_plain(v, origin) for k, v in value.items()}, origin, origin)
    if isinstance(value, list | tuple):
        return Node([from_plain(v, origin) for v in value], origin, origin)
    return Node(str(value) if isinstance(value, Path) else value, origin, origin)


def child(node: Node, part: str | int) -> Node | None:
    """Return the node one step down, or None if there is none."""
    if isinstance(node.value, dict):
        return node.value.get(str(part))
    if isinstance(node.value, list) and isinstance(part, int) and 0 <= part < len(node.value):
        return node.value[part]
    return None


def follow(node: Node, path: Sequence[str | int]) -> tuple[Node, int]:
    """Return the deepest existing node on `path`, and the number of path parts that lead to it."""
    for depth, part in enumerate(path):
        below = child(node, part)
        if below is None:
            return node, depth
        node = below
    return node, len(path)


def leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield (path, value) of every scalar, list of scalars and empty mapping below `value`, in order."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for position, below in enumerate(value):
            yield from leaves(below, (*path, position))
    else:
        yield path, value


def format_path(path: Sequence[str | int]) -> str:
    """Join a path with dots: `("rewards", 0, "weight")` -> `rewards.0.weight`."""
    return ".".join(str(part) for part in path)
