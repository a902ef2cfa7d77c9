"""Autograd collectives of tensor parallelism: all-reduce and all-gather of activations.

An activation is either replicated (equal on each rank of the group) or sharded (each rank holds a slice of its last
dimension, or a term of a sum). The gradient of a replicated activation is replicated as well, so each function
communicates in one direction only: a forward all-reduce is the identity backward, a forward all-gather is a slice
backward, and vice versa.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def sum_gradients_of(whole: Tensor, group: Any) -> Tensor:
    """Identity forward, all-reduce of the gradient backward: for a replicated activation before sharded weights."""
    return _SumBackward.apply(whole, group) if whole.requires_grad else whole  # type: ignore[no-any-return]


def sum_parts(partial: Tensor, group: Any) -> Tensor:
    """All-reduce the ranks' terms; identity backward, since each term has the gradient of the sum."""
    return _SumForward.apply(partial, group)  # type: ignore[no-any-return]


def gather_last(part: Tensor, group: Any) -> Tensor:
    """All-gather equal parts along the last dimension; backward each rank takes its slice of the gradient."""
    return _GatherLast.apply(part, group)  # type: ignore[no-any-return]


def own_last(whole: Tensor, group: Any) -> Tensor:
    """Return this rank's slice of the last dimension; backward all-gathers the gradients of the slices."""
    return _OwnLast.apply(whole, group)  # type: ignore[no-any-return]


def local(tensor: Any) -> Any:
    """Return this rank's shard of a DTensor, with gradient and without communication; return other values unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reduce(tensor: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce into a new tensor, without gradient."""
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
