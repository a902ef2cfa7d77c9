"""What every stage that trains asks of the machine, before it reads data or loads a model."""

from __future__ import annotations

import torch

from posttrain.errors import RecipeError
from posttrain.models import pretrained
from posttrain.models.adapters import BASE
from posttrain.recipe.stages import DpoRecipe, RewardModelRecipe, RlRecipe, SftRecipe
from posttrain.train import allocator, compiled, optim, sharding


def check(recipe: SftRecipe | DpoRecipe | RewardModelRecipe | RlRecipe) -> None:
    """Refuse an optimiser, a compilation or a division of the model that cannot be here. Raises UserError.

    On a GPU it also sets up torch's allocator.
    """
    device = pretrained.device_of(recipe.model)
    optim.check(recipe.optim, device)
    check_half_weights(recipe)
    compiled.check(recipe.model, device)
    sharding.check(recipe.model)
    if isinstance(recipe, RlRecipe):
        check_roles(recipe, device)
    allocator.use_growing_segments(device)


def check_half_weights(recipe: SftRecipe | DpoRecipe | RewardModelRecipe | RlRecipe) -> None:
    """Refuse `model.half_weights` where products are in another type: auto is float32 on a CPU. Raises RecipeError."""
    if recipe.model.half_weights and pretrained.dtype_of(recipe.model) != torch.bfloat16:
        raise RecipeError("model.half_weights is for products in bfloat16", hint="write `model.dtype: bfloat16`")


def check_roles(recipe: RlRecipe, device: torch.device) -> None:
    """Refuse roles of the base beside adapters where vLLM runs on a CPU: it computes their requests with the last
    adapter. Raises RecipeError."""
    workflow = recipe.rollout.workflow
    if workflow and BASE in workflow.adapters.values() and recipe.rollout.engine == "vllm" and device.type == "cpu":
        raise RecipeError(
            "on a CPU, vLLM has no requests without an adapter beside those with one",
            where="rollout.workflow.adapters",
            hint="write `rollout.engine: transformers`, or leave `base` out",
        )
