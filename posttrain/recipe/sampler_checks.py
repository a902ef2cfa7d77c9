"""What components read of the prompt sampler of an `rl` recipe, and what a run says of its filters."""

from __future__ import annotations

from posttrain.path_resolution import split_function
from posttrain.recipe.stages import RlRecipe

GIVES = {"gdro": {"bins", "bin_scores"}, "taco": {"kl_threshold"}}  # sampler -> what components may read of it


def sampler_gives(recipe: RlRecipe) -> set[str]:
    """What the recipe's sampler says to components. One of the user's may say anything."""
    if split_function(recipe.sampler.use) is not None:
        return set().union(*GIVES.values())
    return GIVES.get(recipe.sampler.use, set())


def band_notes(recipe: RlRecipe) -> list[str]:
    """What a run says at its start of a band of pass rates that few groups can be in."""
    notes, size = [], recipe.rollout.group_size
    for keep in recipe.keeps:
        if keep.use == "balanced_difficulty_filter":
            low, high = keep.params["t_low"], keep.params["t_high"]
            inside = [f"{n}/{size}" for n in range(size + 1) if low <= n / size <= high]
            if len(inside) < 3:
                which = ", ".join(inside) or "none"
                notes.append(f"keep: of the pass rates of {size} rollouts, {which} lie between {low:g} and {high:g}")
    return notes
