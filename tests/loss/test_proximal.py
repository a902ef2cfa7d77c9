"""DPPO's limit on the divergence of a token: hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.loss.proximal import dppo

Q = (0.5, 0.5, 0.001)  # probabilities when sampled, and now:
P = (0.75, 0.55, 0.01)


def gradient(advantage: float, q: tuple[float, ...] = Q, p: tuple[float, ...] = P, **keys: Any) -> list[float]:
    old = torch.tensor([q], dtype=torch.float64).log()
    logp = torch.tensor([p], dtype=torch.float64).log().requires_grad_()
    mask, ids = torch.ones(1, len(q), dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    rows = RolloutBatch(ids, mask, old_logp=old - 1, rollout_logp=old, advantages=torch.tensor([advantage]).double())
    dppo(rows, logp, **keys).values.sum().backward()
    assert logp.grad is not None
    return logp.grad[0].tolist()


def test_likely_tokens_are_limited_and_unlikely_ones_are_not() -> None:
    """|p - q| is 0.25, 0.05, 0.009 with ratios 1.5, 1.1, 10: PPO would cut the third. Gradient -A r. The distance is
    to the engine's log-probs, not to `old_logp`."""
    assert gradient(2.0, clip_low=0.15) == pytest.approx([0, -2.2, -20])
    assert gradient(2.0, clip_low=0.15, cap=3.0) == pytest.approx([0, -2.2, -6])


def test_what_leads_back_is_not_limited() -> None:
    """A < 0 pulls p back towards q; from the other side it does not."""
    assert gradient(-1.0, clip_low=0.15) == pytest.approx([1.5, 1.1, 10])
    assert gradient(-1.0, q=P, p=Q, clip_low=0.15) == pytest.approx([0, 0.5 / 0.55, 0.1])
    assert gradient(-1.0, q=P, p=Q, clip_low=0.3, clip_high=0.0) == pytest.approx([0.5 / 0.75, 0.5 / 0.55, 0.1])


def test_kl_of_a_coin() -> None:
    """q 0.5, p 0.75: 0.5 ln(2/3) + 0.5 ln 2 = 0.1438."""
    exact = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert exact == pytest.approx(0.1438, abs=1e-4)
    assert gradient(1.0, divergence="kl", clip_low=exact - 1e-3)[0] == 0
    assert gradient(1.0, divergence="kl", clip_low=exact + 1e-3)[0] == pytest.approx(-1.5)
