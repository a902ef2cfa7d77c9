"""A model whose weights, gradients and optimiser moments are sharded over the ranks (FSDP2, torch's `fully_shard`).

Each rank keeps an even shard of every weight, in float32. A layer's weights are all-gathered only while it runs,
forward and backward, in the half precision that its products are computed in anyway; what is outside of the layers
(embeddings, last norm, head) is gathered in float32, and residuals are float32 too. Gradients are reduce-scattered in
float32 and summed, not averaged, since losses are divided by denominators of the whole step. Under LoRA the frozen base
is sharded, in the type that it was loaded in; the adapter is replicated, and its gradients are all-reduced as without
sharding. All ranks must run the same number of passes: one with fewer micro-batches runs idle ones, see `idle`.

In full training each rank writes its shards of a checkpoint and some of the files of the final model
(`divided_checkpoint`, `model_folder`); a run may go on with another number of ranks. An adapter is saved by rank 0, and
by all ranks where it is merged into the base.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from posttrain.errors import ModelError
from posttrain.models import load as models
from posttrain.models import pretrained, slices, tower, vision
from posttrain.models.adapters import backbone, causal_of
from posttrain.models.images import probe_image
from posttrain.models.load import LoadedModel
from posttrain.recipe.sections import Model, Parallel
from posttrain.train import distributed, expert_split, rank_consistency, tensor_split
from posttrain.train.collectives import local
from posttrain.train.compiled import layers_of
from posttrain.train.context_split import split_lines
from posttrain.train.mesh import check_mesh, context_group, expert_mesh, shard_mesh, weight_mesh
from posttrain.train.tensor_split import Divider, Part

T = TypeVar("T")
PASS = "run_as_forward"  # the method of a sharded model that runs a function with its own weights whole


def check(section: Model) -> None:
    """Raises RecipeError where the ranks of this run cannot divide the model as the recipe says."""
    check_mesh(section, distributed.world())


def load(section: Model, base_dir: Path, *, seed: int) -> LoadedModel:
    """The model to train: whole, or divided. Of a directory of safetensors each rank then reads its own parts; others
    come whole to the host, and are divided layer by layer on their way to the GPU."""
    parallel = section.divided
    distributed.set_model_parallel_size(*((parallel.context, parallel.tensor) if parallel else (1,)))
    device = pretrained.device_of(section)
    if parallel is not None and parallel.follows_plan:
        check_plan(section, base_dir, parallel)
    if parallel is not None and (unfilled := slices.build_unfilled(section, base_dir, seed=seed)) is not None:
        rank_consistency.check_files(unfilled.files)
        loaded = shard_model(unfilled.loaded, device, parallel)
        slices.fill_parts(unfilled)
        check_shared_gradients(loaded, parallel)
        return loaded
    loaded = models.load(section, base_dir, seed=seed, training=True, on_host=parallel is not None)
    rank_consistency.check_weights(
        loaded.model, trained=parallel is not None
    )  # else rank 0 gives its own: `distributed.broadcast_weights`
    if parallel is not None:
        loaded = shard_model(loaded, device, parallel)
        check_shared_gradients(loaded, parallel)
    return loaded


def check_plan(section: Model, base_dir: Path, parallel: Parallel) -> None:
    """Raises ModelError where the model cannot be divided as transformers plans it; before its weights are read, unless
    only they say what it is."""
    bare = models.skeleton(section.model_copy(update={"lora": None}), base_dir)
    if bare is not None:
        _check_plan_of(bare.model, parallel)


def _check_plan_of(causal: Any, parallel: Parallel) -> None:
    if parallel.tensor > 1:
        tensor_split.check(causal, parallel.tensor)
    if parallel.expert > 1:
        expert_split.check(causal, parallel.expert)


def check_shared_gradients(loaded: LoadedModel, parallel: Parallel) -> None:
    """Raises ModelError where ranks that run the same tokens get different gradients of a weight that each has whole:
    transformers' plan leaves it out then, though each uses it for its own columns (an activation that is trained). It
    is tried on a few tokens; all ranks of the run call this."""
    if parallel.tensor == 1 or loaded.is_lora:
        return
    causal, training = causal_of(loaded.model), loaded.model.training
    ids = torch.arange(3, 11, device=loaded.device)[None] % causal.config.get_text_config().vocab_size
    with loaded.autocast():
        loaded.model.eval()
        states = as_forward(causal, lambda: backbone(causal)(input_ids=ids, use_cache=False).last_hidden_state)
    (states.float() * torch.linspace(-1, 1, states.numel(), device=loaded.device).view(states.shape)).sum().backward()
    loaded.model.train(training)
    wrong = [name for found in distributed.gather(tensor_split.find_unlike_gradients(causal)) for name in found]
    causal.zero_grad(set_to_none=True)
    if wrong:
        raise ModelError(
            f"model.parallel.tensor: transformers' plan for {causal.config.model_type} leaves out {wrong[0]}, whose"
            " gradient is in parts",
            hint=f"{tensor_split.SHARD_INSTEAD}, or train with LoRA",
        )


def shard_model(loaded: LoadedModel, device: torch.device, parallel: Parallel) -> LoadedModel:
    """Divide the model in place; it keeps a skeleton of itself, from which `whole` builds an ordinary one."""
    skeleton = without_storage(loaded.model)
    mesh, experts = (make(parallel, distributed.world(), device.type) for make in (weight_mesh, expert_mesh))
    assert mesh is not None
    if parallel.context > 1:
        split_lines(loaded.model, context_group(parallel, distributed.world(), device.type))
    adapter = {p for p in loaded.model.parameters() if p.requires_grad} if loaded.is_lora else set[nn.Parameter]()
    causal = causal_of(loaded.model)
    _check_plan_of(causal, parallel)
    shard(causal, mesh, loaded.half, adapter, experts)
    if loaded.images is not None:
        tower.run_in_every_pass(backbone(causal), loaded.images.read(probe_image()).tensors)
    for parameter in adapter:
        parameter.data = parameter.data.to(device)
    return dataclasses.replace(loaded, skeleton=skeleton)


def without_storage(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device; buffers are copied, for some are in no checkpoint."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    half: torch.dtype | None,
    kept: set[nn.Parameter],
    of_experts: DeviceMesh | None = None,
) -> None:
    """Divide the parameters of `model` in place, but for those that are `kept` whole, and bring this rank's part to its
    device. mesh, of_experts: as `weight_mesh` and `expert_mesh` give them; half: see above; or None."""
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    dense = shard_mesh(mesh)
    tensor = Divider(model, mesh["tensor"]) if "tensor" in (mesh.mesh_dim_names or ()) else None
    experts = set[Any]() if of_experts is None else set(expert_split.experts_of(model).values())
    divide = partial(fully_shard, reshard_after_forward=True, ignored_params=kept, shard_placement_fn=_sharded_dim)
    for layer in layers_of(model):
        if tensor is not None:
            tensor.divide(layer)
        for module in [module for module in layer.modules() if module in experts]:
            assert of_experts is not None
            expert_split.divide_experts(module, of_experts["expert"])
            divide(module, mesh=shard_mesh(of_experts), mp_policy=precision)
        divide(layer, mesh=dense, mp_policy=precision)
    if tensor is not None:
        tensor.divide(model)
    divide(model, mesh=dense)
    if tensor is not None:
        tensor.connect(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows sums only
    # what stands around the layers, whose weights come in `half`, computes in it as well, under autocast or not
    setattr(model, PASS, partial(run_in_dtype, mesh.device_type, half))
    register_fsdp_forward_method(model, PASS)


def _sharded_dim(parameter: nn.Parameter) -> Shard | None:
    """The dimension that FSDP divides: the first, unless tensor parallelism takes a part of each of several pieces of
    it, whose parts have no order then."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return Shard(1) if any(not p.is_shard() and getattr(p, "dim", None) == 0 for p in placements) else None


