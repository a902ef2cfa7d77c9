"""Thinking that forgets: chunks that carry a part of the text over, summaries in place of the text.

Several rows a rollout, each with a prompt of its own; the last one is scored, and its reward is that of them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.batch import Segment
from posttrain.errors import UserError
from posttrain.registry import register
from posttrain.shapes.protocol import Asked, Row

SUMMARISE = "\n\nThe context is full. Summarise what you have found so far and what is left to do.\n"


def next_prompt(query: Sequence[int], answer: Sequence[int], keep_head: int, keep_tail: int) -> list[int]:
    """The prompt of the chunk after this answer so far: the query, its first keep_head and its last keep_tail tokens.

    An answer that is not longer than both is kept whole. keep_tail must be above 0.
    """
    if keep_tail < 1:
        raise ValueError("keep_tail must be at least 1")
    if len(answer) <= keep_head + keep_tail:
        return [*query, *answer]
    return [*query, *answer[:keep_head], *answer[len(answer) - keep_tail :]]


def chunk_prompts(
    query: Sequence[int], chunks: Sequence[Sequence[int]], *, keep_head: int, keep_tail: int
) -> list[list[int]]:
    """Delethink: the prompt after each chunk. The answer so far is what was carried over, then what the chunk added."""
    found: list[list[int]] = []
    carried: list[int] = []
    for chunk in chunks:
        found.append(next_prompt(query, [*carried, *chunk], keep_head, keep_tail))
        carried = found[-1][len(query) :]
    return found


@register("shape", "chunks", paper="2510.06557", needs=("shared_reward",))
async def think_in_chunks(
    asked: Asked, *, keep_head: int = 100, keep_tail: int = 3996, max_chunks: int = 5
) -> list[Row]:
    """Delethink: the thought goes on in chunks, each of which sees the question, the first keep_head tokens of the
    answer so far and its last keep_tail, and nothing else. So the context never exceeds prompt + max_new_tokens.

    The first chunk has at most max_new_tokens tokens, later ones max_new_tokens - keep_head - keep_tail; at most
    max_chunks of them, and a rollout that then has not ended is `length`. Each chunk is a row under its own prompt;
    what was carried over is prompt and not trained on. Rewards read the carried text and the last chunk. A chunk that
    another one follows counts as ended. Raises UserError for keys that leave a later chunk no token.
    """
    room = asked.max_new_tokens - keep_head - keep_tail
    if room < 1:
        raise UserError(
            f"rollout.shape `chunks`: keep_head {keep_head} + keep_tail {keep_tail} leave later chunks no token",
            allowed=f"less than rollout.max_new_tokens ({asked.max_new_tokens}) together",
        )
    prompt, limit = asked.prompt, asked.max_new_tokens
    pieces: list[tuple[int, ...]] = []
    rows: list[Row] = []
    while True:
        (piece,) = await asked.sample([prompt], limit)
        carried = prompt[len(asked.prompt) :]
        if piece.finish == "stop" or len(rows) + 1 == max_chunks:
            text = asked.text((*carried, *piece.ids))
            return [*rows, Row(prompt, (piece.segment,), piece.finish, text=text)]
        rows.append(Row(prompt, (piece.segment,), "stop", scored=False))
        pieces.append(piece.ids)
        prompt = tuple(chunk_prompts(asked.prompt, pieces, keep_head=keep_head, keep_tail=keep_tail)[-1])
        limit = room


@register(
    "shape",
    "summaries",
    paper="2510.06727",
    needs=("shared_reward",),
    note="For thinking without tools: the paper summarises conversations with tools. Its instruction is not known.",
)
async def summarise_context(
    asked: Asked, *, max_summaries: int = 5, instruction: str = SUMMARISE, answer_tokens: int = 512
) -> list[Row]:
    """SUPO: where a completion fills max_new_tokens, the same policy writes a summary behind `instruction`, and goes on
    from the prompt and that summary alone, at most max_summaries times. answer_tokens: the longest summary.

    Each stretch with its summary is a row under its own prompt; work and summaries are trained on, the instruction is
    not. Rewards read the last stretch. A summary and what follows it have max_new_tokens together. Raises UserError for
    summaries that leave no token for what follows.
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
        summary = written.written
