"""Checks on a list of rewards: asked of a recipe, and by the scorer of a list that was made in code.

Each yields (key below the list, what is wrong, what would be right).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from posttrain.errors import did_you_mean
from posttrain.path_resolution import split_function
from posttrain.recipe.requirements import Found, find_refused
from posttrain.recipe.reward_sections import Reward


def reward_name(reward: Reward) -> str:
    """The name of a reward in metrics: its own, or that of its function."""
    split = split_function(reward.use)
    return reward.name or (split[1] if split else reward.use.rpartition(".")[2])


def problems(rewards: Sequence[Reward]) -> Found:
    """Everything that is wrong with a list of rewards, whatever their scripts are."""
    for position, reward in enumerate(rewards):
        yield from ((f"{position}.{key}", what, right) for key, what, right in find_refused(reward))
    yield from compare_rewards(rewards)


def compare_rewards(rewards: Sequence[Reward]) -> Found:
    """Everything that is wrong between the rewards of a list; what is wrong in one of them is marked at its fields."""
    names = [reward_name(reward) for reward in rewards]
    for check in (_names, _correct, _conditions, _canaries):
        yield from check(rewards, names)


def _names(_: Sequence[Reward], names: Sequence[str]) -> Found:
    times = Counter(names)
    for position, name in enumerate(names):
        if times[name] > 1:
            yield f"{position}", f"{times[name]} rewards are called `{name}`", "give each a `name` of its own"


def _correct(rewards: Sequence[Reward], names: Sequence[str]) -> Found:
    marked = [position for position, reward in enumerate(rewards) if reward.correct]
    if len(marked) > 1:
        listed = ", ".join(names[position] for position in marked)
        yield f"{marked[-1]}.correct", f"several rewards have `correct: true`: {listed}", "leave it in one"


def _conditions(rewards: Sequence[Reward], names: Sequence[str]) -> Found:
    on = {name: reward.condition.on for name, reward in zip(names, rewards, strict=True) if reward.condition}
    for position, (name, reward) in enumerate(zip(names, rewards, strict=True)):
        if reward.condition is None:
            continue
        key, other = f"{position}.condition.on", reward.condition.on
        if other == name:
            yield key, f"reward {name} has a condition on itself", "`clip` limits a score"
        elif other not in names:
            others = [one for one in names if one != name]
            right = did_you_mean(other, others) or f"the other rewards: {', '.join(others) or 'none'}"
            yield key, f"reward {name} has a condition on `{other}`, which is no reward", right
        elif name in (circle := _dependency_chain(name, on)):
            listed = " -> ".join([name, *circle])
            yield key, f"the conditions go in a circle: {listed}", "remove one of them"


def _dependency_chain(name: str, on: dict[str, str]) -> list[str]:
    """The rewards that a reward depends on, one after the other, until one comes twice."""
    found: list[str] = []
    while (name := on.get(name, "")) and name not in found:
        found.append(name)
    return found


def _canaries(rewards: Sequence[Reward], names: Sequence[str]) -> Found:
    """A canary must not be trained on through a condition."""
    canaries = {name for name, reward in zip(names, rewards, strict=True) if reward.canary}
    for position, reward in enumerate(rewards):
        if reward.condition is not None and reward.condition.on in canaries and reward.weight:
            what = f"`{reward.condition.on}` is a canary: a condition on it trains on it"
            yield f"{position}.condition", what, "name another reward"
