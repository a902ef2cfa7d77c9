"""ROVER: the log-ratio of the sampled token as a relative Q-value, fitted to the value of the random policy."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.loss.clip import token_advantages, token_log_ratio, token_ratio
from posttrain.registry import register


@register("loss", "rover", paper="2509.24981", needs=("vocab_mean_logp", "old_vocab_mean_logp", "every_row"))
def rover(batch: RolloutBatch, logp: Tensor, *, rho: float = 1.0, next_q_scale: float = 1.0) -> TokenLoss:
    """Compute (q_t - y_t)^2, q_t = rho (logp - old_logp), with target y_t = A + next_q_scale rho (m - m_old)_{t+1}.

    The target is detached. m_t is the mean over the vocabulary of the log-probs at position t, m_old the same for the
    policy at rollout time; the second term is 0 if t + 1 is not a trained token. A is the centered reward (advantage
    `group`, scale none; the paper's Math script divides by the std + 1e-6). No clip. rho 1 and next_q_scale 1 are the
    paper's. Stats [N,T]: `q`, `target`, `ratio`. Raises ValueError for a batch without the vocabulary means of the
    log-probs.
    """
    if batch.vocab_mean_logp is None or batch.old_vocab_mean_logp is None:
        raise ValueError("rover needs the vocabulary means of the log-probs, now and at rollout time")
    q = rho * token_log_ratio(batch, logp)
    change = torch.where(batch.mask, batch.vocab_mean_logp.detach() - batch.old_vocab_mean_logp.detach(), 0.0)
    next_change = torch.cat([change[:, 1:], torch.zeros_like(change[:, :1])], dim=-1)
    target = torch.where(batch.mask, token_advantages(batch, logp) + next_q_scale * rho * next_change, 0.0)
    values = torch.where(batch.mask, (q - target).square(), 0.0)
    return TokenLoss(values, {"q": q.detach(), "target": target, "ratio": token_ratio(batch, logp).detach()})
