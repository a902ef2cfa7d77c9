"""Sharding of a model's weights, gradients and optimiser moments over the ranks (FSDP2, torch's `fully_shard`).

Each rank keeps an even shard of every weight, in float32. A layer's weights are all-gathered only while it runs,
forward and backward, in the half precision of its matrix products; weights outside the layers (embeddings, last norm,
head) are gathered in float32, and residuals are float32 too. Gradients are reduce-scattered in float32 and summed, not
averaged, since losses are divided by denominators of the whole step. With LoRA the frozen base is sharded, in the dtype
in which it was loaded; the adapter is replicated, and its gradients are all-reduced as without sharding. All ranks must
run the same number of passes: a rank with fewer micro-batches runs idle ones, see `idle_passes`.

In full training each rank writes its shards of a checkpoint and some of the files of the final model
(`divided_checkpoint`, `model_folder`); a run may resume with another number of ranks. An adapter is saved by rank 0,
and by all ranks if it is merged into the base.
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
from posttrain.train import data_parallel, distributed, expert_split, rank_consistency, tensor_split
from posttrain.train.collectives import local
from posttrain.train.compiled import layers_of
from posttrain.train.context_split import split_lines
from posttrain.train.mesh import check_mesh, context_group, expert_mesh, shard_mesh, weight_mesh
from posttrain.train.tensor_split import Divider, Part

T = TypeVar("T")
_GATHERED = "posttrain_gathered_dtype"  # attribute of a sharded model
PASS = "run_as_forward"  # method of a sharded model that runs a function with the model's root weights gathered


def check(section: Model) -> None:
    """Raise RecipeError if the ranks of this run cannot divide the model as the recipe says."""
    check_mesh(section, distributed.world())


def load(section: Model, base_dir: Path, *, seed: int) -> LoadedModel:
    """Load the model to train, whole or divided.

    From a directory of safetensors each rank reads only its own shards; other models are loaded whole on the host and
    divided layer by layer on their way to the GPU.
    """
    parallel = section.divided
    data_parallel.set_model_parallel_size(*((parallel.context, parallel.tensor) if parallel else (1,)))
    device = pretrained.device_of(section)
    if parallel is not None and parallel.follows_plan:  # checked before the weights are read, if possible
        bare = models.build_skeleton(section.model_copy(update={"lora": None}), base_dir)
        if bare is not None:
            check_plan(bare.model, parallel)
    if parallel is not None and (unfilled := slices.build_empty(section, base_dir, seed=seed)) is not None:
        rank_consistency.check_files(unfilled.files)
        loaded = shard_model(unfilled.loaded, device, parallel)
        slices.read_local_weights(unfilled)
        check_shared_gradients(loaded, parallel)
        return loaded
    loaded = models.load(section, base_dir, seed=seed, training=True, on_host=parallel is not None)
    rank_consistency.check_weights(
        loaded.model, trained=parallel is not None
    )  # else rank 0 gives its own: `data_parallel.broadcast_weights`
    if parallel is not None:
        loaded = shard_model(loaded, device, parallel)
        check_shared_gradients(loaded, parallel)
    return loaded


def check_plan(causal: Any, parallel: Parallel) -> None:
    """Raise ModelError if transformers' plan cannot divide the model; its weights may be on the meta device."""
    if parallel.tensor > 1:
        tensor_split.check(causal, parallel.tensor)
    if parallel.expert > 1:
        expert_split.check(causal, parallel.expert)


def check_shared_gradients(loaded: LoadedModel, parallel: Parallel) -> None:
    """Raise ModelError if ranks that run the same tokens get different gradients of a replicated weight.

    This happens if transformers' plan leaves out a weight that each rank applies to its own columns (a trained
    activation). Checked with a pass over a few tokens; all ranks of the run must call this.
    """
    if parallel.tensor == 1 or loaded.is_lora:
        return
    causal, training = causal_of(loaded.model), loaded.model.training
    ids = torch.arange(3, 11, device=loaded.device)[None] % causal.config.get_text_config().vocab_size
    with loaded.autocast():
        loaded.model.eval()
        states = as_forward(causal, lambda: backbone(causal)(input_ids=ids, use_cache=False).last_hidden_state)
    (states.float() * torch.linspace(-1, 1, states.numel(), device=loaded.device).view(states.shape)).sum().backward()
    loaded.model.train(training)
    wrong = [
        name for differing in distributed.gather(tensor_split.find_differing_gradients(causal)) for name in differing
    ]
    causal.zero_grad(set_to_none=True)
    if wrong:
        raise ModelError(
            f"model.parallel.tensor: transformers' plan for {causal.config.model_type} leaves out {wrong[0]}, whose"
            " gradient differs between ranks",
            hint=f"{tensor_split.SHARD_INSTEAD}, or train with LoRA",
        )