def run_in_dtype(device: str, half: torch.dtype | None, function: Callable[[], T]) -> T:
    """What `function` returns with its products in `half`; as it is without one."""
    if half is None:
        return function()
    with torch.autocast(device, dtype=half, cache_enabled=False):  # weights of layers are there for one use
        return function()


def as_forward(model: Any, function: Callable[[], T]) -> T:
    """What `function` returns, run as a forward pass of `model`: it may use embeddings and head by themselves."""
    return getattr(model, PASS)(function) if isinstance(model, FSDPModule) else function()


def sum_over_copies(model: Any, now: bool) -> None:
    """Whether the next backward pass adds up the gradients of copies of a divided model (`parallel.replicate`): only
    the last of an update needs to. Within a copy each pass does, for no rank has room for gradients of whole layers."""
    divided = causal_of(model)
    if isinstance(divided, FSDPModule):
        divided.set_requires_all_reduce(now)


def drop_unseen_gradients(model: Any) -> None:
    """Take the gradient, which is 0, from the tower of a divided model if no rank has had an image since the last
    update: without one, as on one rank, the optimiser leaves it as it is. All ranks must ask."""
    causal = causal_of(model)
    if not isinstance(causal, FSDPModule) or not tower.runs_in_every_pass(backbone(causal)):
        return
    if not distributed.any_rank(tower.take_images_seen(backbone(causal))):
        for name, parameter in model.named_parameters():
            if vision.part_of(name) != "language":
                parameter.grad = None


