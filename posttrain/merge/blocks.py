"""Blockwise processing of large tensors: no large temporaries, and each block stays in the CPU cache.

Shapes: all tensors of a call have the same shape, which may be any shape; so has the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BLOCK_ENTRIES = 1 << 18  # per block: 1 MB in float32


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread: for small blocks, threads spend more time waiting than computing.

    On a busy machine the difference is a factor of ten. On an idle one it is small, because memory bandwidth is the
    limit.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reuse_memory() -> None:
    """Make the C library reuse freed memory instead of requesting zeroed pages from the kernel each time.

    glibc reuses blocks up to the size of the largest block freed so far, at most 32 MB; therefore a block of 31 MB is
    allocated and freed. Other C libraries are not affected.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def iterate_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the corresponding blocks of several flattened tensors of the same shape."""
    yield from zip(*(tensor.reshape(-1).split(BLOCK_ENTRIES) for tensor in tensors), strict=True)


def map_blocks(function: Callable[..., Tensor], *tensors: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Apply an elementwise `function` to tensors of the same shape, block by block, and return the result."""
    first = tensors[0]
    found = torch.empty(first.shape, dtype=dtype or first.dtype)
    fill_by_block(found, function, *tensors)
    return found


def fill_by_block(out: Tensor, function: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Apply an elementwise `function` block by block and write the result into `out`, in the dtype of `out`."""
    for block, *parts in iterate_blocks(out, *tensors):
        block.copy_(function(*parts))


def apply_rule_by_block(
    out: Tensor,
    rule: Callable[..., Tensor],
    models: Sequence[Tensor],
    base: Tensor | None,
    weights: Sequence[float],
    params: Any,
) -> None:
    """Write the result of an elementwise merge rule into `out`."""
    count = len(models)

    def part(*parts: Tensor) -> Tensor:
        return rule(parts[:count], None if base is None else parts[count], weights, **params)

    fill_by_block(out, part, *models, *([] if base is None else [base]))


def all_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity. A finite sum proves it; otherwise the entries are checked."""
    return all(bool(torch.isfinite(part.sum()) or torch.isfinite(part).all()) for (part,) in iterate_blocks(tensor))


def squared_distance(a: Tensor, b: Tensor) -> float:
    """Return the sum of (a - b)^2, accumulated over blocks in float64."""
    total = 0.0
    for x, y in iterate_blocks(a, b):
        difference = x.double() - y.double() if x.dtype == torch.float64 else x.float() - y.float()
        total += float(torch.dot(difference, difference))
    return total


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether all entries are numerically equal, whatever their dtypes. The tensors must not contain NaN."""
    if a is b:
        return True
    if a.dtype == b.dtype:
        return torch.equal(a, b)
    return all(bool((x.double() == y.double()).all()) for x, y in iterate_blocks(a, b))


def fingerprint(tensor: Tensor) -> int:
    """Return a non-cryptographic hash that changes if any bit changes or two blocks are swapped.

    It hashes the sums of each block's 64-bit words, which takes no longer than reading the memory.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    sums = [int(block.sum()) for block in raw[:whole].view(torch.int64).split(BLOCK_ENTRIES)]
    return hash((*sums, *raw[whole:].tolist()))
