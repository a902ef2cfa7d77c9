"""On-policy distillation: divergences from a teacher at each trained position of the student's own samples."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0  # limit for tokens to which the teacher assigns almost no probability


class Distilled(NamedTuple):
    """Divergence of each position [N, T] (0 where masked) and its mean over the trained ones."""

    per_token: Tensor
    loss: Tensor


def full_distill(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, *, beta: float = 1.0, temperature: float = 1.0
) -> Distilled:
    """Compute the generalized divergence between student and teacher logits [N, T, V].

    beta 1: KL(student || teacher), beta 0: KL(teacher || student). For beta in between: beta KL(t || m) + (1 - beta)
    KL(s || m) with m = beta t + (1 - beta) s. Never below 0.
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
    trained = torch.where(mask.bool(), divergence, torch.zeros_like(divergence))
    return Distilled(trained, trained.sum() / mask.sum().clamp(min=1))


class Sampled(NamedTuple):
    """Advantages from a teacher's log-probs of the sampled tokens [N, T], and the loss."""

    advantages: Tensor
    loss: Tensor


def sampled_distill(logp: Tensor, teacher_logp: Tensor, mask: Tensor) -> Sampled:
    """Compute -sum(A logp) / tokens, A = detached teacher - student log-prob of sampled tokens [N, T].

    In expectation its gradient is that of the reverse KL of each token. Log-ratios are limited to +-20 (this project's
    choice).
    """
    trained = mask.bool()
    ratio = (teacher_logp - logp.detach()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    advantages = torch.where(trained, ratio, torch.zeros_like(ratio))
    terms = torch.where(trained, advantages * logp, torch.zeros_like(logp))
    return Sampled(advantages, -terms.sum() / mask.sum().clamp(min=1))


def sampled_logp(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the log-probs [N, T] of the tokens [N, T] under logits [N, T, V]."""
    return torch.log_softmax(logits / temperature, -1).gather(-1, tokens[..., None].long())[..., 0]


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return sum p (log p - log q) over the last axis of log-probs; entries with p = 0 add nothing."""
    return torch.where(p > -torch.inf, p.exp() * (p - q), torch.zeros_like(p)).sum(-1)
