"""Checks on the arguments of components that the range of a single number cannot make.

What names a reward must name one of the recipe; lists must fit each other; bundles must be filled. Each check yields
(key, what is wrong, what would be right), as those of `checks.py` do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.errors import RecipeError, count_noun, did_you_mean
from posttrain.path_resolution import split_function
from posttrain.recipe.requirements import Found
from posttrain.recipe.reward_checks import reward_name
from posttrain.recipe.section import ComponentSection
from posttrain.recipe.stages import DpoRecipe, RlRecipe

ALSO = ("correct", "reward")  # what a gate, or a `ScoreName`, may name besides


def names(recipe: RlRecipe) -> Found:
    """A component reads a reward by its name."""
    known = [reward_name(reward) for reward in recipe.rewards]
    for key, section in recipe.components():
        for place, name, others in named_rewards(section.kinds, section.use, section.params):
            if name.partition("/")[0] not in (*known, *others):
                right = did_you_mean(name, [*known, *others]) or f"rewards here: {', '.join(known)}"
                yield f"{key}.{place}", f"`{section.use}` reads `{name}`, and no reward is called so", right


def named_rewards(
    kinds: Sequence[str], use: str, params: Mapping[str, Any]
) -> Iterator[tuple[str, str, Sequence[str]]]:
    """(place, name, what it may be besides a reward) of everything in a component's arguments that names a reward."""
    entries = [registry.index().get(kind, {}).get(use, {}) for kind in kinds]
    described: Mapping[str, Any] = next((entry["params"] for entry in entries if entry), {})
    for argument, value in params.items():
        kind = described.get(argument, [""])[0]
        if isinstance(value, str) and ("RewardName" in kind or "ScoreName" in kind):
            yield argument, value, ALSO if "ScoreName" in kind else ()
        elif "Channel" in kind:
            for number, channel in enumerate(value or ()):
                yield from ((f"{argument}.{number}.rewards", name, ALSO) for name in channel.get("rewards", {}))
                for part in ("condition", "among"):
                    yield from _gate(f"{argument}.{number}.{part}", channel.get(part))
        elif "dict[str, Gate]" in kind:
            for name, gate in (value or {}).items():
                yield argument, name, ()
                yield from _gate(f"{argument}.{name}", gate)
        elif "Gate" in kind:
            yield from _gate(argument, value)


def _gate(place: str, gate: Mapping[str, Any] | None) -> Iterator[tuple[str, str, Sequence[str]]]:
    if gate and "on" in gate:
        yield f"{place}.on", gate["on"], ALSO


def bundles(recipe: RlRecipe) -> Found:
    """Prompts of a step are put together in bundles of one size."""
    size, prompts = recipe.advantage.params.get("bundle_size"), recipe.rollout.prompts_per_step
    if isinstance(size, int) and size > 0 and prompts % size:
        what = f"{count_noun(prompts, 'prompt')} a step cannot be divided into bundles of {size}"
        yield "advantage.bundle_size", what, f"write a `rollout.prompts_per_step` that {size} divides"


def lists(recipe: RlRecipe) -> Found:
    """Lists of one component whose lengths or order must fit each other."""
    for key, section in recipe.components():
        given = section.params
        match section.use:
            case "stages":
                values, until = given["values"], list(given["until"])
                if len(values) != len(until) + 1 or sorted(set(until)) != until:
                    what = f"{count_noun(len(values), 'value')} and until {until}"
                    yield _at(key, "until"), what, "write one value more than `until`, which rises"
            case "truncation_tiers" if len(given["target_lengths"]) != len(given["thresholds"]) + 1:
                many, targets = len(given["thresholds"]), len(given["target_lengths"])
                what = (
                    f"{count_noun(many, 'threshold')} make {many + 1} levels; there are {count_noun(targets, 'target')}"
                )
                yield f"{key}.target_lengths", what, f"write {many + 1} numbers"


SHARES = ("ratios", "fractions")  # of a solution


def prompts(recipe: RlRecipe) -> Found:
    """Arguments of sampler and prompt_variants: shares of a solution, texts around a prompt."""
    for key, section in (("sampler", recipe.sampler), ("prompt_variants", recipe.prompt_variants)):
        if section is None or split_function(section.use) is not None:
            continue
        given = section.params
        for name in SHARES:
            shares = given.get(name)
            if shares is not None and (not shares or not all(0 < share <= 1 for share in shares)):
                yield f"{key}.{name}", f"{list(shares)}", "write one share or more, each above 0 and at most 1"
            elif shares is not None and list(shares) != sorted(set(shares)):
                yield f"{key}.{name}", f"{list(shares)} do not rise: each shows more of the solution", "sort them"
        if "mixture" in given and (min(given["mixture"]) < 0 or not any(given["mixture"])):
            yield f"{key}.mixture", f"{list(given['mixture'])}", "write [with prefix, plain], from 0 on, not both 0"
        texts = {"user": given["user"]} if "user" in given else {}
        texts |= {f"own.{name}": text for name, text in (given.get("own") or {}).items()}
        for place, text in texts.items():
            if "{prompt}" not in text:
                yield f"{key}.{place}", "has no {prompt}: the problem itself would not be asked", "add {prompt}"


def _at(key: str, argument: str) -> str:
    """The place of an argument; a controller's key has dots of its own, so that its section is named."""
    return key if key.startswith("controllers.") else f"{key}.{argument}"


def histories(recipe: DpoRecipe) -> Found:
    """A weight for each of the earlier policies."""
    weights, count = recipe.loss.params.get("weights"), len(recipe.anchors.history)
    if weights is not None and count > len(weights):
        what = f"{count_noun(len(weights), 'weight')} for a history of {count}"
        yield "loss.weights", what, "give one for each of `anchors.history`, or none"


def load_component(section: ComponentSection, base_dir: Path | None) -> registry.Component:
    """The component that a section names. Raises UserError for a name that is not there, and, of a function of the
    user, which is only known now, for keys of the section that are not its keyword-only arguments."""
    component = registry.resolve(section.kinds, section.use, base_dir)
    head, takes = f"{component.kind} `{section.use}`", f"it takes: {', '.join(component.params) or 'none'}"
    if unknown := next((key for key in section.params if key not in component.params), None):
        raise RecipeError(
            f"{head} has no argument {unknown}", allowed=takes, hint=did_you_mean(unknown, component.params)
        )
    for key, (_, default) in component.params.items():
        if default is ... and key not in section.params:
            raise RecipeError(f"{head} needs the argument {key}", allowed=takes)
    hints = registry.types_of(component.function)
    for key, value in section.params.items():
        if why := registry.wrong_type(hints.get(key), value):
            raise RecipeError(f"{head}: argument {key}: {why}, got {registry.shown_value(value)}")
    return component
