"""Checks on a list of rewards, of a recipe or made in code (the scorer calls them).

Each check yields (key below the list, what is wrong, what would be right).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from posttrain.errors import did_you_mean
from posttrain.path_resolution import split_function
from posttrain.recipe.requirements import Found, find_refused
from posttrain.recipe.reward_sections import Reward


def reward_name(reward: Reward) -> str:
    """Return the name of a reward in metrics: its `name`, or the name of its function."""
    split = split_function(reward.use)
    return reward.name or (split[1] if split else reward.use.rpartition(".")[2])


def problems(rewards: Sequence[Reward]) -> Found:
    """Yield every problem of a list of rewards that can be found without loading their scripts."""
    for position, reward in enumerate(rewards):
        yield from ((f"{position}.{key}", what, right) for key, what, right in find_refused(reward))
    yield from compare_rewards(rewards)


def compare_rewards(rewards: Sequence[Reward]) -> Found:
    """Yield the problems between the rewards of a list. Problems of a single reward are marked at its fields."""
    names = [reward_name(reward) for reward in rewards]
    times, marked = Counter(names), [place for place, reward in enumerate(rewards) if reward.correct]
    on = {name: reward.condition.on for name, reward in zip(names, rewards, strict=True) if reward.condition}
    canaries = {name for name, reward in zip(names, rewards, strict=True) if reward.canary}
    if len(marked) > 1:
        listed = ", ".join(names[place] for place in marked)
        yield f"{marked[-1]}.correct", f"several rewards have `correct: true`: {listed}", "leave it in one"
    for position, (name, reward) in enumerate(zip(names, rewards, strict=True)):
        if times[name] > 1:
            yield f"{position}", f"{times[name]} rewards are called `{name}`", "give each a `name` of its own"
        if reward.condition is None:
            continue
        key, other, chain = f"{position}.condition", reward.condition.on, [name]
        while (after := on.get(chain[-1])) and after not in chain[1:]:
            chain.append(after)
        if other == name:
            yield f"{key}.on", f"reward {name} has a condition on itself", "`clip` limits a score"
        elif other not in names:
            others = [other for other in names if other != name]
            right = did_you_mean(other, others) or f"the other rewards: {', '.join(others) or 'none'}"
            yield f"{key}.on", f"reward {name} has a condition on `{other}`, which is not a reward", right
        elif name in chain[1:]:
            yield f"{key}.on", f"the conditions go in a circle: {' -> '.join(chain)}", "remove one of them"
        if other in canaries and reward.weight:
            yield key, f"`{other}` is a canary: a condition on it trains on it", "name another reward"
