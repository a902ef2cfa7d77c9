"""What a key needs, and what makes it do nothing, as marks at its field; and what evaluates them on a recipe.

    min_lr: Annotated[float | None, Idle("schedule != stable_decay", "with schedule {schedule}")] = ...

A condition is text: clauses joined by ` and `, these by ` or `. A clause is a key that must say something (`lora`), a
key with its values (`engine = vllm|stored`, `use != adamw`), a comparison with a number or another key (`samples > 1`;
a list counts its entries), `WORD in KEY`, or `not` before one of these. A key is looked for in the section that holds
the field, then in those around it, and last in the recipe (`.mix`: in the first alone); of a list all entries are
meant. A key that a stage does not have says nothing. `N % M` holds where M does not divide N. Texts may hold `{key}`, a
key's value, `{.key}`, its place in the recipe, `{#key}`, how many entries it has, and `{key noun}`, such as `3 nouns`.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from posttrain import registry
from posttrain.errors import Problem, count_noun
from posttrain.recipe.limits import refused_argument
from posttrain.recipe.section import ComponentSection, Idle, Refused
from posttrain.recipe.tree import Node, Path_, follow, format_path

Found = Iterator[tuple[str, str, str]]  # (key, what is wrong, what would be right)
_CLAUSE = re.compile(
    r"(?P<negated>not )?(?:(?P<word>\w+) in )?(?P<key>[\w.]+)(?: (?P<sign>=|!=|<=|>=|<|>|%) (?P<right>\S+))?"
)
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "%": operator.mod}
_IN_TEXT = re.compile(r"\{([.#]?)([\w.]+)(?: (\w+))?\}")
_NOTHING = object()
Marks = Sequence[Any]  # of a field


@dataclass(frozen=True)
class Scope:
    """The sections around a key with their places, from the recipe to the one that holds it; a mapping may stand for
    one. above: marks that hold for each of its keys."""

    sections: tuple[tuple[Path_, Any], ...]
    above: tuple[Idle, ...] = ()

    def find(self, key: str) -> tuple[Path_, Any]:
        """The place and the value of a key, ((), None) where there is none."""
        parts = key.removeprefix(".").split(".")
        for path, section in self.sections[-1:] if key.startswith(".") else reversed(self.sections):
            if _get(section, parts[0], _NOTHING) is not _NOTHING:
                return (*path, *parts), _value(section, parts)
        return (), None

    def fill(self, text: str) -> str:
        """A text with the values, numbers and places of the keys in braces."""

        def put(found: re.Match[str]) -> str:
            path, value = self.find(found[2])
            if found[1] == ".":
                return format_path(path)
            number = _number(value)
            if number is not None and (found[1] or found[3]):
                return count_noun(int(number), found[3]) if found[3] else f"{number:g}"
            return _as_text(value)

        return _IN_TEXT.sub(put, text)

    def holds(self, condition: str) -> bool:
        """Whether a condition is met; the empty one always is."""
        return any(all(self._is_met(clause) for clause in every) for every in parse(condition))

    def _is_met(self, clause: Clause) -> bool:
        value = self.find(clause.key)[1]
        entries = value if isinstance(value, list | set) else [value]
        if clause.word:
            met = any(clause.word in (one or ()) for one in (value if isinstance(value, list) else [value]))
        elif clause.sign in ("=", "!="):
            met = bool(entries) and all(_as_text(one) in clause.right.split("|") for one in entries)
            met ^= clause.sign == "!="
        elif clause.sign:
            is_number = re.fullmatch(r"-?[\d.]+", clause.right)
            left, right = _number(value), float(clause.right) if is_number else _number(self.find(clause.right)[1])
            met = left is not None and right is not None and bool(_COMPARE[clause.sign](left, right))
        else:
            met = any(entries)
        return met ^ bool(clause.negated)


class Clause(NamedTuple):
    """One part of a condition."""

    negated: str
    word: str
    key: str
    sign: str
    right: str


@functools.cache
def parse(condition: str) -> tuple[tuple[Clause, ...], ...]:
    """The clauses of a condition: of one of these tuples all must be met. Raises ValueError if it cannot be read."""

    def read(text: str) -> Clause:
        if (found := _CLAUSE.fullmatch(text)) is None:
            raise ValueError(f"`{text}` is no condition")
        return Clause(**found.groupdict(""))

    return tuple(tuple(map(read, filter(None, part.split(" and ")))) for part in condition.split(" or "))


def find_refused(recipe: BaseModel) -> Found:
    """(key, what is wrong, what would be right) of every key whose mark `Refused` holds."""
    for scope in scopes(recipe):
        path, section = scope.sections[-1]
        for name, field in type(section).model_fields.items():
            marks = [mark for mark in field.metadata if isinstance(mark, Refused)]
            yield from refuse(scope, marks, format_path((*path, field.alias or name)))
        if isinstance(section, ComponentSection) and section.described:
            kind = registry.kind_of(section.kinds, section.use)
            for name in section.params:
                yield from refuse(scope, refused_argument(kind, section.use, name), format_path((*path, name)))


def refuse(scope: Scope, rows: Iterable[Sequence[str]], key: str) -> Found:
    """(key, what is wrong, what would be right) of each mark that holds; `rows` of a table are marks too."""
    for mark in (Refused(*row) for row in rows):
        if scope.holds(mark.when):
            yield key, scope.fill(mark.what), scope.fill(mark.right)


def find_idle(recipe: BaseModel) -> Iterator[tuple[Path_, Idle, str]]:
    """(path, mark, why) of every value that was written, is not its default, and does nothing: by the first mark that
    holds."""
    for scope in scopes(recipe):
        path, section = scope.sections[-1]
        for shown, marks in _written_keys(section):
            for mark in (*marks, *scope.above):
                if isinstance(mark, Idle) and not (mark.below and mark in marks) and scope.holds(mark.when):
                    why = scope.fill(mark.why)
                    yield (*path, shown), mark, why if why.startswith(":") else f" {why}"
                    break


def find_contradictions(recipe: BaseModel) -> Found:
    """(key, what is wrong, what would be right) of each value that does nothing because it contradicts another."""
    for path, mark, why in find_idle(recipe):
        if not mark.note:
            yield format_path(path), f"does nothing{why}", mark.right


def notes(recipe: BaseModel, tree: Node, prefix: Sequence[str | int] = ()) -> list[Problem]:
    """The settings that a recipe's user wrote and that are left aside, each with its line. What a preset chose may be
    idle beside what the user chose. `prefix` marks a stage of a pipeline."""
    told = []
    for path, mark, why in find_idle(recipe):
        node, depth = follow(tree, path)
        if mark.note and depth == len(path) and node.origin.kind in ("file", "command line"):
            place = node.at_key.mark if node.mapping else node.origin.mark
            told.append(Problem(place, f"{format_path([*prefix, *path])}: does nothing{why}", hint=mark.right))
    return told


def _written_keys(section: BaseModel) -> Iterator[tuple[str, list[Any]]]:
    """(key, marks) of the keys of a section that were written with another value than the default."""
    for name, field in type(section).model_fields.items():
        if name in section.model_fields_set and getattr(section, name) != field.get_default(call_default_factory=True):
            yield field.alias or name, field.metadata
    if isinstance(section, ComponentSection):
        described = section.described.get("params", {})
        for key, mark in section.idle_arguments.get(section.use, {}).items():
            value = section.params[key]
            if (list(value) if isinstance(value, tuple) else value) != described[key][1]:
                yield key, [mark]


def scopes(
    section: BaseModel, around: tuple[tuple[Path_, Any], ...] = (), path: Path_ = (), above: Marks = ()
) -> Iterator[Scope]:
    """Every section of a recipe with those around it. above: the marks of the key that holds `section`."""
    chain = (*around, (path, section))
    yield Scope(chain, tuple(mark for mark in above if isinstance(mark, Idle) and mark.below))
    for name, field in type(section).model_fields.items():
        value, place = getattr(section, name), (*path, field.alias or name)
        listed = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for inner, one in [(place, value), *(((*place, key), one) for key, one in listed)]:
            if isinstance(one, BaseModel):
                yield from scopes(one, chain, inner, field.metadata)


def _get(holder: Any, name: str, missing: Any = None) -> Any:
    """A key of a section, an argument of its component, or an entry of a mapping; `missing` where there is none."""
    if isinstance(holder, Mapping):
        return holder.get(name, missing)
    if isinstance(holder, ComponentSection) and name in holder.params:
        return holder.params[name]
    known = name in type(holder).model_fields or isinstance(getattr(type(holder), name, None), property)
    return getattr(holder, name) if known else missing


def _value(value: Any, parts: Sequence[str]) -> Any:
    """The value at a dotted key below a value; of a list those of its entries, None where there is nothing."""
    if not parts or value is None:
        return value
    if isinstance(value, list | tuple):
        if not parts[0].isdigit():
            return [_value(one, parts) for one in value]
        return _value(value[int(parts[0])], parts[1:]) if int(parts[0]) < len(value) else None
    if isinstance(value, Mapping):
        return value.get(".".join(parts))
    return _value(_get(value, parts[0]), parts[1:])


def _number(value: Any) -> float | None:
    if isinstance(value, list | tuple):
        return len(value)
    return value if isinstance(value, int | float) else None


def _as_text(value: Any) -> str:
    if isinstance(value, list | set):
        return ", ".join(map(_as_text, sorted(value) if isinstance(value, set) else value))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
