"""Training on completions that the data rows bring, in place of own samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain import whereabouts
from posttrain.batch import Prompt
from posttrain.data.render import render_example
from posttrain.errors import DataError, counted
from posttrain.recipe.sections import Data
from posttrain.rollout.stored import Tokens


def stored_completions(prompts: Sequence[Prompt], tokenizer: Any, section: Data, limit: int) -> Tokens:
    """uid -> the tokens that a model would have to write for the row's completion, its end included.

    Raises DataError for a row without a completion, one of several turns, and rows that are longer than `limit`.
    """
    found: dict[str, tuple[int, ...]] = {}
    for prompt in prompts:
        example = render_example(prompt.row, tokenizer, section)
        start = example.trained.index(True) if True in example.trained else len(example.ids)
        ids = tuple(i for i, trained in zip(example.ids, example.trained, strict=True) if trained)
        if example.ids[:start] != prompt.ids or example.ids[start : start + len(ids)] != ids or not ids:
            raise DataError(
                "the row is not a prompt and one completion of it",
                where=whereabouts.row(prompt.uid),
                hint="rollout.engine stored reads columns `prompt` and `completion`",
            )
        found[prompt.uid] = ids
    long = [uid for uid, ids in found.items() if len(ids) > limit]
    if long:
        longest = max(len(found[uid]) for uid in long)
        raise DataError(
            f"{len(long)} of {counted(len(found), 'completion')} longer than rollout.max_new_tokens {limit}",
            where=whereabouts.rows(long),
            hint=f"write `rollout.max_new_tokens: {longest}`, or take long rows out: a cut trace has no outcome",
        )
    return found
