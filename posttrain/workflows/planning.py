"""Workflows that divide work over roles: a planner with executors (CoDA), a thought cut and scored (SCMA)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from posttrain.registry import register
from posttrain.workflows.documents import search_documents
from posttrain.workflows.protocol import Caller, fill, last_between

PLANNER = """Answer the question by giving tasks to an assistant, one at a time. In each turn think in
<think>...</think>, then write either one task as <task>...</task>, or the final answer as <answer>...</answer>. The
assistant knows nothing but the text of the task.

Question: {question}"""
EXECUTOR = """Do the task. Think in <think>...</think>. To look something up, write <search>words</search> and stop.
When you are shown passages, write what of them matters as <refine>...</refine>. End with <answer>...</answer>.

Task: {task}"""
SEGMENTER = """Cut the following text into segments. Repeat it word for word, and put <seg> between two segments. Change
nothing else.

{thought}"""
SCORER = """Here are the numbered segments of a solution.

Problem:
{question}

{segments}

How important is each segment for the answer, from 1 (it could go) to 5 (without it the answer would be lost)? Write
one line a segment: its number, a colon, and <score>N</score>."""
_SCORE = re.compile(r"(\d+)\s*:\s*<score>\s*([1-5])\s*</score>")


@register("workflow", "planner_executors", roles=("planner", "executor"))
async def planner_executors(
    row: Mapping[str, Any],
    call: Caller,
    *,
    planner: str = PLANNER,
    executor: str = EXECUTOR,
    max_tasks: int = 5,
    max_searches: int = 4,
    documents: str = "documents",
    passages: int = 3,
) -> None:
    """CoDA: a planner writes one task per turn, and an executor with its own context does each; the planner sees only
    the executor's answer.

    planner, executor: prompts, with {question} and {task}. The planner is one row, with the answers between its turns;
    so is each executor, with the passages between its searches. documents: the data column with the row's texts; a
    search shows the `passages` texts that share the most words with it, and finds nothing without the column. The
    paper's limits: 6 turns of the planner, 5 steps of an executor.
    """
    plan = await call("planner", fill(planner, question=call.question))
    texts = [str(text) for text in row.get(documents) or ()]
    for _ in range(max_tasks):
        task = last_between(plan.parts[-1], "task")
        if task is None or last_between(plan.parts[-1], "answer") is not None:
            return
        done = await call("executor", fill(executor, task=task), parent=plan)
        await search_documents(call, done, texts, max_searches, passages)
        answer = last_between(done.parts[-1], "answer")
        await call.reply(plan, "no answer" if answer is None else answer)


@register(
    "workflow",
    "segment_scores",
    paper="2601.21919",
    roles=("reasoner", "segmenter", "scorer"),
    note="Reconstructed from the abstract and a review; the paper's prompts are not known.",
)
async def segment_scores(
    row: Mapping[str, Any], call: Caller, *, segmenter: str = SEGMENTER, scorer: str = SCORER
) -> None:
    """SCMA: a reasoner answers the prompt, a segmenter cuts its text with <seg>, and a scorer rates the importance of
    each segment from 1 to 5.

    segmenter, scorer: prompts, with {thought}, {question} and {segments}. The scorer's call has the note `segments`, a
    list of (text, score), which `roles.segment_importance` reads. A text that the segmenter did not cut, or changed, is
    one segment of score 5; a segment without a score has 5.
    """
    del row
    thought = await call("reasoner")
    cut = await call("segmenter", fill(segmenter, thought=thought.text), parent=thought)
    segments = cut_segments(thought.text, cut.answer)
    listed = "\n".join(f"{n}: {text}" for n, text in enumerate(segments, 1))
    scored = await call("scorer", fill(scorer, question=call.question, segments=listed), parent=cut)
    scores = {int(number): int(score) for number, score in _SCORE.findall(scored.answer)}
    known = scores if len(segments) > 1 else {}
    scored.note["segments"] = [[text, known.get(n, 5)] for n, text in enumerate(segments, 1)]


def cut_segments(text: str, marked: str) -> list[str]:
    """Return the segments of a text from its copy with <seg> between them; the whole text as one segment if the copy
    differs in more than whitespace."""
    segments = [segment for segment in marked.split("<seg>") if segment.strip()]
    same = "".join("".join(segments).split()) == "".join(text.split())
    return segments if same and segments else [text]
