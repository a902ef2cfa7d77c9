"""`posttrain reward test` on every shipped reward, on its own `ROWS`: no trick pays, no gold is bad, nothing raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.errors import RewardError
from posttrain.path_resolution import known_files
from posttrain.recipe.reward_sections import Scoring
from posttrain.verify.examples import read_examples
from posttrain.verify.script_rows import CORRECTNESS, own_rows
from posttrain.verify.trial import try_rewards

pytestmark = pytest.mark.usefixtures("forked_workers")

SHIPPED = known_files("rewards", [".py"])


SLOW = pytest.mark.slow(reason="half a minute of programs")


@pytest.mark.parametrize("script", [pytest.param(s, marks=SLOW) if s == "code" else s for s in sorted(SHIPPED)])
def test_shipped_reward_passes_its_trial(script: str) -> None:
    tried = own_rows(SHIPPED[script])
    assert {own.function for own in tried} == set(read_examples(SHIPPED[script])), "a reward without rows of its own"
    for own in tried:
        trial = try_rewards(own.rewards, Scoring(workers=1), None, own.rows)
        assert trial.rows == len(own.rows)
        assert trial.failures == 0, trial.first_traceback
        assert (own.function, trial.bad_gold if trial.knows_gold else {}) == (own.function, {})
        assert (own.function, trial.paying_tricks if trial.knows_gold else {}) == (own.function, {})
        assert (own.function, {name: n for name, n in trial.outbid.items() if n[0]}) == (own.function, {})
        assert not any(moved for by_name in trial.injected.values() for moved, _ in by_name.values())


def test_rows_next_to_a_reward_that_reads_correct(script: Callable[..., Path]) -> None:
    path = script("""
        def short(completion, correct): return 1.0 if correct and len(completion) < 90 else 0.0
        def wordy(completion): return len(completion) / 10
        ROWS = {
            "short": [{"prompt": "1 + 6?", "answer": "7"}],
            "wordy": {"rows": [{"prompt": "1 + 6?", "answer": "7"}], "correct": "math.accuracy"},
        }
    """)
    short, wordy = own_rows(path)
    assert [r.use for r in short.rewards] == [CORRECTNESS, f"{path}:short"]
    trial = try_rewards(wordy.rewards, Scoring(workers=1), None, wordy.rows)
    assert trial.paying_tricks == {}
    assert trial.outbid["injection"] == (1, 1)  # more words, more reward
    assert trial.outbid["empty thought"] == (0, 1)
    assert [own.function for own in own_rows(path, "wordy")] == ["wordy"]


def test_invalid_rows_are_refused(script: Callable[..., Path]) -> None:
    assert own_rows(script("def f(completion): return 1.0")) == []
    with pytest.raises(RewardError, match="unknown keys: parms"):
        own_rows(script("def f(completion): return 1.0\nROWS = {'rows': [{}], 'parms': {}}", "keys.py"))
    with pytest.raises(RewardError, match="not rows"):
        own_rows(script("def f(completion): return 1.0\nROWS = ['what']", "text.py"))
