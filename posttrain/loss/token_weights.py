"""Supervised objectives as weights on trained tokens: each is one weighted sum of negative log-probs.

Weights are detached and 0 for untrained tokens. Entries with mask 0 may hold any value.

Shapes: logp, mask and weights [N,T].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.registry import register


@dataclass(frozen=True)
class TokenRows:
    """Input of the token weights. `texts` [N][T]: the text of each token; missing inputs are None."""

    logp: Tensor  # [N, T] of the label tokens under the trained model
    mask: Tensor  # [N, T] bool: trained on
    behavior_logp: Tensor | None = None  # [N, T] under the model that wrote the data; NaN if unknown
    texts: Sequence[Sequence[str]] | None = None


def weighted_nll(
    logp: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    *,
    num_items: float | None = None,
    reduction: Literal["token", "sequence"] = "token",
    normalize: Literal["tokens", "weights"] = "tokens",
) -> Tensor:
    """Compute -sum(w logp) over trained tokens, normalized; a scalar, 0 if no token is trained on.

    `token`: divided by num_items, the trained tokens of the whole optimizer step (default: those given; at least 1), or
    with normalize `weights` by the sum of the weights. `sequence`: the mean over rows of each row's mean; rows without
    trained tokens are ignored.
    """
    trained = mask.bool()
    terms = -torch.where(trained, logp, torch.zeros_like(logp))
    if weights is not None:
        terms = terms * torch.where(trained, weights.detach(), torch.zeros_like(weights))
    if reduction == "sequence":
        counts = trained.sum(1)
        means = terms.sum(1) / counts.clamp(min=1)
        return means.sum() / (counts > 0).sum().clamp(min=1)
    if normalize == "weights":
        total = trained.sum() if weights is None else torch.where(trained, weights, torch.zeros_like(weights)).sum()
        return terms.sum() / torch.where(total > 0, total, torch.ones_like(total))
    return terms.sum() / max(float(trained.sum()) if num_items is None else num_items, 1.0)


@register("token_weight", "ce")
def ce(rows: TokenRows) -> Tensor:
    """Return weight 1 for every trained token: plain cross-entropy."""
    return rows.mask.to(rows.logp.dtype)


@register("token_weight", "dft", paper="2508.05629", needs=("logp",))
def dft(rows: TokenRows) -> Tensor:
    """Return each token's own probability under the current model (dynamic fine-tuning).

    Unlikely tokens get almost no gradient, which is bad for new formats and special tokens. The loss is not comparable
    with cross-entropy, which is logged beside it.
    """
    return torch.where(rows.mask.bool(), rows.logp, rows.logp.new_tensor(-torch.inf)).exp().detach()


@register("token_weight", "pear", paper="2602.01058", needs=("logp", "behavior_logp"))
def pear(
    rows: TokenRows,
    *,
    level: Literal["token", "block", "sequence"] = "token",
    block: int = 4,
    gamma: float = 0.999,
    clip_ratio: tuple[float, float] = (-0.08, 0.3),
    clip_log: tuple[float, float] = (-10.0, 5.0),
) -> Tensor:
    """Return PEAR's weights: lower for tokens whose continuation the model itself would hardly write.

    RL after this SFT gains more. delta = logp - behavior_logp, clipped. token: log G = sum of delta over the later
    tokens + (number of later tokens) ln gamma, so the last token has weight 1; block: the same for all tokens of a
    block, taken at its last one; sequence: the sum of all delta. log G is clipped. A row with unknown behavior
    log-probs has weight 1. The factor gamma^(later tokens) alone makes early tokens of long rows small.
    """
    mask = rows.mask.bool()
    if rows.behavior_logp is None:
        return mask.to(rows.logp.dtype)
    known = ~(rows.behavior_logp.isnan() & mask).any(-1, keepdim=True)
    delta = torch.where(mask & known, (rows.logp.detach() - rows.behavior_logp).clamp(*clip_ratio), 0.0)
    weights = _suffix_log_ratio(delta, mask, level, block, gamma).clamp(*clip_log).exp()
    return torch.where(mask, torch.where(known, weights, 1.0), 0.0).to(rows.logp.dtype)


def _suffix_log_ratio(delta: Tensor, mask: Tensor, level: str, block: int, gamma: float) -> Tensor:
    """Return log G of each trained token [N, T]; delta is 0 elsewhere."""
    if level == "sequence":
        return delta.sum(-1, keepdim=True).expand_as(delta)
    index, count = mask.cumsum(-1) - 1, mask.sum(-1, keepdim=True)
    found = delta.flip(-1).cumsum(-1).flip(-1) - delta + (count - 1 - index) * math.log(gamma)
    if level == "token":
        return found
    last = torch.minimum((index // block + 1) * block, count) - 1  # last token of the token's block
    trained = mask.sort(stable=True, dim=-1, descending=True).indices  # positions of the trained tokens in the row
    return found.gather(-1, trained.gather(-1, last.clamp(min=0)))


@register("token_weight", "action_aware", needs=("texts",))
def action_aware(
    rows: TokenRows,
    *,
    action_open: str = "<answer>",
    action_close: str = "</answer>",
    action_weight: float = 2.0,
    ground_key: str = '"point_2d":',
    ground_weight: float = 2.0,
) -> Tensor:
    """Return GUI-Libra's weights: higher for tokens in the first action, and higher again after a key in it.

    A token entirely inside `action_open` ... `action_close` (to the end of the text without `action_close`) is weighted
    by action_weight, and additionally by ground_weight if it starts after the first `ground_key` there. The tags,
    tokens across a boundary, and texts without an action have weight 1. For agents that call tools, use `<tool_call>`.
    Source: "GUI-Libra: Training Native GUI Agents to Reason and Act with Action-aware Supervision and Partially
    Verifiable RL".
    """
    weights = torch.zeros_like(rows.logp)
    for i, texts in enumerate(rows.texts or ()):
        row_weights = action_weights(texts, action_open, action_close, action_weight, ground_key, ground_weight)
        weights[i, : len(row_weights)] = rows.logp.new_tensor(row_weights)
    return weights * rows.mask.to(weights.dtype)


def action_weights(
    texts: Sequence[str],
    action_open: str,
    action_close: str,
    action_weight: float,
    ground_key: str,
    ground_weight: float,
) -> list[float]:
    """Return the weight of each token of one text, given as the texts of its tokens."""
    whole = "".join(texts)
    opening = whole.find(action_open)
    if opening < 0:
        return [1.0] * len(texts)
    start = opening + len(action_open)
    closing = whole.find(action_close, start)
    end = len(whole) if closing < 0 else closing
    key = whole.find(ground_key, start, end)
    ground = end + 1 if key < 0 else key + len(ground_key)
    weights, offset = [], 0
    for text in texts:
        inside = offset >= start and offset + len(text) <= end
        weights.append((action_weight if inside else 1.0) * (ground_weight if inside and offset >= ground else 1.0))
        offset += len(text)
    return weights


def neftune(
    embeddings: Tensor,
    attention_mask: Tensor,
    noise: Tensor,
    *,
    alpha: float = 5.0,
    count: Literal["padded", "real"] = "padded",
) -> Tensor:
    """Return input embeddings [N, T, D] with noise: e + u alpha / sqrt(L D), u uniform in (-1, 1).

    NEFTune (arXiv 2310.05914). L: the padded length of the batch, as in common code, or each row's own length (`real`,
    as in the paper).
    """
    width = embeddings.shape[-1]
    if count == "padded":
        lengths = embeddings.new_full((embeddings.shape[0],), embeddings.shape[1])
    else:
        lengths = attention_mask.sum(1).clamp(min=1).to(embeddings.dtype)
    return embeddings + noise * (alpha / (lengths * width).sqrt())[:, None, None]
