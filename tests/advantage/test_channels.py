"""GDPO and HDPO, which normalize each reward separately."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain.advantage.channels import channels, gdpo, gdpo_terms
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError

Groups = Callable[..., RolloutBatch]
HALF = math.sqrt(0.5)
SEPARATE: list[Any] = [
    {"rewards": {"answer": 0.9, "format": 0.1}},
    {"rewards": {"calls": 1.0}, "among": {"on": "calls", "above": 0.0}, "weight": 0.15},
]


def test_gdpo_normalizes_each_component(groups: Groups) -> None:
    """Two rows: (1, 0) normalizes to +-sqrt(1/2) whatever the scale. a: +-, b with weight 2: -+ 2. Sum -+1
    sqrt(1/2)."""
    batch = groups([[1, 0], [1, 0]], a=[[1, 0], [1, 0]], b=[[0, 10], [0, 0]])
    terms = gdpo_terms(batch, weights={"b": 2.0}, eps=0.0, batch_norm="none")
    assert terms["pre_batch"].tolist() == pytest.approx([-HALF, HALF, HALF, -HALF])
    # mean 0, unbiased variance 4/2 / 3 = 2/3
    scaled = gdpo(batch, weights={"b": 2.0}, eps=0.0)
    assert scaled.tolist() == pytest.approx([x / math.sqrt(2 / 3) for x in (-HALF, HALF, HALF, -HALF)])


def test_gdpo_ignores_the_scale_of_a_component(groups: Groups) -> None:
    small, large = (groups([[1, 0, 0]], a=[[1, 0, 0]], b=[[0, k, 2 * k]]) for k in (1, 50))
    torch.testing.assert_close(gdpo(small, eps=0.0), gdpo(large, eps=0.0))


def test_gdpo_conditions_and_missing_components(groups: Groups) -> None:
    """b counts only if a >= 1: (5, 7, -) with a (1, 0, 1) is (5, 0, -): +-sqrt(1/2), and 0 for the third row."""
    batch = groups([[1, 0, 1]], a=[[1, 0, 1]], b=[[5, 7, None]])
    terms = gdpo_terms(batch, weights={"a": 0.0}, conditions={"b": {"on": "a", "min": 1.0}}, eps=0.0)
    assert terms["pre_batch"].tolist() == pytest.approx([HALF, -HALF, 0])
    assert terms["advantages"].tolist() == pytest.approx([HALF, -HALF, 0])  # two rows: mean 0, variance 1
    assert gdpo(groups([[1, 0]], a=[[None, None]], b=[[1, 1]])).tolist() == [0.0, 0.0]
    with pytest.raises(UserError, match="condition on `c`"):
        gdpo(batch, conditions={"c": {}})


def test_gdpo_uses_the_recipe_weights(groups: Groups) -> None:
    """Annotations of weight 0 and parts of components are excluded; `weights` overrides only the components it
    names."""
    batch = groups([[1, 0]], a=[[1, 0]], b=[[0, 1]], note=[[3, 9]], **{"a/part": [[0, 7]]})
    weighed = batch.replace(reward_weights={"a": 1.0, "b": 0.5, "note": 0.0})
    assert gdpo_terms(weighed, eps=0.0)["pre_batch"].tolist() == pytest.approx([HALF / 2, -HALF / 2])
    assert gdpo_terms(weighed, weights={"b": 3.0}, eps=0.0)["pre_batch"][0] == pytest.approx(-2 * HALF)
    assert "a/part" not in weighed.reward_weights
    with pytest.raises(UserError, match="no component has a weight"):
        gdpo(batch.replace(reward_weights={"a": 0.0, "b": 0.0, "note": 0.0}))


def test_gdpo_by_tokens_has_a_token_mean_of_zero(groups: Groups) -> None:
    """s = +-sqrt(1/2), lengths 3 and 1: token mean sqrt(1/2) / 2, and the token mean of the advantages is 0."""
    batch = groups([[1, 0]], [[3, 1]], a=[[1, 0]])
    found = gdpo(batch, eps=0.0, batch_norm="token")
    assert found.shape == (2, 3)
    assert float(found.sum()) == pytest.approx(0)
    assert float(found[batch.mask].var()) == pytest.approx(1)
    assert found[1, 1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("correct", [[[1]], [[1], [0]], [[1, 1], [0, 0]]])
def test_gdpo_of_equal_rewards_is_zero(correct: list[list[int]], groups: Groups) -> None:
    assert not gdpo(groups(correct, a=correct)).any()


def test_conditioned_channel_compares_only_the_rows_that_qualify(groups: Groups) -> None:
    """Accuracy (1, 1, 0.1) and calls (1, 1/2, 0): the second channel compares the first two rows only."""
    batch = groups([[1, 1, 0]], answer=[[1, 1, 0]], format=[[1, 1, 1]], calls=[[1, 0.5, 0]])
    found = channels(batch, channels=SEPARATE, eps=0.0, separate=True)
    third = 1 / math.sqrt(3)
    assert found.channels["0"].tolist() == pytest.approx([third, third, -2 * third])
    assert found.channels["1"].tolist() == pytest.approx([0.15 * HALF, -0.15 * HALF, 0])
    assert torch.equal(found.total, found.channels["0"])
    together = channels(batch, channels=SEPARATE, eps=0.0)
    assert torch.equal(together.total, found.channels["0"] + found.channels["1"])


def test_conditioned_channel_with_one_row_gets_zero(groups: Groups) -> None:
    batch = groups([[1, 0]], answer=[[1, 0]], format=[[1, 1]], calls=[[1, 0]])
    assert channels(batch, channels=SEPARATE).channels["1"].tolist() == [0.0, 0.0]


def test_calls_of_wrong_rows_change_nothing(groups: Groups) -> None:
    some, more = (
        groups([[1, 1, 0]], answer=[[1, 1, 0]], format=[[1, 0, 1]], calls=[[1, 0.5, wrong]]) for wrong in (0, -3)
    )
    assert torch.equal(channels(some, channels=SEPARATE).total, channels(more, channels=SEPARATE).total)


def test_empty_channels_raise(groups: Groups) -> None:
    with pytest.raises(UserError, match="no channel"):
        channels(groups([[1, 0]]), channels=[])
