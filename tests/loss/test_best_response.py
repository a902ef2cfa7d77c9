"""Best-response preference loss: its gradient through the policy that maximizes a reward, against the exact value."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from posttrain.loss.reward_model import best_response, bradley_terry, center_by_prompt

TEMPERATURE = 0.5


def sample_pairs(rewards: Tensor) -> dict[tuple[int, int], Tensor]:
    """Return the probability of each pair (better, worse) of three answers under the best response to a uniform
    reference. The annotator prefers the earlier answer and is indifferent between equal ones."""
    policy = torch.softmax(rewards / TEMPERATURE, -1)
    chances = {(i, j): policy[i] * policy[j] for i, j in itertools.combinations(range(3), 2)}
    total = sum(chances.values(), torch.zeros(()))
    return {pair: chance / total for pair, chance in chances.items()}


def test_expected_gradient_equals_autograd_through_the_best_response() -> None:
    """Averaged over all ways to sample two pairs, the gradient is that of sum_pairs prob(r) loss(r), where autograd
    treats the policy as a function of the reward. Without the extra term the gradient differs."""
    rewards = torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64, requires_grad=True)
    chances = sample_pairs(rewards)
    exact = sum(
        (chance * bradley_terry(rewards[i], rewards[j]).losses for (i, j), chance in chances.items()), torch.zeros(())
    )
    (wanted,) = torch.autograd.grad(exact, rewards)
    found, plain = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for first, second in itertools.product(chances, repeat=2):
        chosen, rejected = (rewards[[first[side], second[side]]][:, None] for side in (0, 1))
        losses, sums = bradley_terry(chosen, rejected).losses, chosen + rejected
        excess = center_by_prompt(losses.detach(), torch.tensor([0, 0]))
        term = best_response(excess, sums, sums.detach(), temperature=TEMPERATURE)
        assert term.log_odds.tolist() == [[0.0], [0.0]]
        chance = (chances[first] * chances[second]).detach()
        found += chance * torch.autograd.grad((losses + term.losses).mean(), rewards, retain_graph=True)[0]
        plain += chance * torch.autograd.grad(losses.mean(), rewards)[0]
    torch.testing.assert_close(found, wanted)
    assert (plain - wanted).abs().max() > 0.05


def test_losses_are_centered_by_the_prompts_other_pairs() -> None:
    """Losses 1, 2, 6 of one prompt: 1 - 4, 2 - 3.5, 6 - 1.5; the other prompt's single pair gets 0."""
    found = center_by_prompt(torch.tensor([[1.0], [5.0], [2.0], [6.0]]), torch.tensor([0, 1, 0, 0]))
    assert found[:, 0].tolist() == [-3.0, 0.0, -1.5, 4.5]


def test_pairs_beyond_the_log_odds_limit_get_no_outward_gradient() -> None:
    """At temperature 1/2, log-prob sums changed by 1 give log-odds of 2, the limit. A loss above the mean still pulls
    the pair back in, a loss below the mean has no gradient; the signs swap for sums changed by -1. Pairs at 1/4 always
    have one."""
    sums = torch.tensor([[1.0], [1.0], [-1.0], [-1.0], [0.25], [0.25]], requires_grad=True)
    found = best_response(torch.tensor([[3.0], [-3.0]] * 3), sums, torch.zeros(6, 1), temperature=0.5)
    assert found.losses[:, 0].tolist() == [3.0, -3.0, -3.0, 3.0, 1.5, -1.5]
    assert found.log_odds[:, 0].tolist() == [2.0, 2.0, -2.0, -2.0, 0.5, 0.5]
    (moved,) = torch.autograd.grad(found.losses.sum(), sums)
    assert moved[:, 0].tolist() == [6.0, 0.0, 0.0, -6.0, 6.0, -6.0]
