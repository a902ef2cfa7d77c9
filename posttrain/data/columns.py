"""The data columns that components of a recipe name, of numbers or texts, checked before a model is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain import source_locations
from posttrain.errors import DataError, Problem, count_noun, nearest
from posttrain.options import MEASURED

if TYPE_CHECKING:
    from posttrain.recipe.rl_sections import PromptVariants, Solutions

Row = Mapping[str, Any]


class Wanted(NamedTuple):
    """A column that a component reads. key: the argument that names it, e.g. `factors.0.column`. use: the component.
    every: each row must have a number there, else at least one row. text: it holds texts, no numbers."""

    key: str
    use: str
    column: str
    every: bool
    text: bool = False


def named_columns(
    key: str, use: str, annotations: Mapping[str, tuple[str, Any]], given: Mapping[str, Any]
) -> Iterator[Wanted]:
    """The columns that the arguments of a component name: those annotated as `options.Column`, `PartialColumn` or
    `TextColumn`.

    annotations: argument -> (annotation as text, default), as `registry.keywords` gives them; given: the recipe's.
    """
    for argument, (annotation, default) in annotations.items():
        kinds = set(re.findall(r"\w+", annotation))
        column = given.get(argument, default)
        if kinds & {"Column", "PartialColumn", "TextColumn"} and isinstance(column, str):
            yield Wanted(f"{key}.{argument}", use, column, every="Column" in kinds, text="TextColumn" in kinds)


def solution_columns(variants: PromptVariants | None, given: Solutions | None) -> Iterator[Wanted]:
    """The columns of solutions that prompt variants and `solutions` read."""
    if variants is not None and "solution" in variants.needs:
        yield Wanted("prompt_variants.solution", variants.use, variants.solution, every=False, text=True)
    if given is not None:
        yield Wanted("solutions.column", "solutions", given.column, every=False, text=True)


def problems(rows: Sequence[Row], wanted: Iterable[Wanted], *, acts: bool) -> Iterator[tuple[Wanted, Problem]]:
    """What is wrong with each column: the rows lack it, or hold something else than numbers (texts) in it.

    acts: whether rollouts have tools or an environment, whose times are measured (`options.MEASURED`).
    """
    for one in wanted:
        lacking = [row for row in rows if _is_missing(row.get(one.column))]
        there = [row for row in rows if not _is_missing(row.get(one.column))]
        reads = f"`{one.use}` reads the column `{one.column}`"
        kind, what = (str, "text") if one.text else (int | float, "number")
        if strange := [row for row in there if not isinstance(row[one.column], kind)]:
            told = f"{reads} as a {what}, which {strange[0][one.column]!r:.60} is not"
            yield one, _of_rows(strange, told, f"give each row a {what} there, or leave the row out")
        elif not there and not (one.column in MEASURED and acts):
            yield one, _absent(one, rows, f"{reads}, and the data has none")
        elif one.every and there and lacking:
            yield one, _of_rows(lacking, f"{reads}: {len(lacking)} of {count_noun(len(rows), 'row')} without a number")


def refuse_missing(rows: Sequence[Row], wanted: Iterable[Wanted], *, acts: bool) -> None:
    """Raise DataError with everything that `problems` finds."""
    found = problems(rows, wanted, acts=acts)
    if told := [replace(problem, what=f"{one.key}: {problem.what}") for one, problem in found]:
        raise DataError.of(told)


def _absent(one: Wanted, rows: Sequence[Row], what: str) -> Problem:
    known = sorted({name for row in rows for name in row if name != "uid"})
    hint = f"map it: data.columns: {{{one.column}: {nearest(one.column, known) or 'THEIR_NAME'}}}"
    if one.column in MEASURED:
        hint = "it is measured where rollouts have `tools` or an `environment`: add them, or remove the component"
    return Problem("", what, f"columns: {', '.join(known)}", hint)


def _of_rows(
    those: Sequence[Row], what: str, hint: str = "give each row a number there, or leave the row out"
) -> Problem:
    where = source_locations.rows([str(row.get("uid", "?")) for row in those])
    return Problem(where, what, hint=hint)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
