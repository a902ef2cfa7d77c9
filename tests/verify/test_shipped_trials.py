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

CLEAN = [("math.accuracy", PLAIN), ("numeric.distance", PLAIN), ("qa.ansf1", TEXT), ("reasoning.dianjin", TEXT)]
# The last answer block counts wherever it stands, as in the authors' code: an open gap, not a clean reward.
PAID_IN_THOUGHT = ["qa.search_r1", "qa.search_r2", "qa.reseek"]


@pytest.mark.parametrize(("use", "rows"), CLEAN)
def test_a_shipped_reward_is_clean(use: str, rows: list[dict[str, Any]]) -> None:
    trial = try_rewards([Reward(use=use)], Scoring(workers=1), None, rows)
    assert trial.rows == len(rows)
    assert trial.failures == 0, trial.first_traceback
    assert trial.bad_gold == {}
    assert trial.paying == {}


@pytest.mark.parametrize("use", PAID_IN_THOUGHT)
def test_what_pays_for_an_answer_in_the_thought_is_known(use: str) -> None:
    trial = try_rewards([Reward(use=use)], Scoring(workers=1), None, TEXT)
    assert trial.failures == 0, trial.first_traceback
    assert trial.bad_gold == {}
    assert list(trial.paying) == ["gold in the thought"]
