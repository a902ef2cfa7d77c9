"""Marks on schema fields that say what a key needs and when it has no effect, and their evaluation on a recipe.

    min_lr: Annotated[float | None, Idle("schedule != stable_decay", "with schedule {schedule}")] = ...

A condition is text: alternatives joined by ` or `, each made of clauses joined by ` and `. A clause is a key that must
have a true value (`lora`), a key with its allowed values (`engine = vllm|stored`, `use != adamw`), a comparison with a
number or another key (`samples > 1`; a list counts its entries), `WORD in KEY`, or `not` before one of these. `N % M`
holds if M does not divide N. `A+B` is the sum of keys and whole numbers; `LIST.least`, `LIST.largest` and `LIST.rising`
describe the entries of a list. A property of a section or stage (`keeps` in `rl_stage.py`) can be used like a key.

A key is looked up in the section that holds the field, then in the sections around it, and last in the recipe (`.mix`:
only in the section that holds the field); for a list, every entry must match. A key that a stage does not have counts
as empty.

Messages may contain `{key}` (value of a key), `{.key}` (its path in the recipe), `{#key}` (its number of entries), and
`{key noun}` (a count such as `3 nouns`).
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from posttrain import registry
from posttrain.errors import Problem, count_noun
from posttrain.recipe import limits
from posttrain.recipe.section import ComponentSection, Idle, NoImages, Refused
from posttrain.recipe.tree import Node, Path_, follow, format_path

Found = Iterator[tuple[str, str, str]]  # (key, what is wrong, what would be right)
_CLAUSE = re.compile(
    r"(?P<negated>not )?(?:(?P<word>\w+) in )?(?P<key>[\w.+]+)(?: (?P<sign>=|!=|<=|>=|<|>|%) (?P<right>\S+))?"
)
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "%": operator.mod}
_IN_TEXT = re.compile(r"\{([.#]?)([\w.+]+)(?: (\w+))?\}")
_OF_LISTS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "least": functools.partial(min, default=None),
    "largest": functools.partial(max, default=None),
    "rising": lambda entries: list(entries) == sorted(set(entries)),
}
_NOTHING = object()
Mark = TypeVar("Mark", bound=Refused | Idle | NoImages)


@dataclass(frozen=True)
class Scope:
    """The sections around a key with their paths, from the recipe down to the section that holds the key. A mapping may
    stand in for a section. above: marks of the enclosing keys that apply to every key below them."""

    sections: tuple[tuple[Path_, Any], ...]
    above: tuple[Idle, ...] = ()

    @classmethod
    def of(cls, *sections: Any) -> Scope:
        """Build a scope of sections whose paths do not matter, from the recipe to the innermost one."""
        return cls(tuple(((), section) for section in sections))

    def find(self, key: str) -> tuple[Path_, Any]:
        """Return the path and the value of a key or sum, or ((), None) if no section has it."""
        if "+" in key:
            values = [int(part) if part.isdigit() else _number(self.find(part)[1]) for part in key.split("+")]
            return (), sum(value or 0 for value in values)
        parts = key.removeprefix(".").split(".")
        for path, section in self.sections[-1:] if key.startswith(".") else reversed(self.sections):
            if _get(section, parts[0], _NOTHING) is not _NOTHING:
                return (*path, *parts), _value(section, parts)
        return (), None

    def fill(self, text: str) -> str:
        """Return the text with the keys in braces replaced by their values, counts or paths."""

        def replace_key(match: re.Match[str]) -> str:
            path, value = self.find(match[2])
            if match[1] == ".":
                return format_path(path)
            number = _number(value)
            if number is not None and (match[1] or match[3]):
                return count_noun(int(number), match[3]) if match[3] else f"{number:g}"
            return _as_text(value)

        return _IN_TEXT.sub(replace_key, text)

    def holds(self, condition: str) -> bool:
        """Return whether a condition holds; an empty condition always holds."""
        return any(all(self._is_met(clause) for clause in every) for every in parse(condition))

    def _is_met(self, clause: Clause) -> bool:
        """Return whether a single clause holds."""
        value = self.find(clause.key)[1]
        entries = value if isinstance(value, list | set) else [value]
        if clause.word:
            met = any(clause.word in (entry or ()) for entry in (value if isinstance(value, list) else [value]))
        elif clause.sign in ("=", "!="):
            met = bool(entries) and all(_as_text(entry) in clause.right.split("|") for entry in entries)
            met ^= clause.sign == "!="
        elif clause.sign:
            is_number = re.fullmatch(r"-?[\d.]+", clause.right)
            left, right = _number(value), float(clause.right) if is_number else _number(self.find(clause.right)[1])
            met = left is not None and right is not None and bool(_COMPARE[clause.sign](left, right))
        else:
            met = any(entries)
        return met ^ bool(clause.negated)


class Clause(NamedTuple):
    """One clause of a condition."""

    negated: str
    word: str
    key: str
    sign: str
    right: str


@functools.cache
def parse(condition: str) -> tuple[tuple[Clause, ...], ...]:
    """Parse a condition into alternatives, each a tuple of clauses that must all hold. Raises ValueError for invalid
    syntax."""

    def read(text: str) -> Clause:
        if (found := _CLAUSE.fullmatch(text)) is None:
            raise ValueError(f"`{text}` is not a condition")
        return Clause(**found.groupdict(""))

    return tuple(tuple(map(read, filter(None, part.split(" and ")))) for part in condition.split(" or "))


def find_marks(recipe: BaseModel, kind: type[Mark]) -> Iterator[tuple[Scope, Path_, Mark]]:
    """Yield (scope, path of the key, mark) for each mark of a kind: at fields, and of the arguments of components."""
    for scope in scopes(recipe):
        at, section = scope.sections[-1]
        yield from (
            (scope, (*at, key), mark) for key, mark in _marks_of(section, scope.above) if isinstance(mark, kind)
        )


def find_refused(recipe: BaseModel) -> Found:
    """Yield (key, what is wrong, what would be right) for every key whose `Refused` mark holds."""
    for scope, path, mark in find_marks(recipe, Refused):
        yield from refuse(scope, [mark], format_path(path))


def refuse(scope: Scope, rows: Iterable[Sequence[str]], key: str) -> Found:
    """Yield (key, what is wrong, what would be right) for each mark that holds; a mark may be given as a row of
    strings."""
    for mark in (Refused(*row) for row in rows):
        if scope.holds(mark.when):
            yield key, scope.fill(mark.what), scope.fill(mark.right)


def find_idle(recipe: BaseModel) -> Iterator[tuple[Path_, Idle, str]]:
    """Yield (path, mark, what is wrong) for every value that was written, differs from its default, and has no effect.
    The first mark that holds decides."""
    idle = set[Path_]()
    for scope, path, mark in find_marks(recipe, Idle):
        if path not in idle and _is_changed(scope.sections[-1][1], str(path[-1])) and scope.holds(mark.when):
            idle.add(path)
            why = scope.fill(mark.why)
            yield path, mark, f"does nothing{why if why.startswith(':') else f' {why}'}"


def find_contradictions(recipe: BaseModel) -> Found:
    """Yield (key, what is wrong, what would be right) for each value that has no effect because it contradicts another
    one."""
    for path, mark, what in find_idle(recipe):
        if not mark.note:
            yield format_path(path), what, mark.right


def notes(recipe: BaseModel, tree: Node, prefix: Sequence[str | int] = ()) -> list[Problem]:
    """Return a note, with its line, for each setting that the user wrote and that has no effect. Choices of a preset
    are left out: the user's choices may override them. `prefix`: path of the stage inside a pipeline."""
    problems = []
    for path, mark, what in find_idle(recipe):
        node, depth = follow(tree, path)
        if mark.note and depth == len(path) and node.origin.kind in ("file", "command line"):
            place = node.at_key.mark if node.mapping else node.origin.mark
            problems.append(Problem(place, f"{format_path([*prefix, *path])}: {what}", hint=mark.right))
    return problems


