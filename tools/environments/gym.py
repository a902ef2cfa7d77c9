"""`environment: {use: gym}`: a task of reasoning-gym (`data: {source: gym:TASK}`) with several attempts.

The model answers in <answer> tags, or with its whole turn; after a wrong answer it is told so and may try again.
"""

import re
from typing import Any

from posttrain import typed_json
from posttrain.verify.gym import scorer

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Environment:
    """attempts: turns in which it may answer. discount: what each further attempt costs: score * discount^k."""

    def __init__(self, *, attempts: int = 3, discount: float = 0.9) -> None:
        self.attempts, self.discount = attempts, discount

    def reset(self, row: Any) -> None:
        self.check = scorer(row["gym_task"], row.get("gym_params") or "{}")
        self.entry = typed_json.loads(row["gym_entry"])
        self.tried, self.best = 0, 0.0

    def step(self, text: str) -> tuple[str, bool, float]:
        """The observation, whether it is over, and how much better the best answer so far has become."""
        found = _ANSWER.findall(text)
        earned = float(self.check((found[-1] if found else text).strip(), self.entry)) * self.discount**self.tried
        gain, self.best = max(0.0, earned - self.best), max(self.best, earned)
        self.tried += 1
        if earned > 0.99 * self.discount ** (self.tried - 1) or self.tried >= self.attempts:
            return "", True, gain
        return "That is not right. Try again.", False, gain

    def score(self) -> float:
        return self.best

    def close(self) -> None:
        """Nothing is held."""
