"""Advantage factors: hand-computed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain.advantage.factors import (
    adora_terms,
    duration_weights,
    inverse_easiness_terms,
    negative_scale,
    semantic_entropy_terms,
)
from posttrain.batch import RolloutBatch

NAN = float("nan")


def rows(group_ids: list[int], rewards: list[float], **fields: Any) -> RolloutBatch:
    return RolloutBatch(
        group_ids=torch.tensor(group_ids),
        mask=torch.ones(len(group_ids), 1, dtype=torch.bool),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        **fields,
    )


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def build_batch(answers: list[int], logp: list[float]) -> RolloutBatch:
    return rows(
        [0] * len(answers), [0.0] * len(answers), answer_ids=torch.tensor(answers), old_logp=column(*logp)[:, None]
    )


def test_semantic_entropy_of_two_equal_clusters() -> None:
    """Two clusters of weight 1/2: ln 2; with four rows x = ln 2 / ln 4 = 1/2: 1 / (1 + 1/2)."""
    found = semantic_entropy_terms(build_batch([0, 0, 1, 1], [-1.0] * 4), alpha=1.0)
    assert found.measure.tolist() == pytest.approx([math.log(2)])
    assert found.by_row.tolist() == pytest.approx([2 / 3] * 4)
    assert semantic_entropy_terms(build_batch([0, 0, 1, 1], [-1.0] * 4), alpha=3.0, fn="linear").by_group.item() == 0.0


def test_semantic_entropy_weights_rows_by_likelihood_or_frequency() -> None:
    """exp(log-probs) 3/4 and 1/4: -3/4 ln 3/4 - 1/4 ln 1/4; mc: the mean of -ln p; frequency: ln 2."""
    batch = build_batch([0, 1], [math.log(0.75), math.log(0.25)])
    p = [0.75, 0.25]
    rao = -sum(x * math.log(x) for x in p)
    assert semantic_entropy_terms(batch).measure.item() == pytest.approx(rao)
    assert semantic_entropy_terms(batch, estimator="mc").measure.item() == pytest.approx(-sum(map(math.log, p)) / 2)
    assert semantic_entropy_terms(batch, estimator="frequency").measure.item() == pytest.approx(math.log(2))


def test_rows_without_an_answer_are_their_own_cluster() -> None:
    found = semantic_entropy_terms(build_batch([-1, -1, -1], [0.0] * 3), alpha=1.0)
    assert found.measure.item() == pytest.approx(math.log(3))
    assert found.by_group.item() == pytest.approx(0.5)
    assert semantic_entropy_terms(build_batch([-1], [0.0])).by_group.item() == 1.0


@pytest.mark.parametrize(
    ("rewards", "lengths", "llm", "vlm"),
    [
        ([1, 0], [9, 5], 1, 1),  # the right one is longer
        ([1, 0], [5, 5], 0, 0),  # a tie is no advantage
        ([0, 0], [9, 5], 0, 1),  # nothing right
        ([1, 1], [9, 5], 1, 0),  # nothing wrong
        ([1, 0], [3, 10], 1, 0),  # the wrong one hit the limit of 10: no short wrong one
        ([1, NAN], [3, 1], 1, 0),  # an unscored row is neither
    ],
)
def test_adora_variants(rewards: list[float], lengths: list[int], llm: int, vlm: int) -> None:
    batch = rows([0, 0], rewards, lengths=torch.tensor(lengths))
    assert adora_terms(batch, max_length=10).measure.tolist() == [llm]
    assert adora_terms(batch, max_length=10, variant="vlm").measure.tolist() == [vlm]


def test_negative_rows_are_weighted_by_the_groups_mean_reward() -> None:
    """Mean reward 0.1: 0.5 + 0.15; positive rows are unchanged; also per token."""
    batch = rows([0] * 2, [0.2, 0.0], advantages=column(1.0, -1.0))
    assert negative_scale(batch).tolist() == pytest.approx([1.0, 0.65])
    tokens = rows([0] * 2, [0.2, 0.0], advantages=torch.tensor([[1.0], [-1.0]], dtype=torch.float64))
    assert negative_scale(tokens)[:, 0].tolist() == pytest.approx([1.0, 0.65])


def test_harder_prompts_weigh_more_with_a_mean_weight_of_one() -> None:
    """1 / x is 1 and 4, mean 2.5, independent of the number of rows per prompt."""
    batch = rows([7, 7, 7, 3], [0.0] * 4, columns={"easiness": column(1.0, 1.0, 1.0, 0.25)})
    assert inverse_easiness_terms(batch).by_row.tolist() == pytest.approx([0.4, 0.4, 0.4, 1.6])
    zero = rows([0, 1], [0.0] * 2, columns={"easiness": column(0.0, 0.5)})
    with pytest.raises(ValueError, match="floor"):
        inverse_easiness_terms(zero)
    assert inverse_easiness_terms(zero, floor=0.5).by_row.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="no column `hardness`"):
        inverse_easiness_terms(zero, column="hardness")


def test_unknown_durations_have_weight_one() -> None:
    """2 and 6: mean 4; a limit applies to all."""
    assert duration_weights(column(2.0, 6.0, NAN)).tolist() == [0.5, 1.5, 1.0]
    assert duration_weights(column(2.0, 6.0, NAN), floor=1.2, cap=1.4).tolist() == pytest.approx([1.2, 1.4, 1.2])
    assert duration_weights(column(0.0, 0.0)).tolist() == [1.0, 1.0]
    assert duration_weights(column(NAN, NAN)).tolist() == [1.0, 1.0]
