"""Normalization of data rows to one of: messages; prompt (+ completion | answer | chosen/rejected); text.

Every other column is left unchanged, for rewards and templates to read.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping
from typing import Any

from posttrain.data.messages import are_messages, describe_value, get_answer, parse_messages
from posttrain.errors import DataError, count_noun, did_you_mean, nearest

Row = dict[str, Any]

SHAPES = (
    "messages (or ShareGPT's conversations); prompt + completion; instruction (+ input, history) + output; "
    "prompt + chosen + rejected; chosen + rejected (message lists); prompt (+ answer and any columns); text"
)
# Columns of a row that this package reads
KNOWN_COLUMNS = ("messages", "prompt", "completion", "answer", "chosen", "rejected", "text", "label", "tools")
_COMMON_NAMES = {  # column names common in other data sets -> our names
    **dict.fromkeys(("question", "problem", "query", "input", "task"), "prompt"),
    **dict.fromkeys(("conversation", "dialog", "dialogue", "turns"), "messages"),
}
_MAIN_COLUMNS = ("messages", "prompt", "completion", "instruction", "output", "chosen", "rejected", "text")


def normalize_row(
    row: Mapping[str, Any],
    where: str,
    prompt_template: str | None = None,
    completion_template: str | None = None,
    *,
    trained: bool = False,
) -> Row:
    """Return a record as a row with `messages`, `prompt` (and its answer) or `text`. DataErrors name `where`.

    The templates build `prompt` and `completion` from columns, both those of the file and those added by the
    conversion. trained: as in `parse_messages`.
    """
    out = dict(row)
    _rename_conversations(out)
    if isinstance(out.get("functions"), list) and out.get("tools") is None and are_messages(out.get("messages")):
        # OpenAI's deprecated name
        out["tools"] = [{"type": "function", "function": schema} for schema in out.pop("functions")]
    for column in ("messages", "prompt", "chosen", "rejected", "completion"):
        if are_messages(out.get(column)):
            out[column] = parse_messages(out[column], column, where, trained=trained)
    if out.get("chosen") is not None or out.get("rejected") is not None:
        templated = prompt_template is not None and "prompt" not in template_fields(prompt_template)
        _convert_pair(out, where, templated=templated)
    elif out.get("prompt") is None and out.get("instruction") is not None:
        _convert_instruction(out, where)
    if prompt_template is None and any(out.get(c) is not None for c in ("instruction", "completion", "chosen")):
        _prepend_history(out)
    filled = {
        column: fill_template(template, out, where, f"{column}_template")
        for column, template in (("prompt", prompt_template), ("completion", completion_template))
        if template is not None
    }
    if "completion" in filled and prompt_template is None and out.get("prompt") is None:
        problem = "data.completion_template answers a prompt, and the row has none"
        raise DataError(
            problem, where=where, hint="write data.prompt_template as well, or data.columns: {prompt: NAME}"
        )
    out |= filled
    _check_shape(out, where, templated=prompt_template is not None)
    return out


def _rename_conversations(row: Row) -> None:
    """Rename ShareGPT's `conversations` to messages, and wrap single-message sides of a pair in a list."""
    for side in ("chosen", "rejected"):
        if isinstance(row.get(side), Mapping):
            row[side] = [row[side]]
    if are_messages(row.get("conversations")) and all(
        row.get(c) is None for c in ("messages", "prompt", "instruction")
    ):
        row["messages"] = row.pop("conversations")


def _convert_instruction(row: Row, where: str) -> None:
    """Convert Alpaca's columns: the input is appended to the instruction, the output is the completion."""
    parts = [_require_text(row["instruction"], "instruction", where)]
    if row.get("input"):
        parts.append(_require_text(row["input"], "input", where))
    row["prompt"] = "\n\n".join(parts)
    if row.get("output") is not None and row.get("completion") is None:
        row["completion"] = _require_text(row["output"], "output", where)


