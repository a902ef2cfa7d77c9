"""Load balancing of mixtures of experts: a term that keeps the router from sending most tokens to a few experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, TokenLoss
from posttrain.registry import register


def load_balance(logits: Sequence[Tensor], rows: Tensor, count: int, chosen: int) -> Tensor:
    """Compute the load-balancing loss [N] of each row of tokens: the mean over layers of experts * sum_e f_e P_e.

    f_e: share of the row's tokens sent to expert e; P_e: the mean of its probability, which carries the gradient.
    Switch Transformer (2101.03961), equations 4 to 6; an even load gives `chosen`, the number of experts per token.
    logits: router logits of each layer. rows: the row of each token. count: the number N of rows. Shapes: each of
    logits [M,E] with M tokens and E experts, rows [M], the result [N].
    """
    sizes = torch.bincount(rows, minlength=count).clamp(min=1)[:, None]
    total = torch.zeros(count, device=rows.device)
    for layer in logits:
        probabilities = layer.float().softmax(-1)
        sent = torch.zeros_like(probabilities).scatter_(-1, probabilities.detach().topk(chosen, dim=-1).indices, 1.0)
        empty = probabilities.new_zeros(count, layer.shape[-1])
        load, mean = (empty.index_add(0, rows, each) / sizes for each in (sent, probabilities))
        total = total + layer.shape[-1] * (load * mean).sum(-1)
    return total / len(logits)


@register("regulariser", "router_balance", paper="2101.03961", needs=("router_loss", "every_row"))
def router_balance(batch: RolloutBatch, logp: Tensor) -> TokenLoss:
    """Compute the router's load-balancing loss: experts * sum_e f_e P_e of each row (coef 0.001).

    For mixtures of experts. f_e is the share of a row's tokens, prompt included, sent to expert e, P_e the mean
    probability that the router gives it; mean over layers. An even load gives the number of experts per token. It is
    the loss of transformers, computed for each row separately so that micro-batches do not change it; a row counts by
    its trained tokens. logp and values [N,T]; stat [N]: `router_loss`. Raises ValueError for a batch without
    router_loss.
    """
    if batch.router_loss is None:
        raise ValueError("router_balance needs router_loss, which a pass of a mixture of experts gives")
    values = torch.where(batch.mask, batch.router_loss.to(logp)[:, None], 0.0)
    return TokenLoss(values, {"router_loss": batch.router_loss.detach().to(logp)}, counted=batch.mask)
