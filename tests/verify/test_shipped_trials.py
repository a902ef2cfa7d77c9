"""`posttrain reward test` on shipped correctness rewards: no trick pays, no gold is bad, nothing raises."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.recipe.sections import Reward, Scoring
from posttrain.verify.trial import try_rewards

PLAIN = [{"uid": str(i), "prompt": f"What is {i} + 7?", "answer": str(i + 7)} for i in range(11, 17)]
TEXT = [
    {"uid": str(i), "prompt": "Which city is the capital?", "answer": city}
    for i, city in enumerate(["Paris", "Lisbon", "Nairobi", "Ottawa"])
]


@pytest.mark.parametrize(("use", "rows"), [("math.accuracy", PLAIN), ("qa.ansf1", TEXT)])
def test_a_shipped_reward_is_clean(use: str, rows: list[dict[str, Any]]) -> None:
    trial = try_rewards([Reward(use=use)], Scoring(workers=1), None, rows)
    assert trial.rows == len(rows)
    assert trial.failures == 0, trial.first_traceback
    assert trial.bad_gold == {}
    assert trial.paying == {}
