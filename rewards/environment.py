"""What the environment itself says of a rollout.

environment: {use: gym}
rewards:
  - use: environment.score
  - use: environment.steps        # its rewards by turn, for advantages that credit turns (gigpo, step_gae)
"""

from collections.abc import Sequence

from posttrain.verify.contract import per_turn


def score(completion: str, world_score: float | None) -> float | None:
    """The environment's `score()`; None where there is none, or it failed."""
    return world_score


@per_turn
def steps(completion: str, parts: Sequence[str], turn_rewards: Sequence[float | None]) -> list[float | None] | None:
    """What the environment's `step` gave for each turn, 0 where it gave nothing; None where it never does."""
    return list(turn_rewards) if any(reward is not None for reward in turn_rewards) else None


EXAMPLES = {
    "score": [
        ("", {"world_score": 0.5}, 0.5),
        ("it is 4", {"world_score": 1.0}, 1.0),
        ("it is 5", {"world_score": 0.0}, 0.0),
        ("lost", {"world_score": None}, None),
    ],
    "steps": [
        ("3\n4", {"parts": ["3", "4"], "turn_rewards": [-0.1, 1.0]}, [-0.1, 1.0]),
        ("3\n4", {"parts": ["3", "4"], "turn_rewards": [None, 1.0]}, [0.0, 1.0]),
        ("3", {"parts": ["3"], "turn_rewards": [None]}, None),
        ("", {"parts": [""], "turn_rewards": []}, None),
    ],
}

_BESIDE = {"rows": [{"prompt": "What is 2 + 2?", "answer": "4"}], "correct": "math.accuracy"}
ROWS = {"score": _BESIDE, "steps": _BESIDE}
