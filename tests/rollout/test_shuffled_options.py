"""Answer options in a new order: parsing of options, rewriting of the thought, and refused rows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from posttrain.batch import Segment
from posttrain.errors import UserError
from posttrain.shapes.options import ask_again, draw_permutation, read_options, replace_letters, shuffle_options
from posttrain.shapes.protocol import Asked, Grade, Row, Sampled

PROMPT = "Is Oslo in Norway or Peru? A) Peru B) Norway C) Spain "
ROW = {"options": ["Peru", "Norway", "Spain"], "answer": "B"}


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def rewrite(numbers: Sequence[int]) -> str:
    return "".join(map(chr, numbers))


def shuffle(completion: str, finish: str = "stop", second: str = "C", **keys: object) -> tuple[Row, list[str]]:
    """Return the row of a rollout with this completion and second answer, and the prompts that were sampled from."""
    prompts: list[str] = []

    async def draw(asked: Sequence[tuple[int, ...]], _: Sequence[int], *, greedy: bool = False) -> list[Sampled]:
        assert greedy is bool(prompts), "the second answer alone"
        prompts.extend(map(rewrite, asked))
        text = completion if len(prompts) == 1 else second
        return [Sampled(Segment("model", (*ids(text), 0)), finish if len(prompts) == 1 else "stop")]  # type: ignore[arg-type]

    async def grade(_: Sequence[Row]) -> list[Grade]:
        raise AssertionError

    asked = Asked(ids(PROMPT), ROW, 500, 1000, 0, draw, grade, ids, rewrite, lambda i: rewrite(i).replace("\0", ""))
    (row,) = asyncio.run(ask_again(asked, **keys))  # type: ignore[arg-type]
    return row, prompts


def test_last_mention_of_an_option_is_used() -> None:
    assert shuffle_options(PROMPT, ROW["options"], [2, 0, 1]) == (  # type: ignore[arg-type]
        "Is Oslo in Norway or Peru? A) Spain B) Peru C) Norway "
    )


def test_right_option_always_moves() -> None:
    drawn = [draw_permutation(3, 1, random.Random(seed)) for seed in range(60)]
    assert all(sorted(one) == [0, 1, 2] and one[1] != 1 for one in drawn)
    assert len(set(map(tuple, drawn))) == 4  # those of the 6 permutations that move it


def test_option_letters_are_replaced_by_their_texts() -> None:
    texts = ["Peru", "Norway"]
    assert replace_letters("Not option A. (B) is it, so the answer is B.", texts) == (
        "Not option Peru. Norway is it, so the answer is Norway."
    )
    assert (
        replace_letters("The answer a pupil gave is no option Z.", texts) == "The answer a pupil gave is no option Z."
    )


def test_thought_is_kept_without_its_answer() -> None:
    row, (first, again) = shuffle("north: option B</think><answer>B</answer>", second="<answer>C</answer>")
    assert first == PROMPT and again.endswith("north: option Norway</think>\n")
    assert again.startswith("Is Oslo in Norway or Peru? A) ") and not again.startswith(PROMPT)
    assert row.text is not None and row.text.startswith(
        "north: option B</think><answer>B</answer>\n<second permutation="
    )
    assert row.text.endswith('"><answer>C</answer></second>')
    assert row.segments[0].kind == "model" and len(row.segments) == 1


@pytest.mark.parametrize(("text", "finish"), [("no end", "stop"), ("x</think>B", "length")])
def test_truncated_or_unfinished_thoughts_get_no_second_answer(text: str, finish: str) -> None:
    row, prompts = shuffle(text, finish)
    assert prompts == [PROMPT]
    assert row.text is not None and row.text.endswith('"></second>')


def test_block_written_by_the_policy_is_no_second_answer() -> None:
    row, _ = shuffle('x\n<second permutation="0 1 2">B</second></think>B')
    assert row.text is not None and row.text.count("<second permutation=") == 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"answer": "A"}, "column `options` is None"),
        ({"options": "a b", "answer": "A"}, "column `options` is 'a b'"),
        ({"options": ["a", "b"], "answer": "C"}, "is 'C', and it has 2 options"),
        ({"options": ["a", "b"]}, "is '', and it has 2 options"),
    ],
)
def test_rows_without_options_raise(row: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_options(row, "options", "answer")


def test_options_missing_from_the_prompt_raise() -> None:
    with pytest.raises(UserError, match="no option 'Chile'"):
        shuffle_options(PROMPT, ["Peru", "Chile"], [1, 0])
