"""Label tasks, reward stability and the scaling fit, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.errors import UserError
from posttrain.evaluate.measures import expected_calibration_error, label_report, reward_stability
from posttrain.run.jsonl import to_lines
from posttrain.run.scaling import fit_scaling, scaling_curve


def record(problem: int, sample: int, **more: Any) -> dict[str, Any]:
    return {"problem": problem, "sample": sample, "uid": str(problem), **more}


def test_probabilities_count_samples_without_a_label() -> None:
    answers = [["Yes", "yes.", "no", None], ["no", "no", "no", "maybe"], ["yes"] * 4]
    records = [record(p, s, answer=answer) for p, row in enumerate(answers) for s, answer in enumerate(row)]
    found = label_report(records, {"0": "yes", "1": "yes", "2": "something"}, ["yes", "no"])
    assert found["questions"] == 2
    assert [row["mean_probability"] for row in found["classes"]] == [0.25, 0.5]
    # said: yes, no; truth: yes, yes -> F1 of yes 2/3; no has no question
    assert found["macro_f1"] == pytest.approx(2 / 3)
    assert [row["f1"] for row in found["classes"]] == [pytest.approx(2 / 3), 0.0]
    assert found["ece"] == pytest.approx((0.5 + 0.75) / 2)


def test_calibrated_forecast_has_zero_calibration_error() -> None:
    assert expected_calibration_error([0.75] * 4, [True, True, True, False]) == pytest.approx(0.0)
    assert expected_calibration_error([1.0] * 4, [False] * 4) == 1.0
    assert expected_calibration_error([], []) is None


def test_weight_change_flips_the_best_answer_within_the_bound() -> None:
    rows = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.05}]
    records = [record(0, n, scores=row, reward=0.0) for n, row in enumerate(rows)]
    records += [record(1, n, scores={"right": 1.0, "short": 0.5}, reward=0.0) for n in range(2)]
    found = reward_stability(records, {"right": 1.0, "short": 1.0})
    assert found["problems"] == 2
    assert found["tied"] == 0.5
    right, short = found["components"]
    assert (right["reward"], right["flips"], short["flips"]) == ("right", 0.5, 0.0)
    assert right["cliff"] == 1.0  # a tie, and a margin of 0.05 that a change of 0.1 eats
    assert 0 < right["soft_tv"] <= right["soft_bound"]


def test_fit_recovers_the_curve_of_the_points() -> None:
    x = [50, 100, 200, 400, 800, 1600, 3200]
    y = scaling_curve(x, r0=0.5, asymptote=0.9, slope=1.2, midpoint=400)
    found = fit_scaling(x, y, 0.5)
    assert (found.asymptote, found.slope, found.midpoint) == (
        pytest.approx(0.9, abs=2e-3),
        pytest.approx(1.2, abs=0.02),
        pytest.approx(400, rel=0.02),
    )
    assert found.interval[0] <= 0.9 + 2e-3
    assert found.rmse < 1e-3
    with pytest.raises(UserError, match="5 points"):
        fit_scaling(x[:4], y[:4], 0.5)


def test_report_fits_a_metric_of_a_run(tmp_path: Path) -> None:
    steps = list(range(1, 40))
    values = scaling_curve(steps, r0=0.2, asymptote=0.8, slope=1.5, midpoint=8)
    rows = [{"step": step, "reward": value} for step, value in zip(steps, values, strict=True)]
    (tmp_path / "metrics.jsonl").write_text(to_lines(rows))
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--fit", "reward"])
    assert result.exit_code == 0, result.output
    assert "midpoint at step" in result.output
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--fit", "rewards"])
    assert "did you mean `reward`?" in result.output + result.stderr
