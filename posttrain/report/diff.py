"""Comparison of two runs: differing values, metrics, and completions of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.report.compare import averaged_steps, differing_values, final_metrics
from posttrain.report.run_view import RunView, open_runs, read_ends
from posttrain.run.atomic_io import read_json


@dataclass(frozen=True)
class Diff:
    """Differences between two runs.

    values: key -> both runs' values as text. files: key -> both hashes. metrics: name -> both runs' numbers. spans: the
    steps over which each run's metrics are averaged, as text; "" for a run without curves. samples: prompt, and the
    record of each run.
    """

    values: dict[str, list[str]]
    files: dict[str, list[str]]
    metrics: dict[str, list[float | None]]
    spans: list[str]
    samples: list[tuple[str, dict[str, Any], dict[str, Any]]]


def diff(a: Path, b: Path, samples: int, *, every: bool = False) -> Diff:
    """Compare two run directories.

    samples: maximum number of prompts whose completions are compared. every: all metrics, not only the main ones.
    Raises UserError for a path that is not a run directory.
    """
    views = open_runs([a, b])
    metrics = final_metrics(views, every=every)
    spans = [averaged_steps(view) for view in views]
    return Diff(differing_values(views), _differing_files(views), metrics, spans, _find_shared_prompts(views, samples))


def _differing_files(views: Sequence[RunView]) -> dict[str, list[str]]:
    """Return the files named in the recipes that differ: key -> what each run was started with."""
    facts_by_view = [
        {key: fact["shown"] for key, fact in (read_json(view.path / "inputs.json") or {}).items()} for view in views
    ]
    keys = list(dict.fromkeys(key for facts in facts_by_view for key in facts))
    rows = {key: [facts.get(key, "-") for facts in facts_by_view] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _find_shared_prompts(views: Sequence[RunView], limit: int) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return prompts that both runs have completed, with the newest completion of each run."""
    newest = [
        {
            str(record.get("prompt")): record
            for record in _read_samples(view.path)
            if record.get("completion") is not None
        }
        for view in views
    ]
    shared = [prompt for prompt in newest[0] if prompt in newest[1]]
    return [(prompt, newest[0][prompt], newest[1][prompt]) for prompt in shared[-limit:]] if limit else []


def _read_samples(run: Path) -> list[dict[str, Any]]:
    """Return the completions of an evaluation, or the samples of a training."""
    found = read_ends(run / "completions.jsonl")
    return [r for r in found if r.get("sample", 0) == 0] if found else read_ends(run / "samples.jsonl")
