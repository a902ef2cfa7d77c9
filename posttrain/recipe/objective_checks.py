"""Checks on the components of an `rl` recipe: choices that cannot be combined or would silently have no effect.

Components declare what they need and which actions are exclusive (`registry.register`), so few checks name a method.
What a single key needs is marked at its field; the checks here look at all components. `checks.py` runs them.
"""

from __future__ import annotations

from typing import Any

from posttrain import registry
from posttrain.errors import UserError
from posttrain.recipe import needs
from posttrain.recipe.requirements import Found, Scope, refuse
from posttrain.recipe.section import ComponentSection
from posttrain.recipe.stages import RlRecipe
from posttrain.recipe.workflow_checks import check_roles


def check_components(recipe: RlRecipe) -> Found:
    """Check that each component gets what it needs, that nothing in the recipe contradicts it, and that no two
    components perform the same exclusive action."""
    given, owners = provided_fields(recipe), dict[str, ComponentSection]()
    alone = recipe.rollout.group_size == 1 and not rollouts_are_groups(recipe) and not recipe.rollout.workflow
    for_all_right = {f"`{section.use}`" for _, section in recipe.active_components() if "all_correct" in section.needs}
    facts: dict[str, Any] = {"alone": alone, "for_all_right": for_all_right}
    for key, section in recipe.active_components():
        for need in sorted(section.needs - given):
            what = f"`{section.use}` needs {need}: {needs.LACKS.get(need, 'nothing in this recipe gives them')}"
            right = "use another component"
            if need in needs.MAKERS:
                what = f"`{section.use}` reads {need}, and no component makes them"
                right = f"write `advantage: {needs.MAKERS[need][0]}`"
            yield f"{key}.use", what, right
        for action in section.described.get("exclusive", []):
            if (owner := owners.setdefault(action, section)) is not section:
                yield f"{key}.use", f"`{section.use}` and `{owner.use}` both {action}", "keep one of them"
        facts |= {"kind": key.partition(".")[0], "filters": section in recipe.keeps}
        facts |= {name: section.needs & set(words) for name, words in needs.TOGETHER.items()}
        scope = Scope.of(recipe, section, facts)
        for place, rows in needs.REFUSED.items():
            yield from refuse(scope, rows, place if place != "use" else f"{key}.use")


def provided_fields(recipe: RlRecipe) -> set[str]:
    """Return the batch fields and marks that a recipe provides to its components. A user's function may provide
    everything that its kind can."""
    scope, advantage = Scope.of(recipe), recipe.advantage
    found = {field for when, fields in needs.GIVERS.values() if scope.holds(when) for field in fields}
    found |= {field for field, makers in needs.MAKERS.items() if advantage.is_function or advantage.use in makers}
    return found | fields_from_sampler(recipe)


def fields_from_sampler(recipe: RlRecipe) -> set[str]:
    """Return the fields that the recipe's sampler provides to components. A user's sampler may provide any of them."""
    every = set().union(*needs.SAMPLERS.values())
    return every if recipe.sampler.is_function else needs.SAMPLERS.get(recipe.sampler.use, set())


def rollouts_are_groups(recipe: RlRecipe) -> bool:
    """Return whether the rows of each rollout form a group of their own."""
    return recipe.rollout.shape is not None and recipe.rollout.shape.may("own_group")


def check_channels(recipe: RlRecipe) -> Found:
    """Check that every channel of an advantage is used by exactly one loss."""
    advantage, parts = recipe.advantage, recipe.advantage.params.get("channels") or []
    clips = {n: r.params["channel"] for n, r in enumerate(recipe.regularisers) if r.use == "channel_clip"}
    separate = advantage.params.get("separate") and recipe.loss.use != "clip_channels"
    separate_channels = list(range(1, len(parts))) if separate else []
    for number in separate_channels if advantage.use == "channels" else ():
        if number not in clips.values():
            what = f"channel {number} is separate from the advantage, and no loss uses it"
            right = f"write `regularisers: [{{use: channel_clip, channel: {number}}}]`, or `separate: false`"
            yield "advantage.separate", what, right
    for n, channel in clips.items() if advantage.use in ("channels", "copo") else ():
        if channel not in separate_channels:
            right = (
                f"one of {', '.join(map(str, separate_channels))}"
                if separate_channels
                else "remove it: its channels are in the loss already"
            )
            yield f"regularisers.{n}.channel", f"`advantage: {advantage.use}` has no separate channel {channel}", right