def _prepend_history(row: Row) -> None:
    """Put the earlier turns of a column `history`, a list of [question, answer], before the prompt (LLaMA-Factory).

    For Alpaca rows and rows with completions: in a row of a prompt alone the column may be a reward's.
    """
    prompt, turns = row.get("prompt"), row.get("history")
    if not isinstance(prompt, str) or not isinstance(turns, list | tuple) or not turns:
        return
    if all(isinstance(turn, list | tuple) and [type(text) for text in turn] == [str, str] for turn in turns):
        texts = [*itertools.chain.from_iterable(turns), prompt]
        row["prompt"] = [
            {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)
        ]


def _convert_pair(row: Row, where: str, *, templated: bool) -> None:
    """Separate the prompt from the answers of a pair.

    Without a `prompt`, the prompt is the conversation in `messages`, Alpaca's instruction, or what both sides begin
    with. templated: the recipe writes the prompt, so a text is an answer as it is. Raises DataError for sides that are
    not two answers to one prompt, and if the prompt is probably in a column of another name.
    """
    for side in ("chosen", "rejected"):
        if row.get(side) is None:
            state = "null" if side in row else "missing"
            raise DataError(f"`{side}` is {state} beside its counterpart", where=where)
        if not isinstance(row[side], str | list):
            raise DataError(f"`{side}` is {describe_value(row[side])}, not text or messages", where=where)
    conversation: Any = row.get("messages")
    if row.get("prompt") is not None or not are_messages(conversation):
        conversation = []
    context = _drop_last_answer(conversation)
    if context and len(context) == len(conversation):
        row["prompt"] = row.pop("messages")  # axolotl's form: the conversation that both sides answer
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        forms = ["a text" if isinstance(side, str) else "a list of messages" for side in (chosen, rejected)]
        raise DataError(f"`chosen` is {forms[0]} and `rejected` is {forms[1]}: both must be of one kind", where=where)
    texts = isinstance(chosen, str)
    start = _common_text(chosen, rejected) if texts else _common_messages(chosen, rejected)
    if row.get("prompt") is None and context:
        row["prompt"] = context if texts else chosen[:start] or context
    if row.get("prompt") is None and not templated and (texts or not start):
        _find_prompt(row, where)
    if texts:
        if row.get("prompt") is None and not templated:
            row |= {"prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:]}
        return
    if not start and all(len(side) > 1 and side[0]["role"] != "assistant" for side in (chosen, rejected)):
        what = "`chosen` and `rejected` begin with different messages: a pair is two answers to one prompt"
        hint = "leave the row out, or write one `prompt`, and as `chosen` and `rejected` its answers alone"
        raise DataError(what, where=where, hint=hint)
    if row.get("prompt") is None:
        row["prompt"] = chosen[:start]
    row |= {side: _split_answer(row[side], start, row["prompt"], side, where) for side in ("chosen", "rejected")}


def _find_prompt(row: Row, where: str) -> None:
    """Convert Alpaca's instruction beside a pair. Raises DataError for a column that is named like a prompt: without it
    a word with which both answers begin would be the prompt."""
    if row.get("instruction") is not None:
        return _convert_instruction(row, where)
    for name, value in row.items():
        if name.lower() in ("question", "problem", "query", "input") and isinstance(value, str) and value.strip():
            raise DataError(
                f"the pair has no `prompt`; is it `{name}`?", where=where, hint=f"write `columns: {{prompt: {name}}}`"
            )


def _drop_last_answer(messages: list[Row]) -> list[Row]:
    """Return the messages without trailing assistant turns, which are an answer to the same prompt as the pair."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end]


def _split_answer(messages: list[Row], shared: int, prompt: Any, side: str, where: str) -> str | list[Row]:
    """Return the one assistant message after the shared prefix: its text, if the message has no other keys."""
    answer = messages[shared:]
    if len(answer) != 1 or answer[0]["role"] != "assistant":
        roles = ", ".join(m["role"] for m in answer) or "nothing"
        raise DataError(f"`{side}` must be one assistant message after the prompt, not: {roles}", where=where)
    if shared and messages[0]["role"] == "assistant":
        what = f"`chosen` and `rejected` both begin with {count_noun(shared, 'same message')} after the prompt"
        raise DataError(what, where=where, hint="move them to the end of `prompt`, which both sides answer")
    if shared and not _same_prompt(messages[:shared], prompt):
        raise DataError(f"`{side}` begins with another conversation than `prompt`", where=where)
    return get_answer(answer)


def _same_prompt(shared: list[Row], prompt: Any) -> bool:
    """Return whether the shared messages equal the prompt; a text prompt is compared with the last message."""
    if isinstance(prompt, str):
        return str(shared[-1].get("content", "")).strip() == prompt.strip()
    return shared == prompt


def _common_messages(chosen: list[Row], rejected: list[Row]) -> int:
    """Return how many messages both sides begin with; the last message of a side is never counted."""
    longest = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(longest) if chosen[i] != rejected[i]), max(longest, 0))


def _common_text(chosen: str, rejected: str) -> int:
    """Return how many characters both sides begin with, up to the end of a whole word."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    common = "".join(a for a, _ in equal)
    return max(common.rfind(" "), common.rfind("\n")) + 1


def _check_shape(row: Row, where: str, *, templated: bool) -> None:
    """Check that the row has one of the shapes and that its columns have the right types."""
    if not any(row.get(c) is not None for c in ("messages", "prompt", "text")):
        if nulls := [c for c in _MAIN_COLUMNS if c in row and row[c] is None]:
            problem = f"`{nulls[0]}` is null"
            raise DataError(problem, where=where, hint="give it a value, or leave the row out")
        columns = ", ".join(k for k in row)
        near = [(n, c) for c in row for n in [_COMMON_NAMES.get(c.lower()) or nearest(c.lower(), _MAIN_COLUMNS)] if n]
        ours, theirs = near[0] if near else ("prompt", "THEIR_NAME")
        hint = f"name the columns, e.g. `columns: {{{ours}: {theirs}}}`"
        problem = f"no shape that is known; columns: {columns}"
        raise DataError(problem, where=where, allowed=f"shapes: {SHAPES}", hint=hint)
    for column in ("messages",) if row.get("messages") is not None and not templated else ():
        if not isinstance(row[column], list):
            raise DataError(f"`{column}` is {describe_value(row[column])}, not a list of messages", where=where)
    for column in ("prompt", "completion", "chosen", "rejected"):
        value = row.get(column)
        if value is not None and not isinstance(value, str | list):
            raise DataError(f"`{column}` is {describe_value(value)}, not text or messages", where=where)
    if row.get("text") is not None and row.get("prompt") is None and not isinstance(row["text"], str):
        raise DataError(f"`text` is {describe_value(row['text'])}, not text", where=where)


def fill_template(template: str, row: Mapping[str, Any], where: str = "", key: str = "prompt_template") -> str:
    """Fill the {column} fields of a template from the row. Raises DataError naming a missing column."""
    missing = [f for f in template_fields(template, key) if f not in row]
    if missing:
        raise unknown_column_error(missing[0], row, f"{where}, {key}" if where else key)
    return template.format_map({k: "" if v is None else v for k, v in row.items()})


def template_fields(template: str, key: str = "prompt_template") -> list[str]:
    """Return the column names in a template. key: its key in `data`. Raises DataError for invalid braces."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as cause:
        raise DataError(f"data.{key}: {cause}", hint="write {{ and }} for braces that are meant") from cause
    if not all(n.isidentifier() for n in names):
        bad = next(n for n in names if not n.isidentifier())
        raise DataError(f"data.{key}: `{{{bad}}}` is no column name", hint="write {{ and }} for braces")
    return names


def unknown_column_error(name: str, row: Mapping[str, Any], where: str) -> DataError:
    """Return the error for a missing column, with the row's columns and the nearest name."""
    return DataError(
        f"no column `{name}`",
        where=where,
        allowed=f"columns: {', '.join(k for k in row if k != 'uid')}",
        hint=did_you_mean(name, row),
    )


def _require_text(value: Any, column: str, where: str) -> str:
    """Return the value if it is a text, else raise DataError."""
    if not isinstance(value, str):
        raise DataError(f"`{column}` is {describe_value(value)}, not text", where=where)
    return value
