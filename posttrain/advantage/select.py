"""Selectors of rows and tokens to train on; they also decide whether the loss divides by all or by selected tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import group_sum, number_groups, rank_in_group, require_field
from posttrain.batch import RolloutBatch, Selection, row_mean
from posttrain.registry import register

Denominator = Literal["all", "kept"]


@register("select", "high_entropy_tokens", paper="2506.01939", needs=("entropy",))
def high_entropy_tokens(batch: RolloutBatch, *, rho: float = 0.2) -> Selection:
    """Select the share rho of trained tokens with the highest entropy -> mask [N,T].

    The loss divides by all trained tokens.

    Threshold: the (1 - rho) quantile of the entropy over the trained tokens of the whole batch, with linear
    interpolation. Ties stay, so at least rho is selected. A KL term stays on all tokens. The source reports clear gains
    at 14B and 32B, parity at 8B, and no smaller models.
    """
    return Selection(batch.mask & (require_field(batch.entropy, "entropy") >= entropy_threshold(batch, rho=rho)), "all")


def entropy_threshold(batch: RolloutBatch, *, rho: float) -> Tensor:
    """Return the (1 - rho) quantile of the entropy of the trained tokens, linearly interpolated.

    Infinite without a token. A scalar.
    """
    entropy = require_field(batch.entropy, "entropy").detach()
    ascending = entropy[batch.mask].sort().values
    if not len(ascending):
        return entropy.new_tensor(torch.inf)
    index = (1 - rho) * (len(ascending) - 1)
    low = min(max(math.floor(index), 0), len(ascending) - 1)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (index - low)


@register(
    "select",
    "clip_cov",
    paper="2505.22617",
    needs=("old_logp",),
    note=(
        "Once a step, over its whole batch. verl computes the covariance again in each micro-batch, with the current"
        " policy, and leaves out tokens that PPO's clip removes. KL-Cov, which penalises these tokens, is not"
        " implemented."
    ),
)
def clip_cov(batch: RolloutBatch, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0) -> Selection:
    """Remove the policy gradient of a few tokens with a high covariance of log-prob and advantage -> mask [N,T].

    The loss divides by all trained tokens.

    These tokens reduce the policy's entropy most. Of the trained tokens, a `share` (rounded down, at least one token)
    is removed, drawn at random from those with low < covariance < high; a KL term stays on them. See
    `token_covariance`. Raises ValueError for a batch without old_logp or advantages.
    """
    covariance = token_covariance(batch)
    candidates = (batch.mask & (covariance > low) & (covariance < high)).nonzero()
    number = max(1, math.floor(share * int(batch.mask.sum())))
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(batch.step))
    removed = candidates[order[:number].to(candidates.device)]
    kept = batch.mask.clone()
    kept[removed[:, 0], removed[:, 1]] = False
    return Selection(kept, "all")


def token_covariance(batch: RolloutBatch) -> Tensor:
    """Compute (A - mean of A) (old_logp - mean of old_logp) [N,T], means over all trained tokens; 0 elsewhere."""
    mask, tokens = batch.mask, batch.mask.sum().clamp(min=1)
    advantages = require_field(batch.advantages, "advantages")
    spread = advantages if advantages.dim() == 2 else advantages[:, None].expand(mask.shape)
    centered = []
    for values in (spread, require_field(batch.old_logp, "old_logp")):
        known = torch.where(mask, values.detach().double(), 0.0)
        centered.append(known - known.sum() / tokens)
    return torch.where(mask, centered[0] * centered[1], 0.0)


@register(
    "select",
    "step_entropy",
    paper="2509.23866",
    needs=("entropy",),
    note="In the authors' code, but not active in their run; they rank within the batch, not within a group.",
)
def step_entropy(batch: RolloutBatch, *, keep: float = 0.8, scope: Literal["group", "batch"] = "group") -> Selection:
    """Select the rows (steps of a trajectory) with the highest mean token entropy (DART) -> mask [N,T].

    The loss divides by the selected tokens. Of each group of n rows max(1, floor(keep * n)) stay; ties go to the first.
    Advantages are unchanged. keep 0.8 is cited for the method but was not found in its code.
    """
    return Selection(batch.mask & step_terms(batch, keep=keep, scope=scope).step_mask[:, None], "kept")


@dataclass(frozen=True)
class StepSelection:
    """Result of `step_terms`.

    step_entropy [N]: mean entropy over a row's trained tokens, 0 for an empty row; step_mask [N] bool: selected rows.
    """

    step_entropy: Tensor
    step_mask: Tensor


def step_terms(batch: RolloutBatch, *, keep: float = 0.8, scope: str = "group") -> StepSelection:
    """Return the rows that `step_entropy` selects and the entropies that rank them."""
    mean = row_mean(require_field(batch.entropy, "entropy").detach(), batch.mask)
    group = batch.group_ids if scope == "group" else torch.zeros_like(batch.group_ids)
    key = number_groups(group)
    size = group_sum(torch.ones_like(key, dtype=torch.float64), key)
    count = (keep * size + 1e-9).floor().clamp(min=1)  # 0.29 * 100 is 28.999999999999996
    return StepSelection(mean, rank_in_group(mean, key) < count[key])


@register(
    "select",
    "d3s",
    paper="2509.22115",
    needs=("groups", "entropy"),
    note="Follows published notes, which give no tie rules, ends of the schedule or denominator.",
)
def d3s(
    batch: RolloutBatch,
    *,
    n_query: int,
    n_batch: int | None = None,
    token_frac: float,
    n_final: int | None = None,
    k_final: float | None = None,
    denominator: Denominator = "kept",
) -> Selection:
    """Select rows whose advantages differ most, and of their tokens those with the largest |A| * entropy -> mask [N,T].

    1. Of each group the n_query rows whose advantages have the largest variance; 2. of these, n_batch rows over the
    batch, in the same way (None: all); 3. of their M trained tokens max(1, ceil(token_frac * M)); ties by row, then
    position. Advantages are not recomputed. n_final, k_final: final values of n_query and token_frac, reached linearly
    over the run; start small and end large.
    """
    at = d3s_schedule(
        batch.step / max(batch.total_steps - 1, 1),
        n_init=n_query,
        n_final=n_query if n_final is None else n_final,
        k_init=token_frac,
        k_final=token_frac if k_final is None else k_final,
    )
    kept = d3s_terms(batch, n_query=at.n, n_batch=n_batch, token_frac=at.token_frac)
    return Selection(kept.token_mask, denominator)


@dataclass(frozen=True)
class Downsampled:
    """Result of `d3s_terms`. selected [N] bool: rows that stay; token_mask [N,T] bool: their tokens that stay."""

    selected: Tensor
    token_mask: Tensor


def d3s_terms(batch: RolloutBatch, *, n_query: int, n_batch: int | None = None, token_frac: float) -> Downsampled:
    """Compute the rows and tokens that `d3s` selects at one point of its schedule."""
    advantages = require_field(batch.advantages, "advantages")
    by_row = advantages if advantages.dim() == 1 else torch.where(batch.mask, advantages, 0.0).sum(-1)
    values, members = by_row.tolist(), dict[int, list[int]]()
    for row, group in enumerate(batch.group_ids.tolist()):
        members.setdefault(group, []).append(row)
    kept = sorted(
        rows[i] for rows in members.values() for i in select_spread_subset([values[r] for r in rows], n_query)
    )
    if n_batch is not None:
        kept = [kept[i] for i in select_spread_subset([values[r] for r in kept], n_batch)]
    chosen = torch.zeros_like(batch.group_ids, dtype=torch.bool)
    chosen[kept] = True
    size = advantages.abs() if advantages.dim() == 2 else advantages.abs()[:, None]
    score = size * require_field(batch.entropy, "entropy").detach()
    return Downsampled(chosen, select_top_tokens(score, batch.mask & chosen[:, None], token_frac))


def select_spread_subset(values: list[float], count: int) -> list[int]:
    """Return the indices, ascending, of the `count` values with the largest population variance.

    Such a set is always the i largest and the count - i smallest values for some i. Ties (1e-12): the most even split,
    then the larger i. Equal values are ordered by index.
    """
    if count >= len(values):
        return list(range(len(values)))
    order = sorted(range(len(values)), key=lambda index: (values[index], index))
    best, found = (-math.inf, 0, 0), list[int]()
    for largest in range(count + 1):
        subset = order[: count - largest] + order[len(order) - largest :]
        rank = (_variance([values[index] for index in subset]), -abs(2 * largest - count), largest)
        if rank[0] > best[0] + 1e-12 or (rank[0] >= best[0] - 1e-12 and rank[1:] > best[1:]):
            best, found = (max(rank[0], best[0]), *rank[1:]), subset
    return sorted(found)


def _variance(values: list[float]) -> float:
    mean = sum(values) / max(len(values), 1)
    return sum((x - mean) ** 2 for x in values) / max(len(values), 1)


def select_top_tokens(score: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """Return the share `fraction` of the trained tokens with the largest score [N,T], bool.

    max(1, ceil(fraction * M)) of the M trained tokens; ties by row, position.
    """
    cells = mask.flatten().nonzero()[:, 0]
    if not len(cells):
        return mask
    count = max(1, math.ceil(fraction * len(cells) - 1e-9))
    order = score.expand(mask.shape).flatten()[cells].sort(descending=True, stable=True).indices[:count]
    top = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    top[cells[order]] = True
    return top.reshape(mask.shape)


@dataclass(frozen=True)
class SelectionSizes:
    """Number of rows and share of tokens to select."""

    n: int
    token_frac: float


def d3s_schedule(progress: float, *, n_init: int, n_final: int, k_init: float, k_final: float) -> SelectionSizes:
    """Interpolate the number of rows and the token share linearly from initial to final values.

    progress: 0 to 1 of the run.
    """
    p = min(max(progress, 0.0), 1.0)
    return SelectionSizes(math.floor((1 - p) * n_init + p * n_final + 0.5), (1 - p) * k_init + p * k_final)
