"""What the environment itself says of a rollout.

environment: {use: gym}
rewards:
  - use: environment.score
"""


def score(completion: str, world_score: float | None) -> float | None:
    """The environment's `score()`; None where there is none, or it failed."""
    return world_score


EXAMPLES = {
    "score": [
        ("", {"world_score": 0.5}, 0.5),
        ("it is 4", {"world_score": 1.0}, 1.0),
        ("it is 5", {"world_score": 0.0}, 0.0),
        ("lost", {"world_score": None}, None),
    ]
}

ROWS = {"rows": [{"prompt": "What is 2 + 2?", "answer": "4"}], "correct": "math.accuracy"}
