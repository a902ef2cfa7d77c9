"""ReSeek: an agent that searches a row's documents and judges the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.registry import register
from posttrain.workflows.documents import find_passages
from posttrain.workflows.protocol import Caller, fill, last_between

SEARCHER = """Answer the question. To look something up, write <search>words</search> and stop. Begin what you write
behind passages with <judge>Yes</judge> if they help, or <judge>No</judge> if they do not: then they are taken away, and
you write another search or your answer in the same message. End with <answer>...</answer>.

Question: {question}"""
DROPPED = "(What was found here did not help, and was taken away.)"


@register(
    "workflow",
    "judged_search",
    paper="2510.00568",
    roles=("searcher",),
    note="Searches are in the row's own documents. The prompt, and what stands where passages were refused, are ours.",
)
async def judged_search(
    row: Mapping[str, Any],
    call: Caller,
    *,
    searcher: str = SEARCHER,
    dropped: str = DROPPED,
    documents: str = "documents",
    passages: int = 3,
    max_searches: int = 4,
) -> None:
    """ReSeek: an agent searches, judges the passages that it is shown, and continues without those that it refused.

    After <judge>No</judge> the passages leave the context and `dropped` replaces them; what follows is sampled and
    trained on under that context, as a further call. The text before is trained on once, under its original context.
    Rewards with `reads: searcher` see the whole transcript, including refused passages. searcher: the prompt, with
    {question}. documents: the column with the row's texts. A message with neither a search nor an answer ends the
    rollout."""
    texts = [str(text) for text in row.get(documents) or ()]
    trace = await call("searcher", fill(searcher, question=call.question))
    for _ in range(max_searches):
        message = trace.parts[-1]
        query = last_between(message, "search")
        if query is None or last_between(message, "answer") is not None:
            return
        found = find_passages(query, texts, passages)
        shown = "\n".join(f"[{n}] {text}" for n, text in enumerate(found, 1)) or "nothing found"
        refused = bool(trace.shown) and (last_between(message, "judge") or "").lower() == "no"
        if refused:
            trace = await call.replace_reply(trace, len(trace.shown) - 1, dropped, then=shown)
        else:
            await call.reply(trace, shown)
