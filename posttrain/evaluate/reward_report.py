"""Reliability report of a reward model: pairwise accuracy, calibration, and length bias, computed from scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from posttrain import terminal
from posttrain.errors import count_noun
from posttrain.evaluate.estimators import bootstrap_ci
from posttrain.evaluate.run import make_table
from posttrain.evaluate.summary import format_interval

BINS = 10  # bins of confidence, from 1/2 to 1
MATCHED_LENGTH_GAP = 0.1  # lengths that differ by at most this share of the longer one count as matched
RESAMPLES = 1000


def pair_report(
    chosen: Sequence[float],
    rejected: Sequence[float],
    chosen_length: Sequence[int],
    rejected_length: Sequence[int],
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Compute accuracy, calibration and length bias from the scores and answer lengths (tokens) of P pairs [P].

    Returns `accuracy`, `calibration`, `length` and `findings`. A tie of scores counts half. All intervals are 95%, by
    resampling pairs.
    """
    gap = np.asarray(chosen, dtype=float) - np.asarray(rejected, dtype=float)
    longer = np.sign(np.asarray(chosen_length, dtype=float) - np.asarray(rejected_length, dtype=float))
    right = _win_values(gap)
    report = {
        "pairs": len(gap),
        "accuracy": _interval(right, seed),
        "mean_margin": float(gap.mean()) if len(gap) else None,
        "calibration": calibration(gap, seed),
        "length": _length_report(gap, right, longer, chosen, rejected, chosen_length, rejected_length, seed),
    }
    return {**report, "findings": describe_findings(report)}


def _win_values(gap: np.ndarray) -> np.ndarray:
    """Return 1 for positive values, 1/2 for 0 and 0 for negative ones."""
    return np.where(gap > 0, 1.0, np.where(gap == 0, 0.5, 0.0))


def _interval(values: np.ndarray, seed: int) -> dict[str, Any]:
    """Compute a bootstrap interval of values as a dict."""
    return asdict(bootstrap_ci(values.tolist(), resamples=RESAMPLES, seed=seed))


