"""Workflows with adversarial or cooperating roles: proposer and solvers, generator and critic, player and judge."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.registry import register
from posttrain.verify.self_play import explain_rejection
from posttrain.verify.text import exact_match
from posttrain.workflows.documents import find_passages, search_documents
from posttrain.workflows.protocol import Call, Caller, Learned, Outcome, fill, last_between

PROPOSER = """Write a question whose answer is: {answer}

First look up what is known about it: write <search>words</search> and stop, at least twice, with other words each time.
Then write the question as <question>...</question>. It must need the passages that you were shown, have ten words or
more, and not name its answer."""
CHECKER = """Answer the question by the passages. Write the answer alone, as <answer>...</answer>.

{passages}

Question: {question}"""
SOLVER = """Answer the question. To look something up, write <search>words</search> and stop. End with
<answer>...</answer>.

Question: {question}"""
CRITIC = """Here is a task, an output, and a list of checks.

Task:
{question}

Output:
{output}

Checks:
{checks}

Which check does the output fail? Name the one that it most likely fails, as <failure>NUMBER</failure>."""
JUDGE = """Here is a request, and answers to it.

{question}

{answers}

How good is each answer, from 0 (useless) to 10 (perfect)? Write one line an answer: its number, a colon, and
<score>N</score>."""
_SCORE = re.compile(r"(\d+)\s*:\s*<score>\s*(\d+(?:\.\d+)?)\s*</score>")


@register(
    "workflow",
    "proposer_solver",
    paper="2510.18821",
    roles=("proposer", "checker", "solver"),
    note="Searches are in the row's own documents; the paper searches the web.",
)
class ProposerSolver:
    """Search self-play: a proposer writes a question for the row's `answer`, the question is checked, and solvers
    answer it.

    A question is refused (note `refused` of the proposer's call) for its length (10 to 1000 characters, min_words), if
    it contains its answer, after fewer than min_searches searches or a repeated query, or if a checker cannot answer it
    from the proposer's passages mixed with `unrelated` other documents. Solvers are not asked a refused question.
    Instead they are asked a question from the pool, one that at most a share pool_success of its solvers had answered,
    with the documents and answer of its row (note `answer`); if the pool is empty, the rollout is the proposer's call
    alone. The pool holds at most `pool` questions (0 = none), and is emptied every pool_steps steps. Solvers of one
    question form a group. proposer, checker, solver: prompts, with {answer}, {passages} and {question}. documents: the
    column with the row's texts."""

    def __init__(
        self,
        *,
        solvers: int = 5,
        proposer: str = PROPOSER,
        checker: str = CHECKER,
        solver: str = SOLVER,
        documents: str = "documents",
        passages: int = 3,
        max_searches: int = 4,
        min_searches: int = 2,
        min_words: int = 10,
        unrelated: int = 4,
        pool: int = 1000,
        pool_success: float = 1.0,
        pool_steps: int = 10,
    ) -> None:
        self.solvers, self.proposer, self.checker, self.solver = solvers, proposer, checker, solver
        self.documents, self.passages, self.max_searches = documents, passages, max_searches
        self.min_searches, self.min_words, self.unrelated = min_searches, min_words, unrelated
        self.pool, self.pool_success, self.pool_steps = pool, pool_success, pool_steps

    async def run(self, row: Mapping[str, Any], call: Caller) -> None:
        """See `Learner.run`."""
        texts, answer = [str(text) for text in row.get(self.documents) or ()], str(row.get("answer", ""))
        proposed = await call("proposer", fill(self.proposer, answer=answer))
        question, why = await self.check(proposed, texts, answer, call)
        proposed.note |= {"question": question, "refused": why}
        if not why:
            await self.solve(question, texts, call, parent=proposed)
        elif pooled := (call.memory or {}).get("pool"):
            chosen = call.random().choice(pooled)
            for solved in await self.solve(chosen["question"], chosen["documents"], call):
                solved.note |= {"answer": chosen["answer"], "pooled": True}

    async def check(self, proposed: Call, texts: Sequence[str], answer: str, call: Caller) -> tuple[str, str]:
        """Return the proposed question, and the reason for its refusal ("" = accepted)."""
        queries = await search_documents(call, proposed, texts, self.max_searches, self.passages, until="question")
        question = last_between(proposed.parts[-1], "question") or ""
        why = explain_rejection(question, answer, queries, min_words=self.min_words, min_searches=self.min_searches)
        if why:
            return question, why
        others = call.random().sample(range(len(texts)), min(self.unrelated, len(texts)))
        shown = collect_passages(texts, queries, self.passages, others)
        prompt = fill(self.checker, passages="\n".join(shown), question=question)
        checked = await call("checker", prompt, parent=proposed)
        checked_answer = last_between(checked.answer, "answer") or ""
        return question, "" if exact_match(checked_answer, [answer]) else "cannot be answered"

    async def solve(self, question: str, texts: Sequence[str], call: Caller, parent: Call | None = None) -> list[Call]:
        """Sample the solvers' answers to a question, each with its searches."""
        asked = fill(self.solver, question=question)
        answered = await call.several("solver", asked, count=self.solvers, parent=parent, compared="parent")
        for answer in answered:
            await search_documents(call, answer, texts, self.max_searches, self.passages, until="answer")
        return answered

    def learn(self, memory: Any, outcomes: Sequence[Outcome], step: int) -> Learned:
        """See `Learner.learn`."""
        pool = list((memory or {}).get("pool", []))
        for outcome in outcomes:
            proposed, solved = outcome.calls[0], outcome.by("solver")
            rate = sum((call.reward or 0.0) > 0 for call in solved) / max(len(solved), 1)
            if solved and not proposed.note.get("refused") and rate <= self.pool_success:
                documents = [str(text) for text in outcome.columns.get(self.documents) or ()]
                answer = outcome.columns.get("answer", "")
                pool.append({"question": proposed.note["question"], "answer": answer, "documents": documents})
        emptied = step % self.pool_steps == self.pool_steps - 1
        pool = [] if emptied else pool[max(0, len(pool) - self.pool) :]
        pooled = sum(any(call.note.get("pooled") for call in outcome.calls) for outcome in outcomes)
        return Learned({"pool": pool}, metrics={"pool/questions": len(pool), "pool/asked": pooled})


def collect_passages(texts: Sequence[str], queries: Sequence[str], count: int, others: Sequence[int]) -> list[str]:
    """Return the passages that the queries find, each once, followed by some other texts."""
    found = dict.fromkeys(text for query in queries for text in find_passages(query, texts, count))
    return list(found | dict.fromkeys(texts[n] for n in others))


@register(
    "workflow",
    "generator_critic",
    paper="2511.01758",
    roles=("generator", "critic"),
    note="The paper's critic names a failure in words, which a validator for the domain checks; here it names one of "
    "the row's checks. Both models are updated with DPO there.",
)
async def generator_critic(
    row: Mapping[str, Any], call: Caller, *, critic: str = CRITIC, critics: int = 1, checks: str = "checks"
) -> None:
    """RLAC: a generator answers the prompt, and a critic names the check that the output most likely fails. The reward
    `roles.adversary` runs only that check.

    critic: its prompt, with {question}, {output} and {checks}. critics: number per output; they form a group. checks:
    the column with the row's checks, each with a `text`.
    """
    output = await call("generator")
    listed = "\n".join(f"{n}: {check['text']}" for n, check in enumerate(row.get(checks) or (), 1))
    asked = fill(critic, question=call.question, output=output.answer, checks=listed)
    await call.several("critic", asked, count=critics, parent=output, compared="parent")


@register(
    "workflow",
    "self_judge",
    paper="2507.17515",
    roles=("player", "judge"),
    note="Rebuilt from the abstract; the scale from 0 to 10 and the prompt are this project's.",
)
async def self_judge(
    row: Mapping[str, Any],
    call: Caller,
    *,
    samples: int = 8,
    judge: str = JUDGE,
    candidates: str = "candidates",
    answer: str = "answer",
) -> None:
    """URPO: one model answers and judges. A row with `answer` gets `samples` answers, scored by a rule; a row with
    `candidates` gets `samples` judgments of these, scored by a gold order; a row with neither gets `samples` answers,
    scored by one judgment of the same policy.

    judge: its prompt, with {question} and {answers}; it writes a score from 0 to 10 for each. The judgment's call has
    the note `scores`, one per answer, None if unreadable. Answers form a group, and so do the judgments of a row's
    candidates. The reward is `roles.self_judged`.
    """
    if row.get(candidates):
        texts = [str(text) for text in row[candidates]]
        asked = fill(judge, question=call.question, answers=number_texts(texts))
        for judged in await call.several("judge", asked, count=samples):
            judged.note["scores"] = read_scores(judged, len(texts))
        return
    played = await call.several("player", count=samples)
    if row.get(answer) is not None:
        return
    asked = fill(judge, question=call.question, answers=number_texts([call.answer for call in played]))
    judged = await call("judge", asked, parent=played[-1])
    judged.note["scores"] = read_scores(judged, samples)


def number_texts(texts: Sequence[str]) -> str:
    """Return the texts numbered from 1."""
    return "\n\n".join(f"Answer {n}:\n{text}" for n, text in enumerate(texts, 1))


def read_scores(judged: Call, count: int) -> list[float | None]:
    """Return a judgment's scores of answers 1 to count; None for an answer without exactly one score from 0 to 10."""
    scores_by_number: dict[int, set[float]] = {}
    for number, score in _SCORE.findall(judged.answer):
        scores_by_number.setdefault(int(number), set()).add(float(score))
    single = {number: scores.pop() for number, scores in scores_by_number.items() if len(scores) == 1}
    return [score if (score := single.get(n)) is not None and score <= 10 else None for n in range(1, count + 1)]
