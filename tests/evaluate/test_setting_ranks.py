"""Ranking of sweep settings and the metric that decides it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.evaluate.setting_ranks import (
    Criterion,
    choose_criterion,
    describe_ranking,
    measure_setting,
    rank_rows,
)


def _run(path: Path, rows: Sequence[Mapping[str, Any]], **summary: float) -> Path:
    path.mkdir(parents=True)
    lines = [json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows, 1)]
    (path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return path


def rank_settings(settings: Mapping[str, Sequence[Path]], criterion: Criterion) -> list[dict[str, Any]]:
    rows = [{"setting": name, "ranked": measure_setting(runs, criterion)} for name, runs in settings.items()]
    return rank_rows(rows, criterion)


def test_ranking_uses_the_last_quarter_of_a_run(tmp_path: Path) -> None:
    """Eight steps, the last quarter is two: a has (0.9 + 0.1) / 2 = 0.5 with the worse last step, b 0.3.

    Student's interval of two values is +- 12.706 * deviation / sqrt(2); a's deviation is 0.8 / sqrt(2).
    """
    a = _run(tmp_path / "a", [{"reward": value} for value in (0, 0, 0, 0, 0, 0, 0.9, 0.1)])
    b = _run(tmp_path / "b", [{"reward": 0.3}] * 8)
    criterion = choose_criterion([a, b], measured=False)
    assert (criterion.kind, criterion.name) == ("last_part", "reward")
    rows = rank_settings({"b": [b], "a": [a]}, criterion)
    assert [(row["setting"], row["rank"], row["ranked"]["mean"]) for row in rows] == [
        ("a", 1, pytest.approx(0.5)),
        ("b", 2, pytest.approx(0.3)),
    ]
    assert rows[0]["ranked"]["over"] == "steps"
    assert rows[0]["ranked"]["high"] == pytest.approx(0.5 + 12.706 * 0.4)
    said = describe_ranking(rows, criterion)
    assert said == [
        "Ranked by mean reward over the last quarter of the steps, highest first; 95% intervals are over the steps of "
        "one run: another seed may move it further.",
        "The interval of a overlaps with that of b: their order may be chance.",
    ]


def test_lowest_loss_ranks_first_and_setting_without_runs_last(tmp_path: Path) -> None:
    losses = {"high": (2.0, 2.01), "low": (1.0, 1.01)}
    runs = {name: [_run(tmp_path / name, [{"loss": loss} for loss in pair] * 4)] for name, pair in losses.items()}
    criterion = choose_criterion([run for one in runs.values() for run in one], measured=False)
    rows = rank_settings({"none": [], **runs}, criterion)
    assert [(row["setting"], row["rank"]) for row in rows] == [("low", 1), ("high", 2), ("none", None)]
    assert describe_ranking(rows, criterion)[1] == "The interval of low overlaps with no other."


def test_settings_with_equal_values_have_no_order(tmp_path: Path) -> None:
    runs = {name: [_run(tmp_path / name, [{"reward": 0.0}] * 8)] for name in ("a", "b")}
    criterion = choose_criterion([run for one in runs.values() for run in one], measured=False)
    said = describe_ranking(rank_settings(runs, criterion), criterion)
    assert said[0].endswith("; without intervals, because the values of each setting are all equal.")
    assert said[1:] == ["All settings have the same value, 0: they have no order."]


def test_intervals_over_problems_state_whether_seeds_were_averaged(tmp_path: Path) -> None:
    criterion = choose_criterion([_run(tmp_path / "a", [])], measured=True)
    ranked = {"mean": 0.5, "low": 0.4, "high": 0.6, "over": "problems"}
    ends = {1: "over problems, of one seed.", 2: "over problems, each averaged over the seeds; they do not cover "}
    for runs, end in ends.items():
        rows = rank_rows([{"setting": "a", "ranked": {**ranked, "runs": runs}}], criterion)
        assert f"95% intervals are {end}" in describe_ranking(rows, criterion)[0]


def test_held_out_evaluation_ranks_before_rewards_with_its_interval(tmp_path: Path) -> None:
    """The last evaluation counts; over seeds 0.4 and 0.6 Student's interval is 0.5 +- 12.706 * 0.1."""
    found = {"reward": 0.9, "eval/accuracy": 0.4, "eval/accuracy/low": 0.3, "eval/accuracy/high": 0.5}
    one = _run(tmp_path / "one", [{"reward": 0.1, "eval/accuracy": 0.8}, found, {"reward": 0.9}])
    two = _run(tmp_path / "two", [{"reward": 0.1, "eval/accuracy": 0.6}])
    criterion = choose_criterion([one, two], measured=False)
    assert (criterion.kind, criterion.name) == ("held_out", "eval/accuracy")
    alone = measure_setting([one], criterion)
    assert alone == {"mean": 0.4, "low": 0.3, "high": 0.5, "runs": 1, "over": "problems"}
    both = measure_setting([one, two], criterion)
    assert (both["mean"], both["runs"], both["over"]) == (pytest.approx(0.5), 2, "seeds")
    assert both["high"] == pytest.approx(0.5 + 12.706 * 0.1)


def test_ranking_uses_the_metric_of_the_recipe(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [{"eval/accuracy": 0.5, "eval/loss": 1.0}])
    (run / "resolved.json").write_text(json.dumps({"eval": {"metric": "loss"}}), encoding="utf-8")
    criterion = choose_criterion([run], measured=False)
    assert (criterion.name, criterion.lower_is_better) == ("eval/loss", True)


def test_runs_without_metrics_are_ranked_by_their_summaries(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", [], loss_last=2.0)
    criterion = choose_criterion([run], measured=False)
    assert (criterion.kind, criterion.name, criterion.lower_is_better) == ("summary", "loss_last", True)
    assert measure_setting([run], criterion)["mean"] == 2.0
    assert choose_criterion([run], measured=True).describe() == (
        "accuracy on the problems of the evaluation, highest first"
    )
