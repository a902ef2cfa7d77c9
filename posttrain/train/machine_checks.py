"""Machine checks of every training stage, before it reads data or loads a model."""

from __future__ import annotations

import torch

from posttrain.errors import RecipeError
from posttrain.models import pretrained
from posttrain.models.adapters import BASE
from posttrain.recipe.stages import DpoRecipe, RewardModelRecipe, RlRecipe, SftRecipe
from posttrain.train import allocator, compiled, optim, sharding


def check(recipe: SftRecipe | DpoRecipe | RewardModelRecipe | RlRecipe) -> None:
    """Raise UserError if this machine cannot run the recipe's optimizer, compilation or sharding.

    On a GPU, also sets up torch's allocator.
    """
    device = pretrained.device_of(recipe.model)
    optim.check(recipe.optim, device)
    check_half_weights(recipe)
    compiled.check(recipe.model, device)
    sharding.check(recipe.model)
    if isinstance(recipe, RlRecipe):
        check_roles(recipe, device)
    allocator.use_expandable_segments(device)


def check_half_weights(recipe: SftRecipe | DpoRecipe | RewardModelRecipe | RlRecipe) -> None:
    """Raise RecipeError for `model.half_weights` unless matmuls are in bfloat16; `auto` is float32 on a CPU."""
    if recipe.model.half_weights and pretrained.dtype_of(recipe.model) != torch.bfloat16:
        raise RecipeError("model.half_weights needs matmuls in bfloat16", hint="write `model.dtype: bfloat16`")


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
