"""`task:NAME`: rows of a generator with a difficulty dial, made on the spot from a seed.

A generator makes one problem: `generator(level, draw, **params) -> row`, with `level` a whole number from 0 on and
`draw` a random.Random. Registered ones stand beside this file; `task:./mine.py:name` is the user's own.
"""

from __future__ import annotations

import inspect
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.errors import DataError, PosttrainError, count_noun, did_you_mean
from posttrain.path_resolution import find
from posttrain.seeds import derive

Generator = Callable[..., dict[str, Any]]

SOURCE_KEYS = ("levels", "shares", "distinct")  # of `params`: what is made here of a generator; all others are its own
HIGHEST = 1000  # level
TRIES = 200  # problems drawn for one that the source does not have yet


def rows(name: str, size: int, seed: int, params: Mapping[str, Any], base_dir: Path) -> list[dict[str, Any]]:
    """`size` rows of task `name` with columns `task` and `level` beside the generator's own.

    params: `levels` (default [0]) are the levels that occur, in the proportions `shares` (default equal); `distinct`
    (default true) draws again where the source already has the prompt (with its pictures); all others go to the
    generator. Row i is the same for every `size` above i, so that `skip` leaves out exactly the rows that another
    source trains on. Raises DataError for what the generator refuses.
    """
    generator, levels, shares, own = read(name, params, base_dir)
    seen: set[tuple[str, ...]] = set()
    made: list[dict[str, Any]] = []
    for number, level in enumerate(spread(size, levels, shares)):
        row = _new(generator, name, level, own, (seed, number), seen if params.get("distinct", True) else set())
        seen.add(problem_of(row))
        made.append({**row, "task": name, "level": level})
    return made


def check(name: str, params: Mapping[str, Any], base_dir: Path) -> None:
    """Raises DataError for parameters that are wrong, and for a level of which no problem can be made."""
    generator, levels, _, own = read(name, params, base_dir)
    for level in dict.fromkeys(levels):
        _one(generator, name, level, own, random.Random(0))


def read(
    name: str, params: Mapping[str, Any], base_dir: Path
) -> tuple[Generator, list[int], list[float], dict[str, Any]]:
    """(generator, levels, their shares, the generator's own arguments) of a source. Raises DataError."""
    try:
        component = registry.resolve("task", name, base_dir)
    except PosttrainError as error:
        raise DataError.of(error.problems) from error
    own = {key: value for key, value in params.items() if key not in SOURCE_KEYS}
    for key, value in list(own.items()):
        if key not in component.params:
            known = [*SOURCE_KEYS, *component.params]
            raise DataError(
                f"task:{name} has no parameter {key}",
                allowed=f"it has: {', '.join(known)}",
                hint=did_you_mean(key, known),
            )
        if "Path" in component.params[key][0]:
            own[key] = find(str(value), base_dir, f"task:{name}'s {key}", DataError)
        elif problem := registry.wrong_type(registry.types_of(component.function).get(key), value):
            raise DataError(f"task:{name}: {key}: {problem}")
    if missing := [key for key, (_, default) in component.params.items() if default is ... and key not in own]:
        raise DataError(f"task:{name} needs {', '.join(missing)}", hint="write it under data.params")
    check_examples(component.function, name)
    levels = _levels(name, params.get("levels", [0]))
    return component.function, levels, _shares(name, params.get("shares"), len(levels)), own


def check_levels(name: str, params: Mapping[str, Any]) -> None:
    """Raises DataError for `levels` and `shares` under params that are none, or do not fit each other."""
    _shares(name, params.get("shares"), len(_levels(name, params.get("levels", [0]))))


def _format_source(name: str) -> str:
    """A source as the recipe names it: a function of the user's has its file before the colon."""
    return name if ":" in name else f"task:{name}"


def _levels(name: str, given: Any) -> list[int]:
    levels = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not levels or any(type(level) is not int or not 0 <= level <= HIGHEST for level in levels):
        raise DataError(
            f"{_format_source(name)}: levels {given!r}", allowed=f"whole numbers from 0 to {HIGHEST}, e.g. [0, 1, 2]"
        )
    return list(levels)


def _shares(name: str, given: Any, count: int) -> list[float]:
    if given is None:
        return [1.0] * count
    shares = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    numbers = all(type(share) in (int, float) and 0 <= share < math.inf for share in shares)
    if not numbers or len(shares) != count or not sum(shares):
        raise DataError(
            f"{_format_source(name)}: shares {given!r}",
            allowed=f"{count_noun(count, 'number')}, one a level, from 0 on",
        )
    return [float(share) for share in shares]


def spread(size: int, levels: Sequence[int], shares: Sequence[float]) -> list[int]:
    """The level of each row: every beginning of the list has the shares as nearly as can be."""
    total, counts, made = sum(shares), [0] * len(levels), list[int]()
    for number in range(1, size + 1):
        due = max(range(len(levels)), key=lambda i: (shares[i] * number / total - counts[i], -i))
        counts[due] += 1
        made.append(levels[due])
    return made


def problem_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What a row asks: its prompt, and its pictures if it has some."""
    return str(row["prompt"]), *map(str, row.get("images") or ())


def _new(
    generator: Generator, name: str, level: int, own: dict[str, Any], at: tuple[int, int], seen: set[tuple[str, ...]]
) -> dict[str, Any]:
    """A problem that is not among `seen`. Raises DataError where the level seems to have no other."""
    for attempt in range(TRIES):
        row = _one(generator, name, level, own, random.Random(derive(at[0], "task", name, level, at[1], attempt)))
        if problem_of(row) not in seen:
            return row
    raise DataError(
        f"task:{name} has too few problems of level {level}: {TRIES} draws for row {at[1] + 1} found no new one",
        hint="ask for fewer rows or more levels, or write `distinct: false` under params",
    )


def _one(generator: Generator, name: str, level: int, own: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    try:
        inspect.signature(generator).bind(level, draw, **own)
    except TypeError as cause:
        raise DataError(
            f"task:{name}{inspect.signature(generator)} does not fit: {cause}",
            hint="it is called with a level, a random.Random and `params`",
        ) from cause
    try:
        row = generator(level, draw, **own)
    except PosttrainError:
        raise
    except Exception as cause:  # the parameters', or of the user's own generator
        said = f"task:{name} fails at level {level}: {type(cause).__name__}: {cause}"
        raise DataError(said, where=registry.script_line(cause), hint="see data.params") from cause
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise DataError(f"task:{name} must return a dict with a text `prompt`, not {row!r:.80}")
    return row


def examples_of(generator: Generator) -> list[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """(level, params, columns) of each of the EXAMPLES in a generator's file, a list or one a generator's name."""
    given = getattr(sys.modules[generator.__module__], "EXAMPLES", [])
    return list(given.get(generator.__name__, []) if isinstance(given, Mapping) else given)


def check_examples(generator: Generator, name: str) -> None:
    """Raises DataError for the first example of a generator that it does not make.

    The columns of an example are those, or some of those, of the problem that `random.Random(0)` draws.
    """
    for number, (level, params, columns) in enumerate(examples_of(generator), 1):
        row = _one(generator, name, level, dict(params), random.Random(0))
        for key, expected in columns.items():
            if row.get(key) != expected:
                raise DataError(f"{name}: EXAMPLES: the {key} of {number} is {row.get(key)!r}, not {expected!r}")
