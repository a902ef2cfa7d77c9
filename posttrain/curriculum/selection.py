"""Selection of prompts or rows by a number: stages, pools, splits, targets, bin weights. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from posttrain.curriculum.difficulty import in_band
from posttrain.errors import DataError

Mode = Literal["cumulative", "exclusive"]
Middle = Literal["sft", "rl", "drop"]


class Stage(NamedTuple):
    """A stage: its number, a 0/1 mask of its prompts, and the sampling probability of each prompt."""

    number: int
    allowed: list[float]
    probabilities: list[float]


def stage_at(progress: float, stages: int) -> int:
    """Return the stage, from 0, that a share `progress` of the run has reached; stages are equally long."""
    return min(math.floor(progress * stages), stages - 1)


def curriculum_stage(
    difficulty: Sequence[float],
    progress: float,
    boundaries: Sequence[float],
    *,
    mode: Mode = "cumulative",
    temperature: float | None = None,
) -> Stage:
    """Return the stage that a share `progress` of the run has reached, with its prompts (SARI, CRAFT-GUI).

    difficulty: from 0 (easy) to 1. boundaries: ascending, the largest difficulty of each stage. A stage has all prompts
    up to its boundary; `exclusive`: only those above the previous boundary. temperature: probabilities are proportional
    to exp(-|difficulty - boundary| / temperature); None: equal. If no prompt qualifies, all prompts are drawn alike.
    """
    number = stage_at(progress, len(boundaries))
    top = boundaries[number]
    bottom = boundaries[number - 1] if mode == "exclusive" and number else -math.inf
    allowed = [float(bottom < d <= top) for d in difficulty]
    if not any(allowed):
        return Stage(number, allowed, [1 / len(difficulty)] * len(difficulty))
    logs = [0.0 if temperature is None else -abs(d - top) / temperature for d in difficulty]
    highest = max(log for log, ok in zip(logs, allowed, strict=True) if ok)
    weights = [ok * math.exp(min(log - highest, 0.0)) for log, ok in zip(logs, allowed, strict=True)]
    return Stage(number, allowed, [weight / sum(weights) for weight in weights])


def select_nearest(values: Sequence[float], count: int, target: float = 0.5) -> list[int]:
    """Return the indices of the `count` values nearest to `target`, nearest first (ties: the first); PCL."""
    return sorted(range(len(values)), key=lambda n: (abs(values[n] - target), n))[:count]


def select_lowest_pass_rates(pool: Sequence[int], rates: Callable[[int], float | None], keep: int) -> list[int]:
    """Return the `keep` prompts of a pool with the lowest pass rate, lowest first (ties: the first); all if the pool is
    smaller (DRIVE, arXiv 2511.06307). Raises DataError if a prompt has no pass rate."""
    rate_of = {prompt: rates(prompt) for prompt in pool}
    missing = [prompt for prompt, value in rate_of.items() if value is None]
    if missing:
        raise DataError(f"prompts {missing[:5]} of the pool have no pass rate", hint="measure all prompts of the pool")
    return sorted(pool, key=lambda prompt: (rate_of[prompt], prompt))[:keep]


def fold_copies(fold_solved: Sequence[float], hard: Sequence[float], copies: int = 2) -> list[int]:
    """Return how often each row of the next SFT fold is trained on: 0 if the model solves it, `copies` if it is hard,
    else 1 (DRIVE's arena learning)."""
    return [0 if ok else copies if is_hard else 1 for ok, is_hard in zip(fold_solved, hard, strict=True)]


def find_greedy_failures(
    greedy_rewards: Sequence[float | None], *, solved_value: float = 1.0, divisor: int = 1, at_least: bool = False
) -> tuple[list[int], list[int]]:
    """Return (indices whose greedy reward is not `solved_value`, these repeated from the front to a multiple of
    `divisor`) (SELF, arXiv 2510.02230). at_least: a reward above `solved_value` counts as solved too."""
    kept = [
        n
        for n, r in enumerate(greedy_rewards)
        if r is None or not (r == solved_value or (at_least and r > solved_value))
    ]
    padded = [kept[n % len(kept)] for n in range(-(-len(kept) // divisor) * divisor)] if kept else []
    return kept, padded


def choose_pass_rates(pass_rate: Sequence[float], *, low: float = 0.2, high: float = 0.625) -> list[int]:
    """Return the indices of the problems with low <= pass rate <= high (Light-R1)."""
    return [n for n, value in enumerate(pass_rate) if in_band(value, low, high)]


class Split(NamedTuple):
    """Row indices for the SFT stage, for the RL stage, and for neither."""

    sft: list[int]
    rl: list[int]
    dropped: list[int]


def split_by_reasoning(
    scores: Sequence[float | None], *, sft_max: float = 2, rl_min: float = 4, middle: Middle = "sft"
) -> Split:
    """Split rows by a score of the reasoning they need: <= sft_max for SFT, >= rl_min for RL, in between as `middle`
    (DeReason, arXiv 2603.11193; the treatment of the middle is a guess). Rows without a score are dropped."""
    indices: dict[str, list[int]] = {"sft": [], "rl": [], "drop": []}
    for n, score in enumerate(scores):
        if score is None or score != score:
            side = "drop"
        else:
            side = "sft" if score <= sft_max else "rl" if score >= rl_min else middle
        indices[side].append(n)
    return Split(indices["sft"], indices["rl"], indices["drop"])


def draw_weighted(weights: Sequence[float], count: int, uniform: Callable[[], float]) -> list[int]:
    """Draw `count` indices with probability proportional to the weights, without replacement; once all are drawn, all
    can be drawn again. uniform: returns draws from [0, 1)."""
    able = [n for n, weight in enumerate(weights) if weight > 0]
    drawn: list[int] = []
    while able and len(drawn) < count:
        keys = {n: math.log(max(uniform(), 1e-300)) / weights[n] for n in able}
        drawn += sorted(able, key=lambda n: (-keys[n], n))[: count - len(drawn)]
    return drawn


# --- weights of rows by the loss of their bin: GDRO's prompt player (arXiv 2601.19280, kishanpb/verl-gdro) ---


class BinWeights(NamedTuple):
    """Weight q of each bin, and the factor of each row's advantages."""

    bins: dict[str, float]
    rows: list[float]


def compute_bin_weights(
    row_bins: Sequence[int],
    scores: Mapping[str, float],
    *,
    eta: float = 0.65,
    gamma: float = 0.01,
    max_weight: float = 15.0,
    mode: str = "code",
    zscore: bool = False,
    z_cap: float | None = 3.0,
    z_std_floor: float = 1e-3,
    score_clip: float = 5.0,
    num_bins: int | None = None,
) -> BinWeights:
    """Compute weights that favor bins with a high score (moving average of their loss).

    `code`: q = (1-gamma) softmax(eta * s) + gamma / K over the K bins of the batch, at most max_weight; a row's factor
    is q of its bin divided by the mean of q over rows, at most max_weight. zscore: s is standardized over all bins seen
    and clipped to +-z_cap (None: not clipped). `paper`: omega = exp(eta * clip(S, +-score_clip)) over all `num_bins`; a
    row's factor is min(omega, max_weight).
    """
    if not row_bins:
        return BinWeights({}, [])
    if mode == "paper":
        every = list(range(num_bins)) if num_bins is not None else sorted({*row_bins, *map(int, scores)})
        omega = {b: math.exp(eta * min(max(scores.get(str(b), 0.0), -score_clip), score_clip)) for b in every}
        q = {b: (1 - gamma) * omega[b] / sum(omega.values()) + gamma / len(every) for b in every}
        return BinWeights({str(b): q[b] for b in every}, [min(omega.get(b, 1.0), max_weight) for b in row_bins])
    present = sorted(set(row_bins))
    s = {b: scores.get(str(b), 0.0) for b in present}
    if zscore and scores:
        mean = sum(scores.values()) / len(scores)
        std = math.sqrt(sum((value - mean) ** 2 for value in scores.values()) / len(scores))
        cap = math.inf if z_cap is None else z_cap
        s = {b: min(max((value - mean) / max(z_std_floor, std), -cap), cap) for b, value in s.items()}
    top = max(s.values())
    soft = {b: math.exp(eta * (value - top)) for b, value in s.items()}
    q = {b: min((1 - gamma) * soft[b] / sum(soft.values()) + gamma / len(present), max_weight) for b in present}
    mean_q = sum(q[b] for b in row_bins) / len(row_bins)
    return BinWeights({str(b): q[b] for b in present}, [min(q[b] / mean_q, max_weight) for b in row_bins])


def update_bin_losses(
    scores: Mapping[str, float],
    row_bins: Sequence[int],
    row_losses: Sequence[float],
    *,
    beta: float = 0.12,
    by_share: bool = False,
) -> dict[str, float]:
    """Return the bin scores after a step: (1-beta) S + beta * mean loss of the bin's rows; at first the mean itself.

    by_share: the mean is divided by the bin's share of the rows. Bins without rows do not change. Averaging means
    removes EXP3's bias towards frequent bins.
    """
    losses = {str(name): float(score) for name, score in scores.items()}
    for b in sorted(set(row_bins)):
        bin_losses = [loss for number, loss in zip(row_bins, row_losses, strict=True) if number == b]
        loss = sum(bin_losses) / len(bin_losses) / (len(bin_losses) / len(row_bins) if by_share else 1)
        losses[str(b)] = (1 - beta) * losses[str(b)] + beta * loss if str(b) in losses else loss
    return losses
