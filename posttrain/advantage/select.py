"""Which rows and tokens are trained on. A selector says whether the loss is divided by all tokens or by those kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.advantage.group import required
from posttrain.batch import RolloutBatch, Selection
from posttrain.registry import register

Denominator = Literal["all", "kept"]


@register("select", "high_entropy_tokens", paper="2506.01939", needs=("entropy",))
def high_entropy_tokens(batch: RolloutBatch, *, rho: float = 0.2) -> Selection:
    """The share rho of trained tokens of largest entropy -> mask [N,T]; divided by all trained tokens.

    Threshold: the (1 - rho) quantile of the entropy over the trained tokens of the whole batch, with linear
    interpolation; ties stay, so rho is the least that is kept. A KL term stays on all tokens. The source sees clear
    gains at 14B and 32B, parity at 8B, and shows no smaller models.
    """
    entropy = required(batch.entropy, "entropy").detach()
    return Selection(batch.mask & (entropy >= entropy_threshold(entropy, batch.mask, rho)), "all")


def entropy_threshold(entropy: Tensor, mask: Tensor, rho: float) -> Tensor:
    """The (1 - rho) quantile of entropy [N,T] where the mask is 1, linearly interpolated; infinite without a token."""
    rising = entropy[mask].sort().values
    if not len(rising):
        return entropy.new_tensor(torch.inf)
    place = (1 - rho) * (len(rising) - 1)
    low = min(max(math.floor(place), 0), len(rising) - 1)
    high = min(low + 1, len(rising) - 1)
    return rising[low] + (rising[high] - rising[low]) * (place - low)


@register(
    "select",
    "step_entropy",
    paper="2509.23866",
    needs=("entropy",),
    note="In the authors' code, but not active in their run; ranking within a group instead of the batch is ours.",
)
def step_entropy(batch: RolloutBatch, *, keep: float = 0.8, scope: Literal["group", "batch"] = "group") -> Selection:
    """DART: the rows (steps of a trajectory) of largest mean token entropy -> mask [N,T]; divided by what is kept.

    Of each group of n rows max(1, floor(keep * n)) stay; ties go to the first. Advantages are not touched. keep 0.8 is
    quoted of the method and not seen in its code.
    """
    group = batch.group_ids if scope == "group" else torch.zeros_like(batch.group_ids)
    mean = mean_entropy(batch)
    kept = torch.zeros_like(batch.group_ids, dtype=torch.bool)
    for number in group.unique().tolist():
        rows = (group == number).nonzero()[:, 0]
        count = max(1, math.floor(keep * len(rows) + 1e-9))  # 0.29 * 100 is 28.999999999999996
        kept[rows[mean[rows].sort(descending=True, stable=True).indices[:count]]] = True
    return Selection(batch.mask & kept[:, None], "kept")


def mean_entropy(batch: RolloutBatch) -> Tensor:
    """Mean entropy over the trained tokens of each row [N], 0 for an empty one."""
    entropy = torch.where(batch.mask, required(batch.entropy, "entropy").detach(), 0.0)
    return entropy.sum(-1) / batch.mask.sum(-1).clamp(min=1)


@register(
    "select",
    "d3s",
    paper="2509.22115",
    needs=("groups", "entropy"),
    note="Read from published notes; the tie rules, the schedule's ends and the denominator are ours.",
)
def d3s(
    batch: RolloutBatch, *, n_query: int, n_batch: int, token_frac: float, denominator: Denominator = "kept"
) -> Selection:
    """Rows whose advantages differ most, and of them the tokens of largest |A| * entropy -> mask [N,T].

    1. of each group the n_query rows whose advantages have the largest variance; 2. of these n_batch rows over the
    batch, in the same way; 3. of their M trained tokens max(1, ceil(token_frac * M)); ties by row, then place.
    Advantages are not computed anew. Start small and end large (controllers `d3s_rows` and `d3s_tokens`).
    """
    advantages = required(batch.advantages, "advantages")
    by_row = advantages if advantages.dim() == 1 else torch.where(batch.mask, advantages, 0.0).sum(-1)
    kept: list[int] = []
    for number in batch.group_ids.unique().tolist():
        rows = (batch.group_ids == number).nonzero()[:, 0].tolist()
        kept += [rows[i] for i in spread_subset(by_row[rows].tolist(), n_query)]
    kept.sort()
    kept = [kept[i] for i in spread_subset(by_row[kept].tolist(), n_batch)]
    chosen = torch.zeros_like(batch.group_ids, dtype=torch.bool)
    chosen[kept] = True
    mask = batch.mask & chosen[:, None]
    size = advantages.abs() if advantages.dim() == 2 else advantages.abs()[:, None]
    return Selection(top_tokens(size * required(batch.entropy, "entropy").detach(), mask, token_frac), denominator)


def spread_subset(values: list[float], count: int) -> list[int]:
    """Places of the `count` values of largest population variance, rising.

    Such a set is always the i largest and the count - i smallest for some i. Ties (1e-12): the most even split, then
    the larger i. Equal values stand in the order of their places.
    """
    if count >= len(values):
        return list(range(len(values)))
    order = sorted(range(len(values)), key=lambda place: (values[place], place))
    best, found = (-math.inf, 0, 0), list[int]()
    for largest in range(count + 1):
        places = order[: count - largest] + order[len(order) - largest :]
        rank = (_variance([values[p] for p in places]), -abs(2 * largest - count), largest)
        if rank[0] > best[0] + 1e-12 or (rank[0] >= best[0] - 1e-12 and rank[1:] > best[1:]):
            best, found = (max(rank[0], best[0]), *rank[1:]), places
    return sorted(found)


def _variance(values: list[float]) -> float:
    mean = sum(values) / max(len(values), 1)
    return sum((x - mean) ** 2 for x in values) / max(len(values), 1)


def top_tokens(score: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """The max(1, ceil(fraction * M)) of the M trained tokens with the largest score [N,T], bool; ties by row, place."""
    cells = mask.flatten().nonzero()[:, 0]
    if not len(cells):
        return mask
    count = max(1, math.ceil(fraction * len(cells) - 1e-9))
    order = score.expand(mask.shape).flatten()[cells].sort(descending=True, stable=True).indices[:count]
    top = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    top[cells[order]] = True
    return top.reshape(mask.shape)


@dataclass(frozen=True)
class Schedule:
    """Rows and share of tokens to keep."""

    n: int
    token_frac: float


def d3s_schedule(progress: float, *, n_init: int, n_final: int, k_init: float, k_final: float) -> Schedule:
    """Rows and token share at `progress` (0 to 1 of the run): straight lines from the first to the last value."""
    p = min(max(progress, 0.0), 1.0)
    return Schedule(math.floor((1 - p) * n_init + p * n_final + 0.5), (1 - p) * k_init + p * k_final)
