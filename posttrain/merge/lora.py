"""Low-rank adapters as matrices: folded into a weight, and several combined. A [r, in], B [out, r]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posttrain.errors import MergeError
from posttrain.registry import register


class Factors(NamedTuple):
    """One adapter of one module: its part is scaling * b @ a."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scaling: float


class Folded(NamedTuple):
    """A weight with its adapter in it, and the scale that the adapter had."""

    merged: Tensor
    scaling: float


def scaling(alpha: float, rank: int, *, rslora: bool = False) -> float:
    """alpha / r, or alpha / sqrt(r) with rslora."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def fold_matrices(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, *, alpha: float, rslora: bool = False, fan_in_fan_out: bool = False
) -> Folded:
    """W + s B A in the precision of `weight`; transposed for layers that store [in, out]. MergeError if not finite.

    Shapes: weight [O,I], or [I,O] with fan_in_fan_out; lora_a [R,I], lora_b [O,R]. Raises MergeError if the result is
    not finite.
    """
    scale = scaling(alpha, lora_a.shape[0], rslora=rslora)
    product = scale * (lora_b @ lora_a)
    merged = weight + (product.T if fan_in_fan_out else product)
    if not torch.isfinite(merged).all():
        raise MergeError("the folded weight holds NaN or infinite values")
    return Folded(merged, scale)


def combine(
    adapters: Sequence[Factors],
    weights: Sequence[float],
    method: Literal["cat", "svd", "linear"] = "cat",
    *,
    rank: int | None = None,
) -> Factors:
    """Several adapters of one module as one, scaling 1.

    cat: exactly sum_i w_i s_i B_i A_i, ranks add up. svd: the same sum, best approximation of the given rank. linear: A
    and B mixed apart with sqrt|w s| (the sign in A), as PEFT does; it has cross terms, so it is not the sum, and needs
    equal ranks. Raises MergeError for `svd` without a rank, and for `linear` with adapters of several ranks.
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
    left, right = torch.linalg.qr(b), torch.linalg.qr(a.T)  # so that the decomposition is of a small matrix
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
    """Several LoRA adapters of one base as one adapter, which is written in place of a model.

    `models` are adapter directories. cat: exactly the weighted sum of what they add; ranks add up. svd: its best
    approximation of rank `rank`. linear: A and B mixed apart, as PEFT does; equal ranks, and not the sum. Adapters with
    other modules or another base are refused, as are DoRA and modules_to_save.
    """
    return combine(adapters, weights, combination, rank=rank)


def distance(parts: Sequence[Factors], weights: Sequence[float], made: Factors) -> tuple[float, float]:
    """(|sum - made|, |sum|) in the Frobenius norm, for the sum of w_i s_i B_i A_i and what was made of it.

    From small products of the factors, |B A|^2 = trace((B^T B)(A A^T)), in float64.
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
    """What the combined adapter adds to the weight, [out, in]. The result is [O,I]."""
    joined = combine(adapters, weights, method, rank=rank)
    return joined.scaling * (joined.b @ joined.a)
