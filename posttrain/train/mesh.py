"""The device mesh of a run: which ranks hold parts of the same weights, and which hold copies of the same parts.

Ranks are counted with copies outermost and context innermost: with `replicate: 2` on two machines of four GPUs each
machine holds the whole model, and only sums of gradients pass between machines; with `context: 2` neighbours run the
same rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from posttrain.errors import RecipeError
from posttrain.recipe.sections import Model, Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_mesh(section: Model, ranks: int) -> None:
    """Raises RecipeError where `model.parallel` cannot be laid out on so many ranks."""
    if section.divided is not None:
        shard_ranks(section.divided, ranks)


def shard_ranks(parallel: Parallel, ranks: int) -> int:
    """Among how many of `ranks` processes each weight is divided: those of `shard` and of `context`. Raises RecipeError
    where the numbers do not fit."""
    if ranks == 1:
        raise RecipeError("model.parallel divides a model among several processes; this is one", hint="add --gpus N")
    others = {"replicate": parallel.replicate, "context": parallel.context}
    taken = math.prod(others.values())
    asked = "auto" if parallel.shard == "auto" else taken * parallel.shard
    if ranks % taken or asked not in ("auto", ranks):
        numbers = " x ".join(f"{key} {number}" for key, number in {"shard": parallel.shard, **others}.items())
        raise RecipeError(
            f"model.parallel does not fit the {ranks} processes of this run: {numbers}",
            hint="their product must be the number of processes; `shard: auto` takes all that the others leave",
        )
    return ranks // parallel.replicate


def weight_mesh(parallel: Parallel, ranks: int, device_type: str) -> DeviceMesh:
    """The mesh that weights are divided over: (replicate, shard), or (shard) alone. All ranks call it together."""
    from torch.distributed.device_mesh import init_device_mesh

    parts = shard_ranks(parallel, ranks)
    if parallel.replicate == 1:
        return init_device_mesh(device_type, (parts,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (parallel.replicate, parts), mesh_dim_names=("replicate", "shard"))


def context_group(parallel: Parallel, ranks: int, device_type: str) -> Any:
    """The process group of the ranks that run the same rows as this one. All ranks call it together."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (ranks // parallel.context, parallel.context)
    return init_device_mesh(device_type, shape, mesh_dim_names=("rows", "context")).get_group("context")
