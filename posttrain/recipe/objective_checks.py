"""Checks on the components of an `rl` recipe: choices that cannot work together, or would silently do nothing.

Components declare what they need and what only one of them may do (`registry.register`), so few checks name a method.
What a single key needs is marked at its field; here are the checks that ask all components. `checks.py` runs them.
"""

from __future__ import annotations

from posttrain import registry
from posttrain.errors import UserError
from posttrain.recipe.needs import LACKS, MAKERS, REFUSED, REFUSED_CONTROLLERS, SAMPLERS, TOGETHER, given_by
from posttrain.recipe.requirements import Found, Scope, refuse
from posttrain.recipe.section import Refused
from posttrain.recipe.stages import RlRecipe
from posttrain.recipe.workflow_checks import check_workflow


def _refused_needs(recipe: RlRecipe) -> Found:
    """What a component needs cannot stand beside something else."""
    for key, section in recipe.active_components():
        facts = {"kind": key.partition(".")[0], "filters": section in recipe.keeps, "alone": _is_alone(recipe)}
        facts |= {name: section.needs & set(needs) for name, needs in TOGETHER.items()}
        scope = Scope((((), recipe), ((), section), ((), facts)))
        for place, rows in REFUSED.items():
            yield from refuse(scope, (Refused(*row) for row in rows), place if place != "use" else f"{key}.use")


def _is_alone(recipe: RlRecipe) -> bool:
    """Whether each rollout is compared with no other."""
    return recipe.rollout.group_size == 1 and not makes_groups(recipe) and not recipe.rollout.workflow


def _arguments(recipe: RlRecipe) -> Found:
    """Arguments that do not fit each other. A class of the user's is made when the run starts."""
    for kind, section in (("sampler", recipe.sampler), ("replay", recipe.replay)):
        if section is None or section.is_function:
            continue
        try:
            registry.get(section.kinds[0], section.use).function(**section.params)
        except UserError as error:
            problem = error.problems[0]
            yield kind, problem.what, problem.allowed or problem.hint or "see `posttrain methods show`"


def _needs(recipe: RlRecipe) -> Found:
    """Something in the recipe must provide what a component needs."""
    given = given_fields(recipe)
    for key, section in recipe.active_components():
        for need in sorted(section.needs - given):
            if need in MAKERS:
                what = f"`{section.use}` reads {need}, and no component makes them"
                right = f"write `advantage: {MAKERS[need][0]}`"
            else:
                what = f"`{section.use}` needs {need}: {LACKS.get(need, 'nothing in this recipe gives them')}"
                right = "use another component"
            yield f"{key}.use", what, right


def given_fields(recipe: RlRecipe) -> set[str]:
    """What a recipe can give its components; a function of the user may give whatever its kind may."""
    shape, advantage, solutions = recipe.rollout.shape, recipe.advantage, recipe.solutions
    there = {
        "turns": recipe.acts,
        "steps": recipe.scoring.split,
        "simulations": recipe.environment and recipe.environment.simulations,
        "solutions": solutions,
        "mixed_solutions": solutions and solutions.in_group,
        "hints": recipe.prompt_variants and recipe.prompt_variants.may("hinted"),
        "shape": recipe.rollout.several_rows,
        "workflow": recipe.rollout.workflow,
        "tree": shape and (shape.may("tree") or shape.is_function),
        "windows": shape and shape.may("goes_on"),
        "parts": shape and (shape.may("parts") or shape.is_function),
        "opponent": recipe.opponent,
    }
    there |= {field: advantage.is_function or advantage.use in makers for field, makers in MAKERS.items()}
    givers = ["rollouts", "model", "marks", "advantage", *(name for name, is_there in there.items() if is_there)]
    return given_by(*givers) | sampler_gives(recipe)


def sampler_gives(recipe: RlRecipe) -> set[str]:
    """What the recipe's sampler says to components. One of the user's may say anything."""
    every = set().union(*SAMPLERS.values())
    return every if recipe.sampler.is_function else SAMPLERS.get(recipe.sampler.use, set())


def makes_groups(recipe: RlRecipe) -> bool:
    """Whether the rows of each rollout are a group of their own."""
    return recipe.rollout.shape is not None and recipe.rollout.shape.may("own_group")


def _exclusive(recipe: RlRecipe) -> Found:
    """Two components must not both do what only one may do."""
    doers: dict[str, tuple[str, str]] = {}
    for key, section in recipe.active_components():
        for deed in section.described.get("exclusive", []):
            if deed in doers:
                other = doers[deed][1]
                yield f"{key}.use", f"`{section.use}` and `{other}` both {deed}", "keep one of them"
            doers.setdefault(deed, (key, section.use))


