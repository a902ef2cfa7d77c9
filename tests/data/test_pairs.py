"""Pair builders on small groups, and the rules for ties, duplicates and lengths."""

from __future__ import annotations

import re
from typing import Any

import pytest

from posttrain.data import pairs
from posttrain.data.binary_labels import label_rows
from posttrain.data.pairs import Choice, Texts
from posttrain.data.separability import separability
from posttrain.errors import DataError
from posttrain.verify.judging import win_rate_rewards

GOOD = "<think>one and one</think><answer>2</answer>"


def test_right_over_wrong_of_similar_length() -> None:
    """Right 0 (10 tokens) and 1 (20), wrong 2 (19) and 3 (11): closest lengths first, each answer once before any
    twice.
    """
    flags, lengths = [[1, 1, 0, 0], [1, 1, 1, 1]], [[10, 20, 19, 11], [1, 2, 3, 4]]
    assert pairs.right_wrong(flags, lengths, max_pairs=2) == [Choice(0, 0, 3), Choice(0, 1, 2)]
    assert len(pairs.right_wrong(flags, lengths)) == 4


def test_truncated_and_unscored_answers_are_left_out() -> None:
    flags, lengths, cut = [[1, 1, 0, 0, None]], [[1, 2, 3, 4, 5]], [[1, 0, 1, 0, 0]]
    assert pairs.right_wrong(flags, lengths, cut) == [Choice(0, 1, 3)]
    assert {c.rejected for c in pairs.right_wrong(flags, lengths, cut, reject_truncated=True)} == {2, 3}


def test_short_over_long() -> None:
    assert pairs.short_long([[1, 1, 0, 1], [1, 0]], [[30, 10, 1, 20], [5, 5]]) == [Choice(0, 1, 0)]
    assert pairs.short_long([[1, 1]], [[7, 7]], min_gap=0) == []
    assert pairs.short_long([[1, 1]], [[7, 17]], min_gap=11) == []
    assert pairs.short_long([[1, 1]], [[7, 17]], [[1, 0]]) == []


def test_drqa_labels() -> None:
    found = pairs.concise_labels([1, 1, 0], [1, 0, 1], [[0], [-1], [2]])
    assert (found.labels, found.rewards) == ([0, 1, 2], [[1.0], [0.0], [1.0]])


