"""What the sides of a self-play earn: proposers of tasks and their solvers, critics and those they criticise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from posttrain.verify.text import contains, qa_norm

Mode = Literal["one_minus_acc", "intermediate", "format_only"]
Table = Sequence[Sequence[float]]


class Proposed(NamedTuple):
    """success_rate, proposer_rewards: [B], one a proposed task."""

    success_rate: list[float]
    proposer_rewards: list[float]


def score_proposals(
    solver_rewards: Table,
    valid: Sequence[float],
    *,
    mode: Mode = "one_minus_acc",
    format_penalty: float = 0.0,
    left: float = 0.0,
    right: float = 1.0,
) -> Proposed:
    """Search self-play (arXiv 2510.18821): a task earns by how often its solvers fail.

    With s the share of solver rewards above 0: `one_minus_acc` 1 - s; `intermediate` 4 (left + s)(right - s) for 0 < s
    < 1, else 0; `format_only` 1. A task that is not valid earns format_penalty. 1 - s pays tasks that nobody can solve:
    keep the check that they can be answered.
    """
    rates = [sum(reward > 0 for reward in row) / len(row) if row else 0.0 for row in solver_rewards]
    rewards = [
        _proposer_reward(s, mode, left, right) if ok else format_penalty for s, ok in zip(rates, valid, strict=True)
    ]
    return Proposed(rates, rewards)


def _proposer_reward(s: float, mode: Mode, left: float, right: float) -> float:
    """What a valid task earns that this share of its solvers solves."""
    if mode == "format_only":
        return 1.0
    if mode == "one_minus_acc":
        return 1 - s
    return 4 * (left + s) * (right - s) if 0 < s < 1 else 0.0


def refused_question(
    question: str,
    answer: str,
    queries: Sequence[str],
    *,
    min_chars: int = 10,
    max_chars: int = 1000,
    min_words: int = 10,
    min_searches: int = 2,
) -> str:
    """Why a proposed question is refused before it is asked, "" if it is not: its length, its answer in it, too few
    searches behind it, or one of them twice. Whether the material answers it is for a model."""
    if not min_chars <= len(question) <= max_chars or len(question.split()) < min_words:
        return "length"
    if contains(question, [answer]):
        return "holds its answer"
    if len(queries) < min_searches:
        return "too few searches"
    return "a query twice" if len({qa_norm(query) for query in queries}) < len(queries) else ""


class Adversarial(NamedTuple):
    """generator, critic: rewards, a row a task, a column a proposal; they add up to 1."""

    generator: list[list[float]]
    critic: list[list[float]]


def adversarial_rewards(passed: Table, valid: Table | None = None) -> Adversarial:
    """RLAC (arXiv 2511.01758): an output that survives the failure which its critic names earns 1, else its critic.

    passed: 1 where the validator finds that the output survives. valid: 0 for a proposal that cannot be checked; the
    generator earns 1 there and the critic 0 (ours), so that vague critics gain nothing.
    """
    checked = valid if valid is not None else [[1.0] * len(row) for row in passed]
    generator = [
        [float(p) if v else 1.0 for p, v in zip(row, ok, strict=True)] for row, ok in zip(passed, checked, strict=True)
    ]
    return Adversarial(generator, [[1 - g for g in row] for row in generator])


class Judged(NamedTuple):
    """judge_rewards: [N] judgements; player_rewards: [G] of the answers that were judged, None = no score."""

    judge_rewards: list[float]
    player_rewards: list[float | None]


def self_judged_rewards(
    referee_scores: Sequence[Sequence[float | None]], truth: Sequence[float], self_scores: Sequence[float | None]
) -> Judged:
    """Rewards of a model that plays and judges (URPO, arXiv 2507.17515), rebuilt from the abstract.

    Judging: Kendall's tau between a judgement's scores and the gold order, over the pairs that gold orders strictly; a
    tie in the judgement counts 0, one without a score (None) makes the whole judgement worth 0. Playing: the judge's
    score from 0 to 10, divided by 10 and within 0 to 1. The scale and the tau are this project's reading.
    """
    played = [None if score is None else min(max(score / 10, 0.0), 1.0) for score in self_scores]
    return Judged([_rank_agreement(scores, truth) for scores in referee_scores], played)


def _rank_agreement(scores: Sequence[float | None], truth: Sequence[float]) -> float:
    """Share of the pairs that gold orders strictly and the scores order alike, minus that of those turned round."""
    known = [score for score in scores if score is not None]
    pairs = [(i, j) for i in range(len(truth)) for j in range(i) if truth[i] != truth[j]]
    if len(known) < len(scores) or not pairs:
        return 0.0
    agree = [(known[i] > known[j]) - (known[i] < known[j]) for i, j in pairs]
    gold = [(truth[i] > truth[j]) - (truth[i] < truth[j]) for i, j in pairs]
    return sum(a * g for a, g in zip(agree, gold, strict=True)) / len(pairs)
