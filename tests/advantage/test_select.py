"""Row and token selectors: brute-force comparison and hand-computed values."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
import torch

from posttrain.advantage.select import (
    clip_cov,
    d3s,
    d3s_schedule,
    entropy_threshold,
    high_entropy_tokens,
    select_spread_subset,
    select_top_tokens,
    step_entropy,
    token_covariance,
)
from posttrain.batch import RolloutBatch


def batch(entropy: list[list[float]], lengths: list[int], group_ids: list[int], **fields: object) -> RolloutBatch:
    values = torch.tensor(entropy, dtype=torch.float64)
    mask = torch.arange(values.shape[1]) < torch.tensor(lengths)[:, None]
    return RolloutBatch(group_ids=torch.tensor(group_ids), mask=mask, entropy=values, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", range(1, 7))
def test_selected_subset_has_the_largest_variance(count: int) -> None:
    values = [0.3, -1.2, 0.31, 2.0, -0.4, 0.0, 1.1]
    found = [values[place] for place in select_spread_subset(values, count)]
    best = max(statistics.pvariance(subset) for subset in itertools.combinations(values, count))
    assert statistics.pvariance(found) == pytest.approx(best, abs=1e-12)


def test_ties_prefer_the_even_split_then_larger_values() -> None:
    """All equal: two of four are the smallest and the largest by index; one of two is the largest."""
    assert select_spread_subset([0.0] * 4, 2) == [0, 3]
    assert select_spread_subset([1.0, 2.0], 1) == [1]
    assert select_spread_subset([1.0, 2.0], 5) == [0, 1]


def test_down_sampling_by_row_then_by_token() -> None:
    """Rows 0 and 2 differ most; of their four tokens, the half with the largest |A| * entropy is kept."""
    rows = batch([[3, 1], [9, 9], [1, 2]], [2, 2, 2], [0, 0, 0], advantages=torch.tensor([1.0, 0.2, -2.0]))
    found = d3s(rows, n_query=2, token_frac=0.5)
    assert found.mask.tolist() == [[True, False], [False, False], [False, True]]
    assert found.denominator == "kept"


def test_down_sampling_keeps_everything_at_the_end_of_the_schedule() -> None:
    rows = batch([[3, 1], [9, 9], [1, 2]], [2, 2, 1], [0, 0, 0], advantages=torch.tensor([1.0, 0.2, -2.0]))
    last = rows.replace(step=9, total_steps=10)
    assert bool((d3s(last, n_query=1, token_frac=0.1, n_final=3, k_final=1.0).mask == rows.mask).all())
    assert d3s(rows, n_query=1, token_frac=0.1, n_final=3, k_final=1.0).mask.sum() == 1


def test_the_schedule_rounds_half_up_and_stays_within_the_run() -> None:
    halfway = d3s_schedule(0.5, n_init=1, n_final=4, k_init=0.0, k_final=1.0)
    assert (halfway.n, halfway.token_frac) == (3, 0.5)
    assert d3s_schedule(7.0, n_init=1, n_final=4, k_init=0.0, k_final=1.0).n == 4


def test_equal_scores_are_ordered_by_row_then_position() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    assert select_top_tokens(torch.ones(2, 2), mask, 0.6).tolist() == [[True, False], [True, False]]
    assert not select_top_tokens(torch.ones(2, 2), torch.zeros(2, 2).bool(), 0.6).any()


def test_entropy_threshold_is_an_interpolated_quantile_of_trained_tokens() -> None:
    """Entropies 1, 2, 4; rho 1/4: position 0.75 * 2 = 1.5, halfway between 2 and 4. The masked 99 is ignored."""
    rows = batch([[1, 2], [4, 99]], [2, 1], [0, 1])
    assert entropy_threshold(rows, rho=0.25).item() == 3
    found = high_entropy_tokens(rows, rho=0.25)
    assert found.mask.tolist() == [[False, False], [True, False]]
    assert found.denominator == "all"
    assert bool((high_entropy_tokens(rows, rho=1.0).mask == rows.mask).all())


def test_tokens_at_the_threshold_are_kept() -> None:
    rows = batch([[1, 5, 5, 5]], [4], [0])
    assert high_entropy_tokens(rows, rho=0.25).mask.tolist() == [[False, True, True, True]]


def test_steps_with_the_largest_mean_entropy_per_group_are_kept() -> None:
    """Half of three is one, half of one is one; ties go to the first; the mean is over trained tokens."""
    rows = batch([[2, 9], [1, 3], [1, 1], [0, 0]], [1, 2, 2, 0], [0, 0, 0, 1])
    found = step_entropy(rows, keep=0.5)
    assert found.mask.any(-1).tolist() == [True, False, False, False]
    assert found.denominator == "kept"
    assert step_entropy(rows, keep=0.5, scope="batch").mask.any(-1).tolist() == [True, True, False, False]
    assert bool((step_entropy(rows, keep=1.0).mask == rows.mask).all())


def test_covariance_of_tokens_is_numpys() -> None:
    """The covariance over the trained tokens is its mean; masked cells, here NaN and 99, do not count."""
    generator = torch.Generator().manual_seed(3)
    logp, advantages = -torch.rand(5, 6, generator=generator), torch.randn(5, generator=generator)
    mask = torch.arange(6) < torch.tensor([6, 2, 0, 4, 1])[:, None]
    rows = RolloutBatch(
        group_ids=torch.zeros(5, dtype=torch.long),
        mask=mask,
        old_logp=torch.where(mask, logp, torch.nan),
        advantages=advantages,
    )
    of_token = np.repeat(advantages.numpy()[:, None], 6, axis=1)[mask.numpy()].astype(np.float64)
    expected = np.cov(of_token, logp.numpy()[mask.numpy()].astype(np.float64), ddof=0)[0, 1]
    found = token_covariance(rows)
    assert found[mask].mean().item() == pytest.approx(expected, abs=1e-12)
    assert not found[~mask].any()
    by_token = rows.replace(advantages=torch.where(mask, advantages[:, None], 99.0))
    assert torch.equal(token_covariance(by_token), found)


def test_tokens_of_high_covariance_lose_their_gradient() -> None:
    """Mean log-prob -2.25, mean advantage 0: three covariances, 3.5 and twice 1.5, lie between 1 and 4."""
    rows = RolloutBatch(
        group_ids=torch.zeros(2, dtype=torch.long),
        mask=torch.ones(2, 4, dtype=torch.bool),
        old_logp=torch.tensor([[-0.5, -2.0, -1.5, -3.0], [-3.0, -2.0, -1.0, -5.0]]),
        advantages=torch.tensor([2.0, -2.0]),
    )
    assert token_covariance(rows).tolist() == [[3.5, 0.5, 1.5, -1.5], [1.5, -0.5, -2.5, 5.5]]
    high = torch.tensor([[True, False, True, False], [True, False, False, False]])
    everything = clip_cov(rows, share=1.0, low=1.0, high=4.0)
    assert everything.denominator == "all" and torch.equal(everything.mask, ~high)
    removed = {tuple((~clip_cov(rows.replace(step=step), share=0.2, low=1.0, high=4.0).mask).nonzero()[0].tolist())
               for step in range(20)}  # fmt: skip
    assert removed == {tuple(place) for place in high.nonzero().tolist()}  # one at a time, not always the same
    assert clip_cov(rows, share=0.2, low=50.0, high=60.0).mask.all()
