"""Canary: the alarm of a reward that is never trained on, when it is raised and where it is reported."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RecipeError
from posttrain.recipe.load import load_dict
from posttrain.report.page import render
from posttrain.report.run_view import RunView
from posttrain.run.metrics import read_metrics
from posttrain.train import rl
from posttrain.train.canary import Canaries, create_canaries, fit_trend, have_diverged

Opened = Callable[..., AbstractContextManager[Any]]


def test_trend_slope_and_error() -> None:
    """Values 0, 1, 5: slope (5 - 0) / 2 = 2.5; the line is -0.5, 2, 4.5, so the squared residuals sum to 0.25 + 1 +
    0.25 = 1.5; with 1 degree of freedom and a spread of 2 the error is sqrt(0.75)."""
    found = fit_trend([0.0, 1.0, 5.0])
    assert found.rise == pytest.approx(5.0)
    assert found.errors == pytest.approx(2.5 / math.sqrt(0.75))


def test_trend_of_a_noiseless_line_and_of_a_constant() -> None:
    assert fit_trend([1.0, 2.0, 3.0, 4.0]) == (3.0, math.inf)
    assert fit_trend([0.3] * 5).errors == 0.0


def rows(trained: list[float], canary: list[float]) -> list[dict[str, Any]]:
    return [
        {"step": i, "reward": a, "rewards/c/mean": b} for i, (a, b) in enumerate(zip(trained, canary, strict=True), 1)
    ]


UP, DOWN, FLAT = [i / 10 for i in range(20)], [-i / 10 for i in range(20)], [0.5] * 20


@pytest.mark.parametrize(
    ("trained", "canary", "alarm"),
    [(UP, DOWN, True), (UP, UP, False), (UP, FLAT, False), (DOWN, DOWN, False), (FLAT, DOWN, False)],
)
def test_alarm_is_raised_at_a_falling_canary_with_rising_reward(
    trained: list[float], canary: list[float], alarm: bool
) -> None:
    watched = Canaries(["c"], 10)
    said = [watched.add(row["step"], row)[1] for row in rows(trained, canary)]
    assert [step for step, words in enumerate(said, 1) if words] == (
        [10] if alarm else []
    )  # reported once, when it begins
    assert watched.summary()["c"] == {
        "alarm_steps": 11 if alarm else 0,
        "first_alarm": 10 if alarm else None,
        "alarm_at_the_end": alarm,
    }


def test_alarm_is_raised_again_after_it_ended() -> None:
    trained, canary = [*UP, *UP, *UP], [*DOWN, *UP, *DOWN]
    watched = Canaries(["c"], 10)
    told = [row["step"] for row in rows(trained, canary) if watched.add(row["step"], row)[1]]
    assert len(told) == 2 and told[0] == 10 and told[1] > 40


def test_steps_without_a_score_are_skipped() -> None:
    watched = Canaries(["c"], 5)
    for row in rows(UP, DOWN):
        watched.add(row["step"], {**row, "rewards/c/mean": None})
    assert watched.summary()["c"]["alarm_steps"] == 0


def test_noise_rarely_raises_the_alarm() -> None:
    draw = random.Random(0)
    count = 4000
    alarms = sum(
        have_diverged(*(fit_trend([draw.gauss(0, 1) for _ in range(20)]) for _ in range(2))) for _ in range(count)
    )
    assert alarms <= 12  # 0.0009 * 4000 = 3.6 are expected


REWARDS = """
def digits(completion, token_count):
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def letters(completion, token_count):  # what digits crowd out
    return sum(not c.isdigit() for c in completion) / max(token_count, 1)
"""


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(24)))
    return {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 8, "group_size": 6, "max_new_tokens": 8},
        "rewards": [
            {"use": "rewards.py:letters", "weight": 0, "canary": True},
            {"use": "rewards.py:digits"},
        ],
        "scoring": {"workers": 1, "canary_window": 5},
        "optim": {"lr": 1e-2},
        "run": {"steps": 8, "save_every": 4},
    }


def test_run_reports_its_alarm_everywhere(values: dict[str, Any], opened: Opened, tmp_path: Path, capsys: Any) -> None:
    """Digits are rewarded, so letters become rare: the run reports it, and a resumed run continues from the earlier
    history."""
    recipe = load_dict(values, base_dir=tmp_path, where="test").recipe
    with opened(tmp_path / "run") as directory:
        summary = rl.run(recipe, directory)
        (directory.path / "summary.json").write_text(json.dumps(summary))
        steps = read_metrics(directory.path)
        page = render([RunView(directory.path)])
        again = create_canaries(recipe, directory, 8).summary()
    alarms = [row["step"] for row in steps if row.get("canary/letters/alarm")]
    assert alarms and summary["canaries"]["letters"]["first_alarm"] == alarms[0]
    assert again == summary["canaries"]
    assert "canary letters falls while the trained reward rises" in " ".join(capsys.readouterr().err.split())
    assert "Canaries" in page and "fell while the trained reward rose" in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [{"use": "rewards.py:digits", "canary": True}]}, "a canary is never trained on"),
        (
            {"rewards": [{"use": "rewards.py:digits"}, {"use": "rewards.py:letters", "weight": 0, "canary": True,
                                                        "correct": True}]},
            "must not define it",
        ),
        (
            {"rewards": [{"use": "rewards.py:digits", "condition": {"on": "letters"}},
                         {"use": "rewards.py:letters", "weight": 0, "canary": True}]},
            "a condition on it trains on it",
        ),
        ({"rewards": [{"use": "rewards.py:digits"}]}, "does nothing without a canary"),
    ],
)  # fmt: skip
def test_invalid_canaries_raise(values: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_dict({**values, **change}, base_dir=tmp_path, where="test")
