"""Agreement of rewards with labels and with each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.errors import DataError
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.label_agreement import confusion, kappa, read_labeled, try_labeled


def test_kappa_by_hand() -> None:
    """3 of 4 agree; a says right for 2 of 4, b for 3 of 4: chance 0.5 * 0.75 + 0.5 * 0.25 = 0.5; (0.75 - 0.5) / 0.5 =
    0.5.
    """
    assert kappa([True, True, False, False, None], [True, True, True, False, True]) == pytest.approx(0.5)
    assert kappa([True, False], [False, True]) == -1.0
    assert kappa([True, True], [True, True]) is None
    assert kappa([None], [True]) is None


def test_confusion() -> None:
    assert confusion([True, False, True, None], [True, True, False, False]) == {
        "right_right": 1, "right_wrong": 1, "wrong_right": 1, "wrong_wrong": 0, "unscored": 1,
    }  # fmt: skip


def test_rewards_are_compared_with_labels(tmp_path: Path) -> None:
    rows = [("7", "7", 1), ("8", "7", 0), ("x 7", "7", 1), ("9", "", 0)]
    file = tmp_path / "labelled.jsonl"
    file.write_text(
        "".join(json.dumps({"completion": rf"\boxed{{{c}}}", "answer": a, "label": y}) + "\n" for c, a, y in rows)
    )
    (tmp_path / "ends.py").write_text(
        "def ends(completion, answer):\n    return float(completion.endswith(answer + '}'))"
    )
    rewards = [Reward(use="math.accuracy"), Reward(use="./ends.py:ends")]
    told = try_labeled(rewards, Scoring(workers=1), tmp_path, read_labeled(file))
    assert told["rewards"]["accuracy"]["confusion"]["unscored"] == 1
    assert told["rewards"]["accuracy"]["wrong_rows"] == ["line 3"]
    assert told["rewards"]["ends"]["wrong_rows"] == ["line 4"]
    assert told["pairs"]["accuracy, ends"]["rows"] == ["line 3"]


@pytest.mark.parametrize(
    "text", ["", "{", '{"completion": 1, "label": 1}', '{"completion": "x", "label": "yes"}', "[1]"]
)
def test_unlabelled_rows_are_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"label|JSON"):
        read_labeled(tmp_path / "rows.jsonl")
