"""A recipe while it is made from a file of another tool: its values with their origins, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.recipe.foreign.source import Foreign, Given


@dataclass(frozen=True)
class Leaf:
    """A value of the recipe and where it came from."""

    value: Any
    origin: str


@dataclass(frozen=True)
class LeftOut:
    """A key of the file that the recipe does not have, and why."""

    key: str
    value: Any
    line: int
    why: str


@dataclass
class Draft:
    """values: nested mappings (and lists of them) with leaves. read: keys of the file that were used. rewards_file: the
    reward script that may be written beside the recipe. carried: the functions that go into it."""

    foreign: Foreign
    stage: str
    gpus: int
    base_dir: Path
    values: dict[str, Any] = field(default_factory=dict)
    left: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    rewards_file: str | None = None
    carried: list[str] = field(default_factory=list)

    def get(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of these keys that is given (by the file, or as the tool's default); it counts as
        read."""
        for key in keys:
            if key in self.foreign.given:
                self.read.add(key)
                value = self.foreign.given[key].value
                if value is not None:
                    return value
        return default

    def origin(self, *keys: str) -> str:
        """What the comment behind a value says: the keys that it came from, with their lines or values."""
        older = self.foreign.table.older
        found = [self.foreign.given[name] for key in keys if (name := older.get(key, key)) in self.foreign.given]
        if len(found) == 1:
            return _origin(found[0], self.foreign.table.tool)
        return ", ".join(f"{one.key} {one.value}" for one in found if one.value is not None)

    def put(self, path: str, value: Any, origin: str) -> None:
        """Set a value at a dotted key; the first that was set stays."""
        node = self.values
        *above, last = path.split(".")
        for part in above:
            below = node.setdefault(part, {})
            if isinstance(below, Leaf):  # `loss: clip` is short for `loss: {use: clip}`
                below = node[part] = {"use": below}
            node = below
        self._name_loser(path, winner=node.setdefault(last, Leaf(value, origin)), loser=Leaf(value, origin))

    def replace(self, path: str, value: Any, origin: str) -> None:
        """Set a value at a dotted key, whatever stands there."""
        node = self.values
        *above, last = path.split(".")
        for part in above:
            node = node.setdefault(part, {})
        before, node[last] = node.get(last), Leaf(value, origin)
        self._name_loser(path, winner=node[last], loser=before)

    def _name_loser(self, path: str, *, winner: Any, loser: Any) -> None:
        """Of two keys that set one value, name the one that does not count."""
        if isinstance(winner, Leaf) and isinstance(loser, Leaf) and winner.value != loser.value:
            for given in self.behind(loser):
                self.leave(given, f"`{path}` is {winner.value}: {winner.origin}")

    def behind(self, leaf: Any) -> Iterator[Given]:
        """The key of the file that a value came from."""
        name = leaf.origin.partition(", ")[0] if isinstance(leaf, Leaf) else ""
        yield from (given for given in self.foreign.given.values() if given.key == name)

    def at(self, path: str) -> Any:
        """The value at a dotted key, or None."""
        node: Any = self.values
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = node[part]
        return node.value if isinstance(node, Leaf) else node

    def leave(self, given: Given, why: str) -> None:
        """Name a key that has no counterpart; a default of the tool that has none is no key of the file."""
        if given.line:
            self.left.append(LeftOut(given.key, given.value, given.line, why))

    def note(self, text: str) -> None:
        """Say what differs although it was imported."""
        if text not in self.notes:
            self.notes.append(text)

    def plain(self) -> dict[str, Any]:
        """The values alone."""
        return {key: plain(value) for key, value in self.values.items()}

    def origins(self) -> dict[str, str]:
        """Dotted key -> the origin of its value."""
        return dict(_origins(self.values, ""))


def plain(value: Any) -> Any:
    """A value without its origins."""
    if isinstance(value, Leaf):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(below) for key, below in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def _origins(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Leaf):
        yield path, value.origin
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from _origins(below, f"{path}.{key}".lstrip("."))


def _origin(given: Given, tool: str) -> str:
    return f"{given.key}, line {given.line}" if given.line else f"{given.key}, {tool}'s default"
