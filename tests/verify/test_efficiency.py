"""Thoughts split into chunks and segments, repetition and modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.verify import efficiency as e
from posttrain.verify.load import shipped_function

THOUGHT = "We add 2 and 2.\nThat is 4.\nWait, check.\nBut no\nline. Hmm\n it is 4.\n"


def test_chunks_start_at_marker_words_and_single_lines_join_the_next() -> None:
    r"""`Wait, check.` is one line and joins `But no\nline. `; `Hmm..` has two."""
    assert e.chunks(THOUGHT) == [
        "We add 2 and 2.\nThat is 4.\n",
        "Wait, check.\nBut no\nline. ",
        "Hmm\n it is 4.\n",
    ]
    assert "".join(e.chunks(THOUGHT)) == THOUGHT
    assert e.chunks("") == []
    assert e.chunks("Butter Waiting") == ["Butter Waiting"]


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("it is 4.", "4", True),
        ("it is 42", "4", False),
        ("it is 4.5", "4", False),
        ("it is 14", "4", False),
        ("so $1,200$!", "1 200", True),
        ("X = -3", "-3", True),
        ("Paris it is", "paris", True),
        ("anything", " ", False),
    ],
)
def test_mentions(text: str, answer: str, found: bool) -> None:
    assert e.mentions(text, answer) is found


def test_necessary_prefix() -> None:
    start, end, share = e.necessary_prefix(THOUGHT + "</think>4", "4")
    assert (THOUGHT + "</think>4")[start:end] == "Wait, check.\nBut no\nline. Hmm\n it is 4.\n"
    assert share == pytest.approx(1 / 3)
    assert e.necessary_prefix(THOUGHT + "</think>4", "4", think_end="[/THINK]") == (start, end, share)  # as decoded
    assert e.necessary_prefix(THOUGHT + "</think>4", "7")[::2] == (-1, 1.0)
    assert e.necessary_prefix(THOUGHT, "4")[::2] == (-1, 1.0)  # unclosed thought


def test_token_positions() -> None:
    """Tokens of 2, 3 and 1 characters end at 2, 5, 6: character 5 is where token 2 starts."""
    assert [e.token_position(c, (2, 5, 6)) for c in (-1, 0, 2, 4, 5, 6)] == [-1, 0, 1, 1, 2, 3]


def test_repetition_by_hand() -> None:
    """aaaa has three bigrams, one of them distinct."""
    assert e.repetition("aaaa", 2, -0.3) == pytest.approx(-0.2)
    assert e.repetition("abc", 2, -1.0) == e.repetition("a", 2, -1.0) == e.repetition("", 1, -1.0) == 0.0
    for size, penalty in ((2, 0.1), (0, -1.0)):
        with pytest.raises(ValueError, match=r"reward repetition|not positive"):
            e.repetition("abc", size, penalty)


def test_segment_penalty_by_hand() -> None:
    """Ten characters with scores 5 and 1: half essential, half filler: penalty 1/2."""
    assert e.segment_penalty([5, 5], [5, 1]) == 0.5
    assert e.segment_penalty([], []) == e.segment_penalty([0], [1]) == e.segment_penalty([3], [5]) == 0.0
    assert e.segment_reward(1.0, [5, 5], [5, 1]) == pytest.approx(0.9)
    assert e.segment_penalty([4, 6], [2, 3], max_score=3) == pytest.approx(0.2)


def test_segments_that_do_not_match_the_text_cost_nothing(tmp_path: Path) -> None:
    script = tmp_path / "scorer.py"
    script.write_text("def score(text):\n    return [(text[:2], 1), (text[2:4], 5)]\n")
    reward = shipped_function("efficiency.segment_importance")
    assert reward("abcd", True, scorer=f"{script}:score") == pytest.approx(0.9)
    assert reward("abcde", True, scorer=f"{script}:score") == 1.0


def test_modes() -> None:
    assert [e.first_mode(t, ("<A>", "<AB>")) for t in ("<A> x", " <AB> x", "x <A>", "")] == [0, 1, -1, -1]
    table = [e.mode_reward(m, c) for m in (0, 1, -1, None) for c in (1, 0)]
    assert table == [1.0, -1.0, 0.5, -1.0, -1.0, -1.0, -1.0, -1.0]
    assert e.mode_reward(0, None) is None


def test_budgets() -> None:
    assert e.exact_budget(1, 900, 1000, alpha=0.001) == e.exact_budget(1, 1100, 1000, alpha=0.001) == pytest.approx(0.9)
    assert [e.max_budget(1, n, 1000, alpha=0.001) for n in (0, 500, 1000, 1250, 1500, 9999)] == pytest.approx(
        [1, 1, 0.5, 0.25, 0, 0]
    )
    assert e.max_budget(0, 10, 1000) == 0.0
