"""Complementary RL (arXiv 2603.17621): an extractor writes experience for an actor and is rewarded if it helps."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.registry import register
from posttrain.workflows.documents import rank_passages, split_words
from posttrain.workflows.protocol import Call, Caller, Learned, Made, Outcome, fill, last_between

GUIDE = """{question}

What was learnt from problems like this one:
{experience}"""
EXTRACTOR = """Here is a problem, and attempts at it.

Problem:
{question}

{attempts}

A lesson that one of them was shown: {experience}

Which lesson would help with problems like this one? Write one that names no answer, in one or two sentences, as
<add>...</add>. To put a better one in the place of the lesson above, write <update>...</update>. If there is nothing to
learn, write <keep/>."""
Table = Sequence[Sequence[float]]
Memory = dict[str, Any]  # id, text, question, row, retrieved, shown_at, trained, trained_at


@register(
    "workflow",
    "actor_extractor",
    paper="2603.17621",
    needs=("grades", "rollout_logp"),
    roles=("actor", "guided", "extractor"),
    note=(
        "Extractor and actor are roles of one policy; the paper trains two models. Similarity is of shared words, where"
        " the paper has an embedding; `recent_steps` stands for its 300 seconds, so that a run resumes exactly. The"
        " prompts, what merges two memories, and pooling a memory's reward over the prompts of a step are ours."
    ),
)
class ActorExtractor:
    """Complementary RL: an actor solves a problem without and with retrieved experience; an extractor writes experience
    from the attempts and is rewarded by whether it helped.

    In each rollout `plain` attempts see the data's prompt (role `actor`), and `guided` attempts also see a memory from
    the store (role `guided`; if the store is empty they are plain too). The two form separate groups. Then the
    extractor sees a right and a wrong attempt, and adds a memory or rewrites the one that was shown. Its output is
    trained on in later steps that show it: the reward is the sign of the mean of reward - mean reward of the plain
    attempts, times (1 + times trained)^-power, and 0 within `cooldown` steps; at most `batch` memories per step, with
    the ratio to the policy that wrote them.

    Retrieval takes the `candidates` most similar memories and orders them by -index - (diversity_lambda ln(1 + times
    shown) + 1 if shown in the last recent_steps); each attempt skips the first with probability first_dropout. The
    store holds `capacity` memories, the oldest leave first; every merge_every steps, of two memories whose words
    overlap by merge_above the older is removed. guide, extractor: prompts, with {question}, {experience} and
    {attempts}; the extractor sees the last attempt_chars characters of each attempt."""

    late = ("extractor",)

    def __init__(
        self,
        *,
        plain: int = 4,
        guided: int = 4,
        guide: str = GUIDE,
        extractor: str = EXTRACTOR,
        attempt_chars: int = 2000,
        capacity: int = 20_000,
        candidates: int = 16,
        diversity_lambda: float = 0.4,
        recent_steps: int = 1,
        first_dropout: float = 0.5,
        cooldown: int = 1,
        power: float = 0.5,
        batch: int = 64,
        merge_every: int = 5,
        merge_above: float = 0.9,
    ) -> None:
        self.plain, self.guided, self.guide, self.extractor = plain, guided, guide, extractor
        self.attempt_chars, self.capacity, self.candidates = attempt_chars, capacity, candidates
        self.diversity_lambda, self.recent_steps, self.first_dropout = diversity_lambda, recent_steps, first_dropout
        self.cooldown, self.power, self.batch = cooldown, power, batch
        self.merge_every, self.merge_above = merge_every, merge_above

    async def run(self, row: Mapping[str, Any], call: Caller) -> None:
        """See `Learner.run`."""
        del row
        shown = self.retrieve(call.question, call.memory or {}, call.random())
        attempts = await call.several("actor", count=self.plain if shown else self.plain + self.guided)
        if shown:
            asked = [fill(self.guide, question=call.question, experience=memory["text"]) for memory in shown]
            tried = await call.each("guided", asked)
            for attempt, memory in zip(tried, shown, strict=True):
                attempt.note["memory"] = memory["id"]
            attempts = [*attempts, *tried]
        right = [bool(grade.correct) for grade in await call.grade(attempts)]
        first = shown[0] if shown else None
        prompt = fill(
            self.extractor,
            question=call.question,
            attempts=self.list_attempts(attempts, right),
            experience=first["text"] if first else "none",
        )
        written = await call("extractor", prompt, parent=attempts[-1])
        added, updated = last_between(written.answer, "add"), last_between(written.answer, "update")
        written.note["question"] = call.question
        if updated and first:
            written.note |= {"text": updated, "replaces": first["id"]}
        elif added or updated:
            written.note["text"] = added or updated

    def retrieve(self, question: str, memory: Mapping[str, Any], draw: random.Random) -> list[Memory]:
        """Return the memory to show to each guided attempt; [] if the store is empty."""
        known: list[Memory] = memory.get("memories", [])
        near = rank_passages(question, [f"{m['question']} {m['text']}" for m in known])[: self.candidates]
        found = [known[n] for n in near] or known[-self.candidates :]
        recent = [
            stored["shown_at"] is not None and memory["step"] - stored["shown_at"] <= self.recent_steps
            for stored in found
        ]
        order = rerank([stored["retrieved"] for stored in found], recent, diversity_lambda=self.diversity_lambda).order
        if not order:
            return []
        later = min(1, len(order) - 1)
        return [found[order[later if draw.random() < self.first_dropout else 0]] for _ in range(self.guided)]

    def list_attempts(self, attempts: Sequence[Call], right: Sequence[bool]) -> str:
        """Format the first right and the first wrong attempt for the extractor's prompt."""
        firsts = [right.index(kind) for kind in (True, False) if kind in right]
        texts = [
            f"{'Right' if right[n] else 'Wrong'} attempt:\n{attempts[n].text[-self.attempt_chars :]}" for n in firsts
        ]
        return "\n\n".join(texts)

    def learn(self, memory: Any, outcomes: Sequence[Outcome], step: int) -> Learned:
        """See `Learner.learn`."""
        memories = [dict(stored) for stored in (memory or {}).get("memories", [])]
        number = (memory or {}).get("next", 0)
        earned, shown = self.count_use(memories, outcomes, step)
        again = self.train_again(memories, earned, step)
        for outcome in outcomes:
            for made in outcome.by("extractor"):
                if made.note.get("text"):
                    number = _store_memory(memories, made, number)
        if step % self.merge_every == self.merge_every - 1:
            memories = merge_memories(memories, self.merge_above)
        memories = memories[-self.capacity :]
        gains = list(earned.values())
        metrics = {
            "experience/memories": len(memories),
            "experience/shown": shown,
            "experience/trained": len(again),
            **({"experience/reward": sum(gains) / len(gains)} if gains else {}),
        }
        return Learned({"memories": memories, "next": number, "step": step + 1}, again, metrics)

    def count_use(
        self, memories: Sequence[Memory], outcomes: Sequence[Outcome], step: int
    ) -> tuple[dict[str, float], int]:
        """Count the uses of memories in a step; returns (reward of each memory that was shown, number of guided
        attempts)."""
        attempts = [[call for call in outcome.by("actor", "guided") if call.reward is not None] for outcome in outcomes]
        rewards = [[call.reward or 0.0 for call in group] for group in attempts]
        flags = [[float(call.role == "guided") for call in group] for group in attempts]
        names = [[call.note.get("memory") for call in group] for group in attempts]
        uses = Counter(name for group in names for name in group if name is not None)
        for stored in memories:
            if stored["id"] in uses:
                stored["retrieved"], stored["shown_at"] = stored["retrieved"] + uses[stored["id"]], step
        return memory_rewards(rewards, flags, names), uses.total()

    def train_again(
        self, memories: Sequence[Memory], earned: Mapping[str, float], step: int
    ) -> list[tuple[Mapping[str, Any], float]]:
        """Return the extractor calls to train on in this step, with their advantages, and count them as trained."""
        due = [stored for stored in memories if stored["row"] is not None and earned.get(stored["id"])]
        last = [step - self.cooldown if stored["trained_at"] is None else stored["trained_at"] for stored in due]
        counts = [stored["trained"] for stored in due]
        weights = extractor_weights(counts, last, step, cooldown=self.cooldown, power=self.power)
        chosen = [(stored, weight) for stored, weight in zip(due, weights, strict=True) if weight][: self.batch]
        for stored, _ in chosen:
            stored["trained"], stored["trained_at"] = stored["trained"] + 1, step
        return [(stored["row"], weight * earned[stored["id"]]) for stored, weight in chosen]


