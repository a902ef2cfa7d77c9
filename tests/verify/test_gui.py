"""GUI actions: one parser reads every action space, and only the right action earns the full reward."""

from __future__ import annotations

import time
from typing import Any

import pytest

from posttrain.verify.gui import MAX_ACTIONS, Action, action_reward, gold_actions, read_actions


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("click(start_box='<|box_start|>(10,20)<|box_end|>')", [Action("click", ((10, 20),))]),
        (
            "Thought: f(x) is (a).\nAction: left_double(point='<point>10 20</point>')",
            [Action("double_click", ((10, 20),))],
        ),
        ("drag(start_box='(1,2)', end_box='(3,4)')", [Action("drag", ((1, 2), (3, 4)))]),
        (r"type(content='it\'s (ok)\n')", [Action("type", text="it's (ok)\n")]),
        ("hotkey(key='ctrl c')", [Action("key", keys=("ctrl", "c"))]),
        ("scroll(start_box='(1,2)', direction='down')", [Action("scroll", ((1, 2),), direction="down")]),
        ("press_home()", [Action("home")]),
        ("finished(content='ok')", [Action("finish", text="ok")]),
        (
            "pyautogui.click(x=10, y=20)\npyautogui.write('hi', interval=0.1)\npyautogui.press('enter')",
            [Action("click", ((10, 20),)), Action("type", text="hi"), Action("key", keys=("enter",))],
        ),
        ("pyautogui.click(10, 20, clicks=2)", [Action("double_click", ((10, 20),))]),
        ("pyautogui.hotkey('Ctrl', 'c')", [Action("key", keys=("ctrl", "c"))]),
        ("pyautogui.scroll(-5)", [Action("scroll", direction="down")]),
        ("pyautogui.hscroll(5)", [Action("scroll", direction="right")]),
        (
            '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [10, 20]}}'
            "\n</tool_call>",
            [Action("click", ((10, 20),))],
        ),
        ('{"action": "scroll", "pixels": -100}', [Action("scroll", direction="down")]),
        ('{"action": "swipe", "coordinate": [1, 2], "coordinate2": [3, 4]}', [Action("drag", ((1, 2), (3, 4)))]),
        ('{"action": "system_button", "button": "Back"}', [Action("back")]),
        ('{"action": "terminate", "status": "success"}', [Action("finish", text="success")]),
        ('{"type": "click", "x": 1, "y": 2, "button": "right"}', [Action("right_click", ((1, 2),))]),
        ('{"type": "scroll", "x": 1, "y": 2, "scroll_y": 100}', [Action("scroll", ((1, 2),), direction="down")]),
        ('{"type": "drag", "path": [{"x": 1, "y": 2}, {"x": 3, "y": 4}]}', [Action("drag", ((1, 2), (3, 4)))]),
        ('{"name": "click", "arguments": {"x": 3, "y": 4}}', [Action("click", ((3, 4),))]),
        (
            '```json\n[{"action": "click", "point": [1, 2], "input_text": "no"}]\n```',
            [Action("click", ((1, 2),), "no")],
        ),
    ],
)
def test_parser_reads_every_action_space(text: str, actions: list[Action]) -> None:
    assert read_actions(text) == actions


@pytest.mark.parametrize(
    "text",
    [
        "",
        "click the button",
        "print(3)",
        "os.system('click')",
        '{"action": "explode"}',
        "click(x)",
        "click(1, 2" + "0" * 9,
        "click(1, 2)\n" * (MAX_ACTIONS + 1),
    ],
)
def test_text_without_an_action(text: str) -> None:
    assert read_actions(text) is None


def test_coordinates_beyond_float_range_are_no_position() -> None:
    for text in (f"click({'9' * 400}, 2)", f'{{"type": "click", "x": {"9" * 400}, "y": 2}}'):
        assert action_reward(text, [Action("click", ((1, 2),))], tolerance=5)["arguments"] == 0


@pytest.mark.parametrize("piece", ["click(", '{"a":', "click('", '{"action": "click", "x": [', "x.click(1, (2, "])
def test_parsing_time_is_bounded(piece: str) -> None:
    started = time.perf_counter()
    read_actions(piece * 8000)
    assert time.perf_counter() - started < 2


def test_gold_without_an_action_is_an_error() -> None:
    assert gold_actions(None) is gold_actions(" ") is None
    for answer in ("the button", {"bbox": [1, 2, 3, 4]}, 5, {"action": "explode"}):
        with pytest.raises(ValueError, match="must be an action"):
            gold_actions(answer)


def score_action(text: str, answer: Any, **keys: Any) -> float:
    gold = gold_actions(answer)
    assert gold is not None
    return action_reward(text, gold, **keys)["reward"]


def test_clicking_every_corner_is_not_rewarded() -> None:
    """Four clicks, one of which hits: the first is compared, and three of the four are surplus."""
    gold = {"action": "click", "bbox": [0, 0, 2, 2]}
    assert score_action("click(1, 1)\nclick(9, 9)\nclick(9, 1)\nclick(1, 9)", gold) == 0.25
    assert score_action("click(9, 9)\nclick(1, 1)\nclick(9, 1)\nclick(1, 9)", gold) == 0.125
    assert score_action("click(start_box='(9,9) (1,1)')", gold) == 0.5
    assert score_action("click()", gold) == 0.5


def test_coordinate_scales_of_a_screen() -> None:
    """Half of a 200 x 100 screen is (100, 50); a distance of 0.05 of the screen counts with a tolerance of 0.06."""
    keys: dict[str, Any] = {"coordinates": "0-1000", "gold_coordinates": "pixels", "size": [200, 100]}
    assert score_action("click(500, 500)", "click(100, 50)", **keys) == 1
    assert score_action("click(550, 500)", "click(100, 50)", **keys) == 0.5
    assert score_action("click(550, 500)", "click(100, 50)", tolerance=0.06, **keys) == 1
