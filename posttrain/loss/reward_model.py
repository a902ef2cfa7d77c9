"""Losses for reward models, and combination of several: [K,B,G] are K models or heads, B prompts, G answers."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from posttrain.loss.clip import limit_value


class BestResponse(NamedTuple):
    """Result of `best_response`."""

    losses: Tensor  # [P,K]
    log_odds: Tensor  # [P,K] change, since the start, of the log-odds that the best response samples the pair


class RankingLoss(NamedTuple):
    """Bradley-Terry losses and accuracies of pairs."""

    losses: Tensor  # [P]
    accuracy: Tensor  # [P] 1 if chosen scores higher, regardless of the margin


def bradley_terry(
    chosen_rewards: Tensor, rejected_rewards: Tensor, margin: Tensor | None = None, *, center_coef: float = 0.0
) -> RankingLoss:
    """Compute -log s(chosen - rejected - margin) + center_coef (chosen + rejected)^2, scores [P].

    The margin is from arXiv 2307.09288. Without centring, adding a constant to all scores changes nothing; with it the
    scores settle around 0 (arXiv 2312.09244).
    """
    gap = chosen_rewards - rejected_rewards
    losses = -logsigmoid(gap if margin is None else gap - margin)
    if center_coef:
        losses = losses + center_coef * (chosen_rewards + rejected_rewards).square()
    return RankingLoss(losses, (gap.detach() > 0).to(gap.dtype))


def center_by_prompt(losses: Tensor, prompt: Tensor) -> Tensor:
    """Return losses of pairs [P,K] minus the mean of the prompt's other pairs; 0 for the only pair of a prompt.

    prompt [P]: index of each pair's prompt, from 0.
    """
    count = torch.bincount(prompt).to(losses)[prompt][:, None]
    sums = losses.new_zeros(int(prompt.max()) + 1, losses.shape[1]).index_add(0, prompt, losses)[prompt]
    return torch.where(count > 1, losses - (sums - losses) / (count - 1).clamp(min=1), 0.0)


def best_response(
    excess: Tensor, scores: Tensor, start_scores: Tensor, *, temperature: float, limit: float = 1.0
) -> BestResponse:
    """Compute A u [P,K], the loss term for pairs sampled by the policy that optimizes the reward model.

    From PARL (arXiv 2308.02585); u = (scores - start_scores) / temperature, limited to +-limit. The best response to a
    reward r under a KL penalty `temperature` is ref * exp(r / temperature), so the log-odds that a pair is sampled
    change with the sum of its sides' rewards. scores, start_scores [P,K]: that sum now, and under the model that the
    policy has optimized. excess [P,K]: A, the pair's loss under that model by `center_by_prompt`. At the start,
    mean(loss) + mean(this) has the gradient of the bilevel objective, d/dr E_{pairs ~ policy(r)} loss(r). Beyond the
    limit a pair only gets gradients that lead back.
    """
    log_odds = (scores - start_scores) / temperature
    return BestResponse(excess * limit_value(log_odds, -limit, limit), log_odds.detach())


def label_regression(predicted: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean squared error [] over the available labels: predicted and labels [N,M], NaN = not labeled."""
    known = ~labels.isnan()
    return torch.where(known, predicted - labels, 0.0).square().sum() / known.sum().clamp(min=1)


