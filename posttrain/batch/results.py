"""What components return: losses, advantages, selections, corrections; and the pairs that pair losses read.

Shapes: N rows (rollouts), T completion tokens of the longest row, K groups, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLoss:
    """What a policy loss or a regulariser returns: `values` [N,T] to be aggregated once, `stats` name -> [N] or [N,T],
    detached.

    counted [N,T] bool: for a term with a mean of its own, the tokens that this mean is over: its sum is divided by
    their number in the whole optimiser batch. It depends on the batch only, never on logp. None = aggregated as the
    recipe says.
    """

    values: Tensor
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    counted: Tensor | None = None


@dataclass(frozen=True)
class GroupLoss:
    """What a loss over whole groups returns: `values` [K], one a group in order of first appearance, averaged over the
    groups of the optimiser batch; `stats` name -> [K], detached.

    weights [K]: how much a group counts in that average, e.g. its number of pairs; they depend on the batch only, never
    on logp. None, or 0 everywhere in the optimiser batch: all alike.
    """

    values: Tensor
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None


@dataclass(frozen=True)
class Credit:
    """What an advantage with a critic returns: advantages and the returns that the critic learns, both [N,T]."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class ChannelAdvantages:
    """What an advantage with several channels returns: `total` [N] becomes the batch's advantages, `channels`
    name -> [N] its `channels`."""

    total: Tensor
    channels: Mapping[str, Tensor]


@dataclass(frozen=True)
class Selection:
    """Which tokens are trained on: `mask` [N,T] bool, within the batch's mask.

    denominator: `all`: the others lose their policy-gradient term, and nothing else changes; `kept`: the others leave
    the batch and its denominators. A method must say which, because it decides how large the step is.
    """

    mask: Tensor
    denominator: Literal["all", "kept"]


@dataclass(frozen=True)
class Correction:
    """Engine-trainer mismatch: `weights` [N,T] multiply the policy-gradient term, cells where `mask` [N,T] is False
    lose it. Both are constants; other terms (KL, regularisers) and denominators stay as they are."""

    weights: Tensor
    mask: Tensor
    stats: Mapping[str, Tensor] = field(default_factory=dict)

    def apply(self, values: Tensor) -> Tensor:
        """Values [N,T] of the policy-gradient term, corrected."""
        return torch.where(self.mask, values * self.weights, 0.0)


@dataclass(frozen=True)
class Remembered:
    """What a component with a memory returns: its result, and the JSON-able state that comes back to it in the next
    step as `batch.memory[its name]` (absent in the first); it is kept in checkpoints."""

    result: Any
    memory: Any


@dataclass(frozen=True)
class PairBatch:
    """P preference pairs: summed log-probs and lengths of both sides [P]; what no term needs is None.

    Where rows are labelled one by one instead of ranked, the chosen side is the row's completion and the rejected side
    a completion of another row, which belongs to another prompt.
    """

    chosen_logp: Tensor
    rejected_logp: Tensor
    chosen_length: Tensor | None = None
    rejected_length: Tensor | None = None
    ref_chosen_logp: Tensor | None = None
    ref_rejected_logp: Tensor | None = None
    prev_chosen_logp: Tensor | None = None  # by the policy that the pairs were sampled from
    prev_rejected_logp: Tensor | None = None
    history_chosen_logp: Tensor | None = None  # [J,P] by earlier policies, the newest first
    history_rejected_logp: Tensor | None = None
    chosen_win: Tensor | None = None  # share of comparisons won, 0 to 1
    rejected_win: Tensor | None = None
    chosen_score: Tensor | None = None  # any scalar reward
    rejected_score: Tensor | None = None
    ref_sample_is_chosen: Tensor | None = None  # the chosen side is the reference's sample; else the rejected side is
    label: Tensor | None = None  # 1 = the chosen side is a good answer, 0 = a bad one
    mean_chosen_length: Tensor | float | None = None  # of the whole optimiser batch; None = these pairs are all
    kl_baseline: Tensor | None = None  # [] of the whole optimiser batch; None = from the rejected side of these rows


@dataclass(frozen=True)
class PairLoss:
    """What a pair loss returns: `losses` [P] with gradient, `stats` name -> [P], detached."""

    losses: Tensor
    stats: Mapping[str, Tensor] = field(default_factory=dict)
