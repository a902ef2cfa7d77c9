"""The shapes that data comes in, brought to one of: messages; prompt (+ completion | answer | chosen/rejected); text.

Every other column stays in the row as it is, for rewards and templates to read.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.data.messages import answer_of, are_messages, kind, messages
from posttrain.errors import DataError, did_you_mean, nearest

Row = dict[str, Any]

SHAPES = (
    "messages (or ShareGPT's conversations); prompt + completion; instruction (+ input) + output; "
    "prompt + chosen + rejected; chosen + rejected (message lists); prompt (+ answer and any columns); text"
)
READ = ("messages", "prompt", "completion", "answer", "chosen", "rejected", "text", "label", "tools")  # of a row
_USUAL = {  # names of other data sets -> ours
    **dict.fromkeys(("question", "problem", "query", "input", "task"), "prompt"),
    **dict.fromkeys(("conversation", "dialog", "dialogue", "turns"), "messages"),
}
_MAIN = ("messages", "prompt", "completion", "instruction", "output", "chosen", "rejected", "text")


def normalise(
    row: Mapping[str, Any], where: str, prompt_template: str | None = None, completion_template: str | None = None
) -> Row:
    """One record as a row with `messages`, `prompt` (and what answers it) or `text`. DataErrors name `where`.

    The templates make `prompt` and `completion` from columns, those of the file and those that a shape gives.
    """
    out = dict(row)
    _sharegpt(out)
    if isinstance(out.get("functions"), list) and out.get("tools") is None and are_messages(out.get("messages")):
        out["tools"] = [
            {"type": "function", "function": schema} for schema in out.pop("functions")
        ]  # OpenAI's older name
    for column in ("messages", "prompt", "chosen", "rejected", "completion"):
        if are_messages(out.get(column)):
            out[column] = messages(out[column], column, where)
    _shape(out)(out, where)
    filled = {
        column: fill(template, out, where, f"{column}_template")
        for column, template in (("prompt", prompt_template), ("completion", completion_template))
        if template is not None
    }
    if "completion" in filled and prompt_template is None and out.get("prompt") is None:
        problem = "data.completion_template answers a prompt, and the row has none"
        raise DataError(
            problem, where=where, hint="write data.prompt_template as well, or data.columns: {prompt: NAME}"
        )
    out |= filled
    _check(out, where, templated=prompt_template is not None)
    return out


def _sharegpt(row: Row) -> None:
    """ShareGPT's column: the messages, or the prompt of a pair whose sides are one message each."""
    for side in ("chosen", "rejected"):
        if isinstance(row.get(side), Mapping):
            row[side] = [row[side]]
    if are_messages(row.get("conversations")) and all(
        row.get(c) is None for c in ("messages", "prompt", "instruction")
    ):
        row["prompt" if row.get("chosen") is not None else "messages"] = row.pop("conversations")


def _shape(row: Row) -> Callable[[Row, str], None]:
    if row.get("chosen") is not None or row.get("rejected") is not None:
        return _pair
    if row.get("prompt") is None and row.get("instruction") is not None:
        return _instruction
    return _as_it_is


def _as_it_is(row: Row, where: str) -> None:
    del row, where


def _instruction(row: Row, where: str) -> None:
    """Alpaca's columns: the input is put under the instruction, the output is the completion."""
    parts = [_text(row["instruction"], "instruction", where)]
    if row.get("input"):
        parts.append(_text(row["input"], "input", where))
    row["prompt"] = "\n\n".join(parts)
    if row.get("output") is not None and row.get("completion") is None:
        row["completion"] = _text(row["output"], "output", where)


