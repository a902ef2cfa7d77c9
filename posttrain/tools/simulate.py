"""Monte-Carlo value of an environment's state: the mean return of random plays from it (ProAct's Monte-Carlo critic).

The environment must have a method `actions()` that returns the legal moves in its state, as texts that `step` takes,
and must support `copy.deepcopy` (a class that holds more than Python objects defines `__deepcopy__`).
"""

from __future__ import annotations

import copy
import random
from typing import Any

from posttrain.errors import ToolError


def mean_return(environment: Any, rng: random.Random, *, plays: int, horizon: int, gamma: float) -> float:
    """Compute the mean over `plays` of the discounted reward of uniformly random legal actions, until the play is over,
    has no legal action, or has `horizon` steps. The environment itself is not changed."""
    total = 0.0
    for _ in range(plays):
        world, discount = copy.deepcopy(environment), 1.0
        for _ in range(horizon):
            actions = world.actions()
            if not actions:
                break
            done, reward = take(world, rng.choice(list(actions)))
            total += discount * reward
            discount *= gamma
            if done:
                break
    return total / plays


def action_returns(environment: Any, seed: str, *, plays: int, horizon: int, gamma: float) -> dict[str, float]:
    """Compute the return of each legal action: its reward + gamma * the mean return of random plays after it, or the
    reward alone if it ends the episode. Deterministic in `seed`, so all rollouts from this state get equal values. The
    environment is not changed."""
    returns: dict[str, float] = {}
    for action in map(str, environment.actions()):
        after = copy.deepcopy(environment)
        done, value = take(after, action)
        if not done:
            rng = random.Random(f"{seed} {action}")
            value += gamma * mean_return(after, rng, plays=plays, horizon=horizon, gamma=gamma)
        returns[action] = value
    return returns


def take(environment: Any, action: str) -> tuple[bool, float]:
    """Take one step; returns (whether the episode is over, reward). Raises ToolError for a step without a reward."""
    stepped = environment.step(action)
    if len(stepped) != 3:
        raise ToolError("simulations need the rewards of steps", hint="return (observation, done, reward)")
    _, done, reward = stepped
    return bool(done), float(reward or 0.0)


def read_action(environment: Any, text: str) -> str | None:
    """Return the legal action that a turn is: the environment's `action(text)` if it has that method, else the stripped
    text; None if that is not a legal action."""
    read = getattr(environment, "action", None)
    action = read(text) if callable(read) else text.strip()
    return action if action in set(map(str, environment.actions())) else None
