"""Checks on the components of an `rl` recipe: choices that cannot be combined or would silently have no effect.

Components declare what they need and which actions are exclusive (`registry.register`), so few checks name a method.
What a single key needs is marked at its field or listed in arguments.yaml; the checks here look at all components.
`checks.py` runs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain import registry
from posttrain.errors import UserError, did_you_mean
from posttrain.options import NameOf, marked_values
from posttrain.recipe import needs, presets
from posttrain.recipe.requirements import Found, Scope, refuse
from posttrain.recipe.reward_checks import reward_name
from posttrain.recipe.reward_sections import Reward
from posttrain.recipe.section import ComponentSection, params_model
from posttrain.recipe.stages import RlRecipe
from posttrain.recipe.tree import format_path


def check_components(recipe: RlRecipe) -> Found:
    """Check that each component gets what it needs, that nothing in the recipe contradicts it, and that no two
    components perform the same exclusive action."""
    given, owners = needs.provided_fields(recipe), dict[str, ComponentSection]()
    alone = recipe.rollout.group_size == 1 and not recipe.rollouts_are_groups and not recipe.rollout.workflow
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
        for action in section.index_entry.get("exclusive", []):
            if (owner := owners.setdefault(action, section)) is not section:
                yield f"{key}.use", f"`{section.use}` and `{owner.use}` both {action}", "keep one of them"
        facts |= {"kind": key.partition(".")[0], "filters": section in recipe.keeps}
        facts |= {name: section.needs & set(words) for name, words in needs.TOGETHER.items()}
        scope = Scope.of(recipe, section, facts)
        for place, rows in needs.REFUSED.items():
            yield from refuse(scope, rows, place if place != "use" else f"{key}.use")


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
            listed = ", ".join(map(str, separate_channels))
            right = f"one of {listed}" if listed else "remove it: its channels are in the loss already"
            yield f"regularisers.{n}.channel", f"`advantage: {advantage.use}` has no separate channel {channel}", right


def check_controllers(recipe: RlRecipe) -> Found:
    """Check that each controller drives a number that the recipe has and that can change between steps."""
    known = recipe.controllable_numbers()
    for key, section in recipe.controllers.items():
        facts = {"key": key, "known": key in known, "value": known.get(key), "all": set(known)}
        scope = Scope.of(recipe, section, facts | {"of_rollout": key.startswith("rollout.")})
        yield from refuse(scope, needs.REFUSED_CONTROLLERS, f"controllers.{key}")


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


def check_roles(recipe: RlRecipe) -> Found:
    """Check that the roles that `rollout.workflow` names exist, and that trained roles have a reward and an adapter."""
    workflow, several = recipe.rollout.workflow, (recipe.model.lora and recipe.model.lora.adapters) or []
    if workflow is None:
        return
    key, trained = "rollout.workflow", workflow.train or workflow.roles
    named = [(f"{key}.train", role) for role in workflow.train or ()]
    named += [(f"{key}.adapters.{role}", role) for role in workflow.adapters]
    for number, reward in enumerate(recipe.rewards):
        named += [(f"rewards.{number}.roles", role) for role in reward.roles or ()]
        named += [(f"rewards.{number}.reads", reward.reads)] if reward.reads else []
        if trained and reward.roles is not None and not set(reward.roles) & set(trained):
            what = f"does nothing: no call of {', '.join(reward.roles)} is trained on"
            yield f"rewards.{number}.roles", what, f"one of: {', '.join(trained)}"
    if recipe.advantage.use == "from_role":
        named.append(("advantage.role", recipe.advantage.params["role"]))
    for place, role in named if workflow.roles else ():  # the roles of a user's function are unknown
        if role not in workflow.roles:
            yield place, f"workflow `{workflow.use}` calls no `{role}`", _one_of(role, workflow.roles)
    paid = [reward for reward in recipe.rewards if reward.weight]
    for role in trained:
        if role not in workflow.late and not any(reward.roles is None or role in reward.roles for reward in paid):
            what = f"the calls of `{role}` are trained on, and no reward is for them"
            right = f"add a reward with `roles: [{role}]`, or leave the role out of `train`"
            yield f"{key}.train" if workflow.train else key, what, right
    for role, name in workflow.adapters.items() if recipe.model.lora else ():
        place = f"{key}.adapters.{role}"
        if name == "base" and (role in trained or not trained):  # without names, all roles are trained
            what = "the base is frozen, and calls of this role are trained on"
            yield place, what, "name an adapter, or write `train`"
        elif name not in (*several, "base"):
            yield place, f"the model has no adapter `{name}`", _one_of(name, several, "base")
    of_roles = {workflow.adapter_of(role, several) for role in trained}
    for name in several if trained else ():
        if name not in of_roles:
            what = f"the adapter `{name}` would not be trained: no trained role has it"
            yield "model.lora.adapters", what, f"name it in `rollout.workflow.adapters`: {{{trained[0]}: {name}}}"


def _one_of(name: str, known: Sequence[str], *others: str) -> str:
    hint = did_you_mean(name, known)
    return f"one of: {', '.join((*known, *others))}" + (f"; {hint}" if hint else "")


def check_arguments(recipe: RlRecipe) -> Found:
    """Check that the rewards exist that components read."""
    known = [reward_name(reward) for reward in recipe.rewards]
    of_preset = presets.preset(recipe.algorithm).rewards if recipe.algorithm in presets.names() else []
    offered = {reward_name(Reward(**reward)): reward for reward in of_preset}
    for key, section in recipe.every_component():
        given = section.params if section.index_entry else {}
        for place, name, others in named_rewards(section.kinds, section.use, given):
            if name.partition("/")[0] not in (*known, *others):
                right = did_you_mean(name, [*known, *others]) or f"rewards here: {', '.join(known)}"
                if added := offered.get(name.partition("/")[0]):
                    right = f"add the reward of preset {recipe.algorithm}: {json.dumps(added)}"
                yield f"{key}.{place}", f"`{section.use}` reads `{name}`, and no reward is called so", right


def check_variants(recipe: RlRecipe) -> Found:
    """Check the arguments of `prompt_variants`: the shares of a mixture, and templates around a prompt."""
    section = recipe.prompt_variants
    given = section.params if section and section.index_entry else {}
    if "mixture" in given and (min(given["mixture"]) < 0 or not any(given["mixture"])):
        right = "write [with prefix, plain], from 0 on, not both 0"
        yield "prompt_variants.mixture", f"{list(given['mixture'])}", right
    texts = {"user": given.get("user", "{prompt}")}
    for place, text in (texts | {f"own.{name}": text for name, text in (given.get("own") or {}).items()}).items():
        if "{prompt}" not in text:
            what = "has no {prompt}: the model would not see the problem"
            yield f"prompt_variants.{place}", what, "add {prompt}"


def named_rewards(
    kinds: Sequence[str], use: str, params: Mapping[str, Any]
) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield (path, name, allowed names besides rewards) for each argument of a registered component that names a
    reward."""
    others = {"ScoreName": ("correct", "reward"), "RewardName": ()}
    kind = next((candidate for candidate in kinds if use in registry.load_index().get(candidate, {})), None)
    fields = params_model(kind, use).model_fields if kind else {}
    for argument, field in fields.items():
        for place, mark, name in marked_values(field, params.get(argument), NameOf, (argument,)):
            if mark.name in others:
                yield format_path(place), name, others[mark.name]


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


CHECKS = (check_components, check_channels, check_controllers, check_classes, check_roles)
