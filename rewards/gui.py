r"""Is the action on the screen the right one?

rewards:
  - use: gui.action               # `answer`: an action with a box or a point, in any of the action spaces
    params: {coordinates: 0-1000, gold_coordinates: pixels}

Read are the calls of UI-TARS and pyautogui and the JSON of Qwen-VL, Anthropic and OpenAI (posttrain/verify/gui.py names
them); the gold need not be written in the space that the model uses. Where `coordinates` and `gold_coordinates` differ
and one is `pixels`, the column `image_size` = [width, height] is read.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify.gui import Action, action_reward, gold_actions
from posttrain.verify.regions import Coordinates


def action(
    completion: str,
    answer: Any,
    image_size: Sequence[float] | None = None,
    *,
    type_weight: float = 0.5,
    tolerance: float = 0.0,
    coordinates: Coordinates = "pixels",
    gold_coordinates: Coordinates | None = None,
) -> dict[str, float] | None:
    """type_weight for the right kind of action, the rest of 1 for its arguments: place, text, keys, direction.

    A place is right in the gold box, or at most `tolerance` from the gold point (pixels, or shares of the screen where
    the two kinds of coordinates differ). Typed text earns by ANLS, keys and directions must be the same. Several
    actions are compared in order, and one too many or too few counts as wrong. A part for the kind and one for the
    arguments are as in UI-R1 (2503.21620) and GUI-R1 (2504.10458); weights and ANLS are ours. None without a gold.
    Logged parts: type, arguments, readable.
    """
    gold = gold_actions(answer)
    if gold is None:
        return None
    return action_reward(
        completion,
        gold,
        type_weight=type_weight,
        tolerance=tolerance,
        coordinates=coordinates,
        gold_coordinates=gold_coordinates,
        size=image_size,
    )


_CLICK = {"answer": {"action": "click", "bbox": [10, 10, 50, 30]}}
_QWEN = (
    '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [%d, %d]}}\n</tool_call>'
)

EXAMPLES = [
    (_QWEN % (20, 20), _CLICK, {"reward": 1.0, "type": 1.0, "arguments": 1.0, "readable": 1.0}),
    (_QWEN % (60, 20), _CLICK, {"reward": 0.5, "arguments": 0.0}),
    ("Thought: the button\nAction: click(start_box='<|box_start|>(20,20)<|box_end|>')", _CLICK, 1.0),
    ("pyautogui.click(x=20, y=20)", _CLICK, 1.0),
    ("pyautogui.rightClick(20, 20)", _CLICK, 0.0),
    ("click(point='<point>20 20</point>')\nwait()", _CLICK, 0.5),
    ("type(content='hello wirld')", {"answer": "type(content='hello world')"}, 0.5 + 0.5 * 10 / 11),
    ("hotkey(key='ctrl c')", {"answer": {"action": "key", "keys": ["ctrl", "c"]}}, 1.0),
    ('{"action": "scroll", "pixels": -300}', {"answer": "scroll(point='(5,5)', direction='down')"}, 1.0),
    ('{"action": "scroll", "pixels": 300}', {"answer": "scroll(point='(5,5)', direction='down')"}, 0.5),
    ("drag(start_box='(1,2)', end_box='(30,40)')", {"answer": "drag(start_box='(1,2)', end_box='(3,4)')"}, 0.75),
    ("click(12, 10)", {"answer": "click(10, 10)"}, 1.0, {"tolerance": 2.0}),
    (
        _QWEN % (500, 500),
        {"answer": {"action": "click", "bbox": [300, 200, 340, 280]}, "image_size": [640, 480]},
        1.0,
        {"coordinates": "0-1000", "gold_coordinates": "pixels"},
    ),
    ("<think>click(20, 20)</think>", _CLICK, 0.0),
    ("I would click the button.", _CLICK, {"reward": 0.0, "readable": 0.0}),
    ("", _CLICK, 0.0),
    ("click(1, 2)", {"answer": None}, None),
]


def _as_json(action: Action) -> dict[str, Any]:
    """An action as JSON, its places as points."""
    held: dict[str, Any] = {"action": action.kind}
    for key, place in zip(("coordinate", "coordinate2"), action.places, strict=False):
        held[key] = [(place[0] + place[-2]) / 2, (place[1] + place[-1]) / 2]
    held |= {"text": action.text} if action.text is not None else {}
    held |= {"keys": list(action.keys)} if action.keys else {}
    return held | ({"direction": action.direction} if action.direction else {})


def GOLD(row: Mapping[str, Any]) -> str | None:
    """A thought, then the gold actions as JSON."""
    gold = gold_actions(row.get("answer"))
    return None if gold is None else "<think>see</think>\n" + "\n".join(json.dumps(_as_json(one)) for one in gold)


ROWS = [
    {"prompt": "Open the settings.", "answer": {"action": "click", "bbox": [10, 10, 50, 30]}},
    {"prompt": "Search for shoes.", "answer": {"action": "type", "text": "red shoes"}},
    {"prompt": "Show more.", "answer": {"action": "scroll", "direction": "down"}},
]
