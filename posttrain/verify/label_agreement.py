"""Agreement of rewards with human labels, and with each other, on labeled rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import DataError
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.load import check_columns
from posttrain.verify.score import Sample, Scorer, get_score
from posttrain.verify.transcript import read_transcript

Verdicts = Sequence[bool | None]


def confusion(verdicts: Verdicts, labels: Sequence[bool]) -> dict[str, int]:
    """Count verdicts by label: {right_right, right_wrong, wrong_right, wrong_wrong, unscored}, label first."""
    names = {True: "right", False: "wrong"}
    counts = dict.fromkeys(("right_right", "right_wrong", "wrong_right", "wrong_wrong", "unscored"), 0)
    for verdict, label in zip(verdicts, labels, strict=True):
        counts["unscored" if verdict is None else f"{names[label]}_{names[verdict]}"] += 1
    return counts


def kappa(a: Verdicts, b: Verdicts) -> float | None:
    """Compute Cohen's kappa over the rows where both have a verdict: 1 = always equal, 0 = as by chance.

    None without such rows, or if both always give the same single verdict, so that chance agreement is 1.
    """
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if not pairs:
        return None
    same = sum(x == y for x, y in pairs) / len(pairs)
    first, second = sum(x for x, _ in pairs) / len(pairs), sum(y for _, y in pairs) / len(pairs)
    chance = first * second + (1 - first) * (1 - second)
    return None if chance == 1 else (same - chance) / (1 - chance)


def read_labeled(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file of rows with `completion`, `label` (true, false, 1 or 0) and columns. Raises DataError."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"not JSON: {error}", where=f"{path}:{number}") from None
        if not isinstance(row, dict) or not isinstance(row.get("completion"), str) or row.get("label") not in (0, 1):
            raise DataError(
                "not a labelled row",
                where=f"{path}:{number}",
                allowed='{"completion": text, "label": true or false, ...}',
            )
        rows.append({"uid": f"line {number}", **row})
    if not rows:
        raise DataError("no labelled rows", where=str(path))
    return rows


def try_labeled(
    rewards: Sequence[Reward], scoring: Scoring, base_dir: Path | None, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Score labeled rows with the rewards and compare the verdicts with the labels.

    Returns {"rows", "rewards": name -> {confusion, kappa, wrong_rows}, "pairs": "a, b" -> {kappa, rows}}.

    A reward's verdict is right if its score is at least scoring.correct_at. Raises RewardError for missing columns.
    """
    labels = [bool(row["label"]) for row in rows]
    with Scorer(rewards, scoring, base_dir) as scorer:
        check_columns(scorer.rewards, {column for row in rows for column in row})
        samples = [
            Sample(
                row["completion"],
                row,
                prompt=str(row.get("prompt", "")),
                token_count=-(-len(row["completion"]) // 4),
                transcript=read_transcript(row["transcript"], row["completion"], where=row["uid"])
                if row.get("transcript") is not None
                else (),
            )
            for row in rows
        ]
        columns = {r.name: results for r, results in zip(scorer.rewards, scorer.results(samples), strict=True)}
    verdicts_of: dict[str, list[bool | None]] = {
        name: [None if (x := get_score(result)) is None else x >= scoring.correct_at for result in results]
        for name, results in columns.items()
    }
    return {
        "rows": len(rows),
        "rewards": {
            name: {
                "confusion": confusion(verdicts, labels),
                "kappa": kappa(verdicts, labels),
                "wrong_rows": [r["uid"] for r, v, x in zip(rows, verdicts, labels, strict=True) if v not in (x, None)],
            }
            for name, verdicts in verdicts_of.items()
        },
        "pairs": {
            f"{a}, {b}": {
                "kappa": kappa(verdicts_of[a], verdicts_of[b]),
                "rows": [
                    r["uid"]
                    for r, x, y in zip(rows, verdicts_of[a], verdicts_of[b], strict=True)
                    if None not in (x, y) and x != y
                ],
            }
            for a, b in itertools.combinations(verdicts_of, 2)
        },
    }
