r"""Boxes written as text: do they lie where the gold boxes lie, and is the model sure of the right ones?

rewards:
  - use: boxes.visual_rft_iou     # `answer`: a list of [x1, y1, x2, y2], or its JSON text

"Visual-RFT", 2503.01785, after its code. Logged parts: iou, confidence, format.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify.boxes import box_reward, gold_box
from posttrain.verify.structured import from_json

_BOXES = "a list of [x1, y1, x2, y2]"


def visual_rft_iou(
    completion: str, answer: Sequence[Any] | str | None, *, threshold: float = 0.5
) -> dict[str, float] | None:
    """iou + confidence + format in [0, 3] of `<answer>[{'Position': [..], 'Confidence': c}, ..]</answer>`.

    threshold: a box is matched if its IoU with a gold box is above it. None if the row has no list of boxes; with an
    empty one, finding nothing is right.
    """
    if answer is None:
        return None
    return box_reward(completion, from_json(answer, (list, tuple), _BOXES), threshold=threshold)


_ONE = "<think>see</think>\n<answer>[{'Position': [0, 0, 10, 10], 'Confidence': 0.9}%s]</answer>"
_SURE = "<think>see</think><answer>[{'Position': [0, 0, 10, 10], 'Confidence': %d}]</answer>"
_EXTRA = ", {'Position': [50, 50, 60, 60], 'Confidence': 0.3}"

EXAMPLES = [
    (_ONE % "", {"answer": [[0, 0, 10, 8]]}, {"iou": 0.8, "confidence": 0.9, "format": 1.0, "reward": 2.7}),
    (_ONE % _EXTRA, {"answer": "[[0, 0, 10, 10]]"}, {"iou": 0.5, "confidence": 0.8, "reward": 2.3}),
    (_ONE % "", {"answer": [[20, 20, 30, 30]]}, {"iou": 0.0, "confidence": 0.1, "reward": 1.1}),
    (_SURE % 100, {"answer": [[0, 0, 10, 10]]}, 3.0),
    (_SURE % -100, {"answer": [[20, 20, 30, 30]]}, 2.0),
    ("<think>a</think><answer>No Objects</answer>", {"answer": []}, 3.0),
    ("<think>a</think><answer>the cat</answer>", {"answer": [[0, 0, 1, 1]]}, 1.0),
    ("", {"answer": [[0, 0, 1, 1]]}, 0.0),
    ("", {"answer": None}, None),
]


def GOLD(row: Mapping[str, Any]) -> str | None:
    """A completion that earns full marks on this row."""
    if row.get("answer") is None:
        return None
    boxes = [
        {"Position": list(gold_box(b)), "Confidence": 1.0} for b in from_json(row["answer"], (list, tuple), _BOXES)
    ]
    return f"<think>see</think>\n<answer>{boxes}</answer>"


ROWS = [
    {"prompt": "Where is the cat?", "answer": [[0, 0, 10, 8]]},
    {"prompt": "Where are the dogs?", "answer": [[5, 5, 30, 40], [50, 50, 60, 60]]},
]
