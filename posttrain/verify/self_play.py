"""Rewards for self-play: task proposers and solvers, critics and generators, judges and players."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from posttrain.verify.text import contains, qa_norm

Mode = Literal["one_minus_acc", "intermediate", "format_only"]
Table = Sequence[Sequence[float]]


class Proposed(NamedTuple):
    """Result of `score_proposals`. success_rate, proposer_rewards: [B], one per proposed task."""

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
    """Score proposed tasks by how often their solvers fail (search self-play, arXiv 2510.18821).

    With s the share of solver rewards above 0: `one_minus_acc` 1 - s; `intermediate` 4 (left + s)(right - s) for 0 < s
    < 1, else 0; `format_only` 1. An invalid task earns format_penalty. 1 - s rewards unsolvable tasks: keep the check
    that tasks can be answered.
    """
    rates = [sum(reward > 0 for reward in row) / len(row) if row else 0.0 for row in solver_rewards]
    rewards = [
        _proposer_reward(s, mode, left, right) if ok else format_penalty for s, ok in zip(rates, valid, strict=True)
    ]
    return Proposed(rates, rewards)


def _proposer_reward(s: float, mode: Mode, left: float, right: float) -> float:
    """Return the reward of a valid task, given the share s of its solvers that solve it."""
    if mode == "format_only":
        return 1.0
    if mode == "one_minus_acc":
        return 1 - s
    return 4 * (left + s) * (right - s) if 0 < s < 1 else 0.0


def explain_rejection(
    question: str,
    answer: str,
    queries: Sequence[str],
    *,
    min_chars: int = 10,
    max_chars: int = 1000,
    min_words: int = 10,
    min_searches: int = 2,
) -> str:
    """Return why a proposed question is rejected before it is asked; "" if it is not.

    Reasons: bad length, contains its answer, too few or duplicate searches.

    Whether the retrieved material answers the question is left to a model.
    """
    if not min_chars <= len(question) <= max_chars or len(question.split()) < min_words:
        return "length"
    if contains(question, [answer]):
        return "holds its answer"
    if len(queries) < min_searches:
        return "too few searches"
    return "a query twice" if len({qa_norm(query) for query in queries}) < len(queries) else ""


class Adversarial(NamedTuple):
    """Rewards of generator and critic, one row per task, one column per proposal; they add up to 1."""

    generator: list[list[float]]
    critic: list[list[float]]


def adversarial_rewards(passed: Table, valid: Table | None = None) -> Adversarial:
    """Compute adversarial rewards (RLAC, arXiv 2511.01758).

    An output that survives the failure its critic names earns 1, else the critic does.

    passed: 1 if the validator finds that the output survives. valid: 0 for a proposal that cannot be checked; the
    generator then earns 1 and the critic 0 (our choice), so that vague critics gain nothing.
    """
    checked = valid if valid is not None else [[1.0] * len(row) for row in passed]
    generator = [
        [float(p) if v else 1.0 for p, v in zip(row, ok, strict=True)] for row, ok in zip(passed, checked, strict=True)
    ]
    return Adversarial(generator, [[1 - g for g in row] for row in generator])


class Judged(NamedTuple):
    """Result of `self_judged_rewards`.

    judge_rewards: [N] judgments; player_rewards: [G] judged answers, None = no score.
    """

    judge_rewards: list[float]
    player_rewards: list[float | None]


def self_judged_rewards(
    referee_scores: Sequence[Sequence[float | None]], truth: Sequence[float], self_scores: Sequence[float | None]
) -> Judged:
    """Compute rewards of a model that both plays and judges (URPO, arXiv 2507.17515), reconstructed from the abstract.

    Judge: Kendall's tau between a judgment's scores and the gold order, over the pairs that the gold orders strictly; a
    tie in the judgment counts 0, a missing score (None) makes the whole judgment worth 0. Player: the judge's score
    from 0 to 10, divided by 10 and clipped to [0, 1]. The scale and the tau are our interpretation.
    """
    played = [None if score is None else min(max(score / 10, 0.0), 1.0) for score in self_scores]
    return Judged([_rank_agreement(scores, truth) for scores in referee_scores], played)


def _rank_agreement(scores: Sequence[float | None], truth: Sequence[float]) -> float:
    """Compute the share of strictly ordered gold pairs in the same order, minus the share in reverse order."""
    known = [score for score in scores if score is not None]
    pairs = [(i, j) for i in range(len(truth)) for j in range(i) if truth[i] != truth[j]]
    if len(known) < len(scores) or not pairs:
        return 0.0
    agree = [(known[i] > known[j]) - (known[i] < known[j]) for i, j in pairs]
    gold = [(truth[i] > truth[j]) - (truth[i] < truth[j]) for i, j in pairs]
    return sum(a * g for a, g in zip(agree, gold, strict=True)) / len(pairs)
