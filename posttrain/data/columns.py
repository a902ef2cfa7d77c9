"""Data columns that components of a recipe read (numbers or texts), checked before a model is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from posttrain import source_locations
from posttrain.errors import DataError, Problem, count_noun, nearest
from posttrain.options import ROLLOUT_COLUMNS

if TYPE_CHECKING:
    from posttrain.recipe.rl_sections import PromptVariants, Solutions

Row = Mapping[str, Any]


class RequiredColumn(NamedTuple):
    """A column that a component reads.

    key: the recipe key of the argument that names the column, e.g. `factors.0.column`. use: the component's name.
    every: whether every row must have a value (otherwise at least one row). text: whether the column holds texts
    instead of numbers.
    """

    key: str
    use: str
    column: str
    every: bool
    text: bool = False


def named_columns(
    key: str, use: str, annotations: Mapping[str, tuple[str, Any]], given: Mapping[str, Any]
) -> Iterator[RequiredColumn]:
    """Yield the columns named by arguments annotated as `options.Column`, `PartialColumn` or `TextColumn`.

    annotations: argument -> (annotation as text, default), as returned by `registry.keyword_parameters`; given: the
    arguments set in the recipe.
    """
    for argument, (annotation, default) in annotations.items():
        kinds = set(re.findall(r"\w+", annotation))
        column = given.get(argument, default)
        if kinds & {"Column", "PartialColumn", "TextColumn"} and isinstance(column, str):
            yield RequiredColumn(f"{key}.{argument}", use, column, every="Column" in kinds, text="TextColumn" in kinds)


def solution_columns(variants: PromptVariants | None, given: Solutions | None) -> Iterator[RequiredColumn]:
    """Yield the solution columns that prompt variants and the `solutions` section read."""
    if variants is not None and "solution" in variants.needs:
        yield RequiredColumn("prompt_variants.solution", variants.use, variants.solution, every=False, text=True)
    if given is not None:
        yield RequiredColumn("solutions.column", "solutions", given.column, every=False, text=True)


def find_problems(
    rows: Sequence[Row], wanted: Iterable[RequiredColumn], *, acts: bool
) -> Iterator[tuple[RequiredColumn, Problem]]:
    """Yield (column, problem) for each column that is missing from the rows or holds values of the wrong type.

    acts: whether rollouts have tools or an environment, whose times the rollout fills in (`options.ROLLOUT_COLUMNS`).
    """
    for column in wanted:
        lacking = [row for row in rows if _is_missing(row.get(column.column))]
        present = [row for row in rows if not _is_missing(row.get(column.column))]
        reads = f"`{column.use}` reads the column `{column.column}`"
        kind, what = (str, "text") if column.text else (int | float, "number")
        if strange := [row for row in present if not isinstance(row[column.column], kind)]:
            problem = f"{reads} as a {what}, which {strange[0][column.column]!r:.60} is not"
            yield column, _problem_of_rows(strange, problem, f"give each row a {what} there, or leave the row out")
        elif not present and not (column.column in ROLLOUT_COLUMNS and acts):
            yield column, _missing_column_problem(column, rows, f"{reads}, and the data has none")
        elif column.every and present and lacking:
            yield (
                column,
                _problem_of_rows(
                    lacking, f"{reads}: {len(lacking)} of {count_noun(len(rows), 'row')} without a number"
                ),
            )


def refuse_missing(rows: Sequence[Row], wanted: Iterable[RequiredColumn], *, acts: bool) -> None:
    """Raise DataError with all problems that `find_problems` reports."""
    found = find_problems(rows, wanted, acts=acts)
    if missing := [replace(problem, what=f"{column.key}: {problem.what}") for column, problem in found]:
        raise DataError.of(missing)


def _missing_column_problem(column: RequiredColumn, rows: Sequence[Row], what: str) -> Problem:
    """Return the problem of a column that no row has, with the nearest known column as a hint."""
    known = sorted({name for row in rows for name in row if name != "uid"})
    hint = f"map it: data.columns: {{{column.column}: {nearest(column.column, known) or 'THEIR_NAME'}}}"
    if column.column in ROLLOUT_COLUMNS:
        hint = "it is measured where rollouts have `tools` or an `environment`: add them, or remove the component"
    return Problem("", what, f"columns: {', '.join(known)}", hint)


def _problem_of_rows(
    rows: Sequence[Row], what: str, hint: str = "give each row a number there, or leave the row out"
) -> Problem:
    """Return a problem located at the given rows."""
    where = source_locations.describe_rows([str(row.get("uid", "?")) for row in rows])
    return Problem(where, what, hint=hint)


def _is_missing(value: Any) -> bool:
    """Return whether a value is None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))