@contextlib.contextmanager
def keep_without_gradient(model: Any) -> Iterator[None]:
    """Around an idle pass, whose gradient is 0: whole weights that had no gradient have none afterwards (an adapter
    that no row of the update is of), and its images do not count for `drop_unseen_gradients`. With a gradient of 0 the
    optimiser would decay them, and move their moments. Divided weights get the gradient of the other ranks' passes."""
    weights = [w for w in model.parameters() if w.grad is None and not isinstance(w, DTensor)]
    with tower.without_counting_images(backbone(causal_of(model))):
        yield
    for weight in weights:
        weight.grad = None


def idle(passes: int, loaded: LoadedModel) -> int:
    """How many passes this rank must add to its own, so that all make as many. A collective: call it before the first
    pass of any rank."""
    return max(distributed.gather(passes)) - passes if loaded.is_sharded else 0


def capture_passes(loaded: LoadedModel, passes: Callable[..., T], *args: Any) -> distributed.Captured[T]:
    """`distributed.capture` for forward and backward passes. If the model is divided, an error is raised at once: the
    others wait for this rank within a pass, where only `distributed.propagate_failures` reaches them."""
    return distributed.Captured(passes(*args)) if loaded.is_sharded else distributed.capture(passes, *args)


# --- whole tensors ---


def plain(tensor: Any) -> Any:
    """A DTensor all-gathered, on every rank; all ranks must call this. Other values are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_one_piece(tensor: Tensor) -> Tensor:
    """A packed weight, of which each rank has a part of every block (`tensor_split.Part`), redistributed so that each
    rank has one contiguous part: DCP stores no others. A collective. Other tensors are returned as they are."""
    pieces = _in_pieces(tensor)
    if not pieces:
        return tensor
    assert isinstance(tensor, DTensor)
    even = [Shard(pieces[n].dim) if n in pieces else p for n, p in enumerate(tensor.placements)]
    return _gather_along(tensor, pieces).redistribute(placements=even)


@torch.no_grad()
def copy_pieces(tensor: Tensor, value: Tensor) -> None:
    """Copy into a packed weight what was loaded into its `in_one_piece`; a collective."""
    assert isinstance(tensor, DTensor) and isinstance(value, DTensor)
    pieces, mesh = _in_pieces(tensor), tensor.device_mesh
    found = _gather_along(value, pieces).to_local()
    for n, part in pieces.items():
        found = part.of(found, mesh.get_local_rank(n), mesh.size(n))
    tensor.to_local().copy_(found)


def _gather_along(tensor: DTensor, dimensions: Collection[int]) -> DTensor:
    """The tensor replicated along these dimensions of the mesh: an all-gather."""
    placements = [Replicate() if n in dimensions else p for n, p in enumerate(tensor.placements)]
    return tensor.redistribute(placements=placements)


def _in_pieces(tensor: Tensor) -> dict[int, Part]:
    """The dimensions of the mesh along which a packed weight is sharded block by block, each with its `Part`."""
    if not isinstance(tensor, DTensor):
        return {}
    names, placements = tensor.device_mesh.mesh_dim_names or (), tuple[Any, ...](tensor.placements)
    of_tensor = [(n, p) for n, (name, p) in enumerate(zip(names, placements, strict=False)) if name == "tensor"]
    return {n: Part(p.dim, p.split_factor) for n, p in of_tensor if hasattr(p, "split_factor")}


def part_of(full: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has, divided as `like` is."""
    full = full.to(like.device)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def distinct_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's `state_dict`, divided tensors as they are, each tied one once, by its first name."""
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        distinct.setdefault(id(tensor), (name, tensor.detach()))
    return dict(distinct.values())


def whole(loaded: LoadedModel) -> LoadedModel:
    """An ordinary model with all the weights of a sharded one, on rank 0's host; a collective. Other ranks get their
    sharded model back.

    Weights are all-gathered one at a time. A model that is not sharded is returned as it is.
    """
    if loaded.skeleton is None:
        return loaded
    state: dict[str, Tensor] = {}
    found: dict[int, Tensor] = {}  # tied weights stay one tensor
    for name, tensor in loaded.model.state_dict(keep_vars=True).items():
        if id(tensor) not in found:
            full = plain(tensor.detach())
            found[id(tensor)] = full.cpu() if distributed.is_main() else full.new_empty(0)
        state[name] = found[id(tensor)]
    if not distributed.is_main():
        return loaded
    model = copy.deepcopy(loaded.skeleton)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return dataclasses.replace(loaded, model=model, skeleton=None)


def fill(model: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """Copy whole weights into a divided model; returns the names that it has and `weights` has not."""
    missing = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in weights:
            copy_whole(tensor, weights[name])
        else:
            missing.append(name)
    return missing


@torch.no_grad()
def copy_whole(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value, which every rank has, into a tensor that may be divided."""
    local(tensor).copy_(local(part_of(value, tensor)) if isinstance(tensor, DTensor) else value)


def spread(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A `state_dict` with whole tensors as one that fits `optimizer`: divided where its parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if isinstance(parameter, DTensor):
            values = state["state"].get(number, {})
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    values[key] = part_of(value, parameter)
    return state