def _filtered_away(recipe: RlRecipe) -> Found:
    """A component learns from groups in which every answer is right, and a filter drops these groups."""
    for number, keep in enumerate(recipe.keeps):
        if keep.use not in ("dynamic_sampling", "mixed") or keep.params.get("metric", "correct") != "correct":
            continue
        key = f"keep.{number}" if isinstance(recipe.keep, list) else "keep"
        for _, section in recipe.active_components():
            if "all_correct" in section.needs:
                what = f"`{keep.use}` drops the groups that are all right, where `{section.use}` has most to say"
                right = "remove `keep`" if keep.use == "mixed" else "write `metric: reward`, or remove `keep`"
                yield f"{key}.use", what, right


def _channels(recipe: RlRecipe) -> Found:
    """Every channel of an advantage must be in exactly one loss."""
    advantage, parts = recipe.advantage, recipe.advantage.params.get("channels") or []
    clips = {n: r.params["channel"] for n, r in enumerate(recipe.regularisers) if r.use == "channel_clip"}
    apart = [number for number in range(1, len(parts)) if advantage.params.get("separate")]
    if recipe.loss.use == "clip_channels":
        apart = []
    elif advantage.use == "channels":
        for number in sorted({*apart} - {*clips.values()}):
            what = f"channel {number} stands apart from the advantage, and no loss has it"
            right = f"write `regularisers: [{{use: channel_clip, channel: {number}}}]`"
            yield "advantage.separate", what, f"{right}, or `separate: false`"
    if advantage.use in ("channels", "copo"):
        for n, channel in clips.items():
            if channel not in apart:
                what = f"`advantage: {advantage.use}` leaves no channel {channel} apart"
                known = ", ".join(map(str, apart))
                right = f"one of {known}" if known else "remove it: its channels are in the loss already"
                yield f"regularisers.{n}.channel", what, right


def _check_controllers(recipe: RlRecipe) -> Found:
    """A controller must drive a number that the recipe has and that its steps can change."""
    known = numbers(recipe)
    for key, section in recipe.controllers.items():
        largest = max(section.params.get("values", ()), default=0)
        facts = {"key": key, "known": key in known, "value": known.get(key), "largest": largest, "all": set(known)}
        facts["of_rollout"] = key.startswith("rollout.")
        scope = Scope((((), recipe), ((), section), ((), facts)))
        yield from refuse(scope, (Refused(*row) for row in REFUSED_CONTROLLERS), f"controllers.{key}")


def stale_notes(recipe: RlRecipe) -> list[str]:
    """What a run with stale rollouts says at its start."""
    rollout = recipe.rollout
    if not rollout.staleness:
        return []
    key, notes = f"rollout.staleness {rollout.staleness}", []
    if recipe.loss.is_group_loss:
        notes.append(f"{key}: loss `{recipe.loss.use}` does not weigh rollouts by the policy that drew them")
    if why := _generates_between_updates(recipe):
        notes.append(f"{key} with {why}: rollouts are drawn between two updates, and no time is won")
    elif rollout.staleness > 1 and not rollout.partial:
        notes.append(f"{key} without rollout.partial: rollouts are older than with 1, and only slow rewards win time")
    return notes


def _generates_between_updates(recipe: RlRecipe) -> str:
    """What keeps the engine from generating while the trainer changes its weights; empty if nothing does."""
    if recipe.opponent is not None:
        return "an opponent"
    if recipe.rollout.engine != "vllm":
        return f"rollout.engine {recipe.rollout.engine}"
    return "rollout.vllm.sleep" if recipe.rollout.vllm.sleep and not recipe.rollout.vllm.server else ""


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


WITHOUT_RATIO = {"reinforce", "nash_mp", "oreo", "oreo_step", "direct_advantage", "critic"}  # to the old policy


def compares_with_sampler(recipe: RlRecipe) -> bool:
    """Whether the loss itself reads the log-probs of the policy that sampled, beside those of the step's start."""
    weighs = not recipe.loss.is_group_loss and "rollout_logp" in recipe.loss.needs
    return weighs or recipe.loss.use in WITHOUT_RATIO


ROLLOUT_NUMBERS = ("rollout.max_new_tokens", "rollout.group_size", "rollout.temperature", "rollout.max_turns")


def numbers(recipe: RlRecipe) -> dict[str, float]:
    """Key -> value of each number that a controller may drive: those of components, and ROLLOUT_NUMBERS."""
    found = {key: getattr(recipe.rollout, key.partition(".")[2]) for key in ROLLOUT_NUMBERS}
    for key, section in recipe.components():
        if not key.startswith("controllers."):
            own = {"coef": section.coef} if hasattr(section, "coef") else {}
            found |= {f"{key}.{name}": value for name, value in {**section.params, **own}.items()}
    return {key: v for key, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}


CHECKS = (
    _needs,
    _refused_needs,
    _exclusive,
    _filtered_away,
    _channels,
    _check_controllers,
    _arguments,
    check_workflow,
)
