"""Rows that say of one answer whether it is good, as preference losses on single answers take them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain import source_locations
from posttrain.data.messages import answer_of
from posttrain.errors import DataError

Row = dict[str, Any]


def label_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Each answer as a row with chosen = the answer, rejected = an answer of another row, and label 1 or 0.

    Rows have prompt, completion (a text or messages) and label, or messages and label; a pair (prompt, chosen,
    rejected) counts as a good and a bad answer. The answer of another row is the next one in the data with a different
    text and another prompt, round the end: what the model says of it measures how far it is from its reference. Raises
    DataError where there is none, or a row has neither form.
    """
    answers = [answer for row in rows for answer in answers_of(row)]
    return [{**answer, "rejected": _pick_mismatched(answers, place)} for place, answer in enumerate(answers)]


def answers_of(row: Mapping[str, Any]) -> Iterator[Row]:
    """The answers of one row, each with its label. Raises DataError where it has neither form."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        for side, label in (("chosen", 1), ("rejected", 0)):
            yield {**row, "uid": f"{row['uid']}/{side}", "chosen": row[side], "label": label}
        return
    where = source_locations.row(row["uid"])
    prompt, answer = _asked_and_answered(row)
    if answer is None:
        raise DataError(
            "no prompt and completion",
            where=where,
            hint="this loss takes prompt, completion (a text or messages) and label, or pairs",
        )
    if row.get("label") not in (0, 1):  # true and false are 1 and 0
        raise DataError(f"`label` is {row.get('label')!r}", where=where, allowed="true or false, 1 or 0")
    yield {**row, "prompt": prompt, "chosen": answer, "label": int(row["label"])}


def _asked_and_answered(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """(prompt, answer): the answer is the assistant's last message, what stands before it belongs to the prompt."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(completion, str):
        return (None, None) if prompt is None else (prompt, completion)
    talk = row.get("messages") if completion is None else completion
    if not isinstance(talk, list) or not talk or talk[-1]["role"] != "assistant":
        return None, None
    if completion is None:
        return talk[:-1], answer_of(talk)
    if prompt is None or len(talk) == 1:
        return prompt, None if prompt is None else answer_of(talk)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*asked, *talk[:-1]], answer_of(talk)


def _pick_mismatched(answers: Sequence[Row], place: int) -> Any:
    own = answers[place]
    following = (answers[(place + step) % len(answers)] for step in range(1, len(answers)))
    for other in following:
        if other["chosen"] != own["chosen"] and other.get("prompt") != own.get("prompt"):
            return other["chosen"]
    raise DataError("no row with another prompt and another answer", where=source_locations.row(own["uid"]))


def number(row: Mapping[str, Any], column: str) -> float | None:
    """A finite number of a row, or None where it has null. Raises DataError where it has something else, or nothing."""
    value = row.get(column)
    if value is None and column in row:
        return None
    if value is None:
        raise missing_column_error(row, column)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise DataError(f"`{column}` is {str(value)[:40]!r}, not a finite number", where=source_locations.row(row["uid"]))


def missing_column_error(row: Mapping[str, Any], column: str) -> DataError:
    """The error for a row without a column that a reward model learns from."""
    return DataError(
        f"the reward model learns from the column `{column}`, which this row lacks",
        where=source_locations.row(row["uid"]),
        allowed=f"its columns: {', '.join(k for k in row if k != 'uid')}",
        hint=f"name it, e.g. data.columns: {{{column}: THEIR_NAME}}",
    )
