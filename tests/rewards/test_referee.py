"""The referee's reward is the tau of the URPO formula, and its rows come from pairs."""

from __future__ import annotations

import json
import random

import pytest
import torch

from posttrain.data.rows import load_rows
from posttrain.loss.reward_model import urpo
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.sections import Data
from posttrain.verify.load import shipped_function


def test_it_is_the_tau_of_the_formula():
    order, draw = shipped_function("referee.order"), random.Random(0)
    for _ in range(50):
        truth = [draw.randrange(3) / 2 for _ in range(4)]
        said = [draw.randrange(11) for _ in range(4)]
        found = order("\n".join(f"{n}: {score}" for n, score in enumerate(said, start=1)), truth)
        expected = urpo(
            torch.tensor([said], dtype=torch.float64), torch.tensor(truth, dtype=torch.float64), torch.ones(1)
        )
        assert found is None if len(set(truth)) == 1 else found == pytest.approx(float(expected.judge_rewards[0]))


def test_pairs_become_judgements(tmp_path):
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