def calibration(gap: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Compute the expected calibration error of sigmoid(|gap|) as the chance that the higher score is the chosen side.

    ece: mean over pairs of |accuracy - confidence| of their bin, with its interval; `bins`: both values and the number
    of pairs. Few pairs always show some error: compare with `expected_if_calibrated`, the error of equally many pairs
    whose outcomes are sampled from the confidences.
    """
    if not len(gap):
        return {"ece": None, "low": None, "high": None, "expected_if_calibrated": None, "bins": []}
    confidence = 1 / (1 + np.exp(-np.abs(gap)))
    right = _win_values(gap)
    draw = np.random.default_rng(seed % 2**64)  # numpy takes no negative seed
    rows = draw.integers(0, len(gap), (RESAMPLES, len(gap)))
    resampled = [_ece(confidence[row], right[row]) for row in rows]
    ideal = [_ece(confidence, draw.random(len(gap)) < confidence) for _ in range(RESAMPLES // 10)]
    low, high = (float(q) for q in np.quantile(resampled, [0.025, 0.975]))
    return {
        "ece": _ece(confidence, right),
        "low": low,
        "high": high,
        "expected_if_calibrated": float(np.mean(ideal)),
        "bins": [
            {"confidence": float(confidence[at].mean()), "accuracy": float(right[at].mean()), "pairs": int(at.sum())}
            for at in (_bin_index(confidence) == n for n in range(BINS))
            if at.any()
        ],
    }


def _bin_index(confidence: np.ndarray) -> np.ndarray:
    """Return the confidence bin of each pair."""
    return np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)


def _ece(confidence: np.ndarray, right: np.ndarray) -> float:
    """Compute the expected calibration error over bins."""
    difference = np.bincount(_bin_index(confidence), right - confidence, minlength=BINS)
    return float(np.abs(difference).sum() / len(confidence))


def _length_report(
    gap: np.ndarray,
    right: np.ndarray,
    longer: np.ndarray,
    chosen: Sequence[float],
    rejected: Sequence[float],
    chosen_length: Sequence[int],
    rejected_length: Sequence[int],
    seed: int,
) -> dict[str, Any]:
    """Compute the length statistics. `longer`: sign of chosen minus rejected length."""
    lengths = np.array([*chosen_length, *rejected_length], dtype=float)
    tokens = lengths.reshape(2, -1)
    matched = np.abs(tokens[0] - tokens[1]) <= MATCHED_LENGTH_GAP * tokens.max(0) if len(gap) else np.zeros(0, bool)
    differ = longer != 0
    return {
        "correlation": correlation(np.array([*chosen, *rejected], dtype=float), lengths),
        "chosen_longer": float((longer > 0).mean()) if len(gap) else None,
        "longer_wins_rule": _interval(np.where(longer > 0, 1.0, np.where(longer == 0, 0.5, 0.0)), seed),
        "scores_longer_higher": _interval(_win_values(gap * longer)[differ], seed),
        "accuracy_matched": _interval(right[matched], seed),
        "accuracy_chosen_longer": _interval(right[longer > 0], seed),
        "accuracy_chosen_shorter": _interval(right[longer < 0], seed),
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Compute Pearson's correlation; None if either input does not vary."""
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def label_report(
    predicted: np.ndarray, labels: np.ndarray, names: Sequence[str], lengths: Sequence[int], *, seed: int = 0
) -> dict[str, Any]:
    """Compare predictions with labels [N,M] (NaN = not labeled).

    By label: `mse` with its interval, `correlation`, `rows`.

    Also reports the correlation of the prediction, and of the label, with the answer's length.
    """
    report: dict[str, Any] = {}
    for n, name in enumerate(names):
        labeled = ~np.isnan(labels[:, n])
        prediction, label = predicted[labeled, n], labels[labeled, n]
        length = np.asarray(lengths, dtype=float)[labeled]
        report[name] = {
            "rows": int(labeled.sum()),
            "mse": _interval((prediction - label) ** 2, seed),
            "variance": float(label.var()) if len(label) else None,
            "correlation": correlation(prediction, label),
            "length_correlation": correlation(prediction, length),
            "label_length_correlation": correlation(label, length),
        }
    return {"rows": len(labels), "labels": report, "findings": _label_findings(report)}


def describe_findings(report: Mapping[str, Any]) -> list[str]:
    """Return the findings of a pair report as sentences."""
    if not report["pairs"]:
        return ["no pair was held out: the model was tested on its training pairs only"]
    accuracy, length, calibrated = report["accuracy"], report["length"], report["calibration"]
    lines = [f"the chosen answer scores higher in {format_interval(accuracy)} of {count_noun(report['pairs'], 'pair')}"]
    if accuracy["low"] <= 0.5:
        lines.append("that is not significantly better than chance")
    if calibrated["low"] > 2 * calibrated["expected_if_calibrated"]:
        sure = sum(b["pairs"] * (b["confidence"] - b["accuracy"]) for b in calibrated["bins"]) > 0
        lines.append(
            f"its margins are {'over' if sure else 'under'}confident: calibration error {calibrated['ece']:.3f}"
        )
    lines += _length_findings(accuracy, length)
    return lines


def _length_findings(accuracy: Mapping[str, Any], length: Mapping[str, Any]) -> list[str]:
    """Return the findings on length bias."""
    lines = []
    rule, higher, matched = length["longer_wins_rule"], length["scores_longer_higher"], length["accuracy_matched"]
    if higher["mean"] is not None and (higher["low"] > 0.5 or higher["high"] < 0.5):
        side = "longer" if higher["mean"] > 0.5 else "shorter"
        share = higher["mean"] if side == "longer" else 1 - higher["mean"]
        chosen = length["chosen_longer"] if side == "longer" else 1 - length["chosen_longer"]
        lines.append(f"it prefers the {side} answer in {share:.0%} of the pairs; the labels do in {chosen:.0%}")
    best = max(rule["mean"], 1 - rule["mean"])
    if best >= accuracy["low"] and best > 0.55:
        name = "longer" if rule["mean"] > 0.5 else "shorter"
        lines.append(f"the rule `the {name} answer wins` is as good on these pairs: accuracy {best:.3f}")
    if matched["mean"] is None:
        lines.append("no pair has answers of similar length: it may judge by length alone")
    elif matched["low"] <= 0.5 < accuracy["low"]:
        lines.append(f"if lengths match it is not significantly better than chance: {format_interval(matched)}")
    return lines


def _label_findings(by_label: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the findings of a label report."""
    lines = []
    for name, label in by_label.items():
        if not label["rows"]:
            lines.append(f"{name}: no held-out row has this label")
        elif label["variance"] is not None and label["mse"]["high"] >= label["variance"]:
            lines.append(f"{name}: not significantly better than the label's mean (mse {label['mse']['mean']:.4f})")
    return lines


def tables(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Format a report as tables with `title`, `head` and `rows`."""
    if "labels" in report:
        rows = [
            [
                name,
                str(values["rows"]),
                _format_interval(values["mse"]),
                _format_number(values["correlation"]),
                _format_number(values["length_correlation"]),
            ]
            for name, values in report["labels"].items()
        ]
        head = ["label", "rows", "squared error", "correlation", "with length"]
        return [{"title": "Reward model, by label", "head": head, "rows": rows}]
    length = report["length"]
    rows = [
        ["pairwise accuracy", _format_interval(report["accuracy"])],
        ["accuracy, lengths matched", _format_interval(length["accuracy_matched"])],
        ["accuracy, chosen longer", _format_interval(length["accuracy_chosen_longer"])],
        ["accuracy, chosen shorter", _format_interval(length["accuracy_chosen_shorter"])],
        ["the rule `longer wins`", _format_interval(length["longer_wins_rule"])],
        ["scores the longer higher", _format_interval(length["scores_longer_higher"])],
        ["correlation of score and length", _format_number(length["correlation"])],
        ["calibration error", _format_interval({"mean": report["calibration"]["ece"], **report["calibration"]})],
    ]
    bins = [[f"{b['confidence']:.2f}", f"{b['accuracy']:.2f}", str(b["pairs"])] for b in report["calibration"]["bins"]]
    return [
        {"title": f"Reward model, pairs: {report['pairs']}", "head": ["", "mean and 95% interval"], "rows": rows},
        {"title": "Calibration", "head": ["confidence", "accuracy", "pairs"], "rows": bins},
    ]


def show(report: Mapping[str, Any]) -> None:
    """Print tables and findings on stderr."""
    console = terminal.console(stderr=True, markup=False, highlight=False)
    for table in tables(report):
        console.print(make_table(table))
    for line in report["findings"]:
        console.print(line, soft_wrap=True)


def _format_interval(interval: Mapping[str, Any]) -> str:
    """Format an interval; `-` if it has no mean."""
    return "-" if interval.get("mean") is None else format_interval(interval)


def _format_number(value: float | None) -> str:
    """Format a number with three decimals; `-` for None."""
    return "-" if value is None else f"{value:.3f}"
