"""Prompt templates and instructions: one style for the whole run, one per group, or an evolving population."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from posttrain.batch import Variant
from posttrain.registry import register
from posttrain.variants.plan import Asked, Outcome

STYLES = {
    "reasoning": "Reason step by step inside <think> and </think>",
    "planning": "Write a plan inside <plan> and </plan>: what you will do, in order, and then do it",
    "code": "Solve the problem by writing code inside <code> and </code>",
    "knowledge": "Recall the facts and formulas that help inside <knowledge> and </knowledge>",
    "perception": "Describe what you see, as far as the question needs it, inside <description> and </description>",
    "null_example": "Write some examples of your own that are like the problem inside <examples> and </examples>",
}
ENDING = ". Then give the final answer, in \\boxed{}, inside <answer> and </answer>. Write nothing else."


@register(
    "prompt_variants",
    "prior_instruction",
    paper="2505.14157",
    note="The wordings are ours. Evaluation is without the instruction: write it into `eval.data` to keep it there.",
)
def prior_instruction(
    asked: Asked,
    *,
    style: Literal["reasoning", "planning", "code", "knowledge", "perception", "null_example"] = "reasoning",
) -> list[Variant]:
    """Prior prompts: one instruction for the whole run, whose behavior RL instils.

    It asks for a tagged section in the given style, then the answer. perception (ours) is for images: they are
    described before the question is answered. Reward `templates.prior` with the same style scores the format.
    """
    if asked.rounds:
        return []
    return [Variant(style, user="{prompt}\n\n" + STYLES[style] + ENDING, columns={"template": style})]


TemplateName = Literal[
    "bare",
    "steps",
    "question",
    "careful",
    "formal",
    "problem",
    "open-r1",
    "open-r1-teacher",
    "deepseek-r1",
    "deepseek-r1-teacher",
    "reflective",
    "reflective-teacher",
    "final-answer-line",
]


class Template(NamedTuple):
    """Template around a question. rule: the format that reward `templates.augmented` checks."""

    rule: str = "free"
    system: str | None = None
    user: str = "{prompt}"
    prefill: str = ""


_OPEN = "Think first, then answer, each on lines of its own:\n<think>\n...\n</think>\n<answer>\n...\n</answer>"
_INLINE = "Put your reasoning inside <think> </think> and the final answer inside <answer> </answer>."
_REFLECT = (
    "Solve the problem between <solution> and </solution>, then check it between <check> and </check>, beginning with"
    ' "Let\'s verify step by step".'
)
TEMPLATES: dict[TemplateName, Template] = {
    "bare": Template(),
    "steps": Template(system="You solve problems step by step and put the final answer in \\boxed{}."),
    "question": Template(user="Question:\n{prompt}\n\nAnswer step by step:"),
    "careful": Template(user="{prompt}\n\nWork carefully, and write the final answer in \\boxed{}."),
    "formal": Template(system="You are a mathematician. Justify each step and box the result."),
    "problem": Template(user="Problem: {prompt}\nSolution:"),
    "open-r1": Template("open-r1", _OPEN),
    "open-r1-teacher": Template("open-r1-teacher", _OPEN, prefill="<think>\n"),
    "deepseek-r1": Template("deepseek-r1", _INLINE),
    "deepseek-r1-teacher": Template("deepseek-r1-teacher", _INLINE, prefill="<think>"),
    "reflective": Template("reflective", _REFLECT),
    "reflective-teacher": Template("reflective-teacher", _REFLECT, prefill="<solution>\n"),
    "final-answer-line": Template(
        "final-answer-line", user="{prompt}\n\nEnd with one line that begins `The final answer is:`."
    ),
}


@register(
    "prompt_variants",
    "templates",
    paper="2602.03190",
    note="The thirteen kinds of template are the authors', their wordings ours.",
)
def templates(
    asked: Asked, *, names: tuple[TemplateName, ...] = tuple(TEMPLATES), own: dict[str, str] | None = None
) -> list[Variant]:
    """Prompt augmentation: each time a prompt is visited, a template is drawn for it, shared by all of its rollouts.

    names: shipped templates to draw from, uniformly together with `own`: name -> user message with `{prompt}`, without
    a format rule. The column `template` holds the rule for reward `templates.augmented`. A tag with which a `-teacher`
    template begins the answer is part of the prompt.
    """
    if asked.rounds:
        return []
    shipped: dict[str, Template] = {name: TEMPLATES[name] for name in names}
    pool = shipped | {name: Template(user=text) for name, text in (own or {}).items()}
    name = asked.random().choice(list(pool))
    found = pool[name]
    return [
        Variant(name, system=found.system, user=found.user, prefill=found.prefill, columns={"template": found.rule})
    ]


@register(
    "prompt_variants",
    "instructions",
    paper="2512.01945",
    note=(
        "The softmax is from a review of the paper; how weights move, what is pruned and all numbers are guesses. New"
        " instructions come from `candidates`, in order; no second model proposes them."
    ),
)
class Instructions:
    """INSPO: a population of system messages that evolves with the policy.

    Each prompt draws one with probability softmax(w / temperature), w the weights of the messages, shared by all of its
    rollouts. w moves towards the mean reward of the groups that used the message (ema), and does not change if none
    did. Every `evolve_every` steps the ceil(size * keep_ratio) best stay, including always the first `protected` of the
    pool, and the next candidates fill the free slots, with the mean weight of those that stay.
    """

    def __init__(
        self,
        *,
        pool: tuple[str, ...],
        candidates: tuple[str, ...] = (),
        temperature: float = 0.1,
        ema: float = 0.1,
        evolve_every: int = 50,
        keep_ratio: float = 0.5,
        protected: int = 1,
    ) -> None:
        self.pool, self.candidates, self.temperature, self.ema = pool, candidates, temperature, ema
        self.evolve_every, self.keep_ratio, self.protected = evolve_every, keep_ratio, protected

    def plan(self, asked: Asked) -> list[Variant]:
        """See `Planner.plan`."""
        if asked.rounds:
            return []
        members = self._members(asked.memory)
        chances = softmax([weight for _, _, weight in members], self.temperature)
        number, text, _ = asked.random().choices(members, chances)[0]
        return [Variant(f"instruction {number}", system=text, note={"instruction": number})]

    def _members(self, memory: Mapping[str, Any] | None) -> list[tuple[int, str, float]]:
        """Return (number, text, weight) of each member; candidates continue the numbering of the pool."""
        if memory:
            return [(int(number), str(text), float(weight)) for number, text, weight in memory["members"]]
        return [(number, text, 0.0) for number, text in enumerate(self.pool)]

    def learn(self, memory: Mapping[str, Any] | None, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """See `Planner.learn`: returns the members, the step count, and the number of candidates used."""
        members, steps = self._members(memory), int((memory or {}).get("steps", 0)) + 1
        used = int((memory or {}).get("candidates", 0))
        index_of = {number: index for index, (number, _, _) in enumerate(members)}
        drawn = [(index_of.get(o.variant.note.get("instruction", -1)), o.mean_reward) for o in outcomes]
        known = [(index, reward) for index, reward in drawn if index is not None and reward is not None]
        weights = update_weights(
            [w for *_, w in members], [index for index, _ in known], [[reward] for _, reward in known], ema=self.ema
        )
        members = [(n, text, weight) for (n, text, _), weight in zip(members, weights, strict=True)]
        if steps % self.evolve_every == 0:
            fresh = self.candidates[used : used + len(self.pool)]
            safe = [index for index, (number, _, _) in enumerate(members) if number < self.protected]
            kept, weights = prune_population(weights, self.keep_ratio, protected=safe, num_new=len(fresh))
            fresh = fresh[: max(len(self.pool) - len(kept), 0)]
            new = [(len(self.pool) + used + n, text, weights[-1]) for n, text in enumerate(fresh)]
            members, used = [*(members[index] for index in kept), *new], used + len(fresh)
        return {"members": [list(member) for member in members], "steps": steps, "candidates": used}


def softmax(weights: Sequence[float], temperature: float = 0.1) -> list[float]:
    """Compute softmax(weights / temperature)."""
    most = max(weights)
    raised = [math.exp((weight - most) / temperature) for weight in weights]
    return [value / sum(raised) for value in raised]


def update_weights(
    weights: Sequence[float], instruction: Sequence[int], rewards: Sequence[Sequence[float]], ema: float = 0.1
) -> list[float]:
    """Return (1 - ema) * w + ema * the mean reward of the step's groups that used the instruction; w if none did.

    instruction: index of each group's instruction; rewards: the rewards of each group's rollouts.
    """
    rewards_by_instruction: dict[int, list[float]] = {}
    for number, group in zip(instruction, rewards, strict=True):
        rewards_by_instruction.setdefault(int(number), []).append(sum(group) / len(group))
    means = {number: sum(rewards) / len(rewards) for number, rewards in rewards_by_instruction.items()}
    return [(1 - ema) * w + ema * means[n] if n in means else w for n, w in enumerate(weights)]


def prune_population(
    weights: Sequence[float], keep_ratio: float = 0.5, *, protected: Sequence[int] = (), num_new: int = 0
) -> tuple[list[int], list[float]]:
    """Return (ascending indices of the members that stay; their weights, then num_new times the mean of these).

    The ceil(size * keep_ratio) best stay, ties by lower index; protected members come first and always stay.
    """
    order = sorted(range(len(weights)), key=lambda n: (n not in protected, -weights[n], n))
    count = max(math.ceil(len(weights) * keep_ratio - 1e-9), len(set(protected)))
    kept = sorted(itertools.islice(order, count))
    mean = sum(weights[n] for n in kept) / len(kept)
    return kept, [*(weights[n] for n in kept), *[mean] * num_new]
