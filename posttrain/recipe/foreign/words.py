"""Vocabulary of other tools, from tables/*.yaml: what their keys are called here, and why some have no counterpart.

There is one entry per key, with two uses: an unknown key in a recipe is answered with the entry's sentence, and `recipe
import` writes the entry's key. An entry is the dotted key of a recipe, or a mapping:

  to      key of a recipe; by stage if it differs (`{rl: kl.coef, dpo: loss.beta}`)
  values  the tool's value (as text) -> ours; other values are left out
  how     a function of `transforms.py` that writes one or several keys
  part_of key whose function also reads this one
  left    why the key has no counterpart; remove: why it is not needed
  say     sentence for an unknown key, by stage if it differs; default: derived from the other fields
  noop    values equal to our default, or without effect
  ask     write a value that is not in `values` anyway: the recipe is invalid until the user chooses another one
  needs_lora  applies only if an adapter is trained
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "tables"
COMMON = "common"
# Tool names for --from.
TOOLS = (
    *("trl", "open_r1", "axolotl", "llamafactory", "ms_swift", "megatron_swift"),
    *("openrlhf", "verl", "torchtune", "mergekit"),
)


@dataclass(frozen=True)
class Entry:
    """Entry of one key in a table; the module's docstring explains the fields."""

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
        """Return the key of a recipe of `stage`, "" if there is none."""
        return self.to if isinstance(self.to, str) else self.to.get(stage, "")

    def replacement_hint(self, key: str, stage: str) -> str:
        """Return what to write instead of `key` in a recipe of `stage`; "" if the general hints already cover it."""
        sentence = self.say if isinstance(self.say, str) else self.say.get(stage, self.say.get("", ""))
        if sentence or self.left:
            return sentence or self.left
        if self.remove:
            return f"remove it; {self.remove}"
        target = self.target(stage)
        return f"write `{target}`" if target and target.rpartition(".")[2] != key else ""


@dataclass(frozen=True)
class Table:
    """The vocabulary of one tool.

    marks: keys that identify its files; commands, files: words that identify its command lines and file paths. stages:
    how its files name what they train; its `unsupported`: commands and keys of methods that are not converted, with a
    hint. defaults: by stage, algorithm and command, where they differ from ours; null: the algorithm has no such key.
    constants: keys of a recipe with the values that the tool's code fixes, by the same names. lora: defaults of its
    adapters. rewards: its named rewards. notes: by stage, or by `STAGE unless KEY` of the recipe. older:
    older names of its keys.
    """

    name: str
    tool: str
    keys: Mapping[str, Entry]
    marks: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    stages: Mapping[str, Any] = field(default_factory=dict)
    algorithms: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)

    def entry(self, key: str) -> tuple[str, Entry] | None:
        """Return (name, entry) for a key or for the closest enclosing section; None if unknown."""
        parts = self.older.get(key, key).split(".")
        names = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
        return next(((name, self.keys[name]) for name in names if name in self.keys), None)


def replacement_hint(key: str, stage: str) -> str | None:
    """Return what to write instead of another tool's key in a recipe of `stage`, or None for an unknown name."""
    for name in (COMMON, *TOOLS):
        entries = _entries(name)
        if (entry := entries.get(key)) and not any(other.startswith(f"{key}.") for other in entries):  # skip sections
            return entry.replacement_hint(key, stage) or None
    return None


def translate_value(target: str, value: str) -> str | None:
    """Return our value for another tool's value of a key, such as bfloat16 for `bf16` of `model.dtype`; None if
    unknown."""
    for name in (COMMON, *TOOLS):
        for entry in _entries(name).values():
            if entry.to == target and entry.values and value in entry.values:
                return str(entry.values[value])
    return None


@functools.cache
def common_names() -> tuple[str, ...]:
    """Return the keys that several tools share and that have a sentence, to detect typing errors in them."""
    return tuple(key for key, entry in _entries(COMMON).items() if entry.replacement_hint(key, ""))


@functools.cache
def table(name: str) -> Table:
    """Return the table of a tool, including entries shared with other tools; the tool's own entries take precedence."""
    values = dict(_read(name))
    keys = {
        key: entry for included in reversed(values.pop("includes", [])) for key, entry in _entries(included).items()
    }
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


def values(name: str) -> dict[str, Any]:
    """Return one of the mappings of tables/values.yaml, which explains them."""
    found: dict[str, Any] = _read("values")[name]
    return found


def read_table(path: Path) -> dict[str, Any]:
    """Read a YAML table of the package."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if libyaml is available
    read: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return read
