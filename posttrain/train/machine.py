"""What every stage that trains asks of the machine, before it reads data or loads a model."""

from __future__ import annotations

from posttrain.models import load as models
from posttrain.recipe.stages import DpoRecipe, RewardModelRecipe, RlRecipe, SftRecipe
from posttrain.train import allocator, compiled, optim, sharding


def check(recipe: SftRecipe | DpoRecipe | RewardModelRecipe | RlRecipe) -> None:
    """Refuse an optimiser, a compilation or a division of the model that cannot be here. Raises UserError.

    On a GPU it also sets up torch's allocator.
    """
    device = models.device_of(recipe.model)
    optim.check(recipe.optim, device)
    compiled.check(recipe.model, device)
    sharding.check(recipe.model)
    allocator.use_growing_segments(device)
