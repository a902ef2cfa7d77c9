"""What every stage that trains asks of the machine, before it reads data or loads a model."""

from __future__ import annotations

import torch

from posttrain.errors import RecipeError
from posttrain.models import load as models
from posttrain.recipe.stages import DpoRecipe, RewardModelRecipe, RlRecipe, SftRecipe
from posttrain.train import allocator, compiled, optim, sharding


def check(recipe: SftRecipe | DpoRecipe | RewardModelRecipe | RlRecipe) -> None:
    """Refuse an optimiser, a compilation or a division of the model that cannot be here. Raises UserError.

    On a GPU it also sets up torch's allocator.
    """
    device = models.device_of(recipe.model)
    optim.check(recipe.optim, device)
    check_half_weights(recipe)
    compiled.check(recipe.model, device)
    sharding.check(recipe.model)
    allocator.use_growing_segments(device)


def check_half_weights(recipe: SftRecipe | DpoRecipe | RewardModelRecipe | RlRecipe) -> None:
    """Refuse `model.half_weights` where products are in another type: auto is float32 on a CPU. Raises RecipeError."""
    if recipe.model.half_weights and models.dtype_of(recipe.model) != torch.bfloat16:
        raise RecipeError("model.half_weights is for products in bfloat16", hint="write `model.dtype: bfloat16`")
