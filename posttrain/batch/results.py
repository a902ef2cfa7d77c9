"""Return types of components (losses, advantages, selections, corrections), and the input of pair losses.

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
    """Result of a policy loss or regulariser: `values` [N,T], aggregated once by the caller; `stats` name -> [N] or
    [N,T], detached.

    counted [N,T] bool: set by a term that has its own mean: the tokens that this mean runs over. The sum of the term
    is divided by their number in the whole optimizer batch. It depends on the batch only, never on logp. None = the
    term is aggregated as the recipe says.
    """

    values: Tensor
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    counted: Tensor | None = None


@dataclass(frozen=True)
class GroupLoss:
    """Result of a loss over whole groups: `values` [K], one per group in order of first appearance, averaged over the
    groups of the optimizer batch; `stats` name -> [K], detached.

    weights [K]: weight of a group in that average, e.g. its number of pairs. They depend on the batch only, never on
    logp. None, or 0 everywhere in the optimizer batch, = equal weights.
    """

    values: Tensor
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None


@dataclass(frozen=True)
class Credit:
    """Result of an advantage function with a critic: advantages, and returns for the critic to learn, both [N,T]."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class ChannelAdvantages:
    """Result of an advantage function with several channels: `total` [N] becomes the batch's `advantages`, and
    `channels` name -> [N] its `channels`."""

    total: Tensor
    channels: Mapping[str, Tensor]


@dataclass(frozen=True)
class Selection:
    """Tokens that are trained on: `mask` [N,T] bool, a subset of the batch's mask.

    denominator: `all` = unselected tokens only lose their policy-gradient term; `kept` = they also leave the batch and
    its denominators. Each method must choose, because the denominator sets the step size.
    """

    mask: Tensor
    denominator: Literal["all", "kept"]


@dataclass(frozen=True)
class Correction:
    """Correction of the engine-trainer mismatch: the policy-gradient term is multiplied by `weights` [N,T] and set to 0
    where `mask` [N,T] is False. Both are constants. Other terms (KL, regularisers) and denominators do not change."""

    weights: Tensor
    mask: Tensor
    stats: Mapping[str, Tensor] = field(default_factory=dict)

    def apply(self, values: Tensor) -> Tensor:
        """Return the values [N,T] of the policy-gradient term, weighted and masked."""
        return torch.where(self.mask, values * self.weights, 0.0)


@dataclass(frozen=True)
class Remembered:
    """Result of a stateful component: `result`, and `memory`, JSON values that are passed to the component in the next
    step as `batch.memory[its name]` (absent in the first step) and saved in checkpoints."""

    result: Any
    memory: Any


@dataclass(frozen=True)
class PairBatch:
    """P preference pairs: summed log-probs and lengths of both sides [P]; fields that no term needs are None.

    If rows are labeled individually rather than ranked, the chosen side is the row's completion and the rejected side
    is a completion of another row, of another prompt.
    """

    chosen_logp: Tensor
    rejected_logp: Tensor
    chosen_length: Tensor | None = None
    rejected_length: Tensor | None = None
    ref_chosen_logp: Tensor | None = None
    ref_rejected_logp: Tensor | None = None
    prev_chosen_logp: Tensor | None = None  # under the policy that sampled the pairs
    prev_rejected_logp: Tensor | None = None
    history_chosen_logp: Tensor | None = None  # [J,P] under earlier policies, newest first
    history_rejected_logp: Tensor | None = None
    chosen_win: Tensor | None = None  # share of comparisons won, 0 to 1
    rejected_win: Tensor | None = None
    chosen_score: Tensor | None = None  # any scalar reward
    rejected_score: Tensor | None = None
    ref_sample_is_chosen: Tensor | None = None  # True = the reference sampled the chosen side; else the rejected side
    label: Tensor | None = None  # 1 = the chosen side is a good answer, 0 = a bad one
    mean_chosen_length: Tensor | float | None = None  # over the whole optimizer batch; None = over these pairs
    kl_baseline: Tensor | None = None  # [] over the whole optimizer batch; None = from the rejected side of these rows


@dataclass(frozen=True)
class PairLoss:
    """Result of a pair loss: `losses` [P] with gradient; `stats` name -> [P], detached."""

    losses: Tensor
    stats: Mapping[str, Tensor] = field(default_factory=dict)
