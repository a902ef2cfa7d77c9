"""Completions that the data rows bring, as the tokens that a model would have to write for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain import source_locations
from posttrain.batch import Prompt
from posttrain.data.images import Reader
from posttrain.data.render import prompt_messages, render_example
from posttrain.errors import DataError, count_noun
from posttrain.recipe.sections import Data
from posttrain.rollout.stored import Tokens


def stored_completions(
    prompts: Sequence[Prompt], tokenizer: Any, section: Data, limit: int, reader: Reader | None = None
) -> Tokens:
    """uid -> the tokens that a model would have to write for the row's completion, its end included.

    reader: of a model that sees. Raises DataError for a row without a completion, one of several turns, and rows that
    are longer than `limit`.
    """
    found = {prompt.uid: _completion(prompt, dict(prompt.row), tokenizer, section, reader) for prompt in prompts}
    bare = [uid for uid, ids in found.items() if ids is None]
    if bare:
        raise DataError(
            "the row is not a prompt and one completion of it",
            where=source_locations.row(bare[0]),
            hint="rollout.engine stored reads columns `prompt` and `completion`",
        )
    return _within({uid: ids for uid, ids in found.items() if ids is not None}, limit, "completion")


def solution_completions(
    prompts: Sequence[Prompt],
    column: str,
    tokenizer: Any,
    section: Data,
    limit: int,
    shown: Callable[[Any], Any] | None = None,
    reader: Reader | None = None,
) -> Tokens:
    """uid -> the tokens of the solution in `column` as the answer to the prompt, its end included; of rows with one.

    shown: the row as its prompt was rendered. Raises DataError as `stored_completions` does.
    """
    found: dict[str, tuple[int, ...]] = {}
    for prompt in prompts:
        text = prompt.row.get(column)
        if not isinstance(text, str) or not text.strip():
            continue
        row = dict(shown(prompt.row) if shown else prompt.row)
        asked = prompt_messages(row, section) if row.get("prompt") is None else row["prompt"]
        row = {**row, "messages": None, "prompt": asked, "completion": text}
        ids = _completion(prompt, row, tokenizer, section, reader)
        if ids is None:
            raise DataError(
                f"the text in `{column}` cannot stand after the prompt as its answer",
                where=source_locations.row(prompt.uid),
                hint="a prompt that data.max_length cuts has none",
            )
        found[prompt.uid] = ids
    return _within(found, limit, "solution")


def _completion(
    prompt: Prompt, row: dict[str, Any], tokenizer: Any, section: Data, reader: Reader | None
) -> tuple[int, ...] | None:
    """The trained tokens of a row that is rendered as a prompt and its answer; None where it is something else."""
    example = render_example(row, tokenizer, section, reader)
    start = example.trained.index(True) if True in example.trained else len(example.ids)
    ids = tuple(i for i, trained in zip(example.ids, example.trained, strict=True) if trained)
    whole = example.ids[:start] == prompt.ids and example.ids[start : start + len(ids)] == ids
    return ids if ids and whole else None


def _within(found: dict[str, tuple[int, ...]], limit: int, what: str) -> Tokens:
    """The same. Raises DataError where one is longer than `limit`."""
    long = [uid for uid, ids in found.items() if len(ids) > limit]
    if long:
        longest = max(len(found[uid]) for uid in long)
        raise DataError(
            f"{len(long)} of {count_noun(len(found), what)} longer than rollout.max_new_tokens {limit}",
            where=source_locations.rows(long),
            hint=f"write `rollout.max_new_tokens: {longest}`, or take long rows out: a cut one has no outcome",
        )
    return found
