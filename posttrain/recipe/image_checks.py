"""What of a recipe cannot stand beside rows with images, which only the rows can say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from posttrain.errors import Problem, RecipeError
from posttrain.recipe.requirements import Scope

# (key, where it stands against images, why)
_REFUSED = (
    ("rollout.engine", "rollout.engine = stored", "takes completions of texts alone"),
    ("rollout.vllm.server", "rollout.engine = vllm and rollout.vllm.server", "sends tokens alone"),
    ("engine.vllm.server", "engine.engine = vllm and engine.vllm.server", "sends tokens alone"),
    ("rollout.shape", "rollout.shape", "writes prompts of its own"),
    ("sampling.shape", "sampling.shape", "writes prompts of its own"),
    ("rollout.workflow", "rollout.workflow", "writes prompts of its own"),
    ("prompt_variants", "prompt_variants", "writes prompts of its own"),
    ("replay", "replay", "stores tokens alone"),
    ("solutions", "solutions", "reads solutions behind texts"),
    ("sampler", "values in sampler.needs", "reads the policy's states of texts"),
    ("kl.reference", "kl.reference", "may see images in another way"),
    ("prompt_logp", "prompt_logp in reads", "a component reads log-probs of prompts"),
    ("answer_logp", "answer_logp in reads", "a component reads log-probs of the data's answer"),
    ("expert_logp", "expert_logp in reads", "a component reads log-probs of given solutions"),
    ("objective.behavior_model", "objective.behavior_model", "reads texts alone"),
    ("online_kl", "online_kl", "samples from texts alone"),
    ("model.shard", "model.shard", "was not proven with images"),
    ("model.parallel", "model.parallel", "was not proven with images"),
    ("search", "search", "goes on with tokens alone"),
    ("tree", "tree", "goes on with tokens alone"),
    ("eval.contamination", "eval.contamination and stage = eval", "asks with parts of texts"),
)


def problems_with_images(recipe: BaseModel) -> list[Problem]:
    """What is wrong with the recipe if its rows have images."""
    scope = Scope((((), recipe),))
    return [
        Problem("", f"{key}: the rows have images, and it {why}", hint="leave it out, or the column of images")
        for key, condition, why in _REFUSED
        if scope.holds(condition)
    ]


def refuse_with_images(recipe: BaseModel, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises RecipeError for a recipe that cannot stand beside the images of its rows."""
    if any(row.get("images") for row in rows) and (found := problems_with_images(recipe)):
        raise RecipeError.of(found)
