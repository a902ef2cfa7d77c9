"""reasoning-gym's own score of its own tasks, in [0, 1]; many give part credit.

rewards:
  - use: gym.score                # reads the columns that rows of `source: gym:TASK` carry
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify.extract import Extractor, after_think
from posttrain.verify.extract import extract as find_answer
from posttrain.verify.gym import entry_of, import_tasks, scorer


def score(
    completion: str,
    gym_task: str | None,
    gym_entry: str | Mapping[str, Any] | None,
    gym_params: str | None = None,
    *,
    extract: Sequence[Extractor] = ("answer_tag", "boxed"),
    whole_text: bool = False,
    exact: bool = False,
) -> float | None:
    """The task's score of the extracted answer; 0 if there is none; None for a row that is not from reasoning-gym.

    Where a task's own code would run the answer as Python, it gets literals or formulas alone (`posttrain.verify.gym`).
    whole_text: without a marked answer, all text after the thought is the answer. exact: part credit is 0; without it
    many tasks pay for what is wrong, by length or distance (of chain_sum `-3037` earns 0.8 where 3037 is right).
    """
    if gym_task is None or gym_entry is None:
        return None
    text = after_think(completion)
    answer = find_answer(text, extract)
    if answer is None and whole_text:
        answer = text
    if answer is None or not answer.strip():
        return 0.0
    earned = float(scorer(gym_task, gym_params or "{}")(answer.strip(), entry_of(gym_entry)))
    return earned if earned >= 1 or not exact else 0.0


def setup() -> None:
    """Called once in each worker, outside the time limit of a call: importing reasoning-gym takes a second."""
    import_tasks()


_SUM = {"gym_task": "chain_sum", "gym_entry": json.dumps({"question": "2 + 3 =", "answer": "5", "metadata": {}})}
_LARGE = {"gym_task": "chain_sum", "gym_entry": json.dumps({"question": "?", "answer": "3037", "metadata": {}})}

EXAMPLES = [
    ("<think>2 + 3</think><answer>5</answer>", _SUM, 1.0),
    (r"So \boxed{5}", _SUM, 1.0),
    ("<answer>6</answer>", _SUM, 0.0),
    ("<answer>-3037</answer>", _LARGE, 0.8),
    ("<answer>-3037</answer>", _LARGE, 0.0, {"exact": True}),
    ("<answer>3037</answer>", _LARGE, 1.0, {"exact": True}),
    ("5", _SUM, 0.0),
    ("5", _SUM, 1.0, {"whole_text": True}),
    ("<answer>5", _SUM, 0.0),
    ("", _SUM, 0.0),
    ("<answer>5</answer>", {"gym_task": None, "gym_entry": None}, None),
]

ROWS = [
    {
        "prompt": f"{a} + 3 =",
        "answer": str(a + 3),
        "gym_task": "chain_sum",
        "gym_entry": json.dumps({"question": f"{a} + 3 =", "answer": str(a + 3), "metadata": {}}),
    }
    for a in (2, 9, 14)
]
