"""The gradient of a preference loss through the policy that answers a reward, against its exact value."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from posttrain.loss.reward_model import best_response, bradley_terry, centre_by_prompt

TEMPERATURE = 0.5


def drawn(rewards: Tensor) -> dict[tuple[int, int], Tensor]:
    """Of three answers with a uniform reference, the chance of each pair (better, worse) under the best response. The
    annotator prefers the earlier one, and has no preference between equal ones."""
    policy = torch.softmax(rewards / TEMPERATURE, -1)
    chances = {(i, j): policy[i] * policy[j] for i, j in itertools.combinations(range(3), 2)}
    total = sum(chances.values(), torch.zeros(()))
    return {pair: chance / total for pair, chance in chances.items()}


def test_it_is_the_gradient_through_the_best_response() -> None:
    """Over all ways to draw two pairs, the mean gradient is that of sum_pairs chance(r) loss(r), which autograd finds
    with the policy as a function of the reward. Without the term it is another one."""
    rewards = torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64, requires_grad=True)
    chances = drawn(rewards)
    exact = sum(
        (chance * bradley_terry(rewards[i], rewards[j]).losses for (i, j), chance in chances.items()), torch.zeros(())
    )
    (wanted,) = torch.autograd.grad(exact, rewards)
    found, plain = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for first, second in itertools.product(chances, repeat=2):
        chosen, rejected = (rewards[[first[side], second[side]]][:, None] for side in (0, 1))
        losses, sums = bradley_terry(chosen, rejected).losses, chosen + rejected
        excess = centre_by_prompt(losses.detach(), torch.tensor([0, 0]))
        term = best_response(excess, sums, sums.detach(), temperature=TEMPERATURE)
        assert term.log_odds.tolist() == [[0.0], [0.0]]
        chance = (chances[first] * chances[second]).detach()
        found += chance * torch.autograd.grad((losses + term.losses).mean(), rewards, retain_graph=True)[0]
        plain += chance * torch.autograd.grad(losses.mean(), rewards)[0]
    torch.testing.assert_close(found, wanted)
    assert (plain - wanted).abs().max() > 0.05


def test_losses_less_those_of_the_prompts_other_pairs() -> None:
    """1, 2, 6 of one prompt: 1 - 4, 2 - 3.5, 6 - 1.5; the pair of the other prompt is alone."""
    found = centre_by_prompt(torch.tensor([[1.0], [5.0], [2.0], [6.0]]), torch.tensor([0, 1, 0, 0]))
    assert found[:, 0].tolist() == [-3.0, 0.0, -1.5, 4.5]


def test_pairs_that_moved_far_pull_no_more() -> None:
    """At temperature 1/2 sums up by 1 are log-odds of 2, held at 1. A loss above the mean pulls the pair back in, one
    below pulls no further; the other way round for sums down by 1; up by 1/4 all pull."""
    sums = torch.tensor([[1.0], [1.0], [-1.0], [-1.0], [0.25], [0.25]], requires_grad=True)
    found = best_response(torch.tensor([[3.0], [-3.0]] * 3), sums, torch.zeros(6, 1), temperature=0.5)
    assert found.losses[:, 0].tolist() == [3.0, -3.0, -3.0, 3.0, 1.5, -1.5]
    assert found.log_odds[:, 0].tolist() == [2.0, 2.0, -2.0, -2.0, 0.5, 0.5]
    (moved,) = torch.autograd.grad(found.losses.sum(), sums)
    assert moved[:, 0].tolist() == [6.0, 0.0, 0.0, -6.0, 6.0, -6.0]
