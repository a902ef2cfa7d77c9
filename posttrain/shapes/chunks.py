"""Thinking with a bounded context: chunks that carry over part of the text (Delethink), or summaries of it (SUPO).

A rollout has several rows, each with its own prompt; the last row is scored, and all rows share its reward.
"""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.batch import Segment
from posttrain.errors import UserError
from posttrain.registry import register
from posttrain.shapes.protocol import Asked, Row

SUMMARIZE = "\n\nThe context is full. Summarise what you have found so far and what is left to do.\n"


def next_prompt(query: Sequence[int], answer: Sequence[int], keep_head: int, keep_tail: int) -> list[int]:
    """Return the prompt of the next chunk: the query, and the answer's first keep_head and last keep_tail tokens.

    An answer of at most keep_head + keep_tail tokens is kept whole. Raises ValueError for keep_tail below 1.
    """
    if keep_tail < 1:
        raise ValueError("keep_tail must be at least 1")
    if len(answer) <= keep_head + keep_tail:
        return [*query, *answer]
    return [*query, *answer[:keep_head], *answer[len(answer) - keep_tail :]]


def chunk_prompts(
    query: Sequence[int], chunks: Sequence[Sequence[int]], *, keep_head: int, keep_tail: int
) -> list[list[int]]:
    """Return the prompt after each chunk (Delethink). The answer so far = carried-over tokens + the new chunk."""
    prompts: list[list[int]] = []
    carried: list[int] = []
    for chunk in chunks:
        prompts.append(next_prompt(query, [*carried, *chunk], keep_head, keep_tail))
        carried = prompts[-1][len(query) :]
    return prompts


@register("shape", "chunks", paper="2510.06557", needs=("shared_reward",))
async def think_in_chunks(
    asked: Asked, *, keep_head: int = 100, keep_tail: int = 3996, max_chunks: int = 5
) -> list[Row]:
    """Delethink: thinks in chunks, each of which sees only the question and the first keep_head and last keep_tail
    tokens of the answer so far, so the context never exceeds prompt + max_new_tokens.

    The first chunk has at most max_new_tokens tokens, later ones max_new_tokens - keep_head - keep_tail. A rollout has
    at most max_chunks chunks and is `length` if it has not ended by then. Each chunk is a row under its own prompt;
    carried-over tokens are prompt and not trained on. Rewards read the carried text and the last chunk. A chunk with a
    successor counts as ended. Raises UserError for keys that leave a later chunk no token.
    """
    room = asked.max_new_tokens - keep_head - keep_tail
    if room < 1:
        raise UserError(
            f"rollout.shape `chunks`: keep_head {keep_head} + keep_tail {keep_tail} leave later chunks no token",
            allowed=f"less than rollout.max_new_tokens ({asked.max_new_tokens}) together",
        )
    prompt, limit = asked.prompt, asked.max_new_tokens
    chunks: list[tuple[int, ...]] = []
    rows: list[Row] = []
    while True:
        (chunk,) = await asked.sample([prompt], limit)
        carried = prompt[len(asked.prompt) :]
        if chunk.finish == "stop" or len(rows) + 1 == max_chunks:
            text = asked.text((*carried, *chunk.ids))
            return [*rows, Row(prompt, (chunk.segment,), chunk.finish, text=text)]
        rows.append(Row(prompt, (chunk.segment,), "stop", scored=False))
        chunks.append(chunk.ids)
        prompt = tuple(chunk_prompts(asked.prompt, chunks, keep_head=keep_head, keep_tail=keep_tail)[-1])
        limit = room


@register(
    "shape",
    "summaries",
    paper="2510.06727",
    needs=("shared_reward",),
    note="For thinking without tools: the paper summarises conversations with tools. Its instruction is not known.",
)
async def summarize_context(
    asked: Asked, *, max_summaries: int = 5, instruction: str = SUMMARIZE, answer_tokens: int = 512
) -> list[Row]:
    """SUPO: when a completion fills max_new_tokens, the policy writes a summary after `instruction` and continues from
    the prompt and that summary alone, at most max_summaries times. answer_tokens: maximum length of a summary.

    Each stretch with its summary is a row under its own prompt; work and summaries are trained on, the instruction is
    not. Rewards read the last stretch. A summary and its continuation share max_new_tokens. Raises UserError for
    summaries that leave no token for the continuation.
    """
    if answer_tokens >= asked.max_new_tokens:
        raise UserError(
            f"rollout.shape `summaries`: a summary of {answer_tokens} tokens leaves nothing of max_new_tokens",
            allowed=f"answer_tokens below rollout.max_new_tokens ({asked.max_new_tokens})",
        )
    closing = asked.encode(instruction)
    summary: tuple[int, ...] = ()
    rows: list[Row] = []
    while True:
        prompt = (*asked.prompt, *summary)
        (work,) = await asked.sample([prompt], asked.max_new_tokens - len(summary))
        if work.finish == "stop" or len(rows) == max_summaries:
            return [*rows, Row(prompt, (work.segment,), work.finish)]
        (written,) = await asked.sample([(*prompt, *work.ids, *closing)], answer_tokens)
        segments = (work.segment, Segment("injected", closing), written.segment)
        rows.append(Row(prompt, segments, "stop", scored=False))
        summary = written.ids_without_eos