def soft_label(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy against (label, 1 - label), elementwise.

    Logits and labels [...], labels in [0, 1]. MedS3's verifier (arXiv 2501.12051) learns the values of reasoning steps
    this way; one logit here is the difference of its two.
    """
    return binary_cross_entropy_with_logits(logits, labels, reduction="none")


def ensemble(
    all_rewards: Tensor,
    *,
    objective: Literal["uwo", "mean", "wco"] = "uwo",
    uwo_coef: float = 0.5,
    ddof: int = 0,
    center: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Return one conservative reward [B,G] from K models' rewards [K,B,G] (arXiv 2310.02743).

    mean; wco: the lowest; uwo: mean - uwo_coef * variance over the models (0.5 for best-of-n, 0.1 in RL). center and
    scale [K], computed on held-out text, normalize the members first. ddof 1 is the variance of the authors' PPO
    script. A single model has variance 0.
    """
    if center is not None:
        all_rewards = all_rewards - center[:, None, None]
    if scale is not None:
        all_rewards = all_rewards / scale[:, None, None]
    if objective == "wco":
        return all_rewards.amin(0)
    average = all_rewards.mean(0)
    if objective == "mean" or len(all_rewards) == 1:
        return average
    return average - uwo_coef * all_rewards.var(0, correction=ddof)


class Robust(NamedTuple):
    """Rewards [B,G] of `brme`; `rewards` lies between the other two."""

    rewards: Tensor
    nominal: Tensor
    minimum: Tensor


def brme(
    head_means: Tensor,
    head_stds: Tensor,
    *,
    nominal_weight: float = 0.4,
    min_scope: Literal["sample", "batch"] = "sample",
) -> Robust:
    """Compute nominal_weight * nominal + (1 - nominal_weight) * minimum over Gaussian heads [K,B,G] (arXiv 2409.15360).

    Nominal: the mean of the head with the lowest standard deviation for this answer, the first on ties. Minimum: per
    answer, or with `batch` the head whose mean over the batch is lowest. Summaries of the paper disagree on what its
    alpha multiplies; here the weight is the nominal reward's, as in its objective.
    """
    most_certain = head_stds.argmin(0, keepdim=True)
    nominal = head_means.gather(0, most_certain)[0]
    worst_head = head_means.flatten(1).mean(1).argmin()
    minimum = head_means.amin(0) if min_scope == "sample" else head_means[worst_head]
    return Robust(nominal_weight * nominal + (1 - nominal_weight) * minimum, nominal, minimum)


class Mixture(NamedTuple):
    """One round of the mixture of reward models."""

    loglik: Tensor  # [U,K] of a user's pairs under each head
    assignment: Tensor  # [U] the best-fitting head of each user, the first on ties
    responsibilities: Tensor  # [U,K]
    m_step_losses: Tensor  # [K] weighted Bradley-Terry loss of each head, with gradient; 0 for an empty cluster


def mixture_round(
    margins: Tensor, user: Tensor, n_users: int, *, soft: bool = False, log_prior: Tensor | None = None
) -> Mixture:
    """Assign users to K Bradley-Terry heads by the likelihood of their pairs, and weight the heads' losses accordingly.

    margins [P,K]: chosen minus rejected reward of each pair under each head; user [P]. soft weights by responsibilities
    instead of the assignment. log_prior [K]. From the abstract of MaxMin-RLHF (arXiv 2402.08925); hard assignment by
    user is recalled, not checked.
    """
    fit = logsigmoid(margins)
    loglik = fit.detach().new_zeros(n_users, margins.shape[1]).index_add(0, user, fit.detach())
    scored = loglik if log_prior is None else loglik + log_prior
    assignment = scored.argmax(-1)
    responsibilities = torch.softmax(scored, -1)
    chosen = torch.nn.functional.one_hot(assignment, margins.shape[1]).to(fit)
    weights = (responsibilities if soft else chosen)[user]
    total = weights.sum(0)
    losses = (weights * -fit).sum(0) / torch.where(total > 0, total, 1.0)
    return Mixture(scored, assignment, responsibilities, losses)


class Egalitarian(NamedTuple):
    """Rewards of the worst-off group."""

    rewards: Tensor  # [B,G] of the worst-off group
    utilities: Tensor  # [K]
    worst_group: Tensor  # []


def maxmin(group_rewards: Tensor, kl: Tensor, *, beta: float) -> Egalitarian:
    """Return the rewards of the worst-off user group: the lowest mean of r_k - beta * KL over the batch.

    group_rewards [K,B,G], kl [B,G]. Normalize the heads to one scale first, or the lowest scale always wins. From
    MaxMin-RLHF (arXiv 2402.08925).
    """
    utilities = (group_rewards - beta * kl).flatten(1).mean(1)
    worst = utilities.argmin()
    return Egalitarian(group_rewards[worst], utilities, worst)


def gaussian_nll(means: Tensor, log_stds: Tensor, labels: Tensor) -> Tensor:
    """Compute the negative log-likelihood [N,H] of labels [N,1] under H Gaussian heads, without its constant.

    BRME (arXiv 2409.15360) aggregates such heads by their predicted uncertainty. The authors' fitting method was not
    found; a squared error of samples would drive every deviation to 0, so this is the ordinary likelihood.
    Log-deviations are limited to [-5, 5]; outside, only gradients that lead back remain.
    """
    bounded = limit_value(log_stds, -5, 5)
    return 0.5 * ((labels - means) * torch.exp(-bounded)).square() + bounded


def reseed_assignment(found: Mixture, pairs: Tensor) -> Tensor:
    """Return the hard assignment [U] of a round, in which each empty head gets the worst-fitting user of another head.

    pairs [U]: number of pairs of each user. Worst-fitting: the lowest log-likelihood per pair under the user's own
    head, among users whose head has several. At most as many heads can be filled as there are users.
    """
    assignment = found.assignment.clone()
    fit = found.loglik.gather(1, assignment[:, None])[:, 0] / pairs.clamp(min=1)
    for head in range(found.loglik.shape[1]):
        sizes = torch.bincount(assignment, minlength=found.loglik.shape[1])
        crowded = (sizes[assignment] > 1) & (pairs > 0)
        if sizes[head] or not crowded.any():
            continue
        assignment[torch.where(crowded, fit, torch.inf).argmin()] = head
    return assignment
