"""Answers that another role criticises, verifies or sends back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from posttrain.registry import register
from posttrain.workflows.protocol import Caller, fill

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

    critic, refiner: prompts, with {question}, {answer} and {critique}. critiques: of each answer; they are a group, so
    they are compared as critiques of the same answer. The refined answers of a prompt are a group too.
    """
    del row
    first = await call("actor")
    asked = fill(critic, question=call.question, answer=first.answer)
    found = await call.several("critic", asked, count=critiques, parent=first, compared="parent")
    prompts = [fill(refiner, question=call.question, answer=first.answer, critique=one.answer) for one in found]
    await call.each("refiner", prompts, parents=found)


@register("workflow", "solver_verifier", paper="2602.08847", roles=("solver", "verifier"))
async def solver_verifier(
    row: Mapping[str, Any], call: Caller, *, verifier: str = VERIFIER, again: str = AGAIN, rounds: int = 2
) -> None:
    """Dr. MAS: a solver answers, a verifier approves or rejects, and a rejected solver tries again, at most `rounds`
    times in all.

    verifier, again: prompts, with {question}, {answer} and {feedback}. A verdict is the last line `Verdict: approve` or
    `Verdict: reject`; without one the answer stands. Each call is a row, and a role's calls for one prompt are a group.
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


def is_rejected(text: str) -> bool:
    """Whether the last verdict in the text is `reject`; False without one."""
    found = _VERDICT.findall(text)
    return bool(found) and found[-1].lower() == "reject"