def _marks_of(section: BaseModel, above: Sequence[Idle]) -> Iterator[tuple[str, Any]]:
    """Yield (key, mark) for a section's fields and the arguments of its component. above: marks of every key."""
    for name, field in type(section).model_fields.items():
        own = (mark for mark in field.metadata if not (isinstance(mark, Idle) and mark.below))
        yield from ((field.alias or name, mark) for mark in (*own, *above))
    if isinstance(section, ComponentSection) and section.index_entry:
        kind = registry.find_kind(section.kinds, section.use)
        for name in section.params:
            yield from ((name, mark) for mark in argument_marks(kind, section.use, name))


@functools.cache
def argument_marks(kind: str, component: str, argument: str) -> tuple[Refused | Idle, ...]:
    """Return the marks of a component's argument (arguments.yaml)."""
    refused = limits.find_entry(limits.REFUSED, kind, component, argument, ())
    idle = limits.find_entry(limits.IDLE, kind, component, argument, ())
    return (*(Refused(*row) for row in refused), *(Idle(**row, note=True) for row in idle))


def _is_changed(section: BaseModel, key: str) -> bool:
    """Return whether a key of a section was written, and differs from its default; for an argument of a component,
    whether it differs."""
    if isinstance(section, ComponentSection) and key in section.params:
        value, (_, *default) = section.params[key], section.index_entry["params"][key]
        return [list(value) if isinstance(value, tuple) else value] != default
    name, field = next((n, f) for n, f in type(section).model_fields.items() if key == (f.alias or n))
    return name in section.model_fields_set and bool(
        getattr(section, name) != field.get_default(call_default_factory=True)
    )


