"""Workflows in which another role critiques, verifies or rejects an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from posttrain.registry import register
from posttrain.workflows.documents import search_documents
from posttrain.workflows.protocol import Call, Caller, fill, last_between

CRITIC = """Here is a problem and somebody's answer.

Problem:
{question}

Answer:
{answer}

Check the answer step by step and say what should change. End with the line
Correctness of the final answer: Correct
or
Correctness of the final answer: Wrong"""
REFINER = """Here is a problem, an answer, and a critique of it.

Problem:
{question}

Answer:
{answer}

Critique:
{critique}

Solve the problem again. Use the critique where it is right."""
VERIFIER = """Here is a problem and a solution.

Problem:
{question}

Solution:
{answer}

Is the solution right? Say why, and end with the line
Verdict: approve
or
Verdict: reject"""
AGAIN = """{question}

An earlier solution was:
{answer}

A verifier has rejected it:
{feedback}

Solve the problem again."""
ACTOR = """Answer the question. Think in <think>...</think>. To look something up, write <search>words</search> and
stop. End with <answer>...</answer>.

Question: {question}"""
DISCRIMINATOR = """Here is a question, and how somebody came to an answer, step by step.

Question:
{question}

{steps}

Does it hold together, and does every step follow from what was found? End with a score from 0 to 1, as
<score>NUMBER</score>."""
TRIMMER = """Here is a question, and how somebody came to a wrong answer, step by step.

Question:
{question}

{steps}

Which step is the first bad one? What stands before it is kept. End with <step>NUMBER</step>."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_VERDICT = re.compile(r"verdict[\s*]*:[\s*]*(approve|reject)", re.IGNORECASE)


@register(
    "workflow",
    "critique_refine",
    roles=("actor", "critic", "refiner"),
    note="The actor of Critique-RL is frozen; here it is the policy with other prompts, and `train` leaves it out.",
)
async def critique_refine(
    row: Mapping[str, Any], call: Caller, *, critic: str = CRITIC, refiner: str = REFINER, critiques: int = 4
) -> None:
    """Critique-RL: an actor answers the prompt, critics criticise the answer, and a refiner answers again with each
    critique.

    critic, refiner: prompts, with {question}, {answer} and {critique}. critiques: number per answer; they form a group,
    so critiques of the same answer are compared. The refined answers of a prompt form a group too.
    """
    del row
    first = await call("actor")
    asked = fill(critic, question=call.question, answer=first.answer)
    found = await call.several("critic", asked, count=critiques, parent=first, compared="parent")
    prompts = [
        fill(refiner, question=call.question, answer=first.answer, critique=critique.answer) for critique in found
    ]
    await call.each("refiner", prompts, parents=found)


@register("workflow", "solver_verifier", paper="2602.08847", roles=("solver", "verifier"))
async def solver_verifier(
    row: Mapping[str, Any], call: Caller, *, verifier: str = VERIFIER, again: str = AGAIN, rounds: int = 2
) -> None:
    """Dr. MAS: a solver answers, a verifier approves or rejects, and a rejected solver tries again, for at most
    `rounds` answers in total.

    verifier, again: prompts, with {question}, {answer} and {feedback}. A verdict is the last line `Verdict: approve` or
    `Verdict: reject`; without a verdict the answer is accepted. Each call is a row, and a role's calls for one prompt
    form a group.
    """
    del row
    asked, parent = None, None
    for number in range(rounds):
        solved = await call("solver", asked, parent=parent)
        prompt = fill(verifier, question=call.question, answer=solved.answer)
        parent = await call("verifier", prompt, parent=solved)
        if number + 1 == rounds or not is_rejected(parent.answer):
            return
        asked = fill(again, question=call.question, answer=solved.answer, feedback=parent.answer)


@register(
    "workflow",
    "cut_and_regenerate",
    paper="2602.03647",
    roles=("actor", "discriminator", "trimmer"),
    note="The threshold and the prompts are not stated. Searches are in the row's own documents.",
)
async def cut_and_regenerate(
    row: Mapping[str, Any],
    call: Caller,
    *,
    actor: str = ACTOR,
    discriminator: str = DISCRIMINATOR,
    trimmer: str = TRIMMER,
    threshold: float = 0.5,
    max_cuts: int = 1,
    documents: str = "documents",
    passages: int = 3,
    max_searches: int = 4,
) -> None:
    """Search-R2: an actor answers with searches, and a discriminator scores the trace; below `threshold` a trimmer
    names the first bad step, and the trace is regenerated from that step on, at most max_cuts times.

    actor, discriminator, trimmer: prompts, with {question} and {steps}. A step is a turn of the actor with the reply to
    it. An unreadable score accepts the trace; an unreadable step counts as the first. The steps before the cut are not
    trained on a second time. documents: the column with the row's texts.
    """
    texts = [str(text) for text in row.get(documents) or ()]
    trace = await call("actor", fill(actor, question=call.question))
    await search_documents(call, trace, texts, max_searches, passages)
    for _ in range(max_cuts):
        shown = fill(discriminator, question=call.question, steps=number_steps(trace))
        judged = await call("discriminator", shown, parent=trace)
        score = read_number(judged.answer, "score")
        if score is None or score >= threshold:
            return
        cut = await call("trimmer", fill(trimmer, question=call.question, steps=number_steps(trace)), parent=judged)
        step = read_number(cut.answer, "step") or 1
        trace = await call.rewind(trace, min(max(int(step), 1), len(trace.parts)) - 1, parent=cut)
        await search_documents(call, trace, texts, max_searches, passages)


def number_steps(trace: Call) -> str:
    """Return the turns of a call, numbered from 1, each with the reply to it."""
    shown = [f"\n[shown]\n{text}" for text in trace.shown]
    return "\n\n".join(f"Step {n}:\n{part}{''.join(shown[n - 1 : n])}" for n, part in enumerate(trace.parts, 1))


def read_number(text: str, tag: str) -> float | None:
    """Return the number in the last pair of a tag; None if there is none."""
    found = last_between(text, tag)
    return float(found) if found is not None and _NUMBER.fullmatch(found) else None


def is_rejected(text: str) -> bool:
    """Return whether the last verdict in the text is `reject`; False without a verdict."""
    found = _VERDICT.findall(text)
    return bool(found) and found[-1].lower() == "reject"
