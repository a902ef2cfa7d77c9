"""Checks on `rollout.workflow` of an `rl` recipe: roles that are named, trained and rewarded."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.errors import did_you_mean
from posttrain.recipe.stages import RlRecipe

Found = Iterator[tuple[str, str, str]]


def check_workflow(recipe: RlRecipe) -> Found:
    """The roles that a recipe names must be called, and those that are trained must have a reward."""
    workflow = recipe.rollout.workflow
    if workflow is None:
        return
    yield from _unknown_roles(recipe, workflow.roles)
    trained = workflow.train or workflow.roles
    paid = [reward for reward in recipe.rewards if reward.weight]
    for role in trained:
        if role not in workflow.late and not any(reward.roles is None or role in reward.roles for reward in paid):
            key = "rollout.workflow.train" if workflow.train else "rollout.workflow"
            what = f"the calls of `{role}` are trained on, and no reward is for them"
            yield key, what, f"add a reward with `roles: [{role}]`, or leave the role out of `train`"
    for number, reward in enumerate(recipe.rewards):
        if trained and reward.roles is not None and not set(reward.roles) & set(trained):
            what = f"does nothing: no call of {', '.join(reward.roles)} is trained on"
            yield f"rewards.{number}.roles", what, f"one of: {', '.join(trained)}"


def _unknown_roles(recipe: RlRecipe, roles: list[str]) -> Found:
    """Names that a workflow which says its roles never calls."""
    assert recipe.rollout.workflow is not None
    named = [("rollout.workflow.train", role) for role in recipe.rollout.workflow.train or ()]
    for number, reward in enumerate(recipe.rewards):
        named += [(f"rewards.{number}.roles", role) for role in reward.roles or ()]
        named += [(f"rewards.{number}.reads", reward.reads)] if reward.reads else []
    if recipe.advantage.use == "from_role":
        named.append(("advantage.role", recipe.advantage.params["role"]))
    for key, role in named if roles else ():
        if role not in roles:
            what = f"workflow `{recipe.rollout.workflow.use}` calls no `{role}`"
            hint = did_you_mean(role, roles)
            yield key, what, f"one of: {', '.join(roles)}" + (f"; {hint}" if hint else "")
