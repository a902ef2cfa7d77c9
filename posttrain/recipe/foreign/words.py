"""The words of other tools, from tables/*.yaml: what they are called here, and why some have no counterpart.

One entry a key. It is read twice: an unknown key of a recipe is answered with the entry's sentence, and `recipe import`
writes the entry's key. An entry is the dotted key of a recipe, or a mapping:

to      the key of a recipe; by stage where it differs (`{rl: kl.coef, dpo: loss.beta}`)
values  their value (as text) -> ours; others are left out
how     a function of `transforms.py` that writes one or several keys
part_of the key whose function reads this one, too
left    why the key has no counterpart; remove: why it is not needed
say     the sentence for an unknown key, by stage where it differs; default: made of the others
noop    values that mean what is the default here, or nothing
ask     a value that is not in `values` is written all the same: the recipe is wrong until another one is chosen
needs_lora  only where an adapter is trained
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "tables"
COMMON = "common"
ORDER = ("trl", "open_r1", "axolotl", "llamafactory", "ms_swift", "openrlhf", "verl", "mergekit")  # the --from of each


@dataclass(frozen=True)
class Entry:
    """What a table says of one key; `words.py` explains the fields."""

    to: str | Mapping[str, str] = ""
    values: Mapping[str, Any] | None = None
    how: str = ""
    part_of: str = ""
    left: str = ""
    remove: str = ""
    say: str | Mapping[str, str] = ""
    noop: tuple[Any, ...] = ()
    needs_lora: bool = False
    ask: bool = False

    def target(self, stage: str) -> str:
        """The key of a recipe of `stage`, "" where there is none."""
        return self.to if isinstance(self.to, str) else self.to.get(stage, "")

    def sentence(self, key: str, stage: str) -> str:
        """What to write instead of `key` in a recipe of `stage`; "" where the general hints say it as well."""
        said = self.say if isinstance(self.say, str) else self.say.get(stage, self.say.get("", ""))
        if said or self.left:
            return said or self.left
        if self.remove:
            return f"remove it; {self.remove}"
        target = self.target(stage)
        return f"write `{target}`" if target and target.rpartition(".")[2] != key else ""


@dataclass(frozen=True)
class Table:
    """The words of one tool. marks: keys that its files have; commands, files: words of its command lines and of the
    paths of its files. stages: how its files say what they train. defaults: by stage and algorithm, where they differ
    from ours; null: an algorithm has no such key. lora: its adapter where the file says no more. rewards: its named
    rewards. older: older names of its keys."""

    name: str
    tool: str
    keys: Mapping[str, Entry]
    marks: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    stages: Mapping[str, Any] = field(default_factory=dict)
    algorithms: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)

    def entry(self, key: str) -> tuple[str, Entry] | None:
        """The entry for a key, or for the section around it, with the name under which it stands; None if unknown."""
        parts = self.older.get(key, key).split(".")
        names = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
        return next(((name, self.keys[name]) for name in names if name in self.keys), None)


def sentence(key: str, stage: str) -> str | None:
    """What to write instead of a key of another tool in a recipe of `stage`, or None for a name that is not known."""
    for name in (COMMON, *ORDER):
        entries = _entries(name)
        if (entry := entries.get(key)) and not any(other.startswith(f"{key}.") for other in entries):  # no section
            return entry.sentence(key, stage) or None
    return None


def synonym(target: str, value: str) -> str | None:
    """What another tool's word for a value of a key is here, as `bf16` is bfloat16 for `model.dtype`; None if none."""
    for name in (COMMON, *ORDER):
        for entry in _entries(name).values():
            if entry.to == target and entry.values and value in entry.values:
                return str(entry.values[value])
    return None


@functools.cache
def common_names() -> tuple[str, ...]:
    """The words that several tools share and that are answered with a sentence, for slips of the pen in them."""
    return tuple(key for key, entry in _entries(COMMON).items() if entry.sentence(key, ""))


@functools.cache
def table(name: str) -> Table:
    """The table of a tool with the entries that it shares with others; its own come first."""
    values = dict(_read(name))
    keys = {key: entry for one in reversed(values.pop("includes", [])) for key, entry in _entries(one).items()}
    keys |= _entries(name)
    lists = {key: tuple(values.pop(key, ())) for key in ("marks", "commands", "files")}
    return Table(**{**values, **lists, "name": name, "tool": values.get("tool", name), "keys": keys})


@functools.cache
def _entries(name: str) -> dict[str, Entry]:
    return {key: _entry(value) for key, value in _read(name)["keys"].items()}


def _entry(value: str | Mapping[str, Any]) -> Entry:
    if isinstance(value, str):
        return Entry(to=value)
    return Entry(**{**value, "noop": tuple(value.get("noop", ()))})


@functools.cache
def _read(name: str) -> dict[str, Any]:
    return read_table(TABLES / f"{name}.yaml")


def read_table(path: Path) -> dict[str, Any]:
    """A shipped YAML table."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where there is libyaml
    read: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return read
