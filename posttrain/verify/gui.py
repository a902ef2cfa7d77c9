"""Parser of GUI actions that a model wrote as text, and their comparison with gold actions. Pure functions.

Accepted formats: calls of UI-TARS (`click(start_box='(10,20)')`, `type(content='hi')`, `scroll(direction='down',
...)`), pyautogui (`pyautogui.click(10, 20)`, `pyautogui.hotkey('ctrl', 'c')`), and JSON of Qwen-VL (`{"action":
"left_click", "coordinate": [10, 20]}`, bare, in a `<tool_call>` or fenced), Anthropic and OpenAI (`{"type": "click",
"x": 10, "y": 20}`).
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.verify.boxes import hits
from posttrain.verify.edit_distance import anls
from posttrain.verify.regions import Coordinates, Numbers, Region, answer_part, read_regions, to_unit

# name in an action space -> canonical kind
KINDS = {
    **dict.fromkeys(("click", "left_click", "left_single", "tap", "touch"), "click"),
    **dict.fromkeys(("double_click", "left_double", "doubleclick"), "double_click"),
    **dict.fromkeys(("triple_click", "tripleclick"), "triple_click"),
    **dict.fromkeys(("right_click", "right_single", "rightclick"), "right_click"),
    **dict.fromkeys(("middle_click", "middleclick"), "middle_click"),
    **dict.fromkeys(("long_press", "longpress"), "long_press"),
    **dict.fromkeys(("move", "mouse_move", "moveto", "hover"), "move"),
    **dict.fromkeys(("drag", "left_click_drag", "dragto", "swipe", "select"), "drag"),
    **dict.fromkeys(("type", "write", "typewrite", "input_text", "input", "enter_text"), "type"),
    **dict.fromkeys(("key", "hotkey", "press", "keypress"), "key"),
    **dict.fromkeys(("scroll", "hscroll", "vscroll"), "scroll"),
    **dict.fromkeys(("open", "open_app", "launch"), "open"),
    **dict.fromkeys(("press_home", "home", "navigate_home"), "home"),
    **dict.fromkeys(("press_back", "back", "navigate_back"), "back"),
    **dict.fromkeys(("wait", "sleep"), "wait"),
    **dict.fromkeys(("finished", "terminate", "done", "complete", "status"), "finish"),
    **dict.fromkeys(("answer", "call_user"), "answer"),
}
POINTED = ("click", "double_click", "triple_click", "right_click", "middle_click", "long_press", "move", "drag")
TYPED = ("type", "open", "answer")
_NAME_KEYS = ("action", "action_type", "type", "name")
_PLACE_KEYS = (
    *("start_box", "end_box", "point", "point_2d", "start_point", "end_point", "coordinate", "coordinate2"),
    *("start_coordinate", "end_coordinate", "position", "bbox", "bbox_2d", "box", "path"),
)
_ENDS = ("end_box", "end_point", "coordinate2", "end_coordinate")
_TEXT_KEYS = ("text", "content", "input_text", "value", "app_name", "message", "status")
_KEY_KEYS = ("key", "keys")
_CALL = re.compile(r"(?<![\w.])((?:[A-Za-z_]\w*\.)*)([A-Za-z_]\w*)\(")
_MODULES = ("", "pyautogui.", "computer.", "agent.", "mobile.", "time.")
_OBJECT = re.compile(r"\{")
MAX_ACTIONS = 50  # per completion
_MAX_TRIES = 200  # positions in a completion to try as the start of an object or a call
_MAX_CALL_CHARS = 4000  # characters


class Action(NamedTuple):
    """One action.

    kind: a value of KINDS. places: positions, each a point (2 numbers) or a box (4 numbers); two for a drag. text: text
    typed, app opened or answer given. keys: keys pressed, lowercase. direction: scroll direction of the view.
    """

    kind: str
    places: tuple[Numbers, ...] = ()
    text: str | None = None
    keys: tuple[str, ...] = ()
    direction: str | None = None


def read_actions(text: str) -> list[Action] | None:
    """Parse the actions of a text in order: its JSON objects if any is an action, else its calls; None without actions.

    An object with an unknown action name makes the whole text unreadable, as do more than 50 actions; calls of unknown
    functions are treated as prose.
    """
    actions = [action for item in _find_objects(text) if (action := _action_from_object(item)) is not None]
    actions = actions or list(_actions_from_calls(text))
    known = 0 < len(actions) <= MAX_ACTIONS and all(action.kind in KINDS.values() for action in actions)
    return actions if known else None


def _find_objects(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the outermost JSON objects of a text."""
    decoder, position = json.JSONDecoder(), 0
    for _ in range(_MAX_TRIES):
        if (match := _OBJECT.search(text, position)) is None:
            return
        try:
            item, position = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):  # no valid JSON starts here
            position = match.end()
            continue
        yield item


