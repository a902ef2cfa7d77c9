"""CAPO: token selection that drops tokens with a large predicted second-order effect on the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, Selection
from posttrain.loss.clip import token_advantages
from posttrain.registry import register

CELLS = 8192  # tokens per chunk: allocating [N,T,K] for all rows costs a CPU more than the arithmetic


@register(
    "select",
    "capo",
    paper="2510.00819",
    needs=("hidden", "topk_logp", "topk_chosen"),
    note=(
        "The predicted step is one of plain gradient descent. `filter_tokens` also supports Adam, which needs top-k x"
        " hidden moments per run and has no recipe key."
    ),
)
def capo(
    batch: RolloutBatch,
    *,
    learning_rate: float,
    tau_fisher: float = 1e-4,
    tau_hessian: float = 0.01,
    symmetric: bool = True,
) -> Selection:
    """Select tokens with m_fisher < tau_fisher and |m_hessian| < tau_hessian (not symmetric: 0 <= m_hessian < ...).

    m_fisher, m_hessian: predicted change of the policy and of the objective if the last linear layer took one step of
    learning_rate for this token alone, from its probabilities (top k, renormalized; 50 in the paper), its last hidden
    state and its advantage. Rejected tokens are removed from the denominators; the paper rejects below 8% of them. The
    paper's thresholds: GRPO 1e-4 and 0.01, Dr. GRPO 1e-3 and 5e-4, REINFORCE 1e-5 and 0.1. Raises ValueError for a
    batch without hidden states or top-k log-probs.
    """
    if batch.hidden is None or batch.topk_logp is None or batch.topk_chosen is None:
        raise ValueError("capo needs hidden states and the top-k log-probs")
    advantages = token_advantages(batch, batch.topk_logp[..., 0])
    inputs = (batch.topk_logp, batch.topk_chosen, batch.hidden, advantages, batch.mask)
    rows = max(1, CELLS // max(1, batch.mask.shape[1]))
    kept = [
        filter_tokens(
            logp.softmax(-1), *others, learning_rate=learning_rate,
            tau_fisher=tau_fisher, tau_hessian=tau_hessian, symmetric=symmetric,
        ).keep
        for logp, *others in zip(*(x.split(rows) for x in inputs), strict=True)
    ]  # fmt: skip
    return Selection(torch.cat(kept), "kept")


@dataclass(frozen=True)
class Curvature:
    """Predicted effect of each token's update, and the selected tokens.

    fisher, hessian [N,T]: change of the policy and of the objective, 0 where masked; keep [N,T]: tokens within both
    bounds.
    """

    fisher: Tensor
    hessian: Tensor
    keep: Tensor


def filter_tokens(
    probs: Tensor,
    chosen: Tensor,
    hidden: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    learning_rate: float,
    tau_fisher: float,
    tau_hessian: float,
    symmetric: bool = True,
    optimizer: Literal["sgd", "adam"] = "sgd",
    m: Tensor | None = None,
    v: Tensor | None = None,
    step: int = 1,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Curvature:
    """Predict the effect of each token's own update step and select the tokens within the bounds.

    probs, chosen (one-hot) [N,T,K]; hidden [N,T,H]; advantages [N], [N,1] or [N,T]. With e = chosen - probs and g = A e
    h^T, the direction D is g, or with optimizer adam the scaled update from the moments m, v [N,T,K,H]; u = D h; fisher
    = lr^2 (e.u)^2 / 2; hessian = lr <g, D> + lr^2 A [(e.u)^2 - (sum p u^2 - (sum p u)^2)] / 2. Plain gradient descent
    needs only norms: u = A |h|^2 e. Raises ValueError for optimizer `adam` without moments.
    """
    mask = mask.bool()
    e = chosen.to(probs.dtype) - probs
    a = advantages.to(probs.dtype)
    a = a[:, None] if a.dim() == 1 else a
    if optimizer == "sgd":
        u, scale = e, a * hidden.square().sum(-1)  # the shift itself is scale * u
        inner = e.square().sum(-1)
        first_order = a * scale * inner
    else:
        if m is None or v is None:
            raise ValueError("optimizer `adam` needs its moments m and v")
        g = a[..., None, None] * e[..., None] * hidden[..., None, :]
        direction = adam_direction(g, m=m, v=v, step=step, beta1=beta1, beta2=beta2, eps=eps)
        u, scale = (direction * hidden[..., None, :]).sum(-1), torch.ones_like(a)
        inner = (e * u).sum(-1)
        first_order = (g * direction).sum((-1, -2))
    shift_squared = (scale * inner).square()
    weighted = probs * u
    variance = scale.square() * ((weighted * u).sum(-1) - weighted.sum(-1).square())
    fisher = learning_rate**2 * shift_squared / 2
    hessian = learning_rate * first_order + learning_rate**2 * a * (shift_squared - variance) / 2
    low = hessian > -tau_hessian if symmetric else hessian >= 0
    keep = mask & (fisher < tau_fisher) & low & (hessian < tau_hessian)
    return Curvature(torch.where(mask, fisher, 0.0), torch.where(mask, hessian, 0.0), keep)


def adam_direction(
    gradient: Tensor,
    *,
    m: Tensor,
    v: Tensor,
    step: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Tensor:
    """Return Adam's scaled update for a gradient, given its moments before the step (same shape).

    The moments are not modified.
    """
    first = (beta1 * m + (1 - beta1) * gradient) / (1 - beta1**step)
    second = (beta2 * v + (1 - beta2) * gradient.square()) / (1 - beta2**step)
    return first / (second.sqrt() + eps)
