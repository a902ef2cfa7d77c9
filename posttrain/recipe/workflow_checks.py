"""Checks on `rollout.workflow` of an `rl` recipe: roles that are named, trained and rewarded."""

from __future__ import annotations

from posttrain.errors import did_you_mean
from posttrain.recipe.requirements import Found
from posttrain.recipe.stages import RlRecipe


def check_workflow(recipe: RlRecipe) -> Found:
    """The roles that a recipe names must be called, and those that are trained must have a reward."""
    workflow = recipe.rollout.workflow
    if workflow is None:
        return
    yield from _unknown_roles(recipe, workflow.roles)
    yield from _wrong_adapters(recipe)
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
    named += [(f"rollout.workflow.adapters.{role}", role) for role in recipe.rollout.workflow.adapters]
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


def _wrong_adapters(recipe: RlRecipe) -> Found:
    """Adapters that `rollout.workflow.adapters` names and the model has not, those that no trained role has, and roles
    that are trained without one."""
    workflow, lora = recipe.rollout.workflow, recipe.model.lora
    if workflow is None or lora is None:
        return
    several, trained = lora.adapters or [], workflow.train or workflow.roles
    for role, name in workflow.adapters.items():
        key = f"rollout.workflow.adapters.{role}"
        if name == "base" and (role in trained or not trained):  # without names all that a workflow calls are trained
            yield key, "the base is frozen, and calls of this role are trained on", "name an adapter, or write `train`"
        elif name not in (*several, "base"):
            hint = did_you_mean(name, several)
            allowed = f"one of: {', '.join((*several, 'base'))}" + (f"; {hint}" if hint else "")
            yield key, f"the model has no adapter `{name}`", allowed
    of_roles = {workflow.adapter_of(role, several) for role in trained}
    for name in several if trained else ():
        if name not in of_roles:
            what = f"the adapter `{name}` would not be trained: no trained role has it"
            yield "model.lora.adapters", what, f"name it in `rollout.workflow.adapters`: {{{trained[0]}: {name}}}"
