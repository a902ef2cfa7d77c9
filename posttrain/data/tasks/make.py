"""Data source `task:NAME`: rows of a problem generator with a difficulty level, generated from a seed.

A generator makes one problem: `generator(level, draw, **params) -> row`, with an integer `level` from 0 and a
random.Random `draw`. Registered generators are in this folder; `task:./mine.py:name` is a user's own.
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
from posttrain.seeds import derive

Generator = Callable[..., dict[str, Any]]

SOURCE_KEYS = ("levels", "shares", "distinct")  # keys of `params` handled here; all others go to the generator
MAX_LEVEL = 1000
MAX_TRIES = 200  # problems generated to find one that the source does not have yet


def rows(name: str, size: int, seed: int, params: Mapping[str, Any], base_dir: Path) -> list[dict[str, Any]]:
    """Return `size` rows of task `name` with columns `task` and `level` in addition to the generator's own.

    params: `levels` (default [0]) are the levels to generate, in the proportions `shares` (default equal); `distinct`
    (default true) regenerates problems whose prompt (and images) the source already has; all others go to the
    generator. Row i is the same for every `size` above i, so `skip` excludes exactly the rows that another source
    trains on. Raises DataError for parameters that the generator rejects.
    """
    generator, levels, shares, own = resolve_task(name, params, base_dir)
    seen: set[tuple[str, ...]] = set()
    made: list[dict[str, Any]] = []
    for number, level in enumerate(assign_levels(size, levels, shares)):
        row = _generate_unseen(
            generator, name, level, own, (seed, number), seen if params.get("distinct", True) else set()
        )
        seen.add(problem_key(row))
        made.append({**row, "task": name, "level": level})
    return made


def check(name: str, params: Mapping[str, Any], base_dir: Path) -> None:
    """Raise DataError for invalid parameters, or for a level of which no problem can be generated.

    A generator that needs a file of an earlier stage of a pipeline is not called.
    """
    awaited = registry.awaits_stage(params)
    generator, levels, _, own = resolve_task(name, params, base_dir, in_pipeline=awaited)
    for level in () if awaited else dict.fromkeys(levels):
        _generate(generator, name, level, own, random.Random(0))


def resolve_task(
    name: str, params: Mapping[str, Any], base_dir: Path, *, in_pipeline: bool = False
) -> tuple[Generator, list[int], list[float], dict[str, Any]]:
    """Return (generator, levels, their shares, the generator's own arguments) of a source. Raises DataError.

    in_pipeline: as for `registry.resolve_paths`.
    """
    try:
        component = registry.resolve("task", name, base_dir)
    except PosttrainError as error:
        raise DataError.of(error.problems) from error
    given = {key: value for key, value in params.items() if key not in SOURCE_KEYS}
    own = registry.resolve_paths(
        component.function, given, base_dir, f"task:{name}", DataError, in_pipeline=in_pipeline
    )
    for key, value in own.items():
        if key not in component.params:
            known = [*SOURCE_KEYS, *component.params]
            raise DataError(
                f"task:{name} has no parameter {key}",
                allowed=f"it has: {', '.join(known)}",
                hint=did_you_mean(key, known),
            )
        if problem := registry.explain_type_mismatch(registry.resolve_annotations(component.function).get(key), value):
            raise DataError(f"task:{name}: {key}: {problem}")
    if missing := [key for key, (_, default) in component.params.items() if default is ... and key not in own]:
        raise DataError(f"task:{name} needs {', '.join(missing)}", hint="write it under data.params")
    check_examples(component.function, name)
    levels = _levels(name, params.get("levels", [0]))
    return component.function, levels, _shares(name, params.get("shares"), len(levels)), own


def check_levels(name: str, params: Mapping[str, Any]) -> None:
    """Raise DataError for invalid `levels` or `shares` in params, or if their numbers differ."""
    _shares(name, params.get("shares"), len(_levels(name, params.get("levels", [0]))))


def _format_source(name: str) -> str:
    """Return the source as the recipe names it: a user's function has its file before the colon."""
    return name if ":" in name else f"task:{name}"


def _levels(name: str, given: Any) -> list[int]:
    """Return the list of levels. Raises DataError for invalid ones."""
    levels = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not levels or any(type(level) is not int or not 0 <= level <= MAX_LEVEL for level in levels):
        raise DataError(
            f"{_format_source(name)}: levels {given!r}", allowed=f"whole numbers from 0 to {MAX_LEVEL}, e.g. [0, 1, 2]"
        )
    return list(levels)


def _shares(name: str, given: Any, count: int) -> list[float]:
    """Return the shares of the levels. Raises DataError for invalid ones."""
    if given is None:
        return [1.0] * count
    shares = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    numbers = all(type(share) in (int, float) and 0 <= share < math.inf for share in shares)
    if not numbers or len(shares) != count or not sum(shares):
        raise DataError(
            f"{_format_source(name)}: shares {given!r}",
            allowed=f"{count_noun(count, 'number')}, one per level, 0 or more",
        )
    return [float(share) for share in shares]


def assign_levels(size: int, levels: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return the level of each row, so that every prefix of the list matches the shares as closely as possible."""
    total, counts, made = sum(shares), [0] * len(levels), list[int]()
    for number in range(1, size + 1):
        due = max(range(len(levels)), key=lambda i: (shares[i] * number / total - counts[i], -i))
        counts[due] += 1
        made.append(levels[due])
    return made


def problem_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what identifies a problem: its prompt, and its images if any."""
    return str(row["prompt"]), *map(str, row.get("images") or ())


def _generate_unseen(
    generator: Generator, name: str, level: int, own: dict[str, Any], at: tuple[int, int], seen: set[tuple[str, ...]]
) -> dict[str, Any]:
    """Return a problem that is not in `seen`. Raises DataError if MAX_TRIES attempts find none."""
    for attempt in range(MAX_TRIES):
        row = _generate(generator, name, level, own, random.Random(derive(at[0], "task", name, level, at[1], attempt)))
        if problem_key(row) not in seen:
            return row
    raise DataError(
        f"task:{name} has too few problems of level {level}: {MAX_TRIES} draws for row {at[1] + 1} found no new one",
        hint="ask for fewer rows or more levels, or write `distinct: false` under params",
    )


def _generate(generator: Generator, name: str, level: int, own: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return one problem. Raises DataError if the generator fails or returns no dict with a prompt."""
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
    except Exception as cause:  # caused by the parameters, or by a user's own generator
        problem = f"task:{name} fails at level {level}: {type(cause).__name__}: {cause}"
        raise DataError(problem, where=registry.find_script_line(cause), hint="see data.params") from cause
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise DataError(f"task:{name} must return a dict with a text `prompt`, not {row!r:.80}")
    return row


def examples_of(generator: Generator) -> list[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """Return (level, params, columns) of each of the generator's EXAMPLES: a list, or a list per generator name."""
    given = getattr(sys.modules[generator.__module__], "EXAMPLES", [])
    return list(given.get(generator.__name__, []) if isinstance(given, Mapping) else given)


def check_examples(generator: Generator, name: str) -> None:
    """Raise DataError for the first example that the generator does not reproduce.

    The columns of an example are all or some columns of the problem generated with `random.Random(0)`.
    """
    for number, (level, params, columns) in enumerate(examples_of(generator), 1):
        row = _generate(generator, name, level, dict(params), random.Random(0))
        for key, expected in columns.items():
            if row.get(key) != expected:
                raise DataError(f"{name}: EXAMPLES: the {key} of {number} is {row.get(key)!r}, not {expected!r}")
