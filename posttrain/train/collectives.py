"""Collectives of tensor parallelism, with gradients: all-reduce and all-gather of activations.

An activation is either replicated (the same numbers on each rank of the group) or sharded (each rank has a part of its
last dimension, or a term of a sum). The gradient of a replicated activation is replicated as well, so each function
communicates in one direction only: an all-reduce forward is the identity backward, an all-gather forward a slice
backward, and the other way round.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def sum_gradients_of(whole: Tensor, group: Any) -> Tensor:
    """A replicated activation before sharded weights: the identity forward, an all-reduce of the gradient backward."""
    return _SumBackward.apply(whole, group) if whole.requires_grad else whole  # type: ignore[no-any-return]


def sum_parts(partial: Tensor, group: Any) -> Tensor:
    """An all-reduce of the ranks' terms; backward the identity, since each term has the gradient of the sum."""
    return _SumForward.apply(partial, group)  # type: ignore[no-any-return]


def gather_last(part: Tensor, group: Any) -> Tensor:
    """An all-gather of equal parts along the last dimension; backward each rank takes its slice of the gradient."""
    return _GatherLast.apply(part, group)  # type: ignore[no-any-return]


def own_last(whole: Tensor, group: Any) -> Tensor:
    """This rank's slice of the last dimension; backward an all-gather of the slices' gradients."""
    return _OwnLast.apply(whole, group)  # type: ignore[no-any-return]


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor, with gradient and without communication; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reduce(tensor: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """An all-reduce into a new tensor, without gradient."""
    found = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, op, group=group)
    return found


def _gather_parts(part: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, -1)


def _take_own(whole: Tensor, group: Any) -> Tensor:
    return whole.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return reduce(grad, ctx.group), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Any) -> Tensor:  # noqa: ARG004
        return reduce(partial, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # noqa: ARG004
        return grad, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gather_parts(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _take_own(grad, ctx.group), None


class _OwnLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _take_own(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gather_parts(grad, ctx.group), None
