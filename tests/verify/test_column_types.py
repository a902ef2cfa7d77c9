"""Gold columns of other types than a reward expects: converted if unambiguous, otherwise an error, never a silent 0."""

from __future__ import annotations

import math
from typing import Any

import pytest

from posttrain.verify.bleu import reference_bleu
from posttrain.verify.qa import answer_f1, citation_f1, search_r1
from posttrain.verify.reasoning import think_answer_consistency, truth_of
from posttrain.verify.text import golds_of
from rewards import boxes, countdown, structured, tools


@pytest.mark.parametrize("label", ["0", "false", "False", " wrong ", 0, 0.0, False, "incorrect", "no"])
def test_labels_read_as_wrong(label: Any) -> None:
    assert truth_of(label) is False


@pytest.mark.parametrize("label", ["1", "true", "Correct", 1, 1.0, True, "yes"])
def test_labels_read_as_right(label: Any) -> None:
    assert truth_of(label) is True


@pytest.mark.parametrize("label", [None, math.nan, "", " ", "nan", "null"])
def test_labels_without_a_verdict(label: Any) -> None:
    assert truth_of(label) is None


@pytest.mark.parametrize("label", [0.5, 2, "maybe", [1], "0.7"])
def test_invalid_labels_are_refused(label: Any) -> None:
    with pytest.raises(ValueError, match="allowed: 0, 1"):
        truth_of(label)


@pytest.mark.parametrize("numbers", [["3", "5", "2"], (3.0, 5.0, 2.0), "3 5 2", "[3,5,2]", "3, 5, 2"])
@pytest.mark.parametrize("target", [16, "16", 16.0])
def test_countdown_reads_numbers_given_as_text(target: Any, numbers: Any) -> None:
    assert countdown.expression("<answer>(3+5)*2</answer>", target, numbers) == 1.0
    assert countdown.expression("<answer>(3+5)+2</answer>", target, numbers) == 0.1


@pytest.mark.parametrize(
    ("target", "numbers"), [("ten", [1, 2]), (math.nan, [1]), (16, ["a"]), (16, 5), (16, []), (16, [1.5]), ([1], [1])]
)
def test_countdown_refuses_other_types(target: Any, numbers: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        countdown.expression("", target, numbers)


@pytest.mark.parametrize("answer", ["prose", "[1]", 7, [1, 2], "7", math.nan])
def test_invalid_objects_are_refused(answer: Any) -> None:
    for reward in (structured.rl_struct, tools.toolrl):
        with pytest.raises(ValueError, match=r"`answer` must be an object.*, or its JSON text"):
            reward("{}", answer)


@pytest.mark.parametrize("answer", ["prose", '{"a": 1}', 7, {"a": 1}])
def test_invalid_boxes_are_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match="`answer` must be a list of"):
        boxes.visual_rft_iou("", answer)


@pytest.mark.parametrize("nothing", [None, math.nan, "nan", "None", " null ", "", " ", [], [None, "NaN"]])
def test_empty_golds_give_no_score(nothing: Any) -> None:
    for said in ("nan", "none", ""):
        text = f"<answer>{said}</answer>"
        assert search_r1(text, nothing)["reward"] is None
        assert answer_f1(text, nothing)["reward"] is None
        assert reference_bleu(text, nothing) is None


def test_dict_is_refused_as_text() -> None:
    for reward in (search_r1, answer_f1, reference_bleu):
        with pytest.raises(ValueError, match="the gold is a dict with city"):
            reward("<answer>city</answer>", {"city": "Oslo"})
    assert golds_of([5, "Oslo"]) == ["5", "Oslo"]
    assert answer_f1("<answer>5</answer>", 5)["reward"] == 1.0  # type: ignore[arg-type]
    assert reference_bleu("5", 5) == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize("gold", [{"value": "4"}, ["4"], "It is shown that the sum is always even, because n is even"])
def test_golds_that_math_accuracy_cannot_compare(gold: Any) -> None:
    assert think_answer_consistency("<think>so</think><answer>4</answer>", gold)["reward"] is None


@pytest.mark.parametrize(
    ("block", "score"),
    [("[1, 3]", 1.0), ("doc1 and doc-3", 1.0), ("1-3", 1.0), ("-1 -3", 0.0), ("1.3", 0.0)],
)
def test_citations_must_be_integers(block: str, score: float) -> None:
    assert citation_f1(block, [1, 3], "f1") == pytest.approx(score)
