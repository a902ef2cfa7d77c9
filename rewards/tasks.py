r"""One reward for a mixture of `task:` and `gym:` sources: each row by the verifier of its generator.

rewards:
  - use: tasks.right              # reads the column `task`, and what that generator's verifier reads
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.verify.extract import after_think, last_tag
from posttrain.verify.load import shipped_function
from posttrain.verify.maze import maze_reward
from posttrain.verify.sat import assignment_reward, falsify
from posttrain.verify.text import exact_match, golds_of


def right(
    completion: str,
    task: str | None,
    answer: str | Sequence[str] | None = None,
    formula: str | None = None,
    numbers: Sequence[int] | None = None,
    target: float | None = None,
    gym_task: str | None = None,
    gym_entry: str | Mapping[str, Any] | None = None,
    gym_params: str | None = None,
) -> float | None:
    """1 if the row's own verifier takes the answer in full, else 0; None for a row of no shipped generator.

    saturn: the last box satisfies the formula. ariadne: the moves after the thought are the path. countdown: the
    expression is right. random_calculation: the number is right to 1e-6. searchgym, asearcher: exact match of the last
    `<answer>`. gym: the task's score is 1.
    """
    if gym_task is not None and gym_entry is not None:
        return _reward("gym.score")(completion, gym_task, gym_entry, gym_params, exact=True, whole_text=False)
    if task == "saturn" and formula is not None:
        return max(assignment_reward(formula, after_think(completion)), 0.0)
    if task == "ariadne":
        return float(maze_reward(completion, str(answer), weights=(1, 0, 0), normalise=True)["reward"] == 1)
    if task == "countdown":
        return float(_reward("countdown.expression")(completion, target, numbers) == 1)
    if task == "random_calculation":
        return float((_reward("numeric.distance")(completion, answer) or 0.0) > 1 - 1e-6)
    if task in ("searchgym", "asearcher"):
        found = last_tag(after_think(completion), "answer")
        return exact_match(found or "", golds_of(answer))
    return None


@functools.cache
def _reward(name: str) -> Callable[..., Any]:
    return shipped_function(name)


_WRITTEN: dict[str, Callable[[Any], str]] = {
    "saturn": lambda answer: rf"\boxed{{{answer}}}",
    "ariadne": lambda answer: f"<think>t</think>{answer}",
    "random_calculation": lambda answer: rf"\boxed{{{answer}}}",
}


def GOLD(row: Mapping[str, Any]) -> str | None:
    """The answer as the row's verifier reads it."""
    if row.get("answer") is None or (row.get("task") is None and row.get("gym_task") is None):
        return None
    return _WRITTEN.get(row.get("task", ""), lambda answer: f"<answer>{answer}</answer>")(row["answer"])


def NEAR_MISS(row: Mapping[str, Any]) -> str | None:
    """Of a formula an assignment that falsifies it; None for other tasks, where a changed answer is wrong."""
    return rf"\boxed{{{falsify(row['formula'], str(row['answer']))}}}" if row.get("formula") is not None else None


EXAMPLES = [
    (r"\boxed{001}", {"task": "saturn", "formula": "A!B & BC"}, 1.0),
    ("no box", {"task": "saturn", "formula": "A!B & BC"}, 0.0),
    ("<think>t</think><|up|>", {"task": "ariadne", "answer": "<|up|>"}, 1.0),
    ("<think>t</think><|up|>", {"task": "ariadne", "answer": "<|up|><|up|>"}, 0.0),
    ("<answer>2 * 11</answer>", {"task": "countdown", "answer": "11 * 2", "numbers": [11, 2], "target": 22}, 1.0),
    (r"\boxed{0.5}", {"task": "random_calculation", "answer": "0.5"}, 1.0),
    (r"\boxed{0.501}", {"task": "random_calculation", "answer": "0.5"}, 0.0),
    ("<answer>the Batogi</answer>", {"task": "searchgym", "answer": "Batogi"}, 1.0),
    ("", {"task": "searchgym", "answer": "Batogi"}, 0.0),
    ("<answer>3</answer>", {"task": "other", "answer": "3"}, None),
]

ROWS = [
    {"prompt": "A!B & BC", "task": "saturn", "formula": "A!B & BC", "answer": "001"},
    {"prompt": "a maze", "task": "ariadne", "answer": "<|up|><|left|>"},
    {"prompt": "who?", "task": "searchgym", "answer": "Batogi"},
    {"prompt": "1 / 2 + 12", "task": "random_calculation", "answer": "12.5"},
]
