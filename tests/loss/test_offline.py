"""Nash learning steps, distribution matching, offline RL and reward models: hand-computed values. s is the sigmoid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from posttrain.batch import PairBatch, RolloutBatch
from posttrain.loss import distribution, nash, offline_rl, pair, reward_model

ROCK_PAPER_SCISSORS = torch.tensor([[0.5, 0, 1], [1, 0.5, 0], [0, 1, 0.5]], dtype=torch.float64)


def tensor(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- nash


@pytest.mark.parametrize("play", [nash.extragradient, nash.mirror_prox])
def test_rock_paper_scissors_converges_to_the_uniform_policy(play: Any) -> None:
    """Cyclic preferences and a uniform reference: the last iterate, not only the average, is uniform."""
    settings = {"eta": 0.3} if play is nash.extragradient else {"eta": 0.2}
    end = play(tensor(1, 0, -1), tensor(0, 0, 0), ROCK_PAPER_SCISSORS, beta=0.3, steps=400, **settings).policy
    torch.testing.assert_close(end, torch.full((3,), 1 / 3, dtype=torch.float64), rtol=0, atol=1e-4)


def test_both_nash_steps_share_one_fixed_point() -> None:
    """log pi = log ref + pref pi / beta up to a constant: a step from there changes nothing."""
    pref = tensor([0.5, 0.9, 0.4], [0.1, 0.5, 0.7], [0.6, 0.3, 0.5])
    ref = torch.log_softmax(tensor(0.3, -0.2, 0), -1)
    policy = nash.mirror_prox(ref, ref, pref, beta=1.0, eta=2.0, steps=400).policy
    torch.testing.assert_close(torch.softmax(ref + pref @ policy, -1), policy)
    logits = ref + pref @ policy
    torch.testing.assert_close(nash.extragradient(logits, ref, pref, beta=1.0, eta=0.1).policy, policy)


def test_nash_step() -> None:
    """P - 1/2 = 0.3, beta times log-ratios 0.1 (1 + 1 / 0.5 * 2) = 0.5: the coefficient is -0.2, constant."""
    logps = tensor(-1, -1).requires_grad_()
    found = nash.nash_step(logps, tensor(-2, -2), tensor(-3, -3), tensor(0.8, 0.8), beta=0.1, eta=0.5)
    found.loss.backward()
    assert found.advantages.tolist() == pytest.approx([-0.2, -0.2])
    assert found.loss.item() == pytest.approx(-0.2)
    assert logps.grad.tolist() == pytest.approx([0.1, 0.1])


def test_extrapolation() -> None:
    assert nash.extrapolate(tensor(2), tensor(1), alpha=0.3).item() == pytest.approx(2.3)
    assert nash.extrapolate(torch.tensor([3]), torch.tensor([1])).tolist() == [3]
    same = tensor(0.2, 0.8).log()
    torch.testing.assert_close(nash.accelerated_policy(same, same), tensor(0.2, 0.8))


# --- distribution


def test_policy_equal_to_the_target_has_weight_z_and_forward_kl_1() -> None:
    """pi = ref e^(R / beta) / Z sampled from itself: every weight is Z, every forward-KL value 1, and log Z is
    exact."""
    ref, rewards = tensor(0.5, 0.3, 0.2).log(), tensor(1, 0, 0.5)
    z = torch.logsumexp(ref + rewards / 0.5, 0)
    policy = ref + rewards / 0.5 - z
    found = distribution.match_distribution(policy, policy, ref, rewards, beta=0.5)
    assert found.log_z.item() == pytest.approx(z.item())
    assert found.pseudo_rewards.tolist() == pytest.approx([1, 1, 1])
    centered = distribution.match_distribution(policy.requires_grad_(), policy, ref, rewards, beta=0.5, baseline=1.0)
    (gradient,) = torch.autograd.grad(centered.loss, policy)
    torch.testing.assert_close(gradient, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("divergence", "value"),
    [
        ("forward_kl", math.exp(-1)),
        ("reverse_kl", -2),
        ("js", -(math.log(2) - math.log1p(math.exp(-1)))),
        ("tv", -0.5),
    ],
)
def test_pseudo_rewards_by_divergence(divergence: Any, value: float) -> None:
    """log t = 1: a policy e times as likely as the target."""
    assert distribution.pseudo_rewards(tensor(1), divergence).item() == pytest.approx(value)


def test_sample_outside_the_target_has_zero_weight() -> None:
    logps = tensor(-1, -1).requires_grad_()
    found = distribution.match_distribution(
        logps, tensor(-1, -1), tensor(-1, -1), tensor(0, -math.inf), divergence="reverse_kl"
    )
    found.loss.backward()
    assert found.log_z.item() == pytest.approx(-math.log(2))
    assert logps.grad[1].item() == 0 and logps.grad.isfinite().all()


def test_gdc_estimates_z_per_group_and_clamps_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    logp, old, ref = (-torch.rand(5, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1]]).bool()
    rewards = tensor(1, 0, 0.5, math.nan, 0.2)
    batch = RolloutBatch(torch.tensor([7, 7, 3, 3, 3]), mask, rewards, old_logp=old, ref_logp=ref)
    result = distribution.gdc(batch, logp, beta=0.5)
    sums = [torch.where(mask, x, 0.0).sum(-1) for x in (logp, old, ref)]
    for rows, value, z in zip(([0, 1], [2, 4]), result.values, result.stats["gdc/log_z"], strict=True):
        one = distribution.match_distribution(*(x[rows] for x in sums), rewards[rows], beta=0.5)
        assert value.item() == pytest.approx(one.loss.item())
        assert z.item() == pytest.approx(one.log_z.item())
    far = distribution.match_distribution(tensor(0), tensor(-9), tensor(0), tensor(0), max_weight=2.0)
    free = distribution.match_distribution(tensor(-1), tensor(-9), tensor(-1), tensor(0), max_weight=2.0)
    assert far.loss.item() == 0  # log pi = 0
    assert free.loss.item() == pytest.approx(2 * free.pseudo_rewards.item())


def test_hypo_coefficients() -> None:
    """k = 2 and 0 in one group: with rloo the coefficients are 2 and -2; the policy as its own reference has none."""
    pairs = PairBatch(tensor(-1), tensor(-2), ref_chosen_logp=tensor(-1), ref_rejected_logp=tensor(-2))
    mask = torch.tensor([[True, True], [True, False]])
    logp = tensor([-1, -1], [-1, -9]).requires_grad_()
    batch = RolloutBatch(torch.tensor([0, 0]), mask, ref_logp=tensor([-2, -2], [-1, math.nan]))
    found = distribution.hypo(pairs, batch, logp, kl_coef=0.1, baseline="rloo")
    found.loss.backward()
    assert (found.dpo_loss.item(), found.kl.item()) == pytest.approx((math.log(2), 1))
    assert logp.grad.tolist() == [pytest.approx([0.1, 0.1]), pytest.approx([-0.1, 0])]
    same = RolloutBatch(torch.tensor([0, 1]), mask, ref_logp=logp.detach())
    term = distribution.online_kl(same, logp, baseline="rloo")
    assert term.values.abs().sum().item() == 0
    assert pair.mean(pair.dpo(pairs).losses).item() == pytest.approx(math.log(2))


# --- offline RL


def oreo_rows() -> dict[str, torch.Tensor]:
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    return {
        "logp": tensor([-1, -1], [-1, math.nan], [0, 0]),
        "ref_logp": tensor([-2, -3], [-1, math.inf], [1, 1]),
        "rewards": tensor(1, 0, 1),
        "mask": mask,
    }


def test_oreo_by_token() -> None:
    """beta 0.5: u = 1, 2; tails 1.5, 1; d = V - R + tail = 1, 0.5 for V = 0.5. Row 2: d = 0.2. Mean over 3 rows."""
    rows = oreo_rows()
    rows["logp"].requires_grad_()
    values = tensor([0.5, 0.5], [0.2, 9], [9, 9]).requires_grad_()
    found = offline_rl.oreo(values=values, beta=0.5, **rows)
    assert found.residual.tolist() == [pytest.approx(r) for r in ([1, 0.5], [0.2, 0], [0, 0])]
    expected = ((1 + 0.25) / 2 + 0.04) / 3
    assert (found.value_loss.item(), found.policy_loss.item()) == pytest.approx((expected, expected))
    by_value = torch.autograd.grad(found.value_loss, values)[0]
    by_logp = torch.autograd.grad(found.policy_loss, rows["logp"])[0]
    assert by_value.tolist() == [pytest.approx(r) for r in ([1 / 3, 0.5 / 3], [0.4 / 3, 0], [0, 0])]
    assert by_logp[0].tolist() == pytest.approx([0.5 / 3, 0.25 / 3])
    assert not by_logp[~rows["mask"]].any()


def test_oreo_by_response() -> None:
    """Row 1: 0.5 - 1 + 0.5 * 3 = 1; row 2: 0.2; the empty row: 1 - 1 = 0."""
    found = offline_rl.oreo(values=tensor([0.5], [0.2], [1]), beta=0.5, level="response", **oreo_rows())
    assert found.value_loss.item() == found.policy_loss.item() == pytest.approx((1 + 0.04) / 3)


def test_direct_advantages_sum_to_the_reward() -> None:
    """V limited to 1: 0.4, 1 | 0.3; rewards 1 and 0. Gap of step 1 to 0.6 / 0.5 = 1.2, by half over 3 steps."""
    logps = tensor([0, 0], [0, math.nan]).requires_grad_()
    mask = torch.tensor([[True, True], [True, False]])
    found = offline_rl.direct_advantage(
        logps, torch.zeros(2, 2), tensor([0.4, 7], [0.3, 5]), tensor(1, 0), mask, beta=0.5
    )
    assert found.advantages.tolist() == [pytest.approx([0.6, 0]), pytest.approx([-0.3, 0])]
    assert found.loss.item() == pytest.approx((1.2**2 + 0.6**2) / 6)
    (gradient,) = torch.autograd.grad(found.loss, logps)
    assert gradient.tolist() == [pytest.approx([-0.4, 0]), pytest.approx([0.2, 0])]


def test_token_credit_sums_to_the_dpo_reward() -> None:
    rows = {name: x for name, x in oreo_rows().items() if name != "rewards"}
    found = offline_rl.token_credit(beta=0.5, **rows)
    assert found.token_rewards.tolist() == [[0.5, 1], [0, 0], [0, 0]]
    assert found.prefix_rewards[0].tolist() == [0.5, 1.5]
    assert found.sequence_rewards.tolist() == [1.5, 0, 0]


# --- reward models


def test_bradley_terry() -> None:
    """Gap ln 3 beyond a margin of 1: -ln 3/4, and 0.1 * (sum)^2; accuracy does not see the margin."""
    chosen, rejected = tensor(math.log(3) + 1, 0).requires_grad_(), tensor(0, 0)
    found = reward_model.bradley_terry(chosen, rejected, tensor(1, 0), center_coef=0.1)
    total = math.log(3) + 1
    assert found.losses.tolist() == pytest.approx([-math.log(3 / 4) + 0.1 * total**2, math.log(2)])
    assert found.accuracy.tolist() == [1, 0]
    (gradient,) = torch.autograd.grad(found.losses.sum(), chosen)
    assert gradient.tolist() == pytest.approx([-1 / 4 + 0.2 * total, -1 / 2])
    moved = reward_model.bradley_terry(chosen + 9, rejected + 9)
    torch.testing.assert_close(moved.losses, reward_model.bradley_terry(chosen, rejected).losses)


def test_missing_labels_are_ignored() -> None:
    predicted = tensor([1, 5], [0, 1]).requires_grad_()
    loss = reward_model.label_regression(predicted, tensor([0, math.nan], [0, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(2 / 3)
    assert predicted.grad[0, 1].item() == 0
    assert reward_model.label_regression(tensor([1.0]), tensor([math.nan])).item() == 0


def test_ensemble_mean_minimum_and_variance() -> None:
    """1 and 3: mean 2, lowest 1, variance 1 (or 2 with ddof 1); a single model has none."""
    rewards = tensor([[1]], [[3]])
    both = {name: reward_model.ensemble(rewards, objective=name).item() for name in ("mean", "wco", "uwo")}
    assert both == {"mean": 2, "wco": 1, "uwo": 1.5}
    assert reward_model.ensemble(rewards, ddof=1).item() == pytest.approx(1)
    assert reward_model.ensemble(rewards[:1], ddof=1).item() == 1
    calibrated = reward_model.ensemble(rewards, objective="mean", center=tensor(1, 1), scale=tensor(1, 4))
    assert calibrated.item() == pytest.approx(0.25)


def test_brme_lies_between_nominal_and_lowest_reward() -> None:
    """Head 1 is the more certain head (ties go to the first). Head 2 has the lower mean over the batch."""
    means, stds = tensor([[1, 0]], [[0.5, -2]]), tensor([[0.1, 0.3]], [[0.1, 0.2]])
    by_answer = reward_model.brme(means, stds, nominal_weight=0.5)
    assert by_answer.nominal.tolist() == [[1, -2]]
    assert by_answer.rewards.tolist() == [[0.75, -2]]
    means = tensor([[1, -1]], [[0.5, -2]])
    assert reward_model.brme(means, stds, min_scope="batch").minimum.tolist() == [[0.5, -2]]


def test_users_are_assigned_to_the_best_fitting_head() -> None:
    """Head 1 fits user 0 best; user 1 has no pairs and falls back to the first head, whose loss is then 0."""
    margins = tensor([0, 2], [1, 1]).requires_grad_()
    found = reward_model.mixture_round(margins, torch.tensor([0, 0]), 2)
    assert found.assignment.tolist() == [1, 0]
    assert found.loglik[1].tolist() == [0, 0]
    assert found.responsibilities[1].tolist() == [0.5, 0.5]
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))) / 2
    assert found.m_step_losses.tolist() == pytest.approx([0, expected])
    (gradient,) = torch.autograd.grad(found.m_step_losses.sum(), margins)
    assert not gradient[:, 0].any() and bool(gradient[:, 1].all())
    prior = reward_model.mixture_round(margins, torch.tensor([0, 0]), 2, log_prior=tensor(0, -9))
    assert prior.assignment.tolist() == [0, 0]
    soft = reward_model.mixture_round(margins, torch.tensor([0, 0]), 2, soft=True)
    assert bool((soft.m_step_losses > 0).all())


def test_maxmin_rewards_the_worst_off_group() -> None:
    found = reward_model.maxmin(tensor([[1, 0]], [[0.2, 0.3]]), tensor([1, 1]), beta=0.1)
    assert found.utilities.tolist() == pytest.approx([0.4, 0.15])
    assert found.rewards.tolist() == [[0.2, 0.3]] and found.worst_group.item() == 1
