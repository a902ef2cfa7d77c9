"""Optional measures of an evaluation's completions: reasoning habits, probabilities of labels, stability of rewards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.evaluate.estimators import mean
from posttrain.evaluate.summary import group_by_problem
from posttrain.verify.stability import Stability, stability
from posttrain.verify.text import qa_norm

BINS = 10  # bins of confidence, from 0 to 1
HABITS = {  # of models that improve under RL (arXiv 2503.01307)
    "verification": r"\b(?:let(?:'s| me| us) (?:check|verify|confirm)"
    r"|(?:check|verify|confirm)(?:ing)? (?:that|if|whether|this|the)\b)",
    "backtracking": r"\b(?:wait\b|(?:that|this) (?:does not|doesn't|did not|didn't) work|go back|try again|instead\b)",
    "subgoals": r"\b(?:step \d+|the goal is|first,? (?:i|we|let)|next,? (?:i|we|let))\b",
    "backward_chaining": r"\b(?:work(?:ing)? backwards?"
    r"|to (?:reach|get) (?:the target|\d+),? (?:i|we|you) (?:need|can|must))\b",
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in HABITS.items()}


# --- four reasoning habits ---


def count_habits(trace: str) -> dict[str, int]:
    """Count the occurrences of each habit in a trace.

    The paper lets a language model judge each trace; these patterns are a cheap substitute for English text.
    """
    return {name: len(pattern.findall(trace)) for name, pattern in _PATTERNS.items()}


def compute_habit_rates(traces: Sequence[str]) -> dict[str, dict[str, float]]:
    """Compute how often each habit occurs in traces.

    Returns for each habit {`count`: mean count per trace, `share`: share of the traces that show it}; {} without
    traces.
    """
    habits = [count_habits(trace) for trace in traces]
    if not habits:
        return {}
    return {
        name: {
            "count": sum(counts[name] for counts in habits) / len(habits),
            "share": sum(counts[name] > 0 for counts in habits) / len(habits),
        }
        for name in HABITS
    }


# --- tasks whose answer is a label: sampled probabilities, their calibration, and F1 (arXiv 2512.20061) ---


def label_probabilities(labels: Sequence[Sequence[str | None]], classes: Sequence[str]) -> list[list[float]]:
    """Estimate P(class) of each question as the share of its sampled rationales that end in that label.

    labels: the answers of each question's samples. An answer that is not a class, or None, counts in the denominator,
    so probabilities may sum to less than 1. A question without samples has 0 everywhere.
    """
    return [[sum(label == name for label in row) / max(len(row), 1) for name in classes] for row in labels]


def label_report(
    records: Sequence[Mapping[str, Any]], golds: Mapping[str, Any], classes: Sequence[str]
) -> dict[str, Any]:
    """Compute {"macro_f1", "ece", "classes": one row each} of graded completions whose answers are labels.

    golds: uid -> the right label. Answers and labels are compared ignoring case, marks and articles. macro_f1: mean,
    over the classes that occur, of the F1 of each question's most frequent label. ece: mean over questions of |accuracy
    - confidence| of their bin. Questions whose gold answer is not a class are skipped.
    """
    names = [qa_norm(name) for name in classes]
    problems = [p for p in group_by_problem(records) if qa_norm(str(golds.get(p[0]["uid"]))) in names]
    truth = [qa_norm(str(golds[p[0]["uid"]])) for p in problems]
    answers = [[None if r["answer"] is None else qa_norm(str(r["answer"])) for r in p] for p in problems]
    chances = label_probabilities(answers, names)
    predicted = [names[max(range(len(names)), key=lambda i: row[i])] if any(row) else None for row in chances]
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        hits = sum(a == b == name for a, b in zip(predicted, truth, strict=True))
        questions, named = truth.count(name), predicted.count(name)
        f1 = 2 * hits / (questions + named) if questions + named else None
        mean = sum(row[index] for row in chances) / len(chances) if chances else None
        rows.append(
            {"label": classes[index], "questions": questions, "named": named, "f1": f1, "mean_probability": mean}
        )
    known = [f1 for row in rows if row["questions"] and (f1 := row["f1"]) is not None]
    return {
        "macro_f1": sum(known) / len(known) if known else None,
        "ece": expected_calibration_error(
            [max(row) for row in chances], [a == b for a, b in zip(predicted, truth, strict=True)]
        ),
        "questions": len(problems),
        "classes": rows,
    }


def expected_calibration_error(confidence: Sequence[float], right: Sequence[bool]) -> float | None:
    """Compute the mean over questions of |accuracy - mean confidence| of their bin; None without questions."""
    bins: dict[int, list[int]] = {}
    for index, value in enumerate(confidence):
        bins.setdefault(min(int(value * BINS), BINS - 1), []).append(index)
    gaps = [abs(sum(right[i] for i in members) - sum(confidence[i] for i in members)) for members in bins.values()]
    return sum(gaps) / len(confidence) if confidence else None


# --- sensitivity of the optimal policy to the rewards of a run (The Policy Cliff, arXiv 2507.20150) ---


def reward_stability(
    records: Sequence[Mapping[str, Any]],
    weights: Mapping[str, float],
    *,
    share: float = 0.1,
    temperature: float = 0.1,
) -> dict[str, Any]:
    """Measure how ties and small changes of reward weights affect the best answers of problems.

    Returns {"problems", "tied", "cliff", "components": one row per reward}, over problems with several scored
    completions.

    Rewards are the weighted sums of the recorded scores. A component's row describes the effect of increasing its
    weight by `share`: flips, the share of problems whose best answer changes; soft_tv, the mean total variation between
    the policies of both rewards under a KL with coefficient `temperature`, and soft_bound, its upper bound. tied: share
    of problems with several best answers; cliff: tied, or a margin within twice the change. Rewards of 0 and 1 usually
    tie, and what breaks the ties (length, format) is where the policy can drift.
    """
    problems = [
        rows
        for rows in ([r["scores"] for r in p if r["reward"] is not None] for p in group_by_problem(records))
        if len(rows) > 1
    ]
    components = []
    tied = 0
    for moved in weights:
        effects = [_compare_weights(rows, weights, moved, share, temperature) for rows in problems]
        tied = sum(effect.n_optimal > 1 for effect in effects)
        components.append(
            {
                "reward": moved,
                "flips": mean([effect.hard_tv > 0 for effect in effects]),
                "cliff": mean([effect.cliff for effect in effects]),
                "soft_tv": mean([effect.soft_tv for effect in effects]),
                "soft_bound": mean([effect.soft_bound for effect in effects]),
                "margin": mean([effect.margin for effect in effects]),
            }
        )
    return {
        "problems": len(problems),
        "tied": tied / len(problems) if problems else None,
        "share": share,
        "temperature": temperature,
        "components": components,
    }


def _compare_weights(
    rows: Sequence[Mapping[str, Any]], weights: Mapping[str, float], moved: str, share: float, temperature: float
) -> Stability:
    """Compare the rewards of a problem's completions before and after increasing one weight by `share`."""
    other = {**weights, moved: weights[moved] * (1 + share)}
    before, after = (
        [sum(w * (row.get(name) or 0.0) for name, w in each.items()) for row in rows] for each in (weights, other)
    )
    return stability(before, after, [0.0] * len(rows), temperature=temperature)
