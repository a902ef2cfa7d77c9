"""Columns that pair losses read besides the texts: per-row numbers, named like the fields of a PairBatch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrain import registry, source_locations
from posttrain.errors import DataError, RecipeError, count_noun
from posttrain.path_resolution import split_function
from posttrain.recipe.preference_sections import Anchors

Row = Mapping[str, Any]
Columns = dict[str, list[Any]]

# Needs that only the data can provide: need -> columns, required in every row.
GIVEN: dict[str, tuple[str, ...]] = {
    "win_rates": ("chosen_win", "rejected_win"),
    "scores": ("chosen_score", "rejected_score"),
    "ref_sample": ("ref_sample_is_chosen",),
    "labels": ("label",),
}
# Log-probs of other policies, summed over a side: used if the data has them. Without columns the first two are computed
# with the starting policy, and the history is empty.
ANCHORS: dict[str, tuple[str, ...]] = {
    "ref_logp": ("ref_chosen_logp", "ref_rejected_logp"),
    "prev_logp": ("prev_chosen_logp", "prev_rejected_logp"),
    "history": ("history_chosen_logp", "history_rejected_logp"),
}
STARTING_POLICY = ("ref_logp", "prev_logp")
# Arguments of a loss that make a need unnecessary: (key, value) -> need.
UNNEEDED = {
    ("reference_free", True): "ref_logp",
    ("targets", "hard"): "win_rates",
}


def needs_of_loss(component: registry.Component, params: Mapping[str, Any]) -> frozenset[str]:
    """Return what the loss reads. An unregistered function declares nothing, so it gets the reference and all
    columns.
    """
    if split_function(component.name) is not None and not component.needs:
        return frozenset({"ref_logp", "anything"})
    return needs_with_params(component.needs, params)


def needs_with_params(declared: Iterable[str], params: Mapping[str, Any]) -> frozenset[str]:
    """Return what a registered loss reads with these arguments, of the needs that it declares."""
    return frozenset(declared) - {need for (key, value), need in UNNEEDED.items() if params.get(key) == value}


def refuse_twice(columns: Iterable[str], anchors: Anchors) -> None:
    """Raise RecipeError if the data has log-probs for which `anchors` names a model."""
    named = {"ref_logp": anchors.reference, "prev_logp": anchors.previous, "history": anchors.history}
    for field in (field for need, models in named.items() if models for field in ANCHORS[need]):
        if field in columns:
            raise RecipeError(
                f"the data has the column `{field}`, and `anchors` names a model for it",
                hint="remove one of the two",
            )


def read(rows: Sequence[Row], wanted: frozenset[str], use: str) -> Columns:
    """Return the columns that the loss `use` reads and the data has: field -> its value in each row.

    Raises DataError naming the first row that lacks a number which the loss needs or other rows have.
    """
    columns: Columns = {}
    refuse_missing(rows, wanted, use)
    for need, fields in {**GIVEN, **ANCHORS}.items():
        if need not in wanted and "anything" not in wanted:
            continue
        present = any(row.get(field) is not None for field in fields for row in rows)
        if present or (need in GIVEN and need in wanted):
            columns |= {field: [_number(row, field) for row in rows] for field in fields}
    for field in ANCHORS["history"]:
        if len({len(past) for past in columns.get(field, [])}) > 1:
            raise DataError(
                f"`{field}` has more policies in some rows than in others", hint="give one value per policy in each row"
            )
    return columns


def refuse_missing(rows: Sequence[Row], wanted: frozenset[str], use: str) -> None:
    """Raise DataError for a column that the loss needs, or that other rows have, naming the rows that lack it."""
    for need, fields in {**GIVEN, **ANCHORS}.items():
        if need not in wanted and "anything" not in wanted:
            continue
        for field in fields:
            lacking = [row for row in rows if row.get(field) is None]
            present = any(row.get(other) is not None for other in fields for row in rows)
            if lacking and (present or (need in GIVEN and need in wanted)):
                raise DataError(
                    f"pair loss `{use}` needs the column `{field}`, which is missing in {len(lacking)} of "
                    f"{count_noun(len(rows), 'row')}",
                    where=source_locations.describe_rows([str(row["uid"]) for row in lacking]),
                    allowed=f"columns of the first of these rows: {', '.join(k for k in lacking[0] if k != 'uid')}",
                    hint=f"map the data's column to this name, e.g. data.columns: {{{field}: THEIR_NAME}}",
                )


def _number(row: Row, field: str) -> Any:
    """Return the row's value of `field`: a finite number, or a list of finite numbers for a history."""
    value: Any = row.get(field)
    numbers = value if field.startswith("history") else [value]
    if not isinstance(numbers, list) or not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
        raise DataError(
            f"`{field}` is {str(value)[:40]!r}, not a finite number", where=source_locations.describe_row(row["uid"])
        )
    return [float(n) for n in numbers] if field.startswith("history") else float(value)


def refuse_one_class(given: Sequence[float], use: str) -> None:
    """Raise DataError if all answers are good or all are bad: the loss learns from the difference."""
    good = sum(label > 0.5 for label in given)
    if good in (0, len(given)):
        raise DataError(
            f"`label` is {'good' if good else 'bad'} in all {count_noun(len(given), 'answer')}; {use} learns from both",
            hint="add answers of the other kind, or train on the good ones alone with sft",
        )


def labels_note(given: Sequence[float], params: Mapping[str, Any]) -> str:
    """Return a note with the counts of good and bad answers, and whether their weights follow KTO's advice."""
    good = sum(label > 0.5 for label in given)
    bad = len(given) - good
    counts = f"{good} good answers, {bad} bad ones"
    if "desirable_weight" not in params or "undesirable_weight" not in params:
        return counts
    weights = params["desirable_weight"] * good, params["undesirable_weight"] * bad
    if not all(weights):
        return f"{counts}; the {'bad' if weights[0] else 'good'} ones have weight 0 and teach nothing"
    ratio = weights[0] / weights[1]
    advice = "" if 1 <= ratio <= 4 / 3 else "; 1 to 1.33 is advised"
    return f"{counts}; weighted, {ratio:.2f} good to 1 bad{advice}"


def origin_note(wanted: frozenset[str], columns: Columns, source: str, named: Anchors) -> str:
    """Return a line that says where the log-probs of other policies come from. named: models named by the recipe."""
    parts = []
    for need, name, model in (
        ("ref_logp", "reference", named.reference),
        ("prev_logp", "previous policy", named.previous),
    ):
        if need in wanted:
            given = "columns of the data" if ANCHORS[need][0] in columns else f"the starting policy ({source})"
            parts.append(f"{name}: {model or given}")
    past = columns.get(ANCHORS["history"][0])
    if "history" in wanted:
        given = f"{count_noun(len(past[0]), 'policy', 'policies')} of the data" if past else "none"
        parts.append(f"history: {', '.join(named.history) or given}")
    return "; ".join(parts) or "reference model: none, because the loss needs none"