def _action_from_object(item: Mapping[str, Any]) -> Action | None:
    """Return the action of a JSON object, also if nested in `arguments`, `action` or `parameters`, or None."""
    for key in ("arguments", "action", "parameters"):
        inner = item.get(key)
        if isinstance(inner, Mapping) and (found := _action_from_object(inner)) is not None:
            return found
    name = next((item[key] for key in _NAME_KEYS if isinstance(item.get(key), str)), None)
    if name is None:
        return None
    arguments = {**item, **(item["arguments"] if isinstance(item.get("arguments"), Mapping) else {})}
    return _make_action(name, [], {key: value for key, value in arguments.items() if key not in ("action", "name")})


def _actions_from_calls(text: str) -> Iterator[Action]:
    """Yield the actions of calls such as `pyautogui.click(1, 2)`; calls of other modules are ignored."""
    position = tries = 0
    while tries < _MAX_TRIES and (match := _CALL.search(text, position)):
        position = match.end()
        if match[1] not in _MODULES or _snake(match[2]) not in KINDS:
            continue
        tries += 1
        end = _find_closing_bracket(text, match.end())
        try:
            call = ast.parse(text[match.start(2) : end], mode="eval").body if end else None
            if not isinstance(call, ast.Call):
                continue
            values = [ast.literal_eval(argument) for argument in call.args]
            named = {argument.arg: ast.literal_eval(argument.value) for argument in call.keywords if argument.arg}
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # not a call of literals
            continue
        position = end
        yield _make_action(match[2], values, named)


