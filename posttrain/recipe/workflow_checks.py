"""Checks on `rollout.workflow` of an `rl` recipe: the roles that are named, trained and rewarded."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.errors import did_you_mean
from posttrain.recipe.requirements import Found
from posttrain.recipe.stages import RlRecipe


def check_roles(recipe: RlRecipe) -> Found:
    """Check that named roles exist in the workflow, and that trained roles have a reward and an adapter."""
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
