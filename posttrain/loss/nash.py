"""Nash learning from preferences: exact steps over finitely many answers, and one step on samples.

`pref` [A,A]: pref[i, j] is the probability that answer i beats answer j. Policies are log-probabilities or logits [A].

Shapes: `pref` [A,A], policies [A]; on samples logp and values [N,T]; parameters of a model have any shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import token_advantages
from posttrain.registry import register


class Played(NamedTuple):
    """Policies [A] of the last step: after its first half, and after the whole step."""

    half: Tensor
    policy: Tensor


def extragradient(
    logits: Tensor, ref_logits: Tensor, pref: Tensor, *, eta: float, beta: float = 0.1, steps: int = 1
) -> Played:
    """Run EGPO (arXiv 2503.08942) on logits for `steps` steps.

    half = (1 - eta beta) theta + eta beta theta_ref + eta pref softmax(theta); theta is then updated alike with the
    opponent softmax(half) instead of softmax(theta).
    """
    half = logits
    for _ in range(steps):
        start = (1 - eta * beta) * logits + eta * beta * ref_logits
        half = start + eta * pref @ torch.softmax(logits, -1)
        logits = start + eta * pref @ torch.softmax(half, -1)
    return Played(torch.softmax(half, -1), torch.softmax(logits, -1))


def mirror_prox(
    log_policy: Tensor, log_ref: Tensor, pref: Tensor, *, beta: float = 0.1, eta: float = 1.0, steps: int = 1
) -> Played:
    """Run Nash mirror prox (arXiv 2505.19731) for `steps` steps.

    Both halves are anchored at the step's start; the second plays against the result of the first. The theory requires
    eta = 2 beta. The closed form is derived from the two minimizations, not taken from the paper.
    """
    policy = torch.log_softmax(log_policy, -1)
    half = policy
    for _ in range(steps):
        half = proximal(policy, torch.exp(policy), log_ref, pref, beta=beta, eta=eta)
        policy = proximal(policy, torch.exp(half), log_ref, pref, beta=beta, eta=eta)
    return Played(half.exp(), policy.exp())


def proximal(log_policy: Tensor, opponent: Tensor, log_ref: Tensor, pref: Tensor, *, beta: float, eta: float) -> Tensor:
    """Return the log-probs [A] of argmin_pi P(opponent beats pi) / beta + KL(pi || ref) + KL(pi || policy) / eta."""
    pull = pref @ opponent / beta + log_ref
    return torch.log_softmax(eta / (1 + eta) * pull + log_policy / (1 + eta), -1)


class ScoreFunction(NamedTuple):
    """Loss and coefficients of a score-function estimator."""

    loss: Tensor  # [] to be minimized
    advantages: Tensor  # [N] coefficients of the log-probs, constant


def nash_step(
    logps: Tensor, ref_logps: Tensor, target_logps: Tensor, pref: Tensor, *, beta: float = 0.1, eta: float = 1.0
) -> ScoreFunction:
    """Compute the score-function step of Nash mirror prox on N samples y against samples y' of a slow target policy.

    -mean(sg[(P(y beats y') - 1/2) - beta (log pi - log ref) - beta / eta (log pi - log target)] log pi), log-probs
    summed over tokens [N], pref [N] = P(y beats y'). The step is rebuilt from the objective; the paper's own sampling
    step was not available.
    """
    advantages = nash_advantages(logps, ref_logps, target_logps, pref - 0.5, beta=beta, eta=eta)
    return ScoreFunction(-(advantages * logps).sum() / max(len(logps), 1), advantages)


def nash_advantages(
    logps: Tensor, ref_logps: Tensor, target_logps: Tensor, margin: Tensor, *, beta: float, eta: float
) -> Tensor:
    """Return the detached weights of the log-probs in `nash_step`; margin is P(y beats y') - 1/2, all [N]."""
    now = logps.detach()
    return margin - beta * (now - ref_logps.detach()) - beta / eta * (now - target_logps.detach())


@register(
    "loss",
    "nash_mp",
    paper="2505.19731",
    needs=("ref_logp", "opponent_logp", "every_row"),
    note=(
        "The step is rebuilt from the objective; the paper's own sampling step was not available. The update rate of"
        " the opponent (`opponent.ema`) is this project's choice."
    ),
)
def nash_mp(batch: RolloutBatch, logp: Tensor, *, beta: float = 0.1, eta: float = 1.0) -> TokenLoss:
    """Compute Nash mirror prox on samples: -sg[A - beta log(pi / ref) - beta / eta log(pi / opponent)] * logp.

    A is the advantage: with `group_rewards: [versus_opponent]` and `advantage: reward` the probability to beat the
    opponent's answer, minus 1/2 (`rloo` centers it). Log-ratios are sums over the row, and so is the loss with
    `aggregation: seq_mean_token_sum`. Both KL terms together pull to the geometric mixture of reference and opponent.
    Stats: `nash_mp/ref` and `nash_mp/opponent` (the log-ratios of rows). Raises ValueError for a batch without ref_logp
    or opponent_logp.
    """
    if batch.opponent_logp is None or batch.ref_logp is None:
        raise ValueError("nash_mp needs the log-probs of the reference and of the opponent")
    current, ref, opponent = (
        torch.where(batch.mask, x, 0.0).sum(-1) for x in (logp.detach(), batch.ref_logp, batch.opponent_logp)
    )
    margin = token_advantages(batch, logp)
    pulled = nash_advantages(current, ref, opponent, torch.zeros_like(current), beta=beta, eta=eta)
    values = torch.where(batch.mask, -(margin + pulled[:, None]) * logp, 0.0)
    return TokenLoss(values, {"nash_mp/ref": current - ref, "nash_mp/opponent": current - opponent})


def extrapolate(new: Tensor, old: Tensor, *, alpha: float = 0.3) -> Tensor:
    """Return new + alpha (new - old), parameter by parameter: extrapolation between rounds (arXiv 2410.06293).

    Integer tensors are copied. As a merge: task_arithmetic on the old round's model with `lambda: 1 + alpha`.
    Parameters have any shape. The parameter form and alpha are recalled from the paper, not checked.
    """
    return new + alpha * (new - old) if new.is_floating_point() else new.clone()


def accelerated_policy(log_new: Tensor, log_old: Tensor, *, alpha: float = 0.3) -> Tensor:
    """Return the policy [A] proportional to new * (new / old)^alpha."""
    return torch.softmax(extrapolate(log_new, log_old, alpha=alpha), -1)
