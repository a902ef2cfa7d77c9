"""Data source `accepted:RUN`: correct completions of an evaluation run as training rows (rejection sampling, RFT)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.data.sft_rows import select_accepted
from posttrain.errors import DataError, count_noun
from posttrain.path_resolution import find

PARAMS: dict[str, Any] = {"pick": str, "max_per_prompt": int, "max_pass_rate": (int, float)}
_PICKS = ("shortest", "longest", "first")


def rows(run: str, base_dir: Path, params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows with prompt and completion from the run directory of an `eval`, in the order of its problems.

    params: pick (shortest, longest or first); max_per_prompt; max_pass_rate (problems with a higher pass rate yield no
    row). Truncated and unjudged completions are never selected. Raises DataError for a directory without a finished
    evaluation, invalid parameters, or if no completion is selected.
    """
    check(params)
    folder = find(run, base_dir, "evaluation", DataError)
    problems = _lines(folder / "problems.jsonl")
    by_problem: dict[int, list[dict[str, Any]]] = {}
    for record in _lines(folder / "completions.jsonl"):
        by_problem.setdefault(record["problem"], []).append(record)
    samples_by_problem = [sorted(by_problem[i], key=lambda r: r["sample"]) for i in sorted(by_problem)]
    graded = all("correct" in record for samples in samples_by_problem for record in samples)
    if len(samples_by_problem) != len(problems) or any("prompt" not in problem for problem in problems) or not graded:
        raise DataError("not the run of a finished evaluation", where=str(folder))
    kept = select_accepted(
        [[r["completion"] for r in samples] for samples in samples_by_problem],
        [[r["correct"] for r in samples] for samples in samples_by_problem],
        [[r["tokens"] for r in samples] for samples in samples_by_problem],
        [[r["finish"] == "length" for r in samples] for samples in samples_by_problem],
        **params,
    )
    if not kept:
        raise DataError(
            "no completion can be trained on",
            where=str(folder),
            allowed=_explain_none_kept(samples_by_problem, params.get("max_pass_rate")),
            hint="sample more (eval.samples), allow longer answers (sampling.max_new_tokens), or raise max_pass_rate",
        )
    return [{"prompt": problems[p]["prompt"], "completion": samples_by_problem[p][i]["completion"]} for p, i in kept]


def _explain_none_kept(found: list[list[dict[str, Any]]], max_pass_rate: float | None) -> str:
    """Return counts that explain why no completion of an evaluation was selected."""
    right = [record for samples in found for record in samples if record["correct"]]
    cut = sum(record["finish"] == "length" for record in right)
    text = f"of {count_noun(sum(map(len, found)), 'completion')} {len(right)} right, {cut} of these truncated"
    if max_pass_rate is None or not right:
        return text
    solved = sum(any(record["correct"] for record in samples) for samples in found)
    many = f"more than {max_pass_rate:.0%} of samples"
    return f"{text}; of {count_noun(solved, 'problem')} solved, those solved in {many} are left out"


def check(params: Mapping[str, Any]) -> None:
    """Raise DataError for an unknown parameter or an invalid value."""
    for key, value in params.items():
        if key not in PARAMS:
            raise DataError(f"accepted: has no parameter {key}", allowed=f"it has: {', '.join(PARAMS)}")
        right = isinstance(value, PARAMS[key]) and not isinstance(value, bool)
        if not right or (key == "pick" and value not in _PICKS) or (key != "pick" and value <= 0):
            raise DataError(
                f"accepted: cannot use {key} {value!r}", allowed=f"pick: {', '.join(_PICKS)}; numbers above 0"
            )


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON records of a file of the run. Raises DataError if the file is missing."""
    if not path.is_file():
        raise DataError(f"no finished evaluation: {path.name} is missing", where=str(path.parent))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
