"""Checks on component arguments beyond the range of a single number: names of rewards must exist, and the lengths of
lists must match. Arguments that cannot be combined are listed in arguments.yaml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.errors import RecipeError, count_noun, did_you_mean
from posttrain.options import NameOf, marked_values
from posttrain.recipe.requirements import Found
from posttrain.recipe.reward_checks import reward_name
from posttrain.recipe.section import ComponentSection, params_model
from posttrain.recipe.stages import RlRecipe
from posttrain.recipe.tree import format_path

# Type of an argument -> allowed names besides the recipe's rewards.
EXTRA_NAMES = {"ScoreName": ("correct", "reward"), "RewardName": ()}


def check_arguments(recipe: RlRecipe) -> Found:
    """Yield (key, what is wrong, what would be right) for the arguments of every component."""
    known = [reward_name(reward) for reward in recipe.rewards]
    for key, section in recipe.every_component():
        given = section.params if section.described else {}
        for place, name, others in named_rewards(section.kinds, section.use, given):
            if name.partition("/")[0] not in (*known, *others):
                right = did_you_mean(name, [*known, *others]) or f"rewards here: {', '.join(known)}"
                yield f"{key}.{place}", f"`{section.use}` reads `{name}`, and no reward is called so", right
        match section.use:
            case "stages":
                values, until = given["values"], list(given["until"])
                if len(values) != len(until) + 1 or sorted(set(until)) != until:
                    what = f"{count_noun(len(values), 'value')} and until {until}"
                    yield key, what, "write one more value than `until` has steps, and `until` in rising order"
            case "truncation_tiers" if len(given["target_lengths"]) != (levels := len(given["thresholds"]) + 1):
                made, targets = count_noun(levels - 1, "threshold"), count_noun(len(given["target_lengths"]), "target")
                what = f"{made} make {levels} levels; there are {targets}"
                yield f"{key}.target_lengths", what, f"write {levels} numbers"
    if recipe.prompt_variants and recipe.prompt_variants.described:
        yield from _check_variants(recipe.prompt_variants.params)


def _check_variants(given: Mapping[str, Any]) -> Found:
    """Check the arguments of `prompt_variants`: fractions of a solution, and templates around a prompt."""
    for name in given.keys() & {"ratios", "fractions"}:
        shares = list(given[name])
        if not shares or not all(0 < share <= 1 for share in shares):
            yield f"prompt_variants.{name}", f"{shares}", "write one share or more, each above 0 and at most 1"
        elif shares != sorted(set(shares)):
            what = f"{shares} are not in rising order: each must show more of the solution"
            yield f"prompt_variants.{name}", what, "sort them"
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
    kind = next((one for one in kinds if use in registry.load_index().get(one, {})), None)
    fields = params_model(kind, use).model_fields if kind else {}
    for argument, field in fields.items():
        for place, mark, name in marked_values(field, params.get(argument), NameOf, (argument,)):
            if mark.name in EXTRA_NAMES:
                yield format_path(place), name, EXTRA_NAMES[mark.name]


def load_component(section: ComponentSection, base_dir: Path | None) -> registry.Component:
    """Load the component that a section names. Raises UserError for an unknown name, and for keys that are not
    arguments of the user's function, whose signature is first known here."""
    component = registry.resolve(section.kinds, section.use, base_dir)
    head, takes = f"{component.kind} `{section.use}`", f"it takes: {', '.join(component.params) or 'none'}"
    if unknown := next((key for key in section.params if key not in component.params), None):
        raise RecipeError(
            f"{head} has no argument {unknown}", allowed=takes, hint=did_you_mean(unknown, component.params)
        )
    for key, (_, default) in component.params.items():
        if default is ... and key not in section.params:
            raise RecipeError(f"{head} needs the argument {key}", allowed=takes)
    hints = registry.resolve_annotations(component.function)
    for key, value in section.params.items():
        if why := registry.explain_type_mismatch(hints.get(key), value):
            raise RecipeError(f"{head}: argument {key}: {why}, got {registry.format_value(value)}")
    return component
