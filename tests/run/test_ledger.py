"""Ledger of tokens and seconds: each is counted once, the largest share first."""

from __future__ import annotations

import torch

from posttrain.batch import RolloutBatch
from posttrain.run import ledger
from posttrain.train.rl_metrics import token_ledger


def test_every_sampled_token_is_counted_once() -> None:
    """Rows of 4 sampled tokens: trained, without a signal, dropped, truncated and masked, and one with 3 masked
    tokens."""
    sampled = RolloutBatch(group_ids=torch.arange(5), mask=torch.ones(5, 4, dtype=torch.bool))
    left = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    after = sampled.replace(
        mask=left,
        keep=torch.tensor([True, True, False, True, True]),
        truncated=torch.tensor([False, False, True, True, True]),
    )
    found = token_ledger(sampled, after, torch.tensor([True, False, False, False, True]))
    assert found == {"trained": 5.0, "without_signal": 4.0, "dropped": 4.0, "cut": 4.0, "masked": 3.0}
    assert sum(found.values()) == sampled.mask.sum()
    idle = token_ledger(sampled, after, torch.tensor([True, False, False, False, True]), updated=False)
    assert "trained" not in idle and idle["without_update"] == 5.0


def test_steps_are_summed_and_printed_as_shares() -> None:
    sums: dict[str, float] = {}
    for _ in range(2):
        ledger.add(sums, "tokens", {"trained": 150.0, "dropped": 50.0, "cut": 0.0})
        ledger.add(sums, "seconds", {"rollout": 30.0, "update": 10.0})
    found = ledger.ledger(sums, {"checkpoints": 20.0})
    assert found == {
        "tokens": {"trained": 300, "dropped": 100},
        "seconds": {"rollout": 60.0, "update": 20.0, "checkpoints": 20.0},
    }
    shares = "75% trained on, 25% dropped by `keep` or `select`"
    assert ledger.sentences({"ledger": found, "num_tokens": 1400})[0] == (
        f"400 sampled tokens (of 1,400 with their prompts): {shares}"
    )
    assert ledger.sentences({"ledger": found, "num_tokens": 300})[0] == f"400 sampled tokens: {shares}"
    assert ledger.sentences({"ledger": found, "num_tokens": 400}) == [
        f"400 tokens: {shares}",
        "1:40 of steps, evaluations and saves: 60% rollout, 20% update, 20% checkpoints",
    ]
    assert ledger.sentences({}) == []