def _store_memory(memories: list[Memory], made: Made, number: int) -> int:
    """Add what an extractor wrote to the store, remove the memory that it replaces, and return the next id number."""
    replaced = made.note.get("replaces")
    new: Memory = {"id": f"m{number}", "text": made.note["text"], "question": made.note["question"], "row": made.row}
    new |= {"retrieved": 0, "shown_at": None, "trained": 0, "trained_at": None}
    memories[:] = [*(stored for stored in memories if stored["id"] != replaced), new]
    return number + 1


def merge_memories(memories: Sequence[Memory], above: float) -> list[Memory]:
    """Merge each memory into a newer one if their words overlap (shared words / all words of both) by `above` or more;
    the newer one takes over the older one's count of uses."""
    kept: list[Memory] = []
    for memory_state in reversed(memories):
        words = split_words(memory_state["text"])
        same = next((other for other in kept if _overlap(words, split_words(other["text"])) >= above), None)
        if same is None:
            kept.append(dict(memory_state))
        else:
            same["retrieved"] += memory_state["retrieved"]
    return kept[::-1]


def _overlap(first: frozenset[str], second: frozenset[str]) -> float:
    return len(first & second) / max(len(first | second), 1)


def memory_rewards(rewards: Table, guided: Table, memory: Sequence[Sequence[str | None]]) -> dict[str, float]:
    """Return 1, 0 or -1 for each memory that was shown: the sign of the mean of reward - mean unguided reward of the
    same prompt (0 if there is none)."""
    gains: dict[str, list[float]] = {}
    for row, shown, names in zip(rewards, guided, memory, strict=True):
        plain = [r for r, g in zip(row, shown, strict=True) if not g]
        baseline = sum(plain) / len(plain) if plain else 0.0
        for reward, flag, name in zip(row, shown, names, strict=True):
            if flag and name is not None:
                gains.setdefault(name, []).append(reward - baseline)
    return {name: _sign(math.fsum(values) / len(values)) for name, values in gains.items()}


def _sign(value: float) -> float:
    return float((value > 0) - (value < 0))


def extractor_weights(
    train_count: Sequence[int], last_step: Sequence[int], step: int, *, cooldown: int = 1, power: float = 0.5
) -> list[float]:
    """Compute the weight of each extractor sample: (1 + times trained)^-power, 0 within `cooldown` steps of its last
    use."""
    return [
        0.0 if step - last < cooldown else (1 + count) ** -power
        for count, last in zip(train_count, last_step, strict=True)
    ]


class Ranked(NamedTuple):
    """order: indices of the candidates, the first to show first; scores: of the candidates, in their given order."""

    order: list[int]
    scores: list[float]


def rerank(retrieve_count: Sequence[int], recent: Sequence[float], *, diversity_lambda: float = 0.4) -> Ranked:
    """Rank candidates, given in order of similarity: score = -index - (lambda ln(1 + times shown) + 1 if recently
    shown); ties in their order."""
    scores = [
        -index - (diversity_lambda * math.log(1 + count) + float(bool(now)))
        for index, (count, now) in enumerate(zip(retrieve_count, recent, strict=True))
    ]
    return Ranked(sorted(range(len(scores)), key=lambda index: -scores[index]), scores)
