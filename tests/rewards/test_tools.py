"""ToolRL rewards for calls counted by hand. Correctness is -3 + 6 * earned / possible."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

Reward = Callable[[str], Callable[..., Any]]

A = {"name": "a", "parameters": {"x": 1, "y": "u"}}
B = {"name": "b", "parameters": {}}


def text(*calls: Any, reply: str | None = None) -> str:
    """Return a well-formed completion with these calls; a string is returned unchanged."""
    blocks = ["<think>t</think>"]
    if calls:
        blocks += ["<tool_call>", *(c if isinstance(c, str) else json.dumps(c) for c in calls), "</tool_call>"]
    if reply is not None:
        blocks.append(f"<response>{reply}</response>")
    return "\n".join(blocks)


def gold(*calls: Any, response: bool = False) -> dict[str, Any]:
    return {"tools": list(calls), "response": response}


@pytest.mark.parametrize(
    ("predicted", "expected", "why"),
    [
        ([A], 3.0, "equal"),
        ([{"name": "a", "parameters": {"y": "u", "x": 1.0}}], 3.0, "1 = 1.0, the order of keys is free"),
        ([{"name": "a", "parameters": {"x": "1", "y": "u"}}], 1.5, "name 1 + keys 1 + one value = 3 of 4"),
        ([{"name": "a", "parameters": {"x": True, "y": "u"}}], 1.5, "true is not 1"),
        ([{"name": "a", "parameters": {"x": 1}}], -3 + 6 * 2.5 / 4, "keys 1/2, one value"),
        ([{"name": "a", "parameters": {"x": 1, "y": "u", "z": 0}}], -3 + 6 * (1 + 2 / 3 + 2) / 4, "keys 2/3"),
        ([{"name": "a", "parameters": {}}], -3 + 6 * 1 / 4, "only the name"),
        ([B], -3.0, "nothing"),
        ([A, B], -3 + 6 * 3.5 / 4, "names 1/2, the call itself 3"),
        ([A, A], -3 + 6 * 3.5 / 4, "names 1/2; the second is not used"),
        (["", A, "  "], 3.0, "blank lines are skipped"),
        (["{broken"], -3.0, "not JSON"),
        ([A, "{broken"], -3.0, "one line that is not JSON spoils all"),
        ([{"name": "a"}], -3.0, "no parameters"),
        ([{"parameters": {}}], -3.0, "no name"),
        (["[1]"], -3.0, "no object"),
        (["[" * 100_000], -3.0, "too deep to read"),
    ],
)
def test_correctness_with_one_gold_call(predicted: list[Any], expected: float, why: str, reward: Reward) -> None:
    found = reward("tools.toolrl")(text(*predicted), gold(A))
    assert found["correctness"] == pytest.approx(expected), why
    assert found["format"] == 1.0
    assert found["reward"] == pytest.approx(expected + 1.0)


def test_two_gold_calls_of_one_tool_are_matched_greedily_in_gold_order(reward: Reward) -> None:
    """Gold f(x=1), f(x=2); predicted f(x=2), f(x=3). No prediction has the value of the first gold call, which takes
    the first prediction (keys 1); the second takes f(x=3) (keys 1). Names 1: 3 of 1 + 2 + 2. The best matching would
    earn 4."""
    f = [{"name": "f", "parameters": {"x": x}} for x in (1, 2, 3)]
    found = reward("tools.toolrl")(text(f[1], f[2]), gold(f[0], f[1]))
    assert found["correctness"] == pytest.approx(-3 + 6 * 3 / 5)


def test_the_order_of_distinct_tools_does_not_matter(reward: Reward) -> None:
    toolrl = reward("tools.toolrl")
    assert toolrl(text(B, A), gold(A, B))["correctness"] == toolrl(text(A, B), gold(A, B))["correctness"] == 3.0


def test_wrong_extra_call_never_raises_the_reward(reward: Reward) -> None:
    toolrl = reward("tools.toolrl")
    near = {"name": "a", "parameters": {"x": 2, "y": "u"}}
    for extra in (B, {"name": "a", "parameters": {"q": 1}}):
        for predicted in ([A], [near]):
            more = toolrl(text(*predicted, extra), gold(A))["correctness"]
            assert more <= toolrl(text(*predicted), gold(A))["correctness"]


@pytest.mark.parametrize(
    ("granularity", "match", "predicted", "expected"),
    [
        ("coarse", "jaccard", [{"name": "a", "parameters": {"x": 1, "y": "v"}}], -3.0),
        ("coarse", "jaccard", [A], 3.0),
        ("intermediate", "jaccard", [{"name": "a", "parameters": {"x": 1, "y": "v"}}], 0.0),  # name 1 of 2
        ("intermediate", "jaccard", [A, B], -3 + 6 * 1.5 / 2),  # names 1/2, the call 1
        ("fine", "exact", [A, B], -3 + 6 * 3 / 4),  # names 0, the call 3
        ("fine", "exact", [{"name": "a", "parameters": {"x": 1}}], -3 + 6 * 2 / 4),  # names 1, keys 0, one value
    ],
)
def test_granularity_and_match_options(
    granularity: str, match: str, predicted: list[Any], expected: float, reward: Reward
) -> None:
    found = reward("tools.toolrl")(text(*predicted), gold(A), granularity=granularity, match=match)
    assert found["correctness"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (text(A), gold(A), 1.0),
        (text(A, reply="hi"), gold(A, response=True), 1.0),
        (text(reply="hi"), gold(response=True), 1.0),
        ("<think>t</think>", gold(), 1.0),
        (text(A), gold(A, response=True), 0.0),
        (text(A, reply="hi"), gold(A), 0.0),
        (text(reply="hi") + " more", gold(response=True), 0.0),
        (text(A).replace("</think>\n", "</think>"), gold(A), 0.0),
        (text(A) + "\n<tool_call>\n{}\n</tool_call>", gold(A), 0.0),
        ("<think>t</think> more", gold(), 0.0),
        ("", gold(A), 0.0),
        ("", gold(), 0.0),
    ],
)
def test_format_reward(completion: str, answer: dict[str, Any], expected: float, reward: Reward) -> None:
    assert reward("tools.toolrl")(completion, answer)["format"] == expected


def test_correctness_without_gold_calls_is_zero(reward: Reward) -> None:
    assert reward("tools.toolrl")(text(A), gold(response=True))["correctness"] == 0.0
    assert reward("tools.toolrl")("<think>t</think>", gold()) == {
        "reward": 1.0,
        "format": 1.0,
        "correctness": 0.0,
        "length": 0.0,
    }


def test_only_the_first_tool_call_block_is_read(reward: Reward) -> None:
    completion = text(B) + "\n" + text(A)
    assert reward("tools.toolrl")(completion, gold(A))["correctness"] == -3.0


@pytest.mark.parametrize("cut", ["<tool_call>", "</tool_call>"])
def test_opening_and_closing_tag_are_needed(cut: str, reward: Reward) -> None:
    assert reward("tools.toolrl")(text(A).replace(cut, ""), gold(A))["correctness"] == -3.0


@pytest.mark.parametrize(
    ("thought", "expected"), [("w " * 256, 0.5), ("w " * 512, 1.0), ("w " * 900, 1.0), ("w " * 10, 0.02), ("", 0.0)]
)
def test_thought_length_reward(thought: str, expected: float, reward: Reward) -> None:
    """10 / 512 = 0.0195, rounded to two places: 0.02."""
    found = reward("tools.toolrl")(f"<think>{thought}</think>", gold(), length_target=512)
    assert found["length"] == expected
    assert found["reward"] == 1.0 + expected
    assert reward("tools.toolrl")("no thought", gold(), length_target=512)["length"] == 0.0


@pytest.mark.parametrize(
    ("schedule", "step", "limits"),
    [
        ("none", 500, (1.0, 0.0, 3.0, -3.0)),
        ("two_stage", 29, (1.0, 0.0, 1.0, -1.0)),
        ("two_stage", 30, (0.5, 0.0, 3.0, -3.0)),
        ("smooth", 0, (2.0, -2.0, 2.0, -2.0)),
        ("smooth", 75, (1.5, -1.0, 2.5, -2.5)),  # f = 1/2: 2 - f, -2 + 2f, 2 + f, -2 - f
        ("smooth", 150, (1.0, -1.0, 3.0, -3.0)),
        ("smooth", 900, (1.0, -1.0, 3.0, -3.0)),
    ],
)
def test_schedules_scale_format_and_correctness(
    schedule: str, step: int, limits: tuple[float, ...], reward: Reward
) -> None:
    toolrl = reward("tools.toolrl")
    scale = sys.modules[toolrl.__module__].toolrl_scale
    found = scale(step, schedule=schedule)
    assert tuple(found[k] for k in ("format_max", "format_min", "correct_max", "correct_min")) == pytest.approx(limits)
    good, bad = toolrl(text(A), gold(A), step, schedule=schedule), toolrl("", gold(A), step, schedule=schedule)
    assert (good["format"], bad["format"], good["correctness"], bad["correctness"]) == pytest.approx(limits)


def test_gold_can_be_json_text_and_must_parse(reward: Reward) -> None:
    toolrl = reward("tools.toolrl")
    assert toolrl(text(A), json.dumps(gold(A)))["correctness"] == 3.0
    assert toolrl(text(A), None) is None
    with pytest.raises(ValueError):
        toolrl(text(A), "{broken")
