"""Moves through a maze after the thought: Ariadne (2511.00710).

rewards:
  - use: maze.path                # reads the column `answer`, as rows of `source: task:ariadne` have it
"""

from collections.abc import Sequence

from posttrain.verify.maze import maze_reward


def path(
    completion: str,
    answer: str | None,
    steps: int | None = None,
    *,
    prefix_turns: bool = False,
    weights: Sequence[float] = (1.0, 0.1, 0.1),
    normalise: bool = False,
) -> dict[str, float] | None:
    """The moves that follow `</think>` against those of the only path; part credit for a right beginning.

    The whole path earns 2 * steps * (turns + 1), so that long ones weigh more: normalise divides it by that (ours).
    prefix_turns: a beginning earns its moves times (its turns + 1). weights: of path, of moves without other text, of
    one pair of think tags. None for a row without `steps`, which is no maze. Logged parts: path_reward, action_format,
    tag_format.
    """
    if steps is None or answer is None:
        return None
    return maze_reward(completion, answer, prefix_turns=prefix_turns, weights=weights, normalise=normalise)


_ROW = {"answer": "<|up|><|up|><|left|>", "steps": 3}

EXAMPLES = [
    ("<think>t</think><|up|><|up|><|left|>", _ROW, 12.2),
    ("<think>t</think><|up|><|left|><|left|>", _ROW, 1.2),
    ("<|up|><|up|><|left|>", _ROW, 0.0),
    ("<think>t</think>go <|up|><|up|>", _ROW, 2.1),
    ("<think>t</think><|up|><|up|><|left|>", _ROW, 1.2, {"normalise": True}),
    ("<think>t</think><|up|> <|up|><|left|>", _ROW, 3.2),
    ("", _ROW, 0.0),
    ("<|up|>", {"answer": "5"}, None),
]


def GOLD(row: dict) -> str | None:
    """A thought, then the moves."""
    return f"<think>see the open sides</think>{row['answer']}" if row.get("steps") is not None else None


ROWS = [
    {"prompt": "(0,0) right origin\n(1,0) left target", "answer": "<|right|>", "steps": 1},
    {"prompt": "(0,0) down target\n(0,1) up origin", "answer": "<|up|>", "steps": 1},
    {"prompt": "(0,0) down origin\n(0,1) up right\n(1,1) left target", "answer": "<|down|><|right|>", "steps": 2},
]