def _pair(row: Row, where: str) -> None:
    """chosen and rejected without the prompt in them; a prompt that is only in them is what they begin with alike."""
    for side in ("chosen", "rejected"):
        if row.get(side) is None:
            state = "null" if side in row else "missing"
            raise DataError(f"`{side}` is {state} beside its counterpart", where=where)
        if not isinstance(row[side], str | list):
            raise DataError(f"`{side}` is {kind(row[side])}, not text or messages", where=where)
    asked: Any = row.get("messages")
    if row.get("prompt") is None and are_messages(asked) and asked and asked[-1]["role"] != "assistant":
        row["prompt"] = row.pop("messages")  # axolotl's form: the conversation that both sides answer
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        forms = ["a text" if isinstance(side, str) else "a list of messages" for side in (chosen, rejected)]
        raise DataError(f"`chosen` is {forms[0]} and `rejected` is {forms[1]}: both must be of one kind", where=where)
    if isinstance(chosen, str):
        if row.get("prompt") is None:
            start = _common_text(chosen, rejected)
            row |= {"prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:]}
        return
    start = _common_messages(chosen, rejected)
    if not start and all(len(side) > 1 and side[0]["role"] != "assistant" for side in (chosen, rejected)):
        what = "`chosen` and `rejected` begin with different messages: a pair is two answers to one prompt"
        hint = "leave the row out, or write one `prompt`, and as `chosen` and `rejected` its answers alone"
        raise DataError(what, where=where, hint=hint)
    shared = chosen[:start]
    if row.get("prompt") is None:
        row["prompt"] = shared
    row |= {side: _behind_prompt(row[side], start, row["prompt"], side, where) for side in ("chosen", "rejected")}


def _behind_prompt(messages: list[Row], shared: int, prompt: Any, side: str, where: str) -> str | list[Row]:
    """The one assistant message behind the shared beginning: its text, if it holds nothing else."""
    rest = messages[shared:]
    if len(rest) != 1 or rest[0]["role"] != "assistant":
        roles = ", ".join(m["role"] for m in rest) or "nothing"
        raise DataError(f"`{side}` must be one assistant message behind the prompt, not: {roles}", where=where)
    if shared and not _same_prompt(messages[:shared], prompt):
        raise DataError(f"`{side}` begins with another conversation than `prompt`", where=where)
    return answer_of(rest)


def _same_prompt(shared: list[Row], prompt: Any) -> bool:
    if isinstance(prompt, str):
        return str(shared[-1].get("content", "")).strip() == prompt.strip()
    return shared == prompt


def _common_messages(chosen: list[Row], rejected: list[Row]) -> int:
    """Messages that both sides begin with, the last message of a side never counted."""
    longest = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(longest) if chosen[i] != rejected[i]), max(longest, 0))


def _common_text(chosen: str, rejected: str) -> int:
    """Characters that both sides begin with, back to the end of a whole word."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    common = "".join(a for a, _ in alike)
    return max(common.rfind(" "), common.rfind("\n")) + 1


def _check(row: Row, where: str, *, templated: bool) -> None:
    """The row has one of the shapes, and its columns are of the right kind."""
    if not any(row.get(c) is not None for c in ("messages", "prompt", "text")):
        if nulls := [c for c in _MAIN if c in row and row[c] is None]:
            problem = f"`{nulls[0]}` is null"
            raise DataError(problem, where=where, hint="give it a value, or leave the row out")
        columns = ", ".join(k for k in row)
        near = [(n, c) for c in row for n in [_USUAL.get(c.lower()) or nearest(c.lower(), _MAIN)] if n]
        ours, theirs = near[0] if near else ("prompt", "THEIR_NAME")
        hint = f"name the columns, e.g. `columns: {{{ours}: {theirs}}}`"
        problem = f"no shape that is known; columns: {columns}"
        raise DataError(problem, where=where, allowed=f"shapes: {SHAPES}", hint=hint)
    for column in ("messages",) if row.get("messages") is not None and not templated else ():
        if not isinstance(row[column], list):
            raise DataError(f"`{column}` is {kind(row[column])}, not a list of messages", where=where)
    for column in ("prompt", "completion", "chosen", "rejected"):
        value = row.get(column)
        if value is not None and not isinstance(value, str | list):
            raise DataError(f"`{column}` is {kind(value)}, not text or messages", where=where)
    if row.get("text") is not None and row.get("prompt") is None and not isinstance(row["text"], str):
        raise DataError(f"`text` is {kind(row['text'])}, not text", where=where)


def fill(template: str, row: Mapping[str, Any], where: str = "", key: str = "prompt_template") -> str:
    """`template` with its {column} fields filled from the row. Raises DataError naming a column that the row lacks."""
    missing = [f for f in fields(template, key) if f not in row]
    if missing:
        raise unknown_column(missing[0], row, f"{where}, {key}" if where else key)
    return template.format_map({k: "" if v is None else v for k, v in row.items()})


def fields(template: str, key: str = "prompt_template") -> list[str]:
    """The column names in the template of a key of `data`. Raises DataError for braces that do not fit."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as cause:
        raise DataError(f"data.{key}: {cause}", hint="write {{ and }} for braces that are meant") from cause
    if not all(n.isidentifier() for n in names):
        bad = next(n for n in names if not n.isidentifier())
        raise DataError(f"data.{key}: `{{{bad}}}` is no column name", hint="write {{ and }} for braces")
    return names


def unknown_column(name: str, row: Mapping[str, Any], where: str) -> DataError:
    """The error for a column that is not there: the columns there are, and the nearest."""
    return DataError(
        f"no column `{name}`",
        where=where,
        allowed=f"columns: {', '.join(k for k in row if k != 'uid')}",
        hint=did_you_mean(name, row),
    )


def _text(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"`{column}` is {kind(value)}, not text", where=where)
    return value
