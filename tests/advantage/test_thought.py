"""Credit inside a thought: DECS by position, and the control token of DeGRPO."""

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


def test_redundant_tokens_of_a_right_row(groups: Groups) -> None:
    """Tokens 1 and 2 of row 0 are redundant: 2 - (2 - 1) * 4 / 8 = 1.5. Only there do the right rows differ."""
    batch = nrp(groups, [[1, 1]], [[4, 3]], [[1, None]])
    rewards = decs_rewards(batch, max_length=8, r_plus=2.0, r_zero=1.0)
    assert rewards.tolist() == [[2, 1.5, 1.5, 2], [2, 2, 2, 2]]
    found = decs(batch, max_length=8, r_plus=2.0, r_zero=1.0, eps=0.0)
    torch.testing.assert_close(found, torch.tensor([[0, -HALF, -HALF, 0], [0, HALF, HALF, 0]], dtype=torch.float64))


def test_the_papers_equation_is_an_option(groups: Groups) -> None:
    batch = nrp(groups, [[1, 1]], [[4, 3]], [[1, -1]])
    assert decs_rewards(batch, max_length=8, r_plus=2.0, redundant_top="r_zero")[0, 1] == 0.5


def test_wrong_rows_have_nothing_and_the_end_of_a_right_row_counts(groups: Groups) -> None:
    """Position 2: the right row has ended; it counts as 1.1 there, and its own advantage is cut by the mask."""
    batch = nrp(groups, [[1, 0]], [[2, 3]], [[-1, 1]])
    found = decs(batch, max_length=8, eps=0.0)
    torch.testing.assert_close(found, torch.tensor([[HALF, HALF, 0], [-HALF, -HALF, -HALF]], dtype=torch.float64))


@pytest.mark.parametrize("correct", [[[0, 0]], [[1, 1]], [[1]], [[None, 1]]])
def test_groups_without_a_difference_are_zero(correct: list[list[int | None]], groups: Groups) -> None:
    lengths, start = [[3] * len(correct[0])], [[-1] * len(correct[0])]
    assert not decs(nrp(groups, correct, lengths, start), max_length=8).any()


def test_the_control_token_has_a_mean_of_its_own(groups: Groups) -> None:
    """Rows of 3 and 1 tokens, 4 in all, 2 first and 2 later ones: the token mean of the weights is alpha and 1."""
    batch = groups([[1, 0]], [[3, 1]])
    found = control_token(batch.replace(advantages=torch.tensor([1.0, -1.0])), alpha=0.1)
    torch.testing.assert_close(found, torch.tensor([[0.2, 2, 2], [-0.2, 0, 0]]))
    assert not control_token(batch.replace(advantages=torch.tensor([1.0, -1.0])), alpha=0.0)[:, 0].any()


def test_control_tokens_alone_and_empty_rows(groups: Groups) -> None:
    batch = groups([[1, 0]], [[1, 0]])
    found = control_token(batch.replace(advantages=torch.tensor([1.0, -1.0])), alpha=0.5)
    assert found.tolist() == [[0.5], [0.0]]
