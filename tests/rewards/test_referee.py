"""The referee's reward equals tau of the URPO formula, and its rows are built from pairs."""

from __future__ import annotations

import json
import random

import pytest

from posttrain.data.rows import load_rows
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.sections import Data
from posttrain.verify.load import shipped_function
from posttrain.verify.self_play import self_judged_rewards


def test_referee_reward_equals_tau():
    order, draw = shipped_function("referee.order"), random.Random(0)
    for _ in range(50):
        truth = [draw.randrange(3) / 2 for _ in range(4)]
        said = [draw.randrange(11) for _ in range(4)]
        found = order("\n".join(f"{n}: {score}" for n, score in enumerate(said, start=1)), truth)
        expected = self_judged_rewards([said], truth, [1.0]).judge_rewards[0]
        assert found is None if len(set(truth)) == 1 else found == pytest.approx(expected)


def test_pairs_are_converted_to_judgement_rows(tmp_path):
    rows = [{"prompt": f"q{n}", "chosen": f"good{n}", "rejected": f"bad{n}"} for n in range(20)]
    rows.append({"prompt": "r", "ranked": ["first", "second", "third"]})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{shipped_folder('recipes') / 'data' / 'referee.py'}:judgements"
    found = load_rows(Data(source=source, size=21, params={"pairs": str(tmp_path / "p.jsonl")}), tmp_path)
    for n, row in enumerate(found[:20]):
        first = row["prompt"].index(f"good{n}") < row["prompt"].index(f"bad{n}")
        assert row["truth"] == ([1, 0] if first else [0, 1])
    assert 3 < sum(row["truth"] == [1, 0] for row in found[:20]) < 17
    assert sorted(found[20]["truth"]) == [0, 0.5, 1]


def test_judge_rows_are_scored_by_order_and_player_rows_by_their_score():
    """Gold 3 > 2 > 1: right order 1, one inversion 1/3, a tie 0 for its pair, unreadable 0; if all gold scores tie,
    0."""
    said = [[9, 8, 7], [8, 9, 7], [9, 9, 7], [9, None, 7]]
    found = self_judged_rewards(said, [3, 2, 1], [4, 12, -1, None])
    assert found.judge_rewards == pytest.approx([1, 1 / 3, 2 / 3, 0])
    assert found.player_rewards == [0.4, 1, 0, None]
    assert self_judged_rewards(said[:1], [1, 1, 1], [5]).judge_rewards == [0]
    curved = self_judged_rewards([[score**3 for score in row] for row in said[:3]], [3, 2, 1], [5])
    assert curved.judge_rewards == pytest.approx([1, 1 / 3, 2 / 3])
