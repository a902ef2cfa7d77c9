"""Credit within a thought: DECS by position, and the control token of DeGRPO."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from posttrain.advantage.thought import control_token, decs, decs_rewards
from posttrain.batch import RolloutBatch

Groups = Callable[..., RolloutBatch]
HALF = math.sqrt(0.5)


def nrp(groups: Groups, correct: list[list[int | None]], lengths: list[list[int]], start: list[list[int | None]]):
    parts = {"necessary_prefix/start": start, "necessary_prefix/end": [[3] * len(row) for row in start]}
    return groups(correct, lengths, **parts)


def test_decs_lowers_redundant_tokens_of_right_rows(groups: Groups) -> None:
    """Tokens 1 and 2 of row 0 are redundant: 2 - (2 - 1) * 4 / 8 = 1.5. The right rows differ only there."""
    batch = nrp(groups, [[1, 1]], [[4, 3]], [[1, None]])
    rewards = decs_rewards(batch, max_length=8, r_plus=2.0, r_zero=1.0)
    assert rewards.tolist() == [[2, 1.5, 1.5, 2], [2, 2, 2, 2]]
    found = decs(batch, max_length=8, r_plus=2.0, r_zero=1.0, eps=0.0)
    torch.testing.assert_close(found, torch.tensor([[0, -HALF, -HALF, 0], [0, HALF, HALF, 0]], dtype=torch.float64))


def test_decs_offers_the_papers_equation_as_an_option(groups: Groups) -> None:
    batch = nrp(groups, [[1, 1]], [[4, 3]], [[1, -1]])
    assert decs_rewards(batch, max_length=8, r_plus=2.0, redundant_top="r_zero")[0, 1] == 0.5


def test_decs_gives_wrong_rows_zero_and_counts_ended_right_rows(groups: Groups) -> None:
    """Position 2: the right row has ended and counts as 1.1 there; the mask removes its advantage."""
    batch = nrp(groups, [[1, 0]], [[2, 3]], [[-1, 1]])
    found = decs(batch, max_length=8, eps=0.0)
    torch.testing.assert_close(found, torch.tensor([[HALF, HALF, 0], [-HALF, -HALF, -HALF]], dtype=torch.float64))


@pytest.mark.parametrize("correct", [[[0, 0]], [[1, 1]], [[1]], [[None, 1]]])
def test_decs_of_equal_rewards_is_zero(correct: list[list[int | None]], groups: Groups) -> None:
    lengths, start = [[3] * len(correct[0])], [[-1] * len(correct[0])]
    assert not decs(nrp(groups, correct, lengths, start), max_length=8).any()


def test_control_token_is_averaged_separately(groups: Groups) -> None:
    """Rows of 3 and 1 tokens, 4 in total, 2 first and 2 later tokens: the token means of the weights are alpha and
    1."""
    batch = groups([[1, 0]], [[3, 1]])
    found = control_token(batch.replace(advantages=torch.tensor([1.0, -1.0])), alpha=0.1)
    torch.testing.assert_close(found, torch.tensor([[0.2, 2, 2], [-0.2, 0, 0]]))
    assert not control_token(batch.replace(advantages=torch.tensor([1.0, -1.0])), alpha=0.0)[:, 0].any()


def test_control_token_without_later_tokens_and_empty_rows(groups: Groups) -> None:
    batch = groups([[1, 0]], [[1, 0]])
    found = control_token(batch.replace(advantages=torch.tensor([1.0, -1.0])), alpha=0.5)
    assert found.tolist() == [[0.5], [0.0]]
