"""Metrics for tasks whose answer is a label: sampled probabilities, their calibration, and F1 (arXiv 2512.20061)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.evaluate.summary import group_by_problem
from posttrain.verify.text import qa_norm

BINS = 10  # bins of confidence, from 0 to 1


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
