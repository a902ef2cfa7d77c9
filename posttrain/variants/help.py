"""Help for prompts that the policy does not solve: partial solutions, hints in words, guidance, solved examples."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.batch import Variant
from posttrain.options import TextColumn
from posttrain.registry import register
from posttrain.variants.plan import Asked, Outcome
from posttrain.variants.solutions import cut_before_answer

WORD = re.compile(r"\w+|[^\w\s]")  # a word, or a symbol such as `+`
HINT = "{prompt}\n\nHint: {hint}"
GUIDANCE = "{prompt}\n\nAn earlier attempt failed. Guidance for another one:\n{hint}"
EXAMPLES = "Here are solved problems:\n\n{examples}\n\nNow solve this one.\n{prompt}"


@register(
    "prompt_variants",
    "difficulty_hint",
    paper="2512.13095",
    needs=("solution", "hinted", "begins_answer"),
    note="The ratio is from summaries of the paper; w_min, w_max and the noise are unconfirmed.",
)
def difficulty_hint(
    asked: Asked, *, w_min: float = 0.0, w_max: float = 0.8, noise: float = 0.05, trained: bool = True
) -> list[Variant]:
    """ADHint: half of a group's rollouts continue a hint, whose length grows with the difficulty of the prompt.

    The first round is plain. In the second round the answer begins with the first floor(w * tokens) tokens of the
    solution, at most all but one; w = clip((w_max - w_min) * (1 - mean reward of round 1) + w_min + uniform noise, 0,
    1). trained: the hint's tokens carry a gradient, weighted by advantage `adhint` and factor `hint_consistency`; their
    ratio is to the policy at the start of the step. If the hint is empty, the second round is plain too.
    """
    if len(asked.rounds) > 1:
        return []
    if not asked.rounds:
        return [Variant()]
    drawn = asked.random().uniform(-noise, noise)
    ratio = hint_ratio(asked.rounds[0].rewards, w_min=w_min, w_max=w_max, noise=drawn)
    begin = asked.solution[: hint_length(ratio, len(asked.solution))]
    if not begin:
        return [Variant()]
    begin_is = "trained" if trained else "untrained"
    return [Variant("hint", begin=begin, begin_is=begin_is, hinted=True, note={"ratio": ratio})]  # type: ignore[arg-type]


def hint_ratio(
    rewards_naive: Sequence[float | None], *, w_min: float = 0.0, w_max: float = 0.8, noise: float = 0.0
) -> float:
    """Compute the share of the solution to show: clip((w_max - w_min) * difficulty + w_min + noise, 0, 1).

    w_max 0.8 is a guess.
    """
    return min(max((w_max - w_min) * difficulty(rewards_naive) + w_min + noise, 0.0), 1.0)


def difficulty(rewards_naive: Sequence[float | None]) -> float:
    """Compute 1 - mean reward of the plain rollouts; 1 if none is scored."""
    scored = [r for r in rewards_naive if r is not None]
    return 1 - (sum(scored) / len(scored) if scored else 0.0)


def hint_length(ratio: float, length: int) -> int:
    """Return floor(ratio * length) tokens, at most length - 1 and at least 0."""
    return max(min(math.floor(ratio * length + 1e-9), length - 1), 0)  # 0.29 * 100 is 28.999999999999996


@register(
    "prompt_variants",
    "hint_in_context",
    paper="2506.13923",
    needs=("hinted",),
    note="The wording around the hint, and cutting it before the row's answer, are ours.",
)
def hint_in_context(
    asked: Asked,
    *,
    hint: TextColumn = "hint",
    reroll_threshold: float = 0.001,
    spare_answer: bool = True,
    user: str = HINT,
) -> list[Variant]:
    """GUIDE: prompts whose mean reward is at most the threshold are sampled once more with a hint in words.

    The new rollouts form a group of their own. They are trained on as if there had been no hint: the training pass
    computes log-probs under the plain prompt, old log-probs are under the prompt with the hint, and loss `guide` shapes
    the ratio. Prompts without a hint are sampled once. spare_answer: a hint is cut before it names the row's `answer`.
    """
    if len(asked.rounds) == 1:
        text = str(asked.row.get(hint) or "").strip()
        text = cut_before_answer(text, asked.row.get("answer")) if spare_answer else text
        mean = asked.rounds[0].mean_reward
        if text and mean is not None and mean <= reroll_threshold:
            return [Variant("hint", user=user, fills={"hint": text}, loss_on="plain", hinted=True, apart=True)]
    return [] if asked.rounds else [Variant()]


@register(
    "prompt_variants",
    "guided_retry",
    paper="2506.11425",
    needs=("hinted",),
    note=(
        "The authors update by DPO on pairs (`builder: guided` of stage pairs makes them); as RL it is ours. They build"
        " guidance from plans, errors of tests and places to look at; here it is a column."
    ),
)
def guided_retry(
    asked: Asked,
    *,
    guidance: TextColumn = "guidance",
    max_retries: int = 1,
    strip_guidance: bool = True,
    user: str = GUIDANCE,
) -> list[Variant]:
    """Agent-RLVR: a task that no attempt solves is tried again with guidance in its prompt, in the same group.

    strip_guidance: log-probs are computed under the prompt without the guidance, so that the model does not learn to
    depend on it. Also works with tools and environments.
    """
    text = str(asked.row.get(guidance) or "").strip()
    if not asked.rounds:
        return [Variant()]
    if asked.rounds[-1].is_solved or len(asked.rounds) > max_retries or not text:
        return []
    loss = "plain" if strip_guidance else "sampled"
    return [Variant("guided", user=user, fills={"hint": text}, loss_on=loss, hinted=True)]  # type: ignore[arg-type]


@register(
    "prompt_variants",
    "solved_examples",
    paper="2510.06672",
    needs=("hinted",),
    note=(
        "Whether the examples stay in the prompt for the gradient is not stated: they do, so rollouts are on-policy."
        " The paper finds neighbours by embeddings, this by shared words (TF-IDF)."
    ),
)
class SolvedExamples:
    """XRPO: a prompt that every rollout failed is sampled again with `k` solved examples of similar prompts before it.

    A store, saved in checkpoints, keeps one correct answer per solved prompt, the newest `store` of them. Examples are
    the nearest by TF-IDF cosine above `similarity`, as many as fit into max_tokens; if there is none, there is no
    second round. The rollouts of both rounds are one group.
    """

    def __init__(
        self, *, k: int = 2, max_tokens: int = 512, similarity: float = 0.0, store: int = 1000, user: str = EXAMPLES
    ) -> None:
        self.k, self.max_tokens, self.similarity, self.store, self.user = k, max_tokens, similarity, store, user

    def plan(self, asked: Asked) -> list[Variant]:
        """See `Planner.plan`."""
        if not asked.rounds:
            return [Variant()]
        if len(asked.rounds) > 1 or asked.rounds[0].is_solved:
            return []
        stored = {uid: pair for uid, pair in (asked.memory or {}).items() if uid != asked.uid}
        near = rank_similar_texts(
            asked.question, {uid: question for uid, (question, _) in stored.items()}, self.similarity
        )
        shown: list[str] = []
        for uid in near:
            text = f"{stored[uid][0]}\n{stored[uid][1]}"
            if len(shown) < self.k and len(asked.encode("\n\n".join([*shown, text]))) <= self.max_tokens:
                shown.append(text)
        if not shown:
            return []
        fills = {"examples": "\n\n".join(shown)}
        return [Variant("examples", user=self.user, fills=fills, hinted=True, note={"examples": near[: len(shown)]})]

    def learn(self, memory: Mapping[str, Any] | None, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """See `Planner.learn`: returns the store, newest last."""
        examples = dict(memory or {})
        for outcome in outcomes:
            right = [text for text, ok in zip(outcome.texts, outcome.correct, strict=True) if ok]
            if right:
                examples.pop(outcome.uid, None)
                examples[outcome.uid] = [outcome.question, right[0]]
        return dict(list(examples.items())[-self.store :])


def rank_similar_texts(text: str, others: Mapping[str, str], above: float = 0.0) -> list[str]:
    """Return the keys of other texts with a TF-IDF cosine above `above`, most similar first; ties stay in order."""
    words = {key: Counter(re.findall(WORD, other.lower())) for key, other in others.items()}
    query_counts = Counter(re.findall(WORD, text.lower()))
    document_frequency = Counter(word for counts in [query_counts, *words.values()] for word in counts)
    total = 1 + len(words)

    def weigh_words(counts: Counter[str]) -> dict[str, float]:
        weights = {word: count * math.log((1 + total) / document_frequency[word]) for word, count in counts.items()}
        norm = math.sqrt(sum(weight**2 for weight in weights.values())) or 1.0
        return {word: weight / norm for word, weight in weights.items()}

    query = weigh_words(query_counts)
    similarities = {
        key: sum(query.get(word, 0.0) * weight for word, weight in weigh_words(c).items()) for key, c in words.items()
    }
    return [key for key, value in sorted(similarities.items(), key=lambda item: -item[1]) if value > above]
