"""Checks on `replay` of an `rl` recipe: where stored rollouts cannot be trained on."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain import registry
from posttrain.errors import UserError
from posttrain.path_resolution import split_function
from posttrain.recipe.stages import RlRecipe

Found = Iterator[tuple[str, str, str]]

WITHOUT_RATIO = {"reinforce", "nash_mp", "oreo", "oreo_step", "direct_advantage", "critic"}  # to the old policy


def compares_with_sampler(recipe: RlRecipe) -> bool:
    """Whether the loss itself reads the log-probs of the policy that sampled, beside those of the step's start."""
    found = registry.index().get("loss", {}).get(recipe.loss.use, {})
    return "rollout_logp" in found.get("needs", ()) or recipe.loss.use in WITHOUT_RATIO


def check_replay(recipe: RlRecipe) -> Found:
    """Stored rollouts need a prompt of the data, log-probs of whoever sampled them, and a loss that weighs by these."""
    if recipe.replay is None:
        return
    yield from _arguments(recipe)
    yield from _loss(recipe)
    yield from _added_rows(recipe)
    rollout, own = recipe.rollout, split_function(recipe.replay.use) is not None
    right = "remove one of them"
    if rollout.engine == "stored":
        yield "replay", "rollout.engine stored trains on given completions already, whose sampler is unknown", right
    if recipe.prompt_variants is not None:
        yield "replay", "a stored rollout answers the data's prompt, and `prompt_variants` change it", right
    if recipe.solutions is not None and recipe.solutions.in_group:
        yield "replay", "a given solution stands in each group already (`solutions.in_group`)", right
    if rollout.shape is not None:
        yield (
            "replay",
            "a rollout of several rows (`rollout.shape`) is stored row by row, and they belong together",
            right,
        )
    if recipe.opponent is not None:
        yield "replay", "a stored rollout was compared with an opponent of an earlier step", right
    if rollout.max_gen_batches > 1 and (own or "replaces" in recipe.replay.needs):
        what = "groups that failed are replaced by other prompts before a stored rollout could join them"
        yield "rollout.max_gen_batches", what, "write 1"
    if rollout.group_size == 1 and "groups" in recipe.replay.needs:
        yield (
            "rollout.group_size",
            f"`{recipe.replay.use}` joins a group, and a rollout stands alone",
            "write 2 or more",
        )
    if rollout.engine == "vllm" and (rollout.top_p < 1 or rollout.top_k > 0):
        cut = "top_p" if rollout.top_p < 1 else "top_k"
        what = "vLLM then reports no log-probs of the policy, and stored rollouts cannot be weighed"
        yield f"rollout.{cut}", what, "remove it, or `replay`"
    if "rollout.temperature" in recipe.controllers:
        what = "stored log-probs are those of another temperature than the step's"
        yield "controllers.rollout.temperature", what, "remove it, or `replay`"


def _added_rows(recipe: RlRecipe) -> Found:
    """Rows on top, or with an update of their own, bring an advantage and nothing else that their step computed."""
    assert recipe.replay is not None
    needs = recipe.replay.needs
    if "trains_apart" in needs and not recipe.select:
        what = f"`{recipe.replay.use}` trains on rows that a `select` left out, and there is none"
        yield "replay.use", what, "write `select: [rorecomp]`"
    if split_function(recipe.replay.use) is None and not needs & {"adds_rows", "trains_apart"}:
        return
    what = "stored rows bring their advantages alone"
    for key, section in recipe.components():
        if missing := sorted(section.needs & {"values", "new_values", "returns", "channels"}):
            yield f"{key}.use", f"{what}, and `{section.use}` reads {', '.join(missing)}", "remove one of them"
    for number, section in enumerate([] if "trains_apart" in needs else recipe.select):
        yield f"select.{number}.use", f"{what}, and not which tokens `{section.use}` has chosen", "remove one of them"


def _arguments(recipe: RlRecipe) -> Found:
    """Arguments that do not fit each other. A class of the user's is made when the run starts."""
    assert recipe.replay is not None
    if split_function(recipe.replay.use) is not None:
        return
    try:
        registry.get("replay", recipe.replay.use).function(**recipe.replay.params)
    except UserError as error:
        problem = error.problems[0]
        yield "replay", problem.what, problem.allowed or problem.hint or "see `posttrain methods show`"


def _loss(recipe: RlRecipe) -> Found:
    """The loss must weigh a row by the policy that sampled it."""
    right = "take a loss with a ratio, such as `loss: clip`"
    if recipe.loss.use in registry.index().get("group_loss", {}):
        yield "loss.use", f"`{recipe.loss.use}` does not weigh rollouts by the policy that sampled them", right
    elif recipe.loss.use in WITHOUT_RATIO:
        weighed = any("rollout_logp" in section.needs for section in recipe.corrections)
        if recipe.loss.use != "reinforce" or not weighed:
            what = f"`{recipe.loss.use}` has no ratio to the policy that sampled a stored rollout"
            yield "loss.use", what, right
