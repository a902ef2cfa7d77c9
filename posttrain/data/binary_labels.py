"""Rows with one answer and a binary label, the input of unpaired preference losses such as KTO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain import source_locations
from posttrain.data.messages import get_answer
from posttrain.errors import DataError

Row = dict[str, Any]


def label_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return one row per answer: chosen = the answer, rejected = a mismatched answer, label = 1 or 0.

    Input rows have prompt, completion (text or messages) and label, or messages and label; a pair (prompt, chosen,
    rejected) counts as one good and one bad answer. The mismatched answer is the next one in the data (wrapping around)
    with a different text and a different prompt; its log-ratio estimates how far the model is from its reference.
    Raises DataError if no such answer exists or a row has neither form.
    """
    answers = [answer for row in rows for answer in split_answers(row)]
    return [{**answer, "rejected": _pick_mismatched(answers, index)} for index, answer in enumerate(answers)]


def split_answers(row: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the labeled answers of one row. Raises DataError if it is neither a labeled answer nor a pair."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        for side, label in (("chosen", 1), ("rejected", 0)):
            yield {**row, "uid": f"{row['uid']}/{side}", "chosen": row[side], "label": label}
        return
    where = source_locations.describe_row(row["uid"])
    prompt, answer = _split_prompt_and_answer(row)
    if answer is None:
        raise DataError(
            "no prompt and completion",
            where=where,
            hint="this loss takes prompt, completion (a text or messages) and label, or pairs",
        )
    if row.get("label") not in (0, 1):  # true and false are 1 and 0
        raise DataError(f"`label` is {row.get('label')!r}", where=where, allowed="true or false, 1 or 0")
    yield {**row, "prompt": prompt, "chosen": answer, "label": int(row["label"])}


def _split_prompt_and_answer(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return (prompt, answer): the last assistant message is the answer, earlier messages are the prompt."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(completion, str):
        return (None, None) if prompt is None else (prompt, completion)
    messages = row.get("messages") if completion is None else completion
    if not isinstance(messages, list) or not messages or messages[-1]["role"] != "assistant":
        return None, None
    if completion is None:
        return messages[:-1], get_answer(messages)
    if prompt is None or len(messages) == 1:
        return prompt, None if prompt is None else get_answer(messages)
    context = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*context, *messages[:-1]], get_answer(messages)


def _pick_mismatched(answers: Sequence[Row], index: int) -> Any:
    """Return the next answer with a different text and a different prompt. Raises DataError if there is none."""
    own = answers[index]
    following = (answers[(index + step) % len(answers)] for step in range(1, len(answers)))
    for other in following:
        if other["chosen"] != own["chosen"] and other.get("prompt") != own.get("prompt"):
            return other["chosen"]
    raise DataError("no row with another prompt and another answer", where=source_locations.describe_row(own["uid"]))


def read_number(row: Mapping[str, Any], column: str) -> float | None:
    """Return the number in a column of a row, or None for null.

    Raises DataError for a missing column or a value that is not a finite number.
    """
    value = row.get(column)
    if value is None and column in row:
        return None
    if value is None:
        raise missing_column_error(row, column)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise DataError(
        f"`{column}` is {str(value)[:40]!r}, not a finite number", where=source_locations.describe_row(row["uid"])
    )


def missing_column_error(row: Mapping[str, Any], column: str) -> DataError:
    """Return the error for a row without a column that the reward model is trained on."""
    return DataError(
        f"the reward model learns from the column `{column}`, which this row lacks",
        where=source_locations.describe_row(row["uid"]),
        allowed=f"its columns: {', '.join(k for k in row if k != 'uid')}",
        hint=f"name it, e.g. data.columns: {{{column}: THEIR_NAME}}",
    )