def check_classes(recipe: RlRecipe) -> Found:
    """Report arguments that a shipped sampler or replay buffer refuses in its constructor. A user's class is first
    built when the run starts."""
    for kind, section in (("sampler", recipe.sampler), ("replay", recipe.replay)):
        try:
            if section and not section.is_function:
                registry.get(section.kinds[0], section.use).function(**section.params)
        except UserError as error:
            problem = error.problems[0]
            yield kind, problem.what, problem.allowed or problem.hint or "see `posttrain methods show`"


def check_controllers(recipe: RlRecipe) -> Found:
    """Check that each controller drives a number that the recipe has and that can change between steps."""
    known = controllable_numbers(recipe)
    for key, section in recipe.controllers.items():
        largest = max(section.params.get("values", ()), default=0)
        facts = {"key": key, "known": key in known, "value": known.get(key), "largest": largest, "all": set(known)}
        scope = Scope.of(recipe, section, facts | {"of_rollout": key.startswith("rollout.")})
        yield from refuse(scope, needs.REFUSED_CONTROLLERS, f"controllers.{key}")


def stale_notes(recipe: RlRecipe) -> list[str]:
    """Return the notes to print at the start of a run with stale rollouts."""
    if not recipe.rollout.staleness:
        return []
    scope, key = Scope.of(recipe), f"rollout.staleness {recipe.rollout.staleness}"
    return [key + scope.fill(text) for when, text in needs.OF_STALE_ROLLOUTS if scope.holds(when)]


def band_notes(recipe: RlRecipe) -> list[str]:
    """Return a note for each difficulty filter whose pass-rate band contains fewer than three possible pass rates."""
    notes, size = [], recipe.rollout.group_size
    for keep in recipe.keeps:
        if keep.use == "balanced_difficulty_filter":
            low, high = keep.params["t_low"], keep.params["t_high"]
            inside = [f"{n}/{size}" for n in range(size + 1) if low <= n / size <= high]
            if len(inside) < 3:
                which = ", ".join(inside) or "none"
                notes.append(f"keep: of the pass rates of {size} rollouts, {which} lie between {low:g} and {high:g}")
    return notes


# Losses without a ratio to the old policy.
WITHOUT_RATIO = {"reinforce", "nash_mp", "oreo", "oreo_step", "direct_advantage", "critic"}


def compares_with_sampler(recipe: RlRecipe) -> bool:
    """Return whether the loss itself reads the log-probs of the sampling policy in addition to those at the start of
    the step."""
    reads_sampler = not recipe.loss.is_group_loss and "rollout_logp" in recipe.loss.needs
    return reads_sampler or recipe.loss.use in WITHOUT_RATIO


ROLLOUT_NUMBERS = ("rollout.max_new_tokens", "rollout.group_size", "rollout.temperature", "rollout.max_turns")


def controllable_numbers(recipe: RlRecipe) -> dict[str, float]:
    """Return key -> value of each number that a controller may drive: numbers of components, and ROLLOUT_NUMBERS."""
    found = {key: getattr(recipe.rollout, key.partition(".")[2]) for key in ROLLOUT_NUMBERS}
    for key, section in recipe.components():
        if not key.startswith("controllers."):
            own = {"coef": section.coef} if hasattr(section, "coef") else {}
            found |= {f"{key}.{name}": value for name, value in {**section.params, **own}.items()}
    return {key: v for key, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}


CHECKS = (check_components, check_channels, check_controllers, check_classes, check_roles)
