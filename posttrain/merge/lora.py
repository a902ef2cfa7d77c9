"""LoRA factors as matrices: folding an adapter into a weight and combining adapters. A is [r, in], B is [out, r]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posttrain.errors import MergeError
from posttrain.registry import register


class Factors(NamedTuple):
    """LoRA factors of one module; the adapter adds scaling * b @ a to its weight."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scaling: float


class Folded(NamedTuple):
    """A weight with an adapter folded in, and the scale that the adapter had."""

    merged: Tensor
    scaling: float


def scaling(alpha: float, rank: int, *, rslora: bool = False) -> float:
    """Return alpha / r, or alpha / sqrt(r) with rslora."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def fold_matrices(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, *, alpha: float, rslora: bool = False, fan_in_fan_out: bool = False
) -> Folded:
    """Return W + s B A in the dtype of `weight`; B A is transposed for layers that store [in, out].

    Shapes: weight [O,I], or [I,O] with fan_in_fan_out; lora_a [R,I], lora_b [O,R]. Raises MergeError if the result is
    not finite.
    """
    scale = scaling(alpha, lora_a.shape[0], rslora=rslora)
    product = scale * (lora_b @ lora_a)
    merged = weight + (product.T if fan_in_fan_out else product)
    if not torch.isfinite(merged).all():
        raise MergeError("the folded weight has NaN or infinite values")
    return Folded(merged, scale)


def combine(
    adapters: Sequence[Factors],
    weights: Sequence[float],
    method: Literal["cat", "svd", "linear"] = "cat",
    *,
    rank: int | None = None,
) -> Factors:
    """Combine several adapters of one module into one with scaling 1.

    cat: exactly sum_i w_i s_i B_i A_i; the ranks add up. svd: the best approximation of this sum with the given rank.
    linear: A and B are averaged separately with sqrt|w s| (the sign goes into A), as in PEFT; the product has cross
    terms, so it is not the sum, and the ranks must be equal. Raises MergeError for `svd` without a rank, and for
    `linear` with different ranks.
    """
    shares = [weight * adapter.scaling for weight, adapter in zip(weights, adapters, strict=True)]
    if method == "linear":
        if len({adapter.a.shape[0] for adapter in adapters}) > 1:
            raise MergeError("`linear` mixes adapters of equal rank only", hint="use `cat` or `svd`")
        roots = [math.sqrt(abs(share)) for share in shares]
        a = sum(math.copysign(r, s) * x.a for r, s, x in zip(roots, shares, adapters, strict=True))
        b = sum(r * x.b for r, x in zip(roots, adapters, strict=True))
        return Factors(torch.as_tensor(a), torch.as_tensor(b), 1.0)
    a = torch.cat([share * x.a for share, x in zip(shares, adapters, strict=True)])
    b = torch.cat([x.b for x in adapters], dim=1)
    if method == "cat":
        return Factors(a, b, 1.0)
    if rank is None or rank < 1:
        raise MergeError("`svd` needs the rank of the result", hint="give `rank`")
    left, right = torch.linalg.qr(b), torch.linalg.qr(a.T)  # the SVD is then of a small matrix
    u, s, v = torch.linalg.svd(left.R @ right.R.T, full_matrices=False)
    return Factors(s[:rank, None] * (v[:rank] @ right.Q.T), left.Q @ u[:, :rank], 1.0)


@register("merge", "lora_combine", needs=("adapters",))
def lora_combine(
    adapters: Sequence[Factors],
    weights: Sequence[float],
    *,
    combination: Literal["cat", "svd", "linear"] = "cat",
    rank: int | None = None,
) -> Factors:
    """Combine several LoRA adapters of one base into one adapter, which is written instead of a model.

    `models` are adapter directories. cat: exactly the weighted sum of the adapters' updates; the ranks add up. svd: its
    best approximation of rank `rank`. linear: A and B are averaged separately, as in PEFT; the ranks must be equal, and
    the result is not the sum. Adapters with different modules or bases are refused, as are DoRA and modules_to_save.
    """
    return combine(adapters, weights, combination, rank=rank)


def distance(parts: Sequence[Factors], weights: Sequence[float], made: Factors) -> tuple[float, float]:
    """Return (|sum - made|, |sum|) in the Frobenius norm, for the sum of w_i s_i B_i A_i and its approximation `made`.

    Computed in float64 from small products of the factors: |B A|^2 = trace((B^T B)(A A^T)).
    """
    exact = combine(parts, weights, "cat")
    a = torch.cat([exact.a, made.a]).double()
    b = torch.cat([exact.b, -made.scaling * made.b], dim=1).double()
    squares = [float(((y.T @ y) * (x @ x.T)).sum()) for x, y in ((a, b), (exact.a.double(), exact.b.double()))]
    return math.sqrt(max(squares[0], 0.0)), math.sqrt(max(squares[1], 0.0))


def combined_delta(
    adapters: Sequence[Factors],
    weights: Sequence[float],
    *,
    method: Literal["cat", "svd", "linear"] = "cat",
    rank: int | None = None,
) -> Tensor:
    """Return the update [O,I] that the combined adapter adds to the weight."""
    joined = combine(adapters, weights, method, rank=rank)
    return joined.scaling * (joined.b @ joined.a)
