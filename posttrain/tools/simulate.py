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
            stepped = world.step(rng.choice(list(actions)))
            if len(stepped) != 3:
                raise ToolError("simulations need the rewards of steps", hint="return (observation, done, reward)")
            _, done, reward = stepped
            total += discount * float(reward or 0.0)
            discount *= gamma
            if done:
                break
    return total / plays
