"""benchmarks/miniatures.py: arms differ only in what the claim says, and the page matches the results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.recipe.load import load_dict
from posttrain.registry import load_module

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return load_module(ROOT / "benchmarks" / "miniatures.py")


@pytest.fixture
def tasks() -> Any:
    return load_module(ROOT / "benchmarks" / "miniature_data.py")


def test_arms_differ_only_in_the_keys_of_the_claim(study: Any, tmp_path: Path) -> None:
    for name, one in study.MINIATURES.items():
        load_dict(study.start(one), base_dir=ROOT, where=name)
        arms = [study.arm(one, adds, tmp_path, [0, 1, 2], 1, 3) for _, adds in (one.claimed, one.control)]
        trained = [load_dict(arm, base_dir=ROOT, where=name).resolved["stages"][0] for arm in arms]
        keys = {key for adds in (one.claimed[1], one.control[1]) for key in adds}
        for key in trained[0].keys() & trained[1].keys() - keys:
            assert trained[0][key] == trained[1][key], (name, key)
        assert trained[0] != trained[1]


def test_interval_is_students(study: Any) -> None:
    """1, 2, 3: mean 2, s = 1, so half of the width is 4.303 / sqrt(3) = 2.4843."""
    found = study.interval([1.0, 2.0, 3.0])
    assert found == {"mean": 2.0, "low": pytest.approx(2 - 2.4843, abs=1e-4), "high": pytest.approx(4.4843, abs=1e-4)}


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.1, 0.2, "shown"), (-0.2, -0.1, "denied"), (-0.1, 0.3, "not shown"), (0, 0, "not shown")],
)
def test_verdict_follows_the_interval(study: Any, low: float, high: float, said: str) -> None:
    assert study.verdict({"mean": (low + high) / 2, "low": low, "high": high}) == said


def test_control_samples_at_least_as_many_tokens(study: Any) -> None:
    """8 prompts x 8 rollouts of 35 tokens are 2,240 per step: 10,000 tokens take 5 steps (4 are 8,960)."""
    one = study.MINIATURES["hints"]
    assert one.training["rollout"]["prompts_per_step"] * one.training["rollout"]["group_size"] == 64
    assert study.steps_for(10_000, one, 35.0) == 5
    assert study.sampled({"trained": 5, "without_signal": 2, "replaced": 3, "context": 100}) == 10


def test_sums_have_the_requested_carries(tasks: Any) -> None:
    """458+367: 15 and 12, two carries; 120+345 none; 205+106 one."""
    assert [tasks.count_carries(a, b) for a, b in ((458, 367), (120, 345), (205, 106))] == [2, 0, 1]
    trained, held = tasks.sums(30, 0, fewest=1), tasks.sums(30, 0, fewest=1, held_out=True)
    for rows in (trained, held):
        assert sorted(row["difficulty"] for row in rows) == [0.5] * 15 + [1.0] * 15
        for row in rows:
            answer = row["solution"].partition("</think>")[2]
            assert answer == f"<answer>{row['answer']}</answer>"
            assert all(re.search(check["pattern"], answer) for check in row["checks"])
    assert not {row["prompt"] for row in trained} & {row["prompt"] for row in held}


def test_demonstration_follows_its_hint(tasks: Any) -> None:
    rows = tasks.sum_demonstrations(200, 0, forget=1.0, hinted=0.5)
    hinted = [row for row in rows if "\n" in row["prompt"]]
    assert 60 < len(hinted) < 140
    for row in hinted:
        assert row["completion"].startswith(row["prompt"].partition("\n")[2])
    for row in rows:
        a, b = map(int, re.findall(r"\d+", row["prompt"])[:2])
        right = f"<answer>{a + b}</answer>" in row["completion"]
        assert right or tasks.count_carries(a, b)
        assert row in hinted or right == (tasks.count_carries(a, b) == 0)


def test_carried_thought_continues(tasks: Any) -> None:
    """Two steps are 4 tokens; the carried text and its continuation are the end of the only right text. 7DMq!: 7+3 = 0,
    0+2 = 2, 2+1 = 3, 3+0 = 3, and again 6, 8, 9, 9, 2, 4, 5, 5."""
    assert tasks.ask([7, 3, 2, 1, 0]) == "7DMq!=?" and tasks.total_after([7, 3, 2, 1, 0], 12) == 5
    text = "<think>a0b2c3d3e6f8g9h9i2j4k5l5</think><answer>5</answer>"
    assert tasks.work_out([7, 3, 2, 1, 0], [False] * 12) == text
    rows = tasks.total_demonstrations(100, 0, slips=0.0, hurried=0.0)
    carried = [row for row in rows if not row["prompt"].endswith("<|assistant|>")]
    assert 20 < len(carried) < 80
    for row in rows:
        question, _, given = row["prompt"].removeprefix("<bos><|user|>").partition("<|assistant|>")
        others = [alphabet.index(sign) for alphabet, sign in zip(tasks.ALPHABETS, question[1:5], strict=True)]
        whole = tasks.work_out([int(question[0]), *others], [False] * 12)
        assert whole.endswith(given.removeprefix("<think>") + row["completion"])
        assert not given or len(tasks.TOKEN.findall(given)) == 5
    trained, held = tasks.totals(50, 0), tasks.totals(50, 0, held_out=True)
    assert len({row["prompt"] for row in (*trained, *held)}) == 100


def test_page_is_up_to_date_with_the_results(study: Any, tmp_path: Path) -> None:
    """docs/systems_study.md equals the output for the committed results, with every miniature."""
    for name in study.MINIATURES:
        file = RESULTS / f"miniature_{name}.json"
        shutil.copy(file, tmp_path)
        found = json.loads(file.read_text())
        assert len(found["seeds"]) >= 3
        for arm in (found["claimed"], *found["controls"]):
            assert len(arm["accuracy"]) == len(arm["tokens"]) == len(found["seeds"])
    study.write(tmp_path, tmp_path)
    assert (tmp_path / "systems_study.md").read_text() == (ROOT / "docs" / "systems_study.md").read_text()


@pytest.mark.slow
def test_miniature_runs(study: Any, tmp_path: Path) -> None:
    """All arms through the command line, with two seeds and hardly any training; the page has a row for each."""
    folders = [f"--{name}={tmp_path}" for name in ("output", "results", "docs")]
    command = [sys.executable, str(ROOT / "benchmarks" / "miniatures.py"), "--smoke", "--seeds", "0,1", *folders]
    subprocess.run(command, check=True, cwd=tmp_path)
    page = (tmp_path / "systems_study.md").read_text()
    for name, one in study.MINIATURES.items():
        assert f"## {name.capitalize()}" in page
        assert all(f"| {arm} |" in page for arm, _ in (one.claimed, one.control))
