"""Advantage bonuses: hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain.advantage import rank
from posttrain.advantage.rank import add_rank_bonus, effective_ranks
from posttrain.advantage.transforms import confidence, novelty, sequence_confidence
from posttrain.batch import RolloutBatch


def table(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def batch(rewards: list[float], answers: list[float], advantages: list[float], **fields: Any) -> RolloutBatch:
    """Return one token per answer with these probabilities and one prompt token of probability 1/2."""
    count = len(rewards)
    return RolloutBatch(
        group_ids=torch.zeros(count, dtype=torch.long),
        mask=torch.ones(count, 1, dtype=torch.bool),
        rewards=table([rewards])[0],
        correct=table([rewards])[0],
        old_logp=table([answers]).log().T,
        prompt_logp=torch.full((count, 1), math.log(0.5), dtype=torch.float64),
        prompt_mask=torch.ones(count, 1, dtype=torch.bool),
        advantages=table([advantages])[0],
        **fields,
    )


def test_confidence_is_the_mean_over_the_least_likely_tokens() -> None:
    """0.4 of 5 tokens are the 2 lowest; 0.4 of 2 rounds up to 1; at least one; an empty row has full confidence."""
    logp = table([[-1, -2, -3, -4, -5], [-1, -2, 9, 9, 9], [-7, 9, 9, 9, 9], [9, 9, 9, 9, 9]])
    mask = torch.arange(5) < torch.tensor([5, 2, 1, 0])[:, None]
    found = sequence_confidence(logp, mask, 0.4)
    assert found.tolist() == pytest.approx([math.exp(-4.5), math.exp(-2), math.exp(-7), 1.0])


def test_number_of_tokens_is_not_rounded_up_by_floating_point_error() -> None:
    """0.28 * 25 is 7.000000000000001 in floating point, and 7 tokens."""
    logp = -torch.arange(25, 0, -1, dtype=torch.float64)[None]
    found = sequence_confidence(logp, torch.ones(1, 25, dtype=torch.bool), 0.28)
    assert found.item() == pytest.approx(math.exp(-22))  # the mean of 19 .. 25


def test_confident_answers_get_a_smaller_bonus() -> None:
    found = confidence(batch([1, 1, 0], [0.9, 0.1, 0.5], [0.5, 0.5, -1.0]), alpha=1.0)
    assert found.tolist() == pytest.approx([0.5 - 0.4, 0.5 + 0.4, -1.0])


def test_bonus_is_zero_in_wrong_and_optionally_in_all_right_groups() -> None:
    wrong, right = batch([0, 0], [0.9, 0.1], [0.0, 0.0]), batch([1, 1], [0.9, 0.1], [0.0, 0.0])
    assert confidence(wrong).tolist() == [0.0, 0.0]
    assert confidence(right, alpha=1.0).tolist() == pytest.approx([-0.4, 0.4])
    assert confidence(right, skip_all_correct=True).tolist() == [0.0, 0.0]
    unscored = batch([1, math.nan], [0.9, 0.1], [0.0, 0.0])
    assert confidence(unscored, alpha=1.0).tolist() == pytest.approx([-0.4, 0.0])


def test_unlikely_right_answers_get_a_larger_bonus_up_to_the_cap() -> None:
    """Mean log-prob (ln 1/8 + ln 1/2) / 2 = ln 1/4: eta 1/2 and 2. lam 2.5: 1.25, cut to kappa A = 0.25."""
    rows = batch([1, 0], [1 / 8, 1 / 2], [0.5, -0.5])
    assert novelty(rows).tolist() == pytest.approx([0.75, -0.5])
    assert novelty(rows, lam=0.2).tolist() == pytest.approx([0.6, -0.5])
    assert novelty(batch([1, 0], [1 / 2, 1 / 8], [0.5, -0.5])).tolist() == [0.5, -0.5]


def rank_of(states: torch.Tensor) -> torch.Tensor:
    return effective_ranks([states])[0]


def test_effective_rank_counts_directions() -> None:
    """Centered states along one line: 1; along two axes equally: 2; no movement: exp(0) = 1; one state: 0."""
    assert rank_of(table([[1, 0], [-1, 0]])).item() == pytest.approx(1, abs=1e-6)
    assert rank_of(table([[1, 0], [-1, 0], [0, 1], [0, -1]])).item() == pytest.approx(2, abs=1e-6)
    assert rank_of(table([[3, 4], [3, 4]])).item() == pytest.approx(1, abs=1e-6)
    assert rank_of(table([[3, 4]])).item() == 0


def test_effective_rank_is_invariant_to_rotation_and_shift() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    rank = rank_of(states)
    assert 1 <= rank <= 4 + 1e-4
    torch.testing.assert_close(rank_of(states @ turn + 5), rank)


def test_rank_bonus_is_capped_and_zero_in_the_first_step() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = [torch.randn(length, 4, generator=generator, dtype=torch.float64) for length in (9, 2, 5)]
    advantages = table([[1.0, -1.0, 0.0]])[0]
    first = add_rank_bonus(advantages, hidden)
    assert first.advantages.tolist() == advantages.tolist()
    assert first.ema_next["er"] == pytest.approx(0.3 * first.er.mean().item())
    assert first.erv[1] == first.era[1] == 0  # two states are shorter than two windows
    second = add_rank_bonus(advantages, hidden, {"er": 0.1, "erv": 0.01, "era": 0.1}, kappa=4.0)
    gain = second.advantages - advantages
    assert gain[0] == 0.25
    assert 0 <= gain[1] <= 0.25
    assert gain[2] == 0


@pytest.mark.parametrize("cells", [1, 40, 1 << 22])
@pytest.mark.parametrize("width", [2, 16])
def test_batched_effective_ranks_equal_those_of_single_rows(
    cells: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the lengths beside it, and from float32 to its last digits but two: numbers in float32 are exact in
    float64, where the singular values are taken themselves."""
    generator = torch.Generator().manual_seed(0)
    narrow = [torch.randn(n, width, generator=generator) + 3 for n in (7, 1, 8, 0, 3, 8, 2)]
    wide = [states.double() for states in narrow]
    monkeypatch.setattr(rank, "MAX_ELEMENTS", cells)
    expected = torch.stack([rank_of(states) for states in wide])
    assert (expected > 0.9).sum() == 5 and expected[1] == expected[3] == 0
    torch.testing.assert_close(effective_ranks(wide), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(effective_ranks(narrow), expected, rtol=1e-6, atol=0)
