"""Data and model parallelism of a run: which rows a rank works on, and how gradients are summed.

Every rank holds the whole model (unless sharded) and knows the whole step: rollouts are gathered, so every rank
computes advantages, filters, denominators and metrics over all rollouts, and no formula needs to know about ranks. Only
the work is divided: sampling and scoring by prompt, forward and backward passes by row. Gradients are summed once per
update, which needs no wrapper around the model and lets ranks run different numbers of micro-batches.

With model parallelism, neighboring ranks run the same rows and count as one in the division of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.seeds import derive
from posttrain.train import distributed
from posttrain.train.load_balancing import partition, split_rows
from posttrain.train.tensor_split import has_whole_gradient

BUCKET_NUMEL = 1 << 26  # elements per all-reduce of gradients
_model_parallel = 1  # number of neighboring ranks that run the same rows, see `set_model_parallel_size`
_tensor_parallel = 1  # number of neighboring ranks that also run the same tokens


def set_model_parallel_size(context: int, tensor: int = 1) -> None:
    """Declare that each `context` * `tensor` neighboring ranks run the same rows from now on.

    Each of these ranks runs a part of every packed line (`context_split`); each `tensor` neighbors run the same part
    (`tensor_split`).
    """
    global _model_parallel, _tensor_parallel
    _model_parallel, _tensor_parallel = context * tensor, tensor


def model_parallel_size() -> int:
    """Return the number of ranks that run the same rows as this one, itself included."""
    return _model_parallel


def loss_share() -> float:
    """Return the factor for the loss of this rank's rows.

    Ranks of a context sum their gradients; ranks that run the same tokens have equal gradients.
    """
    return _tensor_parallel / _model_parallel


def data_parallel_size() -> int:
    """Return the number of ranks, or groups of ranks with the same rows, that divide the rows of a pass."""
    return distributed.world() // _model_parallel


def rank_seed(seed: int) -> int:
    """Return a seed for draws that must differ between ranks, such as dropout.

    Ranks that run the same tokens share the seed.
    """
    number = distributed.rank() // _tensor_parallel
    return derive(seed, "rank", number) if number else seed


def my_rows(costs: Sequence[float], units: Sequence[int] | None = None) -> list[int]:
    """Return the sorted indices of the rows that this rank works on. costs, units: see `split_rows`."""
    return split_rows(costs, data_parallel_size(), units)[distributed.rank() // _model_parallel]


def my_even_shard(costs: Sequence[float]) -> list[int]:
    """Return the sorted indices of this rank's items.

    All ranks get nearly equal total cost, and numbers of items that differ by at most one.
    """
    room = [-(-len(costs) // data_parallel_size())] * data_parallel_size()
    return sorted(partition(costs, data_parallel_size(), room)[distributed.rank() // _model_parallel])


def my_shard(count: int) -> range:
    """Return the indices of the items that this rank works on, of `count` items of unknown cost."""
    return range(distributed.rank(), count, distributed.world())


def my_pass_shard(count: int) -> range:
    """Return the indices of the passes that this rank runs, of `count` passes of unknown cost."""
    return range(distributed.rank() // _model_parallel, count, data_parallel_size())


def sum_of_passes(tensor: Tensor) -> Tensor:
    """Sum over ranks in place what their rows contributed, each row counted once; bools as in `all_reduce_sum`."""
    summed = distributed.all_reduce_sum(tensor)
    return summed if _model_parallel == 1 or tensor.dtype == torch.bool else summed.div_(_model_parallel)


def sum_gradients(*modules: nn.Module | None) -> None:
    """Sum the gradients of all ranks. A parameter with a gradient on any rank has one on every rank afterwards.

    Gradients of sharded parameters (DTensor) were already summed in the backward pass. Ranks that run the same tokens
    all hold the same gradient, unless it is the gradient of a shard (`tensor_split`), so it is divided by their number
    first.
    """
    if distributed.world() == 1:
        return
    parameters = [p for m in modules if m is not None for p in m.parameters()]
    trained = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if not trained:
        return
    found = torch.tensor([p.grad is not None for p in trained], device=trained[0].device)
    for parameter, anywhere in zip(trained, distributed.all_reduce_sum(found).tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        if _tensor_parallel > 1 and parameter.grad is not None and has_whole_gradient(parameter):
            parameter.grad /= _tensor_parallel
    for bucket in _buckets([p.grad for p in trained if p.grad is not None]):
        flat = distributed.all_reduce_sum(torch.cat([g.reshape(-1) for g in bucket]))
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group consecutive tensors of one dtype into buckets of about BUCKET_NUMEL elements."""
    bucket, size = list[Tensor](), 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.numel() > BUCKET_NUMEL):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def broadcast_weights(*modules: nn.Module | None) -> None:
    """Broadcast the trained weights of rank 0 to all ranks, except sharded ones.

    Weights must be bitwise equal, because they are never compared again.
    """
    if distributed.world() == 1:
        return
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters() if module is not None else ():
                if parameter.requires_grad and not isinstance(parameter, DTensor):
                    distributed.broadcast_tensor(parameter.data)
