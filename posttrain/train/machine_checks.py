"""Machine checks of every training stage, and the setup of torch's CUDA allocator, before data and model are loaded."""

from __future__ import annotations

import os

import torch

from posttrain.errors import RecipeError
from posttrain.models import pretrained
from posttrain.models.adapters import BASE
from posttrain.recipe.stages import DpoRecipe, RewardModelRecipe, RlRecipe, SftRecipe
from posttrain.rollout.weight_transfer import set_allocator
from posttrain.train import compiled, optim, sharding

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PROBE_BYTES = 1 << 22  # allocated to see whether the driver can map memory


def check(recipe: SftRecipe | DpoRecipe | RewardModelRecipe | RlRecipe) -> None:
    """Raise UserError if this machine cannot run the recipe's optimizer, precision, compilation or sharding.

    On a GPU, also sets up torch's allocator.
    """
    device = pretrained.device_of(recipe.model)
    optim.check(recipe.optim, device)
    if recipe.model.half_weights and pretrained.dtype_of(recipe.model) != torch.bfloat16:  # `auto`: float32 on a CPU
        raise RecipeError("model.half_weights needs matmuls in bfloat16", hint="write `model.dtype: bfloat16`")
    compiled.check(recipe.model, device)
    sharding.check(recipe.model)
    if isinstance(recipe, RlRecipe):
        check_roles(recipe, device)
    use_expandable_segments(device)


def check_roles(recipe: RlRecipe, device: torch.device) -> None:
    """Raise RecipeError for a workflow role `base` next to adapters if vLLM runs on a CPU.

    vLLM on a CPU computes requests without an adapter with the last adapter.
    """
    workflow = recipe.rollout.workflow
    if workflow and BASE in workflow.adapters.values() and recipe.rollout.engine == "vllm" and device.type == "cpu":
        raise RecipeError(
            "on a CPU, vLLM cannot serve requests without an adapter next to requests with one",
            where="rollout.workflow.adapters",
            hint="write `rollout.engine: transformers`, or leave `base` out",
        )


def use_expandable_segments(device: torch.device) -> bool:
    """Make all later GPU allocations of this process use torch's expandable segments; return whether they do.

    Segments of fixed sizes stay reserved when micro-batches differ in size. Settings from the user's environment are
    kept, and so is the default if the driver cannot map memory. Memory to be mapped by another process is allocated
    from regular segments: `rollout.weight_transfer.plain_segments`.
    """
    if device.type != "cuda" or any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        return False
    set_allocator("expandable_segments:True")
    try:
        torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # from the driver: some sandboxes do not expose it fully
        set_allocator("expandable_segments:False")
        return False
    return True
