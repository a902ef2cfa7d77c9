"""The report of a reward model on hand-made scores."""

import numpy as np
import pytest

from posttrain.evaluate.reward_report import calibration, correlation, label_report, pair_report


def test_four_pairs_by_hand():
    """Gaps 1, 1, 0, -1: accuracy (1 + 1 + 1/2 + 0) / 4. Lengths: chosen longer, longer, equal, shorter."""
    found = pair_report([1, 2, 3, 0], [0, 1, 3, 1], [5, 5, 4, 2], [3, 3, 4, 8])
    assert found["accuracy"]["mean"] == 0.625
    length = found["length"]
    assert length["chosen_longer"] == 0.5
    assert length["longer_wins_rule"]["mean"] == (1 + 1 + 0.5 + 0) / 4
    assert length["scores_longer_higher"]["mean"] == 1.0  # of the three pairs whose lengths differ
    assert length["accuracy_matched"] | {"note": ""} == length["accuracy_matched"] | {"mean": 0.5, "note": ""}
    assert length["accuracy_chosen_longer"]["mean"] == 1.0 and length["accuracy_chosen_shorter"]["mean"] == 0.0


def test_calibration_by_hand():
    """Confidence 0.75 (gap log 3) and right in 3 of 4: no error. Right in all 4: 0.25."""
    three = np.log(3) * np.array([1, 1, 1, -1])
    assert calibration(three)["ece"] == pytest.approx(0)
    assert calibration(np.abs(three))["ece"] == pytest.approx(0.25)
    assert calibration(three)["bins"] == [{"confidence": pytest.approx(0.75), "accuracy": 0.75, "pairs": 4}]


def test_overconfidence_is_reported_and_calibrated_scores_are_not():
    draw = np.random.default_rng(0)
    gap = draw.normal(0, 1.5, 2000)
    honest = np.where(draw.random(2000) < 1 / (1 + np.exp(-np.abs(gap))), np.abs(gap), -np.abs(gap))
    even = [5] * 2000
    assert not any("confident" in line for line in pair_report(honest, np.zeros(2000), even, even)["findings"])
    assert any("overconfident" in line for line in pair_report(5 * honest, np.zeros(2000), even, even)["findings"])


def test_report_without_held_out_pairs():
    found = pair_report([], [], [], [])
    assert (
        found["pairs"] == 0
        and found["accuracy"]["mean"] is None
        and "on its training pairs only" in found["findings"][0]
    )


def test_labels():
    predicted, labels = np.array([[1.0, 0], [0, 1], [1, 1]]), np.array([[1.0, np.nan], [0, np.nan], [0, np.nan]])
    found = label_report(predicted, labels, ["a", "b"], [1, 2, 3])
    assert found["labels"]["a"]["mse"]["mean"] == pytest.approx(1 / 3) and found["labels"]["b"]["rows"] == 0
    assert "b: no held-out row has this label" in found["findings"]
    assert correlation(np.ones(3), np.arange(3.0)) is None


def test_negative_seed_is_valid() -> None:
    gap = np.array([0.5, -0.2, 1.5, 0.1])
    assert calibration(gap, seed=-1)["ece"] == calibration(gap, seed=0)["ece"]
