"""Sampling: hand-computed cases."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.hf import inverse_cdf, sample, truncate, uniforms

PROBS = [0.5, 0.25, 0.125, 0.125]


def test_inverse_cdf_takes_the_first_token_whose_cumulative_weight_exceeds_u() -> None:
    """Cumulative .5 .75 .875 1: .49 -> 0, .5 -> 1 (token 1's interval begins there), .8 -> 2, .99 -> 3."""
    weights = torch.tensor([PROBS] * 4)
    assert inverse_cdf(weights, torch.tensor([0.49, 0.5, 0.8, 0.99])).tolist() == [0, 1, 2, 3]


def test_inverse_cdf_needs_no_normalised_weights() -> None:
    weights = torch.tensor([[1.0, 3.0]])  # token 1 begins at u = 1/4
    assert inverse_cdf(weights, torch.tensor([0.24])).tolist() == [0]
    assert inverse_cdf(weights, torch.tensor([0.26])).tolist() == [1]


def test_inverse_cdf_never_picks_a_token_of_weight_0() -> None:
    """u rounded up to 1 must not pass the end, and u = 0 must not pick a leading 0."""
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    assert inverse_cdf(weights, torch.tensor([0.0, 1.0])).tolist() == [1, 1]


def test_frequencies_are_the_probabilities() -> None:
    """u on a regular grid of 1000 points hits each token exactly p * 1000 times."""
    grid = (torch.arange(1000) + 0.5) / 1000
    tokens = inverse_cdf(torch.tensor([PROBS]).expand(1000, 4), grid)
    assert torch.bincount(tokens).tolist() == [500, 250, 125, 125]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [0, 1, 2, 3]),
        (1, 1.0, [0]),
        (3, 1.0, [0, 1, 2, 3]),  # tokens 2 and 3 tie for third rank: both are kept
        (0, 0.5, [0]),  # .5 reaches top_p
        (0, 0.51, [0, 1]),
        (0, 0.76, [0, 1, 2]),
        (0, 1e-9, [0]),  # one token is always kept
        (2, 0.6, [0]),  # of top-k's .75, 60% is .45: token 0 alone reaches it
        (2, 0.7, [0, 1]),  # .525: it does not
    ],
)
def test_truncate_by_top_k_and_top_p(top_k: int, top_p: float, kept: list[int]) -> None:
    cut = truncate(torch.tensor([PROBS]), top_k=top_k, top_p=top_p)[0]
    assert cut.nonzero().squeeze(-1).tolist() == kept
    assert torch.equal(cut[kept], torch.tensor(PROBS)[kept])


def test_truncate_orders_by_probability_not_by_id() -> None:
    cut = truncate(torch.tensor([[0.125, 0.5, 0.125, 0.25]]), top_p=0.7)[0]
    assert cut.nonzero().squeeze(-1).tolist() == [1, 3]


def test_log_probs_include_temperature_but_not_truncation() -> None:
    """Logits ln(4), 0 at temperature 2: weights 2 and 1, so the first token has log(2/3), with top_k 1 as well."""
    logits = torch.tensor([[math.log(4.0), 0.0]])
    token, logp = sample(logits, torch.tensor([0.9]), Sampling(temperature=2.0, top_k=1))
    assert token.item() == 0
    assert logp.item() == pytest.approx(math.log(2 / 3))


def test_greedy_takes_the_likeliest_and_reports_temperature_1() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    token, logp = sample(logits, torch.tensor([0.0]), Sampling(temperature=0.0))
    assert token.item() == 1
    assert logp.item() == pytest.approx(math.log(3 / 4))


def test_uniforms_keep_the_global_state_and_do_not_depend_on_later_rows() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    few, many = uniforms(3, 7, seed=5), uniforms(40, 7, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(few, many[:3])
    assert not torch.equal(few, uniforms(3, 7, seed=6))
