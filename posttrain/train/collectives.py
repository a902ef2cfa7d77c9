"""Sums and gatherings of activations among ranks that run the same tokens with parts of the weights.

What each of these ranks computes behind one of them is the same, and so is its gradient: only where ranks go apart are
gradients added up. So each function here communicates in one direction, and does the local opposite in the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_gradients_of(whole: Tensor, group: Any) -> Tensor:
    """`whole`, which ranks use differently; its gradients of all of them are added up."""
    return _SumBackward.apply(whole, group) if whole.requires_grad else whole  # type: ignore[no-any-return]


def sum_parts(partial: Tensor, group: Any) -> Tensor:
    """The sum of what the ranks have; each term gets the gradient of the sum."""
    return _SumForward.apply(partial, group)  # type: ignore[no-any-return]


def gather_last(part: Tensor, group: Any) -> Tensor:
    """The parts of all ranks, which are of one size, one behind the other along the last dimension; each gets its own
    part of the gradient."""
    return _GatherLast.apply(part, group)  # type: ignore[no-any-return]


def own_last(whole: Tensor, group: Any) -> Tensor:
    """This rank's part of the last dimension; the gradients of all parts come together again."""
    return _OwnLast.apply(whole, group)  # type: ignore[no-any-return]


def reduce(tensor: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum, or another reduction, over the ranks in a new tensor; without gradient."""
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
