"""Checks across several keys of a recipe: values that are valid alone but cannot be combined.

Where a rule is written:

- type and range of one value: the type of its field; for the argument of a component, arguments.yaml (`ranges`)
- what a key requires or excludes, and what makes it idle: marks at its field (`Refused`, `Idle`, `NoImages`), which
  requirements.py evaluates; for the argument of a component, arguments.yaml (`refused`, `idle`)
- a key of a shared section that a stage never uses: the mark `Unused` at its field (validate.py refuses the key)
- what a component needs from the recipe, and what it cannot be combined with: needs.yaml
- comparisons over lists, and names that must exist: functions here, in objective_checks.py and in merging.py

Each check is a function that takes a recipe and yields (key, what is wrong, what would be right).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.errors import Problem, RecipeError, did_you_mean
from posttrain.path_resolution import EARLIER
from posttrain.recipe import merging, objective_checks, references, requirements, reward_checks
from posttrain.recipe import stages as st
from posttrain.recipe.requirements import Found
from posttrain.recipe.section import NoImages
from posttrain.recipe.tree import Node, follow, format_path

Check = Callable[[Any], Found]


def run(recipe: st.Stage, tree: Node, prefix: Sequence[str | int] = ()) -> list[Problem]:
    """Return the problems of a recipe that matches its schema. `prefix`: path of the stage inside a pipeline."""
    problems: list[Problem] = []
    for check in (*_checks_of(recipe), *(() if prefix else (_check_references,))):
        for key, what, right in check(recipe):
            path = _split_key(key)
            node, depth = follow(tree, path)
            if node.origin.kind == "preset":
                if check is requirements.find_contradictions:  # choices of the user made the preset's one idle
                    continue
                node, depth = follow(tree, ["algorithm"])
            mark = node.origin.mark if depth == len(path) and not node.mapping else node.at_key.mark
            problems.append(Problem(mark, f"{format_path([*prefix, *path])}: {what}", hint=right))
    return problems


def keys_with_problems(recipe: st.Stage) -> set[str]:
    """Return the keys that at least one check refuses."""
    return {key for check in _checks_of(recipe) for key, _, _ in check(recipe)}


def _checks_of(recipe: st.Stage) -> list[Check]:
    return [check for stage, checks in CHECKS.items() if isinstance(recipe, stage) for check in checks]


def _split_key(key: str) -> list[str | int]:
    """Split a dotted key into its parts. The key of a controller (`kl.coef`) contains dots and stays one part."""
    if key.startswith("controllers."):
        return ["controllers", key.removeprefix("controllers.")]
    return [int(part) if part.isdigit() else part for part in key.split(".")] if key else []


def _check_rewards(recipe: Any) -> Found:
    """Check every list of rewards."""
    for scope in requirements.scopes(recipe):
        path, section = scope.sections[-1]
        for place, what, right in reward_checks.compare_rewards(getattr(section, "rewards", None) or ()):
            yield format_path((*path, "rewards", place)), what, right


def _check_seeds(recipe: st.PipelineRecipe) -> Found:
    for seed, times in Counter(recipe.seeds).items():
        if times > 1:
            yield "seeds", f"{seed} is given {times} times: the runs would be identical", "write other seeds"


def _check_eval_settings(recipe: st.EvalRecipe) -> Found:
    """Check that `eval.samples` is large enough for every pass@k, and that `eval.best_of` names a reward."""
    for position, k in enumerate(recipe.eval.k):
        if k > recipe.eval.samples:
            what = f"pass@{k} needs {k} completions a prompt; eval.samples is {recipe.eval.samples}"
            yield f"eval.k.{position}", what, f"write `eval.samples: {k}` or more"
    name, known = recipe.eval.best_of, [*map(reward_checks.reward_name, recipe.rewards), "reward"]
    if name is not None and name not in known:
        right = did_you_mean(name, known) or f"{', '.join(known[:-1])}, or `reward` for their weighted sum"
        yield "eval.best_of", f"no reward is called `{name}`", right


def _check_references(recipe: Any) -> Found:
    """Refuse `stage:NAME` outside a pipeline. A pipeline replaces these references by paths and checks them itself."""
    for scope in requirements.scopes(recipe):
        path, section = scope.sections[-1]
        for key, name, value in references.names_in(section):
            if name.what in ("model", "critic") and value.startswith(EARLIER):
                what, right = f"`{value}` names a stage of a pipeline", "write the directory of the model"
                yield format_path((*path, *key)), what, right


# What is wrong, and what would be right, for a recipe with images.
_ROWS = ("the rows have images", "leave it out, or the column of images")
_REPLIES = (
    "tools or the environment may show images",
    "leave it out; or annotate what shows none: a tool as `-> str`, an environment's `step` as `-> tuple[str, bool]`",
)


def problems_with_images(recipe: st.Stage, *, rows: bool, replies: bool = False) -> list[Problem]:
    """Return the problems of a recipe whose rows have images, or whose tools or environment may reply with images."""
    what, hint = _ROWS if rows else _REPLIES
    return [
        Problem("", f"{format_path(path)}: {what}, and it {mark.why}", hint=hint)
        for scope, path, mark in requirements.find_marks(recipe, NoImages)
        if (rows or (replies and mark.in_replies)) and scope.holds(mark.when)
    ]


def refuse_with_images(recipe: st.Stage, rows: Sequence[Mapping[str, Any]], *, replies: bool = False) -> None:
    """Raise RecipeError if the recipe cannot be used with the images of its rows, or of replies.

    `replies`: the model reads images, and the tools or the environment may return some.
    """
    if found := problems_with_images(recipe, rows=any(row.get("images") for row in rows), replies=replies):
        raise RecipeError.of(found)


# Recipe class -> its checks. The checks of `Stage` run for every recipe.
CHECKS: dict[type[st.Stage], tuple[Check, ...]] = {
    st.Stage: (requirements.find_refused, requirements.find_contradictions, _check_rewards),
    st.EvalRecipe: (_check_eval_settings,),
    st.RlRecipe: (objective_checks.check_arguments, objective_checks.check_variants, *objective_checks.CHECKS),
    st.MergeRecipe: (merging.problems,),
    st.PipelineRecipe: (_check_seeds,),
}
