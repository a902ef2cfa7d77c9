"""The device mesh of a run: which ranks hold parts of the same weights, and which hold copies of the same parts.

Ranks are counted with copies outermost, then shard, context and tensor: with `replicate: 2` on two machines of four
GPUs each machine holds the whole model, and only sums of gradients pass between machines; with `context: 2` or
`tensor: 2` neighbours run the same rows.
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
    """Among how many of `ranks` processes each weight is divided: all but those of `replicate`. Raises RecipeError
    where the numbers do not fit."""
    if ranks == 1:
        raise RecipeError("model.parallel divides a model among several processes; this is one", hint="add --gpus N")
    others = {key: getattr(parallel, key) for key in ("replicate", "context", "tensor", "expert")}
    taken = math.prod(others.values())
    asked = "auto" if parallel.shard == "auto" else taken * parallel.shard
    if ranks % taken or asked not in ("auto", ranks):
        given = {key: number for key, number in others.items() if number > 1 or key == "replicate"}
        numbers = " x ".join(f"{key} {number}" for key, number in {"shard": parallel.shard, **given}.items())
        raise RecipeError(
            f"model.parallel does not fit the {ranks} processes of this run: {numbers}",
            hint="their product must be the number of processes; `shard: auto` takes all that the others leave",
        )
    return ranks // parallel.replicate


def weight_mesh(parallel: Parallel, ranks: int, device_type: str) -> DeviceMesh:
    """The mesh that weights are divided over: its dimensions are `replicate`, `shard` and `tensor`, without those of
    size 1 but for `shard`. Ranks of a context and of experts are among those of `shard`. All ranks call it together."""
    shard = shard_ranks(parallel, ranks) // parallel.tensor
    return _mesh({"replicate": parallel.replicate, "shard": shard, "tensor": parallel.tensor}, device_type)


def expert_mesh(parallel: Parallel, ranks: int, device_type: str) -> DeviceMesh | None:
    """The mesh that experts are divided over: `replicate`, `shard` and `expert`; None without expert parallelism. All
    ranks call it together."""
    if parallel.expert == 1:
        return None
    shard = shard_ranks(parallel, ranks) // parallel.expert
    return _mesh({"replicate": parallel.replicate, "shard": shard, "expert": parallel.expert}, device_type)


def _mesh(sizes: dict[str, int], device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of a mesh that FSDP divides weights over, and sums gradients."""
    return mesh["replicate", "shard"] if "replicate" in (mesh.mesh_dim_names or ()) else mesh["shard"]


def context_group(parallel: Parallel, ranks: int, device_type: str) -> Any:
    """The process group of the ranks that divide lines of rows with this one. All ranks call it together."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (ranks // parallel.context // parallel.tensor, parallel.context, parallel.tensor)
    return init_device_mesh(device_type, shape, mesh_dim_names=("rows", "context", "tensor")).get_group("context")
