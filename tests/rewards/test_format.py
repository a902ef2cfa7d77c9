"""`format.structure` in each of its modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Reward = Callable[[str], Callable[..., Any]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a b</think>\n<answer>7</answer>", 1.0),
        ("<think>a</think><answer>7</answer>", 1.0),
        ("\n <think>a</think> \n\t <answer>7</answer>  \n", 1.0),
        ("<think>\n\n</think><answer>7</answer>", 1.0),  # a blank thought is allowed
        ("<think>a</think><answer>\n</answer>", 0.0),  # a blank answer is not
        ("<think>a</think>so<answer>7</answer>", 0.0),
        ("Well. <think>a</think><answer>7</answer>", 0.0),
        ("<think>a</think><answer>7</answer>.", 0.0),
        ("<think>a</think><answer>7</answer><answer>7</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>7</answer>", 0.0),
        ("<answer>7</answer><think>a</think>", 0.0),
        ("<think>a<answer>7</answer></think>", 0.0),
        ("<think>a</think><answer>7", 0.0),
        ("<think>a", 0.0),
        ("", 0.0),
        ("<THINK>a</THINK><answer>7</answer>", 0.0),
    ],
)
def test_r1(text: str, expected: float, reward: Reward) -> None:
    assert reward("format.structure")(text) == expected


def test_r1_rejects_blank_thoughts_unless_allowed(reward: Reward) -> None:
    structure = reward("format.structure")
    assert structure("<think> </think><answer>7</answer>", allow_empty_think=False) == 0.0
    assert structure("<think>a</think><answer>7</answer>", allow_empty_think=False) == 1.0


def test_r1_after_a_prompt_that_opens_the_thought(reward: Reward) -> None:
    structure = reward("format.structure")
    assert structure("a</think><answer>7</answer>", prefilled_think=True) == 1.0
    assert structure("<think>a</think><answer>7</answer>", prefilled_think=True) == 0.0  # the tag occurs twice


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n</think>\n<answer>\n7\n</answer>", 1.0),
        ("<think>\na\nb\n</think>\n<answer>\n7\n8\n</answer>", 1.0),
        (
            "<think>\na\n</think>\n<answer>\n7\n</answer>\nmore lines",
            1.0,
        ),  # with re.MULTILINE more lines may follow, as in the source
        ("<think>\na\n</think>\n<answer>\n7\n</answer> more", 0.0),
        ("<think>a</think>\n<answer>7</answer>", 0.0),
        ("\n<think>\na\n</think>\n<answer>\n7\n</answer>", 0.0),
        ("<think>\n\n</think>\n<answer>\n\n</answer>", 1.0),
        ("", 0.0),
    ],
)
def test_open_r1(text: str, expected: float, reward: Reward) -> None:
    assert reward("format.structure")(text, mode="open_r1") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think> seven", 1.0),
        ("<think></think>", 1.0),
        ("<think>\na\n</think>\n7\n8", 1.0),
        ("<think>a</think><think>b</think>", 0.0),
        (" <think>a</think>", 0.0),
        ("<think>a", 0.0),
        ("a</think>", 0.0),
        ("<think>a</think>b</think>", 1.0),
    ],
)
def test_think(text: str, expected: float, reward: Reward) -> None:
    assert reward("format.structure")(text, mode="think") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n</think>\n<answer>\n7\n</answer>", 1.0),  # tags are counted one by one: they may share a newline
        ("<think>\nx\n</think>\n<answer>\n3", 0.75),
        ("<think>\na\n</think>\n<answer>7</answer>", 0.5),
        ("<think>\na\n</think>\n<answer>\n7\n</answer>\n<answer>\n8\n</answer>", 0.5),
        ("<think>\n<think>\na\n</think>\n", 0.25),
        ("", 0.0),
    ],
)
def test_tag_count(text: str, expected: float, reward: Reward) -> None:
    assert reward("format.structure")(text, mode="tag_count") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}", 1.0),
        (r"<think>a</think> \boxed{7}", 1.0),
        (r"<think>\boxed{7}</think> seven", 0.0),
        (r"\boxed{ }", 0.0),
        (r"\boxed{7", 0.0),
        ("", 0.0),
    ],
)
def test_boxed(text: str, expected: float, reward: Reward) -> None:
    assert reward("format.structure")(text, mode="boxed") == expected


def test_prefilled_thought_counts_in_every_mode(reward: Reward) -> None:
    structure = reward("format.structure")
    assert structure("\na\n</think>\n<answer>\n7\n</answer>", prefilled_think=True, mode="open_r1") == 1.0
    assert structure("a</think> 7", prefilled_think=True, mode="think") == 1.0
    assert structure("\na\n</think>\n", prefilled_think=True, mode="tag_count") == 0.5


def test_unknown_mode_raises(reward: Reward) -> None:
    with pytest.raises(ValueError, match="unknown mode 'r2'"):
        reward("format.structure")("", mode="r2")


@pytest.mark.parametrize("tail", ["x", "</answer>", "<answer>8</answer>", "<think>"])
def test_r1_implies_think_and_fails_with_text_after_the_answer(tail: str, reward: Reward) -> None:
    structure = reward("format.structure")
    text = "<think>a\n\nb</think>\n<answer>7</answer>"
    assert structure(text) == structure(text, mode="think") == 1.0
    assert structure(text + tail) == 0.0
