"""Sequence-level importance ratios: hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.loss.aggregate import aggregate, totals
from posttrain.loss.sequence import gmpo, gspo, sequence_clip

MASK = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)


def batch(ratios: list[list[float]], advantages: list) -> tuple[RolloutBatch, torch.Tensor]:
    """Return rows of 2, 1 and 0 trained tokens whose logp - old_logp is log(ratios); masked cells hold garbage."""
    old = torch.where(MASK, -1.0, 7.0).double()
    logp = torch.where(MASK, old + torch.tensor(ratios, dtype=torch.float64).log(), -3.0).requires_grad_()
    rows = RolloutBatch(
        group_ids=torch.zeros(3, dtype=torch.long),
        mask=MASK,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        old_logp=old,
    )
    return rows, logp


def test_gspo_uses_the_geometric_mean_ratio_and_shares_its_gradient() -> None:
    """Ratios (4, 1): s = 2, A = -1, above 1 + 0.5 with A < 0: not cut; value 2, row mean 2. Row 2: r = 3, A = 1: cut at
    1.5. Mean over three rows (2 - 1.5) / 3. Gradient by each token of row 1: -A s / (rows * tokens) = 2 / 6."""
    rows, logp = batch([[4.0, 1.0], [3.0, 1.0], [1.0, 1.0]], [-1.0, 1.0, 5.0])
    found = gspo(rows, logp, clip_low=0.5)
    loss = aggregate(found.values, MASK, "seq_mean_token_mean", totals(MASK))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 / 3)
    expected = torch.tensor([[1 / 3, 1 / 3], [0, 0], [0, 0]], dtype=torch.float64)
    torch.testing.assert_close(logp.grad, expected)
    torch.testing.assert_close(found.stats["seq_ratio"], torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64))
    assert found.stats["clip_ratio/region_mean"][:2].tolist() == [[0, 0], [1, 1]]


def test_gspo_token_applies_the_advantage_of_each_token() -> None:
    """s = 2 for both tokens of row 1; A = (-1, 0.5), clip 1 +- 1.5: values (2, -1), gradients s * -A by the token
    alone: (2, -1), over 2 tokens and 3 rows."""
    rows, logp = batch([[4.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [[-1.0, 0.5], [0.0, 9.0], [9.0, 9.0]])
    found = gspo(rows, logp, level="token", clip_low=0.9, clip_high=1.5)
    aggregate(found.values, MASK, "seq_mean_token_mean", totals(MASK)).backward()
    assert found.values.tolist()[0] == pytest.approx([2.0, -1.0])
    assert logp.grad[0].tolist() == pytest.approx([2 / 6, -1 / 6])


def test_gspo_and_gspo_token_agree_for_row_advantages() -> None:
    gradients = []
    for level in ("sequence", "token"):
        rows, logp = batch([[1.1, 0.8], [0.7, 1.0], [1.0, 1.0]], [1.0, -2.0, 1.0])
        found = gspo(rows, logp, level=level, clip_low=0.5)
        loss = aggregate(found.values, MASK, "seq_mean_token_mean", totals(MASK))
        loss.backward()
        gradients.append((loss.item(), logp.grad))
    assert gradients[0][0] == pytest.approx(gradients[1][0])
    torch.testing.assert_close(gradients[0][1], gradients[1][1])


def test_product_ratio_sums_over_tokens() -> None:
    """r = (2, 3): rho = 6, A = -1: value 6 for both tokens; gradient by each token 6 / rows, not divided by tokens."""
    rows, logp = batch([[2.0, 3.0], [1.0, 1.0], [1.0, 1.0]], [-1.0, 0.3, 1.0])
    found = sequence_clip(rows, logp)
    aggregate(found.values, MASK, "seq_mean_token_mean", totals(MASK)).backward()
    assert found.values[0].tolist() == pytest.approx([6.0, 6.0])
    assert logp.grad[0].tolist() == pytest.approx([2.0, 2.0])
    assert logp.grad[1].tolist() == pytest.approx([-0.1, 0.0])  # on-policy: -A / rows


def test_huge_sequence_ratio_is_finite() -> None:
    rows, logp = batch([[math.exp(300.0), math.exp(300.0)], [1.0, 1.0], [1.0, 1.0]], [-1.0, 0.0, 0.0])
    assert sequence_clip(rows, logp).values[0, 0].item() == pytest.approx(math.exp(20))


def test_gmpo_clips_tokens_and_takes_the_geometric_mean() -> None:
    """A = 1, ratios 4 and 1/2, limit ln 2: the first counts as 2 and has no gradient: s = sqrt(2 / 2) = 1. A = -1 and
    ratio 1/4: it counts as 1/2. Gradient of the free token -A s / tokens / rows."""
    rows, logp = batch([[4.0, 0.5], [0.25, 1.0], [1.0, 1.0]], [1.0, -1.0, 1.0])
    found = gmpo(rows, logp, clip_low=math.log(2))
    aggregate(found.values, MASK, "seq_mean_token_mean", totals(MASK)).backward()
    assert found.stats["seq_ratio"].tolist() == pytest.approx([1.0, 0.5, 1.0])
    assert found.values[0].tolist() == pytest.approx([-1.0, -1.0])
    assert logp.grad.tolist() == [[0.0, pytest.approx(-1 / 6)], [0.0, 0.0], [0.0, 0.0]]
    assert found.stats["clip_ratio/high_mean"][0].tolist() == [1.0, 0.0]
    assert found.stats["clip_ratio/low_mean"][1, 0] == 1.0


def test_gmpo_does_not_clip_what_leads_back() -> None:
    """A = -1 and ratio 4, or A = 1 and ratio 1/4: no clip, as in PPO."""
    rows, logp = batch([[0.25, 0.25], [4.0, 1.0], [1.0, 1.0]], [1.0, -1.0, 1.0])
    found = gmpo(rows, logp, clip_low=0.1)
    assert found.stats["seq_ratio"].tolist() == pytest.approx([0.25, 4.0, 1.0])