def shard_model(loaded: LoadedModel, device: torch.device, parallel: Parallel) -> LoadedModel:
    """Divide the model in place; the result keeps a skeleton, from which `gather_model` builds an ordinary model."""
    # parameters of the skeleton are on the meta device; buffers are copied, since some are in no checkpoint
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in loaded.model.parameters()
    }
    skeleton = copy.deepcopy(loaded.model, memo)
    mesh, experts = (make(parallel, distributed.world(), device.type) for make in (weight_mesh, expert_mesh))
    assert mesh is not None
    if parallel.context > 1:
        split_lines(loaded.model, context_group(parallel, distributed.world(), device.type))
    adapter = {p for p in loaded.model.parameters() if p.requires_grad} if loaded.is_lora else set[nn.Parameter]()
    causal = causal_of(loaded.model)
    check_plan(causal, parallel)
    shard(causal, mesh, loaded.half, adapter, experts)
    if loaded.images is not None:
        tower.run_in_every_pass(backbone(causal), loaded.images.read(probe_image()).tensors)
    for parameter in adapter:
        parameter.data = parameter.data.to(device)
    return dataclasses.replace(loaded, skeleton=skeleton)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    half: torch.dtype | None,
    ignored: set[nn.Parameter],
    of_experts: DeviceMesh | None = None,
) -> None:
    """Divide the parameters of `model` in place, except `ignored` ones, and move this rank's shards to its device.

    mesh, of_experts: from `weight_mesh` and `expert_mesh`. half: dtype in which layers are gathered (None: float32).
    """
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    dense = shard_mesh(mesh)
    tensor = Divider(model, mesh["tensor"]) if "tensor" in (mesh.mesh_dim_names or ()) else None
    experts = set[Any]() if of_experts is None else set(expert_split.experts_of(model).values())
    divide = partial(fully_shard, reshard_after_forward=True, ignored_params=ignored, shard_placement_fn=_sharded_dim)
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
            module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums
    # Modules around the layers compute in `half` as well, inside or outside of autocast.
    setattr(model, PASS, partial(run_in_dtype, mesh.device_type, half))
    setattr(model, _GATHERED, half)
    register_fsdp_forward_method(model, PASS)


def _sharded_dim(parameter: nn.Parameter) -> Shard | None:
    """Return the dimension that FSDP shards: the first, unless tensor parallelism shards that one in several blocks.

    The blocks of a rank's part are then not contiguous in the whole weight, which FSDP cannot shard further.
    """
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return Shard(1) if any(not p.is_shard() and getattr(p, "dim", None) == 0 for p in placements) else None


def run_in_dtype(device: str, half: torch.dtype | None, function: Callable[[], T]) -> T:
    """Call `function` under autocast to `half`; without autocast if `half` is None."""
    if half is None:
        return function()
    with torch.autocast(device, dtype=half, cache_enabled=False):  # gathered weights are freed after one use
        return function()


def as_forward(model: Any, function: Callable[[], T]) -> T:
    """Call `function` as a forward pass of `model`, so that it may use embeddings and head directly."""
    return getattr(model, PASS)(function) if isinstance(model, FSDPModule) else function()


def dtype_of_products(model: Any) -> torch.dtype:
    """Return the dtype of the matrix products of a pass of `model` (`as_forward`).

    It is the dtype of the weights; a sharded model with weights in float32 gathers its layers in half precision.
    """
    dtype: torch.dtype = getattr(model, _GATHERED, None) or model.dtype
    return dtype


def sum_over_copies(model: Any, now: bool) -> None:
    """Set whether the next backward pass all-reduces gradients over copies of a divided model (`parallel.replicate`).

    Only the last pass of an update needs to. Within a copy each pass reduces, since no rank has room for gradients of
    whole layers.
    """
    divided = causal_of(model)
    if isinstance(divided, FSDPModule):
        divided.set_requires_all_reduce(now)


def drop_unseen_gradients(model: Any) -> None:
    """Remove the (zero) gradient of a divided model's vision tower if no rank has had an image since the last update.

    Then the optimiser leaves the tower as it is, as on one rank. All ranks must call this.
    """
    causal = causal_of(model)
    if not isinstance(causal, FSDPModule) or not tower.runs_in_every_pass(backbone(causal)):
        return
    if not distributed.any_rank(tower.pop_images_seen(backbone(causal))):
        for name, parameter in model.named_parameters():
            if vision.find_part(name) != "language":
                parameter.grad = None


@contextlib.contextmanager
def keep_without_gradient(model: Any) -> Iterator[None]:
    """Context manager around an idle pass, whose gradient is 0: whole weights without a gradient have none afterwards.

    Such weights are, for example, of an adapter that no row of the update uses; with a zero gradient the optimiser
    would decay them and change their moments. Images of the idle pass do not count for `drop_unseen_gradients`. Divided
    weights get the gradient of the other ranks' passes.
    """
    weights = [w for w in model.parameters() if w.grad is None and not isinstance(w, DTensor)]
    with tower.without_counting_images(backbone(causal_of(model))):
        yield
    for weight in weights:
        weight.grad = None


