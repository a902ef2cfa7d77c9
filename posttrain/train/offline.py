"""Completions from data rows, as the tokens that a model would have to generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain import source_locations, thoughts
from posttrain.batch import Prompt, Rollout, Segment
from posttrain.data.images import Reader
from posttrain.data.render import prompt_messages, render_example
from posttrain.errors import DataError, count_noun
from posttrain.recipe.sections import Data
from posttrain.rollout.stored import Tokens
from posttrain.train.context import TrainContext
from posttrain.train.scoring import score_while_sampling
from posttrain.verify.failures import Calls


def stored_completions(
    prompts: Sequence[Prompt], tokenizer: Any, section: Data, limit: int, reader: Reader | None = None
) -> Tokens:
    """Return uid -> the tokens that a model would have to generate for the row's completion, including its end.

    reader: image reader of a vision model. Raises DataError for a row without a completion, with several turns, or
    longer than `limit`.
    """
    completions = {prompt.uid: _completion(prompt, dict(prompt.row), tokenizer, section, reader) for prompt in prompts}
    missing = [uid for uid, ids in completions.items() if ids is None]
    if missing:
        raise DataError(
            "the row is not a prompt and one completion of it",
            where=source_locations.describe_row(missing[0]),
            hint="rollout.engine stored reads columns `prompt` and `completion`",
        )
    return _check_lengths({uid: ids for uid, ids in completions.items() if ids is not None}, limit, "completion")


def solution_completions(
    prompts: Sequence[Prompt],
    column: str,
    tokenizer: Any,
    section: Data,
    limit: int,
    shown: Callable[[Any], Any] | None = None,
    reader: Reader | None = None,
) -> Tokens:
    """Return uid -> the tokens of the solution in `column` as the answer to the prompt, including its end.

    Rows without a solution are left out. shown: returns the row as its prompt was rendered. Raises DataError as
    `stored_completions` does.
    """
    completions: dict[str, tuple[int, ...]] = {}
    for prompt in prompts:
        text = prompt.row.get(column)
        if not isinstance(text, str) or not text.strip():
            continue
        row = dict(shown(prompt.row) if shown else prompt.row)
        messages = prompt_messages(row, section) if row.get("prompt") is None else row["prompt"]
        row = {**row, "messages": None, "prompt": messages, "completion": text}
        ids = _completion(prompt, row, tokenizer, section, reader)
        if ids is None:
            raise DataError(
                f"the text in `{column}` cannot be rendered as the answer to the prompt",
                where=source_locations.describe_row(prompt.uid),
                hint="a prompt truncated by data.max_length cannot have an answer",
            )
        completions[prompt.uid] = ids
    return _check_lengths(completions, limit, "solution")


def _completion(
    prompt: Prompt, row: dict[str, Any], tokenizer: Any, section: Data, reader: Reader | None
) -> tuple[int, ...] | None:
    """Return the trained tokens of a row rendered as a prompt and its answer; None if it renders to anything else."""
    example = render_example(row, tokenizer, section, reader)
    start = example.trained.index(True) if True in example.trained else len(example.ids)
    ids = tuple(i for i, trained in zip(example.ids, example.trained, strict=True) if trained)
    matches = example.ids[:start] == prompt.ids and example.ids[start : start + len(ids)] == ids
    return ids if ids and matches else None


def _check_lengths(found: dict[str, tuple[int, ...]], limit: int, what: str) -> Tokens:
    """Return `found`. Raises DataError if a completion is longer than `limit`."""
    long = [uid for uid, ids in found.items() if len(ids) > limit]
    if long:
        longest = max(len(found[uid]) for uid in long)
        raise DataError(
            f"{len(long)} of {count_noun(len(found), what)} longer than rollout.max_new_tokens {limit}",
            where=source_locations.describe_rows(long),
            hint=f"write `rollout.max_new_tokens: {longest}`, or remove long rows: a truncated one cannot be scored",
        )
    return found


def solution_rows(
    ctx: TrainContext, step: int, sampled: Sequence[Rollout], metrics: dict[str, Any]
) -> tuple[list[Rollout], list[Calls]]:
    """Build one scored row for each group of `sampled` that has a solution for its prompt.

    Returns the rows and the calls that scored them; adds counts to `metrics`. The tokens are of kind `given`: trained
    on, without log-probs of an engine.
    """
    groups = {rollout.group: rollout for rollout in sampled}
    rows = [
        Rollout(
            prompt=rollout.prompt,
            group=group,
            segments=(Segment("given", ctx.solutions[rollout.prompt.uid]),),
            text=thoughts.decode(ctx.loaded.tokenizer, [list(ctx.solutions[rollout.prompt.uid])])[0],
            finish="stop",
            version=rollout.version,
        )
        for group, rollout in groups.items()
        if rollout.prompt.uid in ctx.solutions
    ]
    if not rows:
        return rows, []
    with ctx.watchdog.phase("score"):
        with score_while_sampling(ctx, step) as scored:
            pass  # nothing is generated
        return rows, [scored.finish(rows, metrics)]
