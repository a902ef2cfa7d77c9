"""Autograd collectives of tensor parallelism: all-reduce and all-gather of activations.

An activation is either replicated (equal on each rank of the group) or sharded (each rank holds a slice of its last
dimension, or a term of a sum). The gradient of a replicated activation is replicated as well, so each function
communicates in one direction only: a forward all-reduce is the identity backward, a forward all-gather is a slice
backward, and vice versa.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Collective = Callable[[Tensor], Tensor]


class _Collective(torch.autograd.Function):
    """Applies `forward` to a tensor, and `backward` to its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.of_gradient = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.of_gradient(grad), None, None


def collective(tensor: Tensor, forward: Collective, backward: Collective) -> Tensor:
    """Return `forward(tensor)`, whose gradient passes through `backward`."""
    return _Collective.apply(tensor, forward, backward)  # type: ignore[no-any-return]


def sum_gradients_of(whole: Tensor, group: Any) -> Tensor:
    """Identity forward, all-reduce of the gradient backward: for a replicated activation before sharded weights."""
    if not whole.requires_grad:
        return whole
    return collective(whole, lambda x: x.view_as(x), partial(reduce, group=group))


def sum_parts(part: Tensor, group: Any) -> Tensor:
    """All-reduce the ranks' terms; identity backward, since each term has the gradient of the sum."""
    return collective(part, partial(reduce, group=group), lambda grad: grad)


def gather_last(part: Tensor, group: Any) -> Tensor:
    """All-gather equal parts along the last dimension; backward each rank takes its slice of the gradient."""
    return collective(part, partial(_gather_parts, group=group), partial(_take_own, group=group))


def own_last(whole: Tensor, group: Any) -> Tensor:
    """Return this rank's slice of the last dimension; backward all-gathers the gradients of the slices."""
    return collective(whole, partial(_take_own, group=group), partial(_gather_parts, group=group))


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
