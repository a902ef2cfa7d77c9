"""Expert parallelism: each rank of a group holds some of the experts in full, and tokens of all ranks are sent to them.

Ranks of a group run different rows. In each MoE layer every rank sends its tokens to the ranks of the experts chosen by
its router; those ranks run their experts on the received tokens and send the results back, where they are combined with
the router's weights. Which weights are experts is defined by transformers' plan of the architecture (`_ep_plan`). Other
weights are sharded over the same ranks by FSDP; the experts of a rank are sharded over the ranks that hold the same
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from posttrain.errors import ModelError
from posttrain.models.adapters import strip_base_layer
from posttrain.train.collectives import collective
from posttrain.train.tensor_split import Part, base_layer, run_experts, wild_name

WEIGHTS = "grouped_gemm"  # plan style of weights whose first dimension is the experts
MODULES = ("ep_dispatch_experts", "moe_tp_experts")
PART = Part(0)


def experts_of(causal: Any) -> dict[str, Any]:
    """Return the expert modules of a model by name, with adapters. Raises ModelError if transformers has no plan."""
    plan: dict[str, str] = getattr(causal, "_ep_plan", None) or {}
    experts = {name: module for name, module in causal.named_modules() if plan.get(wild_name(name)) in MODULES}
    for name, module in experts.items():
        leaves = [leaf for leaf, weight in base_layer(module)._parameters.items() if weight is not None]
        if any(plan.get(f"{wild_name(strip_base_layer(name))}.{leaf}") != WEIGHTS for leaf in leaves):
            experts = {}
            break
    if not experts:
        raise ModelError(
            "model.parallel.expert: transformers has no expert-parallel plan that posttrain supports for"
            f" {causal.config.model_type}",
            hint="write `shard` in place of `expert`",
        )
    return experts


def check(causal: Any, count: int) -> None:
    """Raise ModelError if `count` ranks cannot divide the experts of a model; weights may be on the meta device."""
    for module in experts_of(causal).values():
        experts = next(w.shape[0] for w in base_layer(module)._parameters.values() if w is not None)
        if experts % count:
            raise ModelError(
                f"model.parallel.expert: {count} GPUs cannot divide the {experts} experts of this"
                f" {causal.config.model_type}",
                hint=f"write a number that divides {experts}",
            )


def divide_experts(module: Any, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts in a module, with its adapters, and make it exchange tokens with other ranks."""
    experts, rank, count = base_layer(module), mesh.get_local_rank(), mesh.size()
    for leaf, weight in experts._parameters.items():
        if weight is not None:
            shard = PART.of(weight.detach(), rank, count).contiguous()
            placed = DTensor.from_local(shard, mesh, [PART.placement], run_check=False)
            experts._parameters[leaf] = nn.Parameter(placed, weight.requires_grad)
    own_part = dict.fromkeys(experts._parameters, partial(PART.of, rank=rank, count=count))
    experts.num_experts //= count
    run = run_experts(module, own_part)
    module.forward = partial(_exchange_tokens, run, experts.num_experts, mesh.get_group())


def _exchange_tokens(
    run: Callable[..., Tensor], local: int, group: Any, hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Compute the output [T,H] of all experts for this rank's tokens [T,H].

    index [T,K]: experts chosen for each token, weighted by `weights` [T,K]. run: this rank's experts, `local` in
    number.
    """
    count, chosen = dist.get_world_size(group), index.reshape(-1)
    order = chosen.argsort(stable=True)
    sent = torch.bincount(chosen, minlength=local * count).view(count, local)  # by rank and expert
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sizes, back = sent.sum(1).tolist(), received.sum(1).tolist()
    tokens = _exchange(hidden[order // index.shape[-1]], sizes, back, group)
    experts = torch.arange(local, device=hidden.device).repeat(count).repeat_interleave(received.reshape(-1))
    if missing := not len(tokens):  # a rank without tokens must still take part in the backward exchange
        tokens, experts = tokens.sum(0, keepdim=True), experts.new_zeros(1)
    found = run(tokens, experts[:, None], tokens.new_ones(len(tokens), 1))
    found = _exchange(found[:0] if missing else found, back, sizes, group)
    placed = torch.empty_like(found).index_copy(0, order, found).view(*index.shape, -1)
    return (placed * weights[..., None].to(placed.dtype)).sum(-2)


def _exchange(rows: Tensor, sizes: list[int], back: list[int], group: Any) -> Tensor:
    """All-to-all of rows [T,H], ordered by rank, within the group; the backward pass sends the gradients back."""
    return collective(rows, partial(_send, sizes, back, group), partial(_send, back, sizes, group))


def _send(sizes: list[int], back: list[int], group: Any, rows: Tensor) -> Tensor:
    received = rows.new_empty(sum(back), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), back, sizes, group=group)
    return received
