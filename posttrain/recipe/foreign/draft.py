"""A recipe under construction from a file of another tool: its values with their origins, and the keys left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.recipe.foreign.source import Foreign, Given


@dataclass(frozen=True)
class Leaf:
    """A value of the recipe and its origin in the file."""

    value: Any
    origin: str


@dataclass(frozen=True)
class LeftOut:
    """A key of the file that has no counterpart in the recipe, and why."""

    key: str
    value: Any
    line: int
    why: str


@dataclass
class Draft:
    """A recipe under construction.

    values: nested mappings (and lists of them) with leaves. read: keys of the file that were used. rewards_file: the
    reward script that may be written next to the recipe. carried: names of the functions to write into it.
    """

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
        """Return the value of the first of these keys that has one (from the file, or the tool's default) and mark it
        as read."""
        for key in keys:
            if key in self.foreign.given:
                self.read.add(key)
                value = self.foreign.given[key].value
                if value is not None:
                    return value
        return default

    def origin(self, *keys: str) -> str:
        """Return the comment for a value: the keys it came from, with their lines or values."""
        older = self.foreign.table.older
        settings = [self.foreign.given[name] for key in keys if (name := older.get(key, key)) in self.foreign.given]
        if len(settings) == 1:
            return _describe_origin(settings[0], self.foreign.table.tool)
        return ", ".join(f"{setting.key} {setting.value}" for setting in settings if setting.value is not None)

    def set_default(self, path: str, value: Any, origin: str) -> None:
        """Set a value at a dotted key unless it is already set."""
        node = self.values
        *above, last = path.split(".")
        for part in above:
            below = node.setdefault(part, {})
            if isinstance(below, Leaf):  # `loss: clip` is short for `loss: {use: clip}`
                below = node[part] = {"use": below}
            node = below
        self._record_overridden(path, winner=node.setdefault(last, Leaf(value, origin)), loser=Leaf(value, origin))

    def replace(self, path: str, value: Any, origin: str) -> None:
        """Set a value at a dotted key, replacing an earlier one."""
        node = self.values
        *above, last = path.split(".")
        for part in above:
            node = node.setdefault(part, {})
        before, node[last] = node.get(last), Leaf(value, origin)
        self._record_overridden(path, winner=node[last], loser=before)

    def _record_overridden(self, path: str, *, winner: Any, loser: Any) -> None:
        """If two keys of the file set one value differently, record the one that does not take effect."""
        if isinstance(winner, Leaf) and isinstance(loser, Leaf) and winner.value != loser.value:
            for given in self.keys_behind(loser):
                self.leave(given, f"`{path}` is {winner.value}: {winner.origin}")

    def keys_behind(self, leaf: Any) -> Iterator[Given]:
        """Yield the key of the file that a value came from."""
        name = leaf.origin.partition(", ")[0] if isinstance(leaf, Leaf) else ""
        yield from (given for given in self.foreign.given.values() if given.key == name)

    def at(self, path: str) -> Any:
        """Return the value at a dotted key, or None."""
        node: Any = self.values
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = node[part]
        return node.value if isinstance(node, Leaf) else node

    def leave(self, given: Given, why: str) -> None:
        """Record a key that has no counterpart; a default of the tool is not a key of the file and is ignored."""
        if given.line:
            self.left.append(LeftOut(given.key, given.value, given.line, why))

    def note(self, text: str) -> None:
        """Add a note about a difference that remains after the import."""
        if text not in self.notes:
            self.notes.append(text)

    def updates_a_step(self) -> int:
        """Return the number of optimizer updates in one step of the recipe; batch sizes must be converted before."""
        return int(self.at("batch.minibatches") or 1) * int(self.at("batch.epochs") or 1) if self.stage == "rl" else 1

    def plain(self) -> dict[str, Any]:
        """Return the values without their origins."""
        return {key: plain(value) for key, value in self.values.items()}

    def origins(self) -> dict[str, str]:
        """Return dotted key -> the origin of its value."""
        return dict(_origins(self.values, ""))


def plain(value: Any) -> Any:
    """Return a value without its origins."""
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


def _describe_origin(given: Given, tool: str) -> str:
    return f"{given.key}, line {given.line}" if given.line else f"{given.key}, {tool}'s default"
