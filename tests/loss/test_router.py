"""Load-balancing loss of a mixture of experts: hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.loss.router import load_balance, router_balance


def test_load_balance_is_1_for_even_load_and_larger_for_one_expert() -> None:
    """Row 0: two tokens, one to each of 2 experts, p = (3/4, 1/4) and (1/4, 3/4): 2 (1/2 1/2 + 1/2 1/2) = 1.
    Row 1: one token to expert 0, p = (3/4, 1/4): 2 (1 * 3/4 + 0 * 1/4) = 3/2; d/dz0 = 2 * 3/4 * 1/4 = 3/8."""
    z = math.log(3.0)
    logits = torch.tensor([[z, 0.0], [0.0, z], [z, 0.0]], requires_grad=True)
    found = load_balance([logits], torch.tensor([0, 0, 1]), 2, 1)
    assert found.tolist() == pytest.approx([1.0, 1.5])
    found[1].backward()
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([0, 0, 0, 0, 0.375, -0.375])


def test_load_balance_averages_over_layers() -> None:
    """4 experts, 2 per token. One layer is even (2); in the other, all tokens go to experts 0 and 1 with certainty: 4
    (1 * 1/2 + 1 * 1/2) = 4. The mean is 3."""
    even = torch.tensor([[9.0, 9.0, -9.0, -9.0], [-9.0, -9.0, 9.0, 9.0]])
    one = torch.tensor([[9.0, 9.0, -9.0, -9.0]] * 2)
    assert load_balance([even, one], torch.zeros(2, dtype=torch.long), 1, 2).item() == pytest.approx(3.0, abs=1e-6)


def test_router_loss_is_spread_over_trained_tokens() -> None:
    rows = RolloutBatch(
        group_ids=torch.tensor([0, 0]),
        mask=torch.tensor([[True, True, False], [True, False, False]]),
        router_loss=torch.tensor([2.0, 5.0], requires_grad=True),
    )
    found = router_balance(rows, torch.zeros(2, 3))
    assert found.values.tolist() == [[2.0, 2.0, 0.0], [5.0, 0.0, 0.0]]
    assert found.counted is rows.mask and found.stats["router_loss"].tolist() == [2.0, 5.0]
