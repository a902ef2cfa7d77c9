"""The environment `screen`: clicks and text count in the order of the goal and appear on the screen."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.tasks.pictures import COLOURS
from posttrain.data.tasks.screens import FIELD, Screen, screen
from posttrain.errors import DataError
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.tool_sections import Environment
from posttrain.registry import load_function
from posttrain.tools.load import load_environment

ROW = screen(1, random.Random(3), types=True)
FIRST, SECOND = ROW["prompt"].removeprefix("Click ").split(", then ")[:2]
WORD = ROW["prompt"].split()[-1].rstrip(".")


def begin(row: dict[str, Any], **params: Any) -> Any:
    world = load_environment(Environment(use="screen", params=params), None)()
    world.reset(row)
    return world


def middle(row: dict[str, Any], name: str) -> tuple[int, int]:
    a, b, c, d = Screen.read(row["screen"]).places[name]
    return (a + c) // 2, (b + d) // 2


def test_goal_steps_are_rewarded_and_visible() -> None:
    """Two clicks, one on the field, one text: a quarter each. A button's frame is dark once it is clicked."""
    world = begin(ROW)
    x, y = middle(ROW, FIRST)
    picture, over, earned = world.step(f"<think>or click(1, 1)?</think>click({x}, {y})")
    assert (over, earned, world.score()) == (False, 0.25, 0.0)
    left, top, *_ = Screen.read(ROW["screen"]).places[FIRST]
    assert picture.getpixel((left, top)) == COLOURS["black"] and picture.getpixel((x, y)) == COLOURS[FIRST]
    _, over, earned = world.step(f"click(start_box='{middle(ROW, SECOND)}')")
    assert (over, earned) == (False, 0.25)
    x, y = middle(ROW, FIELD)
    picture, over, earned = world.step(f'{{"action": "left_click", "coordinate": [{x}, {y}]}}')
    assert not any(picture.getpixel((n, y)) == COLOURS["black"] for n in range(8, 40))
    _, over, earned = world.step(f"type(content='{WORD}')")
    assert (over, earned, world.score()) == (True, 0.25, 1.0)


def test_wrong_order_and_no_action_score_0() -> None:
    world = begin(ROW, turns=3)
    shown, over, earned = world.step("I do not know")
    assert shown[0].startswith("error") and (over, earned) == (False, 0.0)
    _, over, earned = world.step(f"pyautogui.click{middle(ROW, SECOND)}")
    assert (over, earned) == (False, 0.0)
    _, over, earned = world.step(f"click{middle(ROW, FIRST)}")
    assert (over, earned, world.score()) == (True, 0.0, 0.0)


def test_scroll_changes_the_clicked_element() -> None:
    """The same screen position is another page position. Scrolling past an end has no effect."""
    row = screen(0, random.Random(2), types=True, scrolls=True)
    world, (x, y), size = begin(row), middle(row, FIELD), row["image_size"][1]
    assert y > size and "field" in row["prompt"]
    before = world.step(f"click({x}, {y})")[0]  # outside of what is seen
    world.step("scroll(direction='up')")
    assert world.top == 0 and not world.done
    shown = world.step('{"action": "scroll", "pixels": -400}')[0]
    assert world.step("scroll(direction='down')")[0].tobytes() == shown.tobytes() != before.tobytes()
    assert shown.getpixel((Screen.read(row["screen"]).places[FIELD][0], y - size)) == COLOURS["black"]
    world.step(f"click({x}, {y - size})")
    assert world.done == [("click", FIELD)]


def test_relative_coordinates_and_ending_the_episode() -> None:
    row = screen(0, random.Random(1))
    ((_, name),) = json.loads(row["goal"])
    x, y = (n * 1000 // 64 for n in middle(row, name))
    assert begin(row, coordinates="0-1000").step(f"click({x}, {y})")[1:] == (True, 1.0)
    assert begin(row).step("click(1e999, -5) finished()")[1:] == (True, 0.0)


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_traces_reach_the_goal_or_click_another_button(wrong: float) -> None:
    """Replayed traces end in the environment as recorded; each turn except the last is answered with a picture."""
    make = load_function("pictures.py:screen_traces", Path(str(shipped_folder("recipes") / "vision")), what="test")
    params = {"levels": [1], "types": True, "scrolls": True}
    traces = make(4, 0, task="screen", params=params, wrong=wrong)
    rows = load_function("pictures.py:problems", Path(str(shipped_folder("recipes") / "vision")), what="test")(
        4, 1_000_003, task="screen", params=params
    )
    for trace, row in zip(traces, rows, strict=True):
        world = begin(row, turns=20)
        ends = [world.step(m["content"])[1] for m in trace["messages"] if m["role"] == "assistant"]
        assert ends == [False] * (len(ends) - 1) + [True]
        assert world.score() == 1.0 - wrong
        assert len(trace["images"]) == len(ends)


def test_requested_colors_are_clicked_in_order() -> None:
    for level, goal in ((0, ["blue"]), (1, ["blue", "red"])):
        row = screen(level, random.Random(level), colours=("red", "green", "blue"), asked=("blue", "red"))
        assert json.loads(row["goal"]) == [["click", name] for name in goal]
        assert row["prompt"] == f"Click {', then '.join(goal)}."
    for wrong in (("blue",), ("blue", "yellow"), ("blue", "blue")):
        with pytest.raises(DataError, match=r"asked \['blue'"):
            screen(1, random.Random(0), colours=("red", "green", "blue"), asked=wrong)


def test_traces_click_at_multiples_of_a_step_on_the_button() -> None:
    make = load_function("pictures.py:screen_traces", Path(str(shipped_folder("recipes") / "vision")), what="test")
    params = {"levels": [1], "colours": ["red", "blue"], "asked": ["red", "blue"]}
    traces = make(30, 0, task="screen", params=params, wrong=0.0, step=(16, 12))
    rows = load_function("pictures.py:problems", Path(str(shipped_folder("recipes") / "vision")), what="test")(
        30, 1_000_003, task="screen", params=params
    )
    for trace, row in zip(traces, rows, strict=True):
        world = begin(row, turns=2)
        turns = [m["content"] for m in trace["messages"] if m["role"] == "assistant"]
        numbers = [int(n) for turn in turns for n in re.findall(r"\d+", turn)]
        assert len(numbers) == 4 and not any(n % (16, 12)[place % 2] for place, n in enumerate(numbers))
        assert [world.step(turn)[2] for turn in turns] == [0.5, 0.5] and world.score() == 1.0


@pytest.mark.parametrize("level", [-1, 4])
def test_screen_that_is_too_small_is_refused(level: int) -> None:
    with pytest.raises(DataError, match="levels from 0"):
        screen(level, random.Random(0))