def scopes(
    section: BaseModel, around: tuple[tuple[Path_, Any], ...] = (), path: Path_ = (), above: Sequence[Any] = ()
) -> Iterator[Scope]:
    """Yield the scope of every section of a recipe. above: the marks of the key that holds `section`."""
    chain = (*around, (path, section))
    yield Scope(chain, tuple(mark for mark in above if isinstance(mark, Idle) and mark.below))
    for name, field in type(section).model_fields.items():
        value, place = getattr(section, name), (*path, field.alias or name)
        listed = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for inner, inner_value in [(place, value), *(((*place, key), entry) for key, entry in listed)]:
            if isinstance(inner_value, BaseModel):
                yield from scopes(inner_value, chain, inner, field.metadata)


def _get(holder: Any, name: str, missing: Any = None) -> Any:
    """Return a key of a section, an argument of its component, or an entry of a mapping; `missing` if there is none."""
    if isinstance(holder, Mapping):
        return holder.get(name, missing)
    if isinstance(holder, ComponentSection) and name in holder.params:
        return holder.params[name]
    known = name in type(holder).model_fields or isinstance(getattr(type(holder), name, None), property)
    return getattr(holder, name) if known else missing


def _value(value: Any, parts: Sequence[str]) -> Any:
    """Return the value at a dotted key below `value`: for a list the values of its entries, None if there is
    nothing."""
    if not parts or value is None:
        return value
    if isinstance(value, list | tuple):
        if parts[0] in _OF_LISTS:
            return _OF_LISTS[parts[0]](value)
        if not parts[0].isdigit():
            return [_value(entry, parts) for entry in value]
        return _value(value[int(parts[0])], parts[1:]) if int(parts[0]) < len(value) else None
    if isinstance(value, Mapping):
        return value.get(".".join(parts))
    return _value(_get(value, parts[0]), parts[1:])


def _number(value: Any) -> float | None:
    if isinstance(value, list | tuple):
        return len(value)
    return value if isinstance(value, int | float) else None


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple | set):
        return ", ".join(map(_as_text, sorted(value) if isinstance(value, set) else value))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
