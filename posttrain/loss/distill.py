"""Learning from a teacher on the student's own samples: divergences at each trained position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST_RATIO = 20.0  # of log-probs; a teacher that rules a token out says no more than this


class Distilled(NamedTuple):
    """Divergence of each position [N, T] (0 where masked) and its mean over the trained ones."""

    per_token: Tensor
    loss: Tensor


def full_distill(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, *, beta: float = 1.0, temperature: float = 1.0
) -> Distilled:
    """Generalised divergence of logits [N, T, V]: beta 1: KL(student || teacher), beta 0: KL(teacher || student).

    In between beta KL(t || m) + (1 - beta) KL(s || m) with m = beta t + (1 - beta) s. Never below 0.
    """
    student, teacher = (torch.log_softmax(x / temperature, -1) for x in (student_logits, teacher_logits))
    if beta == 1:
        divergence = _kl(student, teacher)
    elif beta == 0:
        divergence = _kl(teacher, student)
    else:
        shares = student.new_tensor([beta, 1 - beta]).log()
        middle = torch.logsumexp(torch.stack([teacher + shares[0], student + shares[1]]), 0)
        divergence = beta * _kl(teacher, middle) + (1 - beta) * _kl(student, middle)
    kept = torch.where(mask.bool(), divergence, torch.zeros_like(divergence))
    return Distilled(kept, kept.sum() / mask.sum().clamp(min=1))


class Sampled(NamedTuple):
    """What a teacher's log-probs of the sampled tokens are worth [N, T], and the loss that they make."""

    advantages: Tensor
    loss: Tensor


def sampled_distill(logp: Tensor, teacher_logp: Tensor, mask: Tensor) -> Sampled:
    """Log-probs [N, T] of the sampled tokens only: A = teacher - student as a constant, loss -sum(A logp) / tokens.

    In the mean its gradient is that of the reverse KL of each token. A ratio beyond e^20 counts as e^20 (ours).
    """
    kept = mask.bool()
    ratio = (teacher_logp - logp.detach()).clamp(-_LARGEST_RATIO, _LARGEST_RATIO)
    advantages = torch.where(kept, ratio, torch.zeros_like(ratio))
    terms = torch.where(kept, advantages * logp, torch.zeros_like(logp))
    return Sampled(advantages, -terms.sum() / mask.sum().clamp(min=1))


def sampled_logp(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probs [N, T] of the tokens [N, T] under logits [N, T, V]."""
    return torch.log_softmax(logits / temperature, -1).gather(-1, tokens[..., None].long())[..., 0]


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """sum p (log p - log q) over the last axis of log-probs; what p rules out adds nothing."""
    return torch.where(p > -torch.inf, p.exp() * (p - q), torch.zeros_like(p)).sum(-1)
