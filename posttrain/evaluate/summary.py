"""Numbers with intervals from graded completions. Pure functions of records, so a resumed run has the same summary.

A truncated completion counts as wrong, whatever its grade, and is also counted separately. A completion whose
correctness could not be judged (None) is excluded from its problem and counted; it never counts as wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from posttrain.evaluate.estimators import (
    Consensus,
    Interval,
    avg_at_k,
    bootstrap_ci,
    cons_at_k,
    drop_unscored,
    pass_contributions,
)
from posttrain.recipe.eval_sections import EvalSettings
from posttrain.thoughts import ends_in_thought

Record = Mapping[str, Any]


def group_by_problem(records: Sequence[Record]) -> list[list[Record]]:
    """Group records by problem, in the order of the prompts and their samples."""
    problems: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda r: (r["problem"], r["sample"])):
        problems.setdefault(record["problem"], []).append(record)
    return list(problems.values())


def verdict(record: Record) -> bool | None:
    """Return whether a completion is right; None if it was not judged. A truncated completion is wrong."""
    if record["correct"] is None:
        return None
    return bool(record["correct"]) and record["finish"] != "length"


def format_interval(interval: Mapping[str, Any]) -> str:
    """Format an interval with a mean: `0.512 [0.401, 0.620]`."""
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def problem_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one row per problem, as written to problems.jsonl and used to compare runs."""
    rows = []
    for samples in group_by_problem(records):
        verdicts = [verdict(r) for r in samples]
        votes = _consensus([samples], None)
        majority, share, won = next(
            zip(votes.majority, votes.share, votes.per_problem, strict=True), (None, None, None)
        )
        rows.append(
            {
                "uid": samples[0]["uid"],
                "samples": len(samples),
                "scored": sum(v is not None for v in verdicts),
                "right": sum(v is True for v in verdicts),
                "accuracy": avg_at_k([verdicts]).avg,
                "tokens": sum(r["tokens"] for r in samples) / len(samples),
                "truncated": sum(r["finish"] == "length" for r in samples),
                "majority": majority,
                "majority_share": share,
                "consensus": won,
            }
        )
    return rows


def compute_estimates(records: Sequence[Record], settings: EvalSettings, seed: int) -> dict[str, Interval]:
    """Compute accuracy, pass@k, cons@k and tokens, each with its interval; all resample the same problems."""
    rows = problem_rows(records)
    problems = group_by_problem(records)
    values: dict[str, Sequence[float] | None] = {"accuracy": drop_unscored([row["accuracy"] for row in rows])}
    judged = [row for row in rows if row["scored"]]
    for k in settings.k:
        n, c = [row["scored"] for row in judged], [row["right"] for row in judged]
        values[f"pass@{k}"] = pass_contributions(n, c, k)
    for k in settings.k:
        if k > 1:  # cons@1 would be the accuracy of the first sample alone
            values[f"cons@{k}"] = _consensus(problems, k).per_problem
    values["tokens"] = [row["tokens"] for row in rows]
    return {name: _interval(per_problem, settings, seed) for name, per_problem in values.items()}


def _consensus(problems: Sequence[Sequence[Record]], k: int | None) -> Consensus:
    """Vote over the first k judged samples of each problem by `vote`: answers that the verifier calls equal are one.

    As in accuracy and pass@k, unjudged samples and problems without a judged sample are excluded. A truncated sample is
    wrong: it casts no vote. A class is right if the verifier accepted its first voter.
    """
    judged = [[r for r in samples if verdict(r) is not None] for samples in problems]
    judged = [samples for samples in judged if samples]
    return cons_at_k([[_vote_of(r) for r in samples] for samples in judged], right=_verdicts(judged), k=k)


def _vote_of(record: Record) -> str | None:
    """Return the answer that a completion votes for; None if it is truncated."""
    # Records of older versions have no `vote`.
    return None if record["finish"] == "length" else record.get("vote", record["answer"])


def _verdicts(problems: Sequence[Sequence[Record]]) -> list[list[bool | None]]:
    """Return the verdicts of each problem's samples."""
    return [[verdict(r) for r in samples] for samples in problems]


def _interval(values: Sequence[float] | None, settings: EvalSettings, seed: int) -> Interval:
    """Compute the bootstrap interval over problems; an empty one without values."""
    if values is None:
        return Interval(None, None, None, settings.level, 0, False, "some problems have fewer scored samples than k")
    return bootstrap_ci(values, level=settings.level, resamples=settings.bootstrap, seed=seed)


def count_outcomes(records: Sequence[Record]) -> dict[str, Any]:
    """Count truncated, unscored and timed-out completions, and average each reward component.

    A component is averaged over the completions it applies to.
    """
    truncated = [r for r in records if r["finish"] == "length"]
    components: dict[str, Any] = {}
    for name in dict.fromkeys(name for r in records for name in r["scores"]):
        values = [r["scores"].get(name) for r in records]
        scored = drop_unscored(values)
        components[name] = {"mean": sum(scored) / len(scored) if scored else None, "none": len(values) - len(scored)}
    return {
        "num_completions": len(records),
        "truncated": len(truncated) / len(records),
        "truncated_right": sum(r["correct"] is True for r in truncated),
        "ended_in_thought": sum(
            r["finish"] == "stop" and ends_in_thought(r["prompt"], r["completion"]) for r in records
        ),
        "unscored": sum(r["correct"] is None for r in records),
        "unscored_problems": sum(all(r["correct"] is None for r in p) for p in group_by_problem(records)),
        "timeouts": dict(sorted(Counter(name for r in records for name in r.get("timeouts", ())).items())),
        "rewards": components,
    }


def summarize(records: Sequence[Record], settings: EvalSettings, seed: int) -> dict[str, Any]:
    """Compute all numbers of an evaluation from its records."""
    found = compute_estimates(records, settings, seed)
    return {
        "accuracy": found["accuracy"].mean,
        "mean_tokens": found["tokens"].mean,
        "problems": len(group_by_problem(records)),
        **count_outcomes(records),
        "intervals": {name: asdict(interval) for name, interval in found.items()},
    }
