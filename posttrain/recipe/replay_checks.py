"""How the loss of an `rl` recipe weighs stored rollouts."""

from __future__ import annotations

from posttrain import registry
from posttrain.recipe.stages import RlRecipe

WITHOUT_RATIO = {"reinforce", "nash_mp", "oreo", "oreo_step", "direct_advantage", "critic"}  # to the old policy


def compares_with_sampler(recipe: RlRecipe) -> bool:
    """Whether the loss itself reads the log-probs of the policy that sampled, beside those of the step's start."""
    found = registry.index().get("loss", {}).get(recipe.loss.use, {})
    return "rollout_logp" in found.get("needs", ()) or recipe.loss.use in WITHOUT_RATIO
