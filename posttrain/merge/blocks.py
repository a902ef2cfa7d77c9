"""Large tensors looked at block by block: no temporaries of their size, and a block stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

ENTRIES = 1 << 18  # of a block: 1 MB in float32


@contextmanager
def one_thread() -> Iterator[None]:
    """torch with one thread: blocks are small, and threads that wait for each other cost more than they bring.

    Beside other processes the difference is a factor of ten; on an idle machine it is small, as memory is the limit.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same stretch of each of several tensors of one shape, as vectors, one stretch after the other."""
    yield from zip(*(tensor.reshape(-1).split(ENTRIES) for tensor in tensors), strict=True)


def by_block(function: Callable[..., Tensor], *tensors: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`function` of tensors of one shape, where an entry of the result depends on the same entry of each alone."""
    first = tensors[0]
    found = torch.empty(first.shape, dtype=dtype or first.dtype)
    for out, *parts in blocks(found, *tensors):
        out.copy_(function(*parts))
    return found


def rule_by_block(
    rule: Callable[..., Tensor],
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    *,
    extra: Sequence[Tensor] | None,
    dtype: torch.dtype,
    params: Any,
) -> Tensor:
    """A merge rule that works entry by entry, with the result in `dtype`. extra: its draws, one tensor a model."""
    count = len(models)

    def part(*parts: Tensor) -> Tensor:
        own, rest = parts[:count], list(parts[count:])
        start = None if base is None else rest.pop(0)
        return rule(own, start, weights, *([] if extra is None else [rest]), **params)

    return by_block(part, *models, *([] if base is None else [base]), *(extra or ()), dtype=dtype)


def all_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity. A sum that is finite says so; only if it is not are the entries looked at."""
    for (part,) in blocks(tensor):
        exact = part if part.dtype in (torch.float32, torch.float64) else part.float()
        if not torch.isfinite(exact.sum()) and not torch.isfinite(exact).all():
            return False
    return True


def squared_distance(a: Tensor, b: Tensor) -> float:
    """Sum of (a - b)^2, in float64 between blocks."""
    total = 0.0
    for x, y in blocks(a, b):
        difference = x.double() - y.double() if x.dtype == torch.float64 else x.float() - y.float()
        total += float(torch.dot(difference, difference))
    return total


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether all entries are equal as numbers, whatever their dtypes."""
    if a.dtype == b.dtype:
        return torch.equal(a, b)
    return all(bool((x.double() == y.double()).all()) for x, y in blocks(a, b))
