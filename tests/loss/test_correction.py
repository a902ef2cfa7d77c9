"""Corrections for the mismatch between engine and trainer log-probs: hand-computed values."""

from __future__ import annotations

import pytest
import torch

from posttrain.batch import RolloutBatch
from posttrain.loss.correction import minirl, off_policy_seq_mask, reject, tis

MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
NAN = float("nan")


def batch(engine: list[list[float]], advantages: list[float] | None = None) -> tuple[RolloutBatch, torch.Tensor]:
    """Return a batch with old_logp = logp = -1 and pi_old / mu = `engine` (NaN: not reported); masked cells hold
    garbage."""
    old = torch.where(MASK, -1.0, 4.0).double()
    ratios = torch.tensor(engine, dtype=torch.float64)
    rows = RolloutBatch(
        group_ids=torch.zeros(3, dtype=torch.long),
        mask=MASK,
        old_logp=old,
        rollout_logp=torch.where(MASK, old - ratios.log(), 77.0),
        advantages=torch.tensor(advantages or [1.0, -1.0, 1.0], dtype=torch.float64),
    )
    return rows, old.clone()


ENGINE = [[4.0, 0.5, NAN], [0.25, 1.0, 1.0], [1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("keys", "weights"),
    [
        ({}, [[2.0, 0.5, 1.0], [0.25, 1.0, 0.0]]),
        ({"clip_min": 0.5}, [[2.0, 0.5, 1.0], [0.5, 1.0, 0.0]]),
        ({"mode": "mask"}, [[0.0, 0.5, 1.0], [0.25, 1.0, 0.0]]),
        ({"mode": "mask", "clip_min": 0.3}, [[0.0, 0.5, 1.0], [0.0, 1.0, 0.0]]),
        ({"level": "sequence"}, [[2.0, 2.0, 2.0], [0.25, 0.25, 0.0]]),
        ({"level": "geometric"}, [[2 ** (1 / 3)] * 3, [0.5, 0.5, 0.0]]),
        ({"veto": 0.3}, [[2.0, 0.5, 1.0], [0.0, 0.0, 0.0]]),
        ({"clip_max": None}, [[4.0, 0.5, 1.0], [0.25, 1.0, 0.0]]),
        ({"clip_max": None, "row_min": 0.6}, [[4.0, 0.5, 1.0], [0.0, 0.0, 0.0]]),
        ({"clip_max": None, "row_min": 0.45, "row_max": 1.2}, [[0.0, 0.0, 0.0], [0.25, 1.0, 0.0]]),
        ({"row_max": 1.3, "veto": 0.3}, [[2.0, 0.5, 1.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_tis_weights(keys: dict, weights: list[list[float]]) -> None:
    """Ratios (4, 1/2, not reported = 1) with product 2 and geometric mean 2^(1/3); (1/4, 1) with 1/4 and 1/2."""
    rows, logp = batch(ENGINE)
    found = tis(rows, logp, **keys)
    torch.testing.assert_close(found.weights[:2], torch.tensor(weights, dtype=torch.float64))
    assert bool((found.weights[2] == 0).all())
    assert torch.equal(found.mask, MASK)


def test_missing_old_logp_falls_back_to_the_current_policy() -> None:
    rows, logp = batch(ENGINE)
    torch.testing.assert_close(tis(rows.replace(old_logp=None), logp).weights, tis(rows, logp).weights)


def test_rejected_tokens_leave_the_denominator() -> None:
    rows, _ = batch(ENGINE)
    found = reject(rows, clip_min=0.3)
    assert found.denominator == "kept"
    assert found.mask.tolist() == [[False, True, True], [False, True, False], [False, False, False]]
    assert not reject(rows, veto=0.3).mask[1].any()


def test_stale_rows_with_negative_advantage_are_masked() -> None:
    """kl = mean of rollout_logp - logp = mean of -ln ratio: row 1 (-ln 4 + ln 2 + 0) / 3 = -0.23, row 2 ln 4 / 2 =
    0.69."""
    rows, logp = batch(ENGINE, [-1.0, -1.0, -1.0])
    found = off_policy_seq_mask(rows, logp, threshold=0.5)
    assert found.stats["seq_kl"].tolist() == pytest.approx([-0.2310490602, 0.6931471806, 0.0])
    assert found.stats["off_policy_kept"].tolist() == [1.0, 0.0, 1.0]
    assert found.mask.tolist() == [[True] * 3, [False] * 3, [False] * 3]
    good = rows.replace(advantages=torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64))
    assert torch.equal(off_policy_seq_mask(good, logp, threshold=0.5).mask, MASK)


def test_stale_rows_mask_only_tokens_with_negative_advantage() -> None:
    rows, logp = batch(ENGINE)
    advantages = torch.tensor([[1.0, -1, 1], [1, -1, NAN], [NAN] * 3], dtype=torch.float64)
    found = off_policy_seq_mask(rows.replace(advantages=advantages), logp, threshold=0.5)
    assert found.mask.tolist() == [[True] * 3, [True, False, False], [False] * 3]


def test_minirl_weights_by_pi_over_mu_and_masks_where_ppo_clips() -> None:
    """pi / pi_old: 1.5 > 1.27 with A = 1 -> cut; 0.7 with A = 1 stays. pi / mu = 1.5 * 4 = 6 -> cap 5; 0.7 * 0.5 =
    0.35; not reported: pi / pi_old = 1. Row 2, A = -1: 0.7 < 0.8 -> cut; 1.5 stays."""
    rows, logp = batch(ENGINE)
    steps = torch.tensor([[1.5, 0.7, 1.0], [0.7, 1.5, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log()
    found = minirl(rows, logp + steps)
    expected = torch.tensor([[5.0, 0.35, 1.0], [0.175, 1.5, 0.0], [0.0] * 3], dtype=torch.float64)
    torch.testing.assert_close(found.weights, expected)
    assert found.mask.tolist() == [[False, True, True], [False, True, False], [False] * 3]
