"""Accuracy relative to tokens, and sources of accuracy gains: pure functions of samples' correctness and length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.evaluate.estimators import mean, pass_at_k


@dataclass(frozen=True)
class Efficiency:
    """Cost of accuracy in tokens. A value is None if it could not be computed."""

    accuracy: float | None
    mean_length: float | None
    mean_length_correct: float | None
    mean_length_wrong: float | None
    tokens_per_correct: float | None
    accuracy_per_1k: float | None
    aes: float | None


def efficiency_metrics(
    correct: Sequence[float],
    lengths: Sequence[float],
    *,
    base_accuracy: float | None = None,
    base_length: float | None = None,
    alpha: float = 1.0,
    beta: float = 3.0,
    gamma: float = 5.0,
) -> Efficiency:
    """Compute efficiency metrics from samples' correctness [N] (0 or 1) and lengths [N] in tokens.

    Truncated samples count with their truncated length. aes, against a baseline: with dL = (L0 - L)/L0 and dA = (A -
    A0)/A0 it is alpha dL + beta |dA| if accuracy did not fall, else alpha dL - gamma |dA| (as length-reduction papers
    quote it); None without a baseline or with A0 = 0. Raises ValueError if the numbers of lengths and verdicts differ.
    """
    if len(correct) != len(lengths):
        raise ValueError(f"{len(correct)} verdicts but {len(lengths)} lengths")
    accuracy, length = mean(correct), mean(lengths)
    right = sum(correct)
    return Efficiency(
        accuracy=accuracy,
        mean_length=length,
        mean_length_correct=mean([n for n, c in zip(lengths, correct, strict=True) if c]),
        mean_length_wrong=mean([n for n, c in zip(lengths, correct, strict=True) if not c]),
        tokens_per_correct=sum(lengths) / right if right else None,
        accuracy_per_1k=accuracy / (length / 1000) if accuracy is not None and length else None,
        aes=accuracy_efficiency(accuracy, length, base_accuracy, base_length, alpha, beta, gamma),
    )


def accuracy_efficiency(
    accuracy: float | None,
    length: float | None,
    base_accuracy: float | None,
    base_length: float | None,
    alpha: float,
    beta: float,
    gamma: float,
) -> float | None:
    """Compute the score `aes` of efficiency_metrics."""
    if accuracy is None or length is None or not base_accuracy or not base_length:
        return None
    shorter = (base_length - length) / base_length
    better = (accuracy - base_accuracy) / base_accuracy
    return alpha * shorter + (beta * better if better >= 0 else gamma * better)


@dataclass(frozen=True)
class Capability:
    """Comparison of two evaluations of the same problems. The two gains add up to the gain of accuracy."""

    pass_at_k_before: dict[int, float | None]
    pass_at_k_after: dict[int, float | None]
    buckets: dict[str, dict[str, float]]
    self_distillation_gain: float
    capability_gain: float


def accuracy_capability(
    n: Sequence[int],
    c_before: Sequence[int],
    c_after: Sequence[int],
    *,
    ks: Sequence[int],
    edges: Sequence[float] = (0.25, 0.5, 0.75),
) -> Capability:
    """Split an accuracy gain into new solutions (capability) and more frequent old ones (self-distillation).

    New solutions show as pass@k at large k. n, c_before, c_after [B]: samples of each problem, and right ones before
    and after. Buckets by the rate before: `unsolved`, or the number of edges that it reaches; each with its count and
    mean accuracy before and after. self_distillation_gain: the gain on problems solved before; capability_gain: on
    problems never solved before (with few samples such a problem may still have a small rate). Raises ValueError for a
    k above some n.
    """
    rows = list(zip(n, c_before, c_after, strict=True))
    if not rows:
        raise ValueError("no problems")
    if ks and max(ks) > min(n):
        raise ValueError(f"pass@{max(ks)} needs {max(ks)} samples of each problem, and one has {min(n)}")
    grouped: dict[str, list[tuple[float, float]]] = {}
    for samples, before, after in rows:
        name = "unsolved" if before == 0 else str(sum(edge <= before / samples for edge in edges))
        grouped.setdefault(name, []).append((before / samples, after / samples))
    gains = [((after - before) / samples / len(rows), before > 0) for samples, before, after in rows]
    return Capability(
        pass_at_k_before=pass_at_k(n, c_before, ks),
        pass_at_k_after=pass_at_k(n, c_after, ks),
        buckets={
            name: {
                "count": len(rates),
                "before": sum(before for before, _ in rates) / len(rates),
                "after": sum(after for _, after in rates) / len(rates),
            }
            for name, rates in sorted(grouped.items())
        },
        self_distillation_gain=sum(gain for gain, solved in gains if solved),
        capability_gain=sum(gain for gain, solved in gains if not solved),
    )
