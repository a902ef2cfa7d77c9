"""Device mesh of a run: which ranks hold shards of the same weights, and which hold replicas of the same shards.

Ranks are numbered with replicas outermost, then shard, context and tensor. With `replicate: 2` on two machines of four
GPUs, each machine holds the whole model, and only gradient sums pass between machines; with `context: 2` or `tensor: 2`
neighboring ranks run the same rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from posttrain.errors import RecipeError
from posttrain.recipe.sections import Model, Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_mesh(section: Model, ranks: int) -> None:
    """Raise RecipeError if `model.parallel` does not fit this number of ranks."""
    if section.divided is not None:
        shard_ranks(section.divided, ranks)


def shard_ranks(parallel: Parallel, ranks: int) -> int:
    """Return the number of `ranks` that each weight is sharded over: all dimensions except `replicate`.

    Raises RecipeError if the sizes do not fit.
    """
    if ranks == 1:
        raise RecipeError("model.parallel divides a model among several processes; this is one", hint="add --gpus N")
    others = {key: getattr(parallel, key) for key in ("replicate", "context", "tensor", "expert")}
    product = math.prod(others.values())
    wanted = "auto" if parallel.shard == "auto" else product * parallel.shard
    if ranks % product or wanted not in ("auto", ranks):
        shown = {key: number for key, number in others.items() if number > 1 or key == "replicate"}
        numbers = " x ".join(f"{key} {number}" for key, number in {"shard": parallel.shard, **shown}.items())
        raise RecipeError(
            f"model.parallel does not fit the {ranks} processes of this run: {numbers}",
            hint="their product must be the number of processes; `shard: auto` uses all remaining processes",
        )
    return ranks // parallel.replicate


def weight_mesh(parallel: Parallel, ranks: int, device_type: str) -> DeviceMesh:
    """Create the mesh that weights are sharded over. All ranks call this together.

    Dimensions: `replicate`, `shard` and `tensor`, without those of size 1 except `shard`. Ranks of a context and of
    experts are part of `shard`.
    """
    shard = shard_ranks(parallel, ranks) // parallel.tensor
    return _init_mesh({"replicate": parallel.replicate, "shard": shard, "tensor": parallel.tensor}, device_type)


def expert_mesh(parallel: Parallel, ranks: int, device_type: str) -> DeviceMesh | None:
    """Create the mesh that experts are sharded over: `replicate`, `shard` and `expert`.

    None without expert parallelism. All ranks call this together.
    """
    if parallel.expert == 1:
        return None
    shard = shard_ranks(parallel, ranks) // parallel.expert
    return _init_mesh({"replicate": parallel.replicate, "shard": shard, "expert": parallel.expert}, device_type)


def _init_mesh(sizes: dict[str, int], device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh dimensions over which FSDP shards weights and sums gradients."""
    return mesh["replicate", "shard"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["shard"]


def context_group(parallel: Parallel, ranks: int, device_type: str) -> Any:
    """Return the process group of the ranks that divide packed lines with this one. All ranks call this together."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (ranks // parallel.context // parallel.tensor, parallel.context, parallel.tensor)
    return init_device_mesh(device_type, shape, mesh_dim_names=("rows", "context", "tensor")).get_group("context")