def test_own_failures() -> None:
    """Prompt 0: teacher wrong, policy's answer 1 right; 1: teacher right; 2: none right.

    Truncated answers are never rejected sides.
    """
    flags, cut = [[0, 1, 0], [0, 1, 0], [0, 0, 0]], [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    found = pairs.own_failures(flags, [0, 1, 0], cut)
    assert found == [[0, 0, 1, 0], [1, 1, -1, 0], [1, 1, -1, 2]]
    assert pairs.own_failures(flags, [0, 1, 0], cut, prefer_teacher=False)[1] == [1, 0, 1, 0]


def test_after_verification_pairs() -> None:
    """A short right answer is not good, but can be the rejected side by type 0; without a good answer there is no
    pair.
    """
    rows = pairs.after_verification([[1, 1, 0]], [[1, 1, 1]], [[0, 0, 0]], [[0, 0, 0]], [[9, 3, 8]], min_length=5)
    assert rows == [[0, 0, 0, 1]]
    assert pairs.after_verification([[1]], [[0]], [[0]], [[1]], [[9]]) == []


def test_best_over_worst_of_judgements() -> None:
    """Means 3, none, 1; then all tied; then only one readable."""
    found = pairs.best_worst([[[3, None], [None], [1, 1]], [[2], [2]], [[5], [None]]])
    assert found.mean_scores == [[3, None, 1], [2, 2], [5, None]]
    assert (found.chosen, found.rejected, found.keep) == ([0, -1, -1], [2, -1, -1], [1, 0, 0])
    turned = pairs.best_worst([[[None, 3], [None], [1, 1]]])
    assert turned.chosen == [0]


def test_past_and_future() -> None:
    """The rejected side is from the past only if strictly worse, the chosen one from the future only if strictly
    better.
    """
    found = pairs.past_and_future([[2, 2], [1, 1]], [[1, 0], [1, 3]], [[2, 1], [4, 1]])
    assert (found.phase1_rejected_source, found.phase1_rejected) == ([1, 0], [1, 0])
    assert (found.phase1_keep, found.phase2_keep) == ([1, 0], [1, 1])
    assert (found.phase2_chosen_source, found.phase2_chosen) == ([0, 2], [0, 0])


def test_win_rates_sum_to_half_the_samples() -> None:
    found = pairs.win_rates([[0.3, -2.0, 900.0]])
    assert sum(found.win[0]) == pytest.approx(1.5)
    assert (found.chosen, found.rejected) == ([2], [1])
    tied = pairs.win_rates([[1.0, 1.0]])
    assert tied.win == [[0.5, 0.5]] and tied.chosen == tied.rejected == [0]


def test_win_rate_rewards() -> None:
    cyclic = [[[9, 1, 0], [0, 9, 1], [1, 0, 9]]]
    assert win_rate_rewards(cyclic) == [[0.5, 0.5, 0.5]]
    assert win_rate_rewards([[[None]], [[0, None], [1, 0]]]) == [[0.5], [0.5, 1]]


def test_tournament() -> None:
    """2 beats all and 1 loses to all: 4 answers need 2 + 1 + 1 + 1 matches; ties go to the first and give no pair."""
    strength = [1, 0, 3, 2]
    pref = [[(a > b) + 0.5 * (a == b) for b in strength] for a in strength]
    assert pairs.tournament(pref) == (2, 1, 1, 5)
    assert pairs.tournament([[0.5] * 8] * 8) == (0, 7, 0, 11)
    with pytest.raises(DataError, match="3 answers"):
        pairs.tournament([[0.5] * 3] * 3)


def test_large_margin() -> None:
    """Student 5: negatives 4 and the defective 6; the teacher's 6 needs two points."""
    scores, teacher, broken = [5, 6, 4, 6], [0, 1, 0, 0], [0, 0, 0, 1]
    assert pairs.large_margin(scores, teacher, broken) == [[0, 2], [0, 3], [1, 2], [1, 3]]
    assert pairs.large_margin([4, 1], [0, 0], [0, 0]) == []


def well_formed(text: str) -> bool:
    return re.fullmatch(r"<think>[^<]+</think><answer>[^<]+</answer>", text) is not None


def test_every_broken_format_preserves_its_content() -> None:
    broken = pairs.broken_formats(GOOD)
    assert len(set(broken.values())) == 5
    for kind, text in broken.items():
        assert text != GOOD
        assert re.sub("<.*?>", "", text).replace("2", "") == "one and one", kind
    assert [kind for kind, text in broken.items() if well_formed(text)] == []
    with pytest.raises(DataError, match="well-formed"):
        pairs.broken_formats("2")


def test_format_pair_preserves_the_answer() -> None:
    """An answer outside its tag is no longer extracted, so that format (number 4) is skipped for the next."""

    def extract(text: str) -> str | None:
        match = re.search("<answer>(.+?)</answer>", text)
        return match and match[1]

    for number in range(5):
        rejected = pairs.format_pair(GOOD, well_formed, extract, number)
        assert rejected is not None and extract(rejected) == "2" and not well_formed(rejected)
    assert pairs.format_pair(GOOD, lambda _: True, extract, 0) is None


def test_generalisation_factor() -> None:
    """b = 2: 5 * 1 * 2 / (4 + 2); no gain at all is 0."""
    assert pairs.generalization_factor([1, 0], [2, 0]) == pytest.approx([5 / 3, 0])


def test_repeated_pairs() -> None:
    first = Texts("p", "a", "b")
    given = [first, Texts("p", "a ", "b"), Texts("p", "b", "a"), Texts("p", "a", " a"), Texts("q", "a", "b")]
    assert pairs.repeats(given) == [None, "repeated", "contradicts a kept pair", "equal sides", None]
    assert pairs.repeats([first, given[-1]], earlier=[first]) == ["repeated", None]


def test_length_balance() -> None:
    """Gaps 5, 1, 0, -2: one longer chosen side may stay, the one with the smaller gap."""
    assert pairs.balance_by_length([5, 1, 0, -2], gap=lambda x: x) == [1, 0, -2]
    assert pairs.balance_by_length([5, 0], gap=lambda x: x) == [0]


def test_separability() -> None:
    """Classes far apart in one feature; identical classes; swapped sides; a probe refitted without each pair."""
    chosen, rejected = [[3.0, 0.1], [2.5, -1.0], [3.5, 0.3]], [[-3.0, 0.2], [-2.0, 0.9], [-3.1, -0.5]]
    found = separability(chosen, rejected)
    assert found is not None
    assert (found.train_accuracy, found.loo_accuracy) == (1, 1) and found.fisher_ratio > 10
    swapped = separability(rejected, chosen)
    assert swapped == pytest.approx(found)
    assert separability(chosen, chosen) == (0, 0, 0)
    assert separability(chosen[:2], rejected[:2]) is None


def test_leave_one_out_probe_is_fitted_without_the_pair() -> None:
    """Pair 3 has swapped sides: a probe of the other two gets both of its rows wrong."""
    chosen, rejected = [[1.0], [1.2], [-0.3], [0.9]], [[-1.0], [-0.8], [0.4], [-1.1]]
    found = separability(chosen, rejected, ridge=1e-3)
    assert found is not None and found.loo_accuracy == 6 / 8


def test_pairs_from_labelled_answers() -> None:
    """A pair is a good and a bad answer; the other side is the next answer of another prompt and text."""
    rows = label_rows(
        [
            {"uid": "1", "prompt": "a", "chosen": "x", "rejected": "y"},
            {"uid": "2", "prompt": "b", "completion": "x", "label": False},
            {"uid": "3", "prompt": "c", "completion": "z", "label": True},
        ]
    )
    assert [(r["uid"], r["chosen"], r["rejected"], r["label"]) for r in rows] == [
        ("1/chosen", "x", "z", 1),
        ("1/rejected", "y", "x", 0),
        ("2", "x", "z", 0),
        ("3", "z", "x", 1),
    ]


def test_labelled_answers_as_messages() -> None:
    """The last message is the answer; messages before it are context, as in sft."""
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows = label_rows(
        [
            {"uid": "1", "prompt": [asked], "completion": [answer], "label": True},
            {"uid": "2", "prompt": "b", "completion": [calling, {"role": "tool", "content": "y"}, answer], "label": 0},
            {"uid": "3", "messages": [asked, {**answer, "content": "z"}], "label": 1},
            {"uid": "4", "prompt": "c", "completion": [{**answer, "reasoning_content": "hm"}], "label": False},
        ]
    )
    assert [(r["prompt"], r["chosen"]) for r in rows] == [
        ([asked], "x"),
        ([{"role": "user", "content": "b"}, calling, {"role": "tool", "content": "y"}], "x"),
        ([asked], "z"),
        ("c", [{**answer, "reasoning_content": "hm"}]),
    ]
    thoughtful = [{**answer, "reasoning_content": "hm"}]
    assert [r["rejected"] for r in rows] == [thoughtful, "z", thoughtful, "x"]  # 3 has the prompt of 1


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "a", "completion": [], "label": True}, "no prompt and completion"),
        ({"prompt": "a", "completion": [{"role": "user", "content": "x"}], "label": True}, "no prompt and completion"),
        ({"completion": [{"role": "assistant", "content": "x"}], "label": True}, "no prompt and completion"),
        ({"prompt": "a", "completion": "x"}, "`label` is None"),
        ({"prompt": "a", "completion": "x", "label": "good"}, "`label` is 'good'"),
        ({"prompt": "a", "label": True}, "no prompt and completion"),
        ({"prompt": "a", "completion": "x", "label": True}, "another prompt"),
    ],
)
def test_invalid_labelled_rows_are_refused(row: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        label_rows([{"uid": "1", **row}])
