"""Checks on the prompt sampler of an `rl` recipe: where it cannot work, and what components read of it."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain import registry
from posttrain.errors import UserError
from posttrain.path_resolution import split_function
from posttrain.recipe.stages import RlRecipe

Found = Iterator[tuple[str, str, str]]

GIVES = {"gdro": {"bins", "bin_scores"}, "taco": {"kl_threshold"}}  # sampler -> what components may read of it
MEASURED = {"values", "new_values", "hidden", "entropy", "old_logp", "ref_logp", "topk_logp", "tempered_ref_logp"}


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


def _arguments(recipe: RlRecipe) -> Found:
    """Arguments that do not fit each other. A class of the user's is made when the run starts."""
    if split_function(recipe.sampler.use) is not None:
        return
    try:
        registry.get("sampler", recipe.sampler.use).function(**recipe.sampler.params)
    except UserError as error:
        problem = error.problems[0]
        yield "sampler", problem.what, problem.allowed or problem.hint or "see `posttrain methods show`"


def _stored_sampler(recipe: RlRecipe) -> Found:
    """Rows with one written completion each cannot be sampled again."""
    if recipe.rollout.engine == "stored" and recipe.sampler.use != "uniform":
        what = f"`{recipe.sampler.use}` follows what the policy makes of prompts, and nothing is sampled"
        yield "sampler.use", what, "remove it, or sample (`rollout.engine: transformers` or `vllm`)"


def _groups(recipe: RlRecipe) -> Found:
    """A sampler that compares or divides the rollouts of a prompt."""
    if "groups" in recipe.sampler.needs and recipe.rollout.group_size == 1:
        what = f"`{recipe.sampler.use}` divides the rollouts of a step among prompts, and there is 1 for each"
        yield "rollout.group_size", what, "write 2 or more"


def _rounds(recipe: RlRecipe) -> Found:
    """A sampler that asks for further rounds of one step."""
    if "rounds" in recipe.sampler.needs and recipe.opponent is not None:
        what = f"`{recipe.sampler.use}` samples a step in several rounds, and the opponent answers once"
        yield "opponent", what, "remove one of them"


def _predicted_values(recipe: RlRecipe) -> Found:
    """Values of prompts are read off the policy's hidden states."""
    if "values" not in recipe.sampler.needs:
        return
    what = f"`{recipe.sampler.use}` reads the policy's hidden states of prompts"
    if recipe.rollout.staleness:
        yield "rollout.staleness", f"{what} while its weights may be changing", "write 0"
    if recipe.model.shard:
        yield "model.shard", f"{what}, whose weights are divided among the GPUs", "remove one of them"


def _row_losses(recipe: RlRecipe) -> Found:
    """A sampler that learns from the loss of rows."""
    if "row_loss" in recipe.sampler.needs and recipe.loss.use in registry.index().get("group_loss", {}):
        what = f"`{recipe.sampler.use}` reads the loss of each row, and loss `{recipe.loss.use}` has one value a group"
        yield "sampler.use", what, "write a loss by token, such as `loss: clip`"


def _variants(recipe: RlRecipe) -> Found:
    """How many rollouts a prompt gets is said by one of the two; a solution joins a group once."""
    if "unequal" not in recipe.sampler.needs:
        return
    right = "remove one of them, or take a sampler with groups of one size"
    if recipe.prompt_variants is not None:
        what = f"`{recipe.sampler.use}` and prompt_variants `{recipe.prompt_variants.use}` both divide rollouts"
        yield "sampler.use", what, right
    if recipe.solutions is not None and recipe.solutions.in_group:
        yield "sampler.use", f"`{recipe.sampler.use}` divides rollouts, and `solutions` adds to each group", right


def _unequal_groups(recipe: RlRecipe) -> Found:
    """Groups of several sizes, or fewer than the recipe says, and a component that puts groups together."""
    several = "makes several" if "unequal" in recipe.sampler.needs else ""
    fewer = "leaves some out" if "fewer" in recipe.sampler.needs else ""
    if not (several or fewer):
        return
    for key, section in recipe.components():
        if "equal_groups" in section.needs:
            which = "groups of one size" if several else "all groups of a step"
            what = f"`{section.use}` needs {which}, and sampler `{recipe.sampler.use}` {several or fewer}"
            yield f"{key}.use", what, "remove one of them"


def _refilled_by_model(recipe: RlRecipe) -> Found:
    """Groups that `keep` drops are replaced while sampling, before the model has read the rollouts."""
    for number, keep in enumerate(recipe.keeps):
        if recipe.rollout.max_gen_batches > 1 and (read := sorted(keep.needs & MEASURED)):
            what = f"keep `{keep.use}` reads {', '.join(read)}, which are measured when all rollouts are there"
            key = f"keep.{number}" if isinstance(recipe.keep, list) else "keep"
            yield f"{key}.use", what, "write `rollout.max_gen_batches: 1`"


SAMPLER_CHECKS = (
    _arguments,
    _stored_sampler,
    _groups,
    _rounds,
    _predicted_values,
    _row_losses,
    _variants,
    _unequal_groups,
    _refilled_by_model,
)
