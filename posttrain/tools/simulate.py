"""What a state of an environment is worth: the mean return of random plays from it (ProAct's Monte-Carlo critic).

An environment that can be played so has a method `actions()`, the legal moves in its state as texts that `step` takes,
and can be copied (`copy.deepcopy`; a class that holds more than Python objects says how in `__deepcopy__`).
"""

from __future__ import annotations

import copy
import random
from typing import Any

from posttrain.errors import ToolError


def mean_return(environment: Any, rng: random.Random, *, plays: int, horizon: int, gamma: float) -> float:
    """Mean over `plays` of the discounted rewards of steps, each with an action drawn evenly from the legal ones, until
    the play is over, has no action left, or has `horizon` steps. The environment itself stays as it is."""
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
    """What each legal action of the state returns: its reward + gamma * the mean return of random plays behind it, 0
    where it ends the episode. The same for every rollout that begins in this state. The environment stays as it is."""
    found: dict[str, float] = {}
    for action in map(str, environment.actions()):
        after = copy.deepcopy(environment)
        done, value = take(after, action)
        if not done:
            rng = random.Random(f"{seed} {action}")
            value += gamma * mean_return(after, rng, plays=plays, horizon=horizon, gamma=gamma)
        found[action] = value
    return found


def take(environment: Any, action: str) -> tuple[bool, float]:
    """Whether the episode is over behind an action, and its reward. Raises ToolError for a step without one."""
    stepped = environment.step(action)
    if len(stepped) != 3:
        raise ToolError("simulations need the rewards of steps", hint="return (observation, done, reward)")
    _, done, reward = stepped
    return bool(done), float(reward or 0.0)


def read_action(environment: Any, text: str) -> str | None:
    """Which legal action a turn is: what the environment's `action(text)` says, without one the text itself without
    blanks around it; None if that is no legal action."""
    own = getattr(environment, "action", None)
    said = own(text) if callable(own) else text.strip()
    return said if said in set(map(str, environment.actions())) else None