def idle_passes(passes: int, divided: bool) -> int:
    """Return how many passes this rank must add so that all ranks run equally many.

    divided: the model is (`LoadedModel.is_sharded`). A collective: call it before the first pass of any rank.
    """
    return max(distributed.gather(passes)) - passes if divided else 0


def capture_passes(divided: bool, passes: Callable[..., T], *args: Any) -> distributed.Captured[T]:
    """`distributed.capture` for forward and backward passes.

    With a divided model an error is raised immediately: other ranks wait for this one within a pass, where only
    `distributed.propagate_failures` reaches them.
    """
    return distributed.Captured(passes(*args)) if divided else distributed.capture(passes, *args)


# --- whole tensors ---


def full_tensor(tensor: Any) -> Any:
    """All-gather a DTensor on every rank; other values are returned as they are. All ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def contiguous_shard(tensor: Tensor) -> Tensor:
    """Redistribute a packed weight so that each rank has one contiguous part instead of a part of every block.

    DCP cannot store block-wise parts (`tensor_split.Part`). A collective. Other tensors are returned as they are.
    """
    parts = _block_parts(tensor)
    if not parts:
        return tensor
    assert isinstance(tensor, DTensor)
    even = [Shard(parts[n].dim) if n in parts else p for n, p in enumerate(tensor.placements)]
    return _gather_along(tensor, parts).redistribute(placements=even)


@torch.no_grad()
def copy_contiguous_shard(tensor: Tensor, value: Tensor) -> None:
    """Copy into a packed weight the value that was loaded into its `contiguous_shard`; a collective."""
    assert isinstance(tensor, DTensor) and isinstance(value, DTensor)
    parts, mesh = _block_parts(tensor), tensor.device_mesh
    own = _gather_along(value, parts).to_local()
    for n, part in parts.items():
        own = part.of(own, mesh.get_local_rank(n), mesh.size(n))
    tensor.to_local().copy_(own)


def _gather_along(tensor: DTensor, dimensions: Collection[int]) -> DTensor:
    """All-gather the tensor along these dimensions of the mesh."""
    placements = [Replicate() if n in dimensions else p for n, p in enumerate(tensor.placements)]
    return tensor.redistribute(placements=placements)


def _block_parts(tensor: Tensor) -> dict[int, Part]:
    """Return the mesh dimensions along which a packed weight is sharded block by block, each with its `Part`."""
    if not isinstance(tensor, DTensor):
        return {}
    names, placements = tensor.device_mesh.mesh_dim_names or (), tuple[Any, ...](tensor.placements)
    of_tensor = [(n, p) for n, (name, p) in enumerate(zip(names, placements, strict=False)) if name == "tensor"]
    return {n: Part(p.dim, p.split_factor) for n, p in of_tensor if hasattr(p, "split_factor")}


def shard_like(full: Tensor, like: DTensor) -> DTensor:
    """Shard a tensor that every rank has, as `like` is sharded."""
    full = full.to(like.device)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def distinct_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's `state_dict` with tied tensors once, under their first name; divided tensors stay divided."""
    distinct: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        distinct.setdefault(id(tensor), (name, tensor.detach()))
    return dict(distinct.values())


def gather_model(loaded: LoadedModel) -> LoadedModel:
    """Gather a sharded model into an ordinary one on rank 0's host; a collective.

    Other ranks get their sharded model back. Weights are all-gathered one at a time. A model that is not sharded is
    returned as it is.
    """
    if loaded.skeleton is None:
        return loaded
    state: dict[str, Tensor] = {}
    found: dict[int, Tensor] = {}  # tied weights stay one tensor
    for name, tensor in loaded.model.state_dict(keep_vars=True).items():
        if id(tensor) not in found:
            full = full_tensor(tensor.detach())
            found[id(tensor)] = full.cpu() if distributed.is_main() else full.new_empty(0)
        state[name] = found[id(tensor)]
    if not distributed.is_main():
        return loaded
    model = copy.deepcopy(loaded.skeleton)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return dataclasses.replace(loaded, model=model, skeleton=None)


def copy_weights(model: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """Copy whole weights into a divided model; return the names of its weights that `weights` lacks."""
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
    local(tensor).copy_(local(shard_like(value, tensor)) if isinstance(tensor, DTensor) else value)


def shard_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Shard the whole tensors of a `state_dict` so that it fits `optimizer`, whose parameters may be divided."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if isinstance(parameter, DTensor):
            values = state["state"].get(number, {})
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    values[key] = shard_like(value, parameter)
    return state
