"""From graded completions to numbers with intervals. Pure: records in, values out, so a resumed run sums up the same.

A truncated completion counts as wrong, whatever was graded, and is reported apart. A completion whose correctness could
not be judged (None) is left out of its problem and counted; it is never a wrong answer.
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
from posttrain.verify.extract import ends_in_thought

Record = Mapping[str, Any]


def group_by_problem(records: Sequence[Record]) -> list[list[Record]]:
    """Records of each problem, in the order of the prompts and their samples."""
    problems: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda r: (r["problem"], r["sample"])):
        problems.setdefault(record["problem"], []).append(record)
    return list(problems.values())


def verdict(record: Record) -> bool | None:
    """Right, wrong, or not judged. What was cut off is wrong."""
    if record["correct"] is None:
        return None
    return bool(record["correct"]) and record["finish"] != "length"


def format_interval(interval: Mapping[str, Any]) -> str:
    """A measured `interval` for people: `0.512 [0.401, 0.620]`."""
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def problem_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row a problem, what problems.jsonl holds and runs are compared by."""
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
    """accuracy, pass@k, cons@k and tokens, each with its interval; all are resampled with the same problems."""
    rows = problem_rows(records)
    problems = group_by_problem(records)
    values: dict[str, Sequence[float] | None] = {"accuracy": drop_unscored([row["accuracy"] for row in rows])}
    judged = [row for row in rows if row["scored"]]
    for k in settings.k:
        n, c = [row["scored"] for row in judged], [row["right"] for row in judged]
        values[f"pass@{k}"] = pass_contributions(n, c, k)
    for k in settings.k:
        if k > 1:  # a vote of one would be the first sample's accuracy, beside that of all samples
            values[f"cons@{k}"] = _consensus(problems, k).per_problem
    values["tokens"] = [row["tokens"] for row in rows]
    return {name: _interval(per_problem, settings, seed) for name, per_problem in values.items()}


def _consensus(problems: Sequence[Sequence[Record]], k: int | None) -> Consensus:
    """Votes of the first k judged samples of each problem, by `vote`: answers that the verifier calls equal are one.

    As in accuracy and pass@k, a sample that was not judged is left out, a problem without a judged one too, and what
    was cut off is wrong: it casts no vote. A class is right if the verifier said so of its first voter.
    """
    judged = [[r for r in samples if verdict(r) is not None] for samples in problems]
    judged = [samples for samples in judged if samples]
    return cons_at_k([[_vote_of(r) for r in samples] for samples in judged], right=_verdicts(judged), k=k)


def _vote_of(record: Record) -> str | None:
    return None if record["finish"] == "length" else record.get("vote", record["answer"])  # older records have no vote


def _verdicts(problems: Sequence[Sequence[Record]]) -> list[list[bool | None]]:
    return [[verdict(r) for r in samples] for samples in problems]


def _interval(values: Sequence[float] | None, settings: EvalSettings, seed: int) -> Interval:
    if values is None:
        return Interval(None, None, None, settings.level, 0, False, "some problems have fewer scored samples than k")
    return bootstrap_ci(values, level=settings.level, resamples=settings.bootstrap, seed=seed)


def count_outcomes(records: Sequence[Record]) -> dict[str, Any]:
    """What was left out or cut, and the mean of every reward component over the completions it applies to."""
    cut = [r for r in records if r["finish"] == "length"]
    components: dict[str, Any] = {}
    for name in dict.fromkeys(name for r in records for name in r["scores"]):
        values = [r["scores"].get(name) for r in records]
        there = drop_unscored(values)
        components[name] = {"mean": sum(there) / len(there) if there else None, "none": len(values) - len(there)}
    return {
        "num_completions": len(records),
        "truncated": len(cut) / len(records),
        "truncated_right": sum(r["correct"] is True for r in cut),
        "ended_in_thought": sum(
            r["finish"] == "stop" and ends_in_thought(r["prompt"], r["completion"]) for r in records
        ),
        "unscored": sum(r["correct"] is None for r in records),
        "unscored_problems": sum(all(r["correct"] is None for r in p) for p in group_by_problem(records)),
        "timeouts": dict(sorted(Counter(name for r in records for name in r.get("timeouts", ())).items())),
        "rewards": components,
    }


def summarise(records: Sequence[Record], settings: EvalSettings, seed: int) -> dict[str, Any]:
    """Every number of an evaluation that follows from its records."""
    found = compute_estimates(records, settings, seed)
    return {
        "accuracy": found["accuracy"].mean,
        "mean_tokens": found["tokens"].mean,
        "problems": len(group_by_problem(records)),
        **count_outcomes(records),
        "intervals": {name: asdict(interval) for name, interval in found.items()},
    }