def _find_closing_bracket(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one before `start`; 0 if none is near.

    Brackets in quotes are ignored.
    """
    depth, quote, position, last = 1, "", start, min(len(text), start + _MAX_CALL_CHARS)
    while position < last and depth:
        character = text[position]
        if quote:
            position += character == "\\"
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        position += 1
    return 0 if depth else position


def _make_action(name: str, values: Sequence[Any], named: Mapping[str, Any]) -> Action:
    """Make an action from a name and arguments. An unknown name becomes the action's kind."""
    if _snake(name) == "system_button":
        name = str(named.get("button", ""))
        if _snake(name) == "enter":
            return Action("key", keys=("enter",))
    kind = KINDS.get(_snake(name), name)
    numbers = [_number(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    texts = [value for value in values if isinstance(value, str)]
    if kind == "scroll":
        return Action(kind, _places(named), direction=_direction(name, numbers, named))
    if kind == "click":
        kind = _kind_of_click(kind, named)
    if kind == "key":
        given = next((named[key] for key in _KEY_KEYS if named.get(key) is not None), texts or named.get("text", ""))
        return Action(kind, keys=_keys(given))
    places = _places(named)
    if kind in POINTED and not places and len(numbers) >= 2:
        places = (tuple(numbers[:2]),)
    if kind in POINTED and not places and (found := read_regions(" ".join(texts))):
        places = tuple(region.numbers for region in found)
    text = next((str(named[key]) for key in _TEXT_KEYS if isinstance(named.get(key), str | int | float)), None)
    return Action(kind, places, text=text if text is not None or not texts else texts[0])


def _snake(name: str) -> str:
    """Normalize a name for lookup in KINDS: `LEFT-CLICK` and `left click` -> left_click."""
    return re.sub(r"[\s-]+", "_", name.strip()).lower()


def _kind_of_click(kind: str, named: Mapping[str, Any]) -> str:
    """Refine a click by its button and count: `click(1, 2, clicks=2)`, `{"type": "click", "button": "right"}`."""
    button = str(named.get("button", "left")).lower()
    if button in ("right", "middle"):
        return f"{button}_click"
    return {2: "double_click", 3: "triple_click"}.get(named.get("clicks", 1), kind)


def _number(value: float) -> float:
    """Convert a number to float; inf for an integer too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _places(named: Mapping[str, Any]) -> tuple[Numbers, ...]:
    """Return the positions of an action: x and y pairs, or the values of position keys, the end of a drag last."""
    places: list[Numbers] = []
    pairs = [("x", "y"), ("x1", "y1"), ("x2", "y2")]
    for x, y in pairs:
        if all(isinstance(named.get(axis), int | float) for axis in (x, y)):
            places.append((_number(named[x]), _number(named[y])))
    for key in sorted((key for key in named if key in _PLACE_KEYS), key=lambda key: key in _ENDS):
        value = named[key]
        regions = read_regions(value if isinstance(value, str) else json.dumps(value, default=str))
        places += [region.numbers for region in regions or []]
    return tuple(places)


def _keys(given: Any) -> tuple[str, ...]:
    """Normalize keys: `ctrl c`, `ctrl+c`, `["ctrl", "c"]` -> (ctrl, c)."""
    listed = given if isinstance(given, list | tuple) else [given]
    names = [name for entry in listed for name in re.split(r"[\s+]+", str(entry).strip().lower()) if name]
    others = {"control": "ctrl", "return": "enter", "escape": "esc", "del": "delete", "command": "cmd"}
    return tuple(others.get(name, name) for name in names)


def _direction(name: str, numbers: Sequence[float], named: Mapping[str, Any]) -> str | None:
    """Return the direction of a scroll; None if it has none.

    Signs follow the action space: positive amounts scroll up in pyautogui and Qwen-VL, down in OpenAI; hscroll scrolls
    right.
    """
    said = named.get("direction", named.get("scroll_direction"))
    if isinstance(said, str):
        return said.strip().lower()
    for key, positive, negative in (
        ("scroll_y", "down", "up"),
        ("scroll_x", "right", "left"),
        ("pixels", "up", "down"),
        ("clicks", "up", "down"),
    ):
        if isinstance(named.get(key), int | float) and named[key]:
            return positive if named[key] > 0 else negative
    if numbers and numbers[0]:  # pyautogui
        positive, negative = ("right", "left") if _snake(name) == "hscroll" else ("up", "down")
        return positive if numbers[0] > 0 else negative
    return None


def gold_actions(answer: Any) -> list[Action] | None:
    """Parse the actions of a gold column: an object, a list of objects, or text in any action space; None for null.

    A box as position (`{"action": "click", "bbox": [x1, y1, x2, y2]}`) accepts any point in it. Raises ValueError for
    anything else.
    """
    if answer is None or answer != answer or (isinstance(answer, str) and not answer.strip()):
        return None
    found = read_actions(answer if isinstance(answer, str) else json.dumps(answer, default=str))
    if found is None:
        raise ValueError(f"`answer` must be an action, such as {{'action': 'click', 'bbox': [..]}}, not {answer!r:.80}")
    return found


def action_reward(
    completion: str,
    gold: Sequence[Action],
    *,
    type_weight: float = 0.5,
    tolerance: float = 0.0,
    coordinates: Coordinates = "pixels",
    gold_coordinates: Coordinates | None = None,
    size: Sequence[float] | None = None,
) -> dict[str, float]:
    """Score the actions of a completion against the gold actions, in order.

    Returns {"reward", "type", "arguments", "readable"}.

    An action of the right kind earns type_weight, plus (1 - type_weight) times the score of its arguments: points in
    the gold box or within `tolerance` of the gold point (in the unit of both); typed text by ANLS (0 below 0.5); equal
    keys; equal direction. Scores are means over the larger number of actions. Each point of a drag counts half.
    """
    actions = read_actions(answer_part(completion))
    if actions is None:
        return {"reward": 0.0, "type": 0.0, "arguments": 0.0, "readable": 0.0}
    if gold_coordinates not in (None, coordinates):
        actions = [_to_unit(action, coordinates, size) for action in actions]
        gold = [_to_unit(action, gold_coordinates or coordinates, size) for action in gold]
    pairs = [(action, other) for action, other in zip(actions, gold, strict=False) if action.kind == other.kind]
    count = max(len(actions), len(gold))
    right = math.fsum(_arguments(action, other, tolerance) for action, other in pairs) / count
    kinds = len(pairs) / count
    return {
        "reward": type_weight * kinds + (1 - type_weight) * right,
        "type": kinds,
        "arguments": right,
        "readable": 1.0,
    }


def _to_unit(action: Action, coordinates: Coordinates, size: Sequence[float] | None) -> Action:
    units = to_unit([Region(place) for place in action.places], coordinates, size)
    return action._replace(places=tuple(unit.numbers for unit in units))


def _arguments(found: Action, gold: Action, tolerance: float) -> float:
    """Score the arguments of an action of the right kind, in [0, 1]."""
    if gold.kind in POINTED and gold.places:
        near = [
            hits(Region(place).center, target, tolerance)
            for place, target in zip(found.places, gold.places, strict=False)
        ]
        return sum(near) / max(len(gold.places), len(found.places))
    if gold.kind in TYPED and gold.text is not None:
        return anls(found.text or "", [gold.text])
    if gold.kind == "key":
        return float(sorted(found.keys) == sorted(gold.keys))
    if gold.kind == "scroll":
        return float(found.direction == gold.direction)
    return 1.0
