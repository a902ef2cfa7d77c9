"""Boxes and points: one parser reads every format, matching is optimal, and overlaps have the expected properties."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest

from posttrain.verify import boxes
from posttrain.verify.matching import best_pairs
from posttrain.verify.regions import MAX_REGIONS, Region, answer_part, gold_regions, read_regions, same_scale, to_unit


@pytest.mark.parametrize(
    ("text", "numbers", "label"),
    [
        ('```json\n[{"bbox_2d": [1, 2, 30, 4.5], "label": "a cat"}]\n```', (1, 2, 30, 4.5), "a cat"),
        ("[{'label': 'dog', 'bbox': [1, 2, 3, 4]}]", (1, 2, 3, 4), "dog"),
        ('{"box_2d": [2, 1, 4, 3], "label": "y first"}', (1, 2, 3, 4), "y first"),
        ('{"point_2d": [10, 20], "label": "tip"}', (10, 20), "tip"),
        ("<ref>the cat</ref><box>(10,20),(30,40)</box>", (10, 20, 30, 40), "the cat"),
        (
            "<|object_ref_start|>dog<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>",
            (1, 2, 3, 4),
            "dog",
        ),
        ("<ref>cat</ref><box>[[1, 2, 3, 4]]</box>", (1, 2, 3, 4), "cat"),
        ("It stands at [0.12, .5, 0.3, 0.75] in the picture.", (0.12, 0.5, 0.3, 0.75), None),
        ("(-1.5, 2e1)", (-1.5, 20), None),
        ("<point>63 44</point>", (63, 44), None),
        ("<bbox>1 2 3 4</bbox>", (1, 2, 3, 4), None),
        ('<point x="63.5" y="44.5" alt="tip">tip</point>', (63.5, 44.5), None),
        ("pyautogui.click(x=100, y=200)", (100, 200), None),
        ("click(start_box='<|box_start|>(100,200)<|box_end|>')", (100, 200), None),
        ('{"type": "click", "x": 5, "y": 6}', (5, 6), None),
    ],
)
def test_parser_reads_every_format(text: str, numbers: tuple[float, ...], label: str | None) -> None:
    assert read_regions(text) == [Region(numbers, label)]


def test_several_regions_keep_their_order() -> None:
    assert read_regions("<ref>a</ref><box>(1,2),(3,4)</box><ref>b</ref><box>(5,6),(7,8)</box>") == [
        Region((1, 2, 3, 4), "a"),
        Region((5, 6, 7, 8), "b"),
    ]
    assert read_regions("[[1, 2], [3, 4]]") == [Region((1, 2)), Region((3, 4))], "two points, not a box"
    assert read_regions('[{"bbox_2d": [1, 2, 3, 4]}, {"bbox_2d": [5, 6, 7, 8], "label": "b"}]') == [
        Region((1, 2, 3, 4)),
        Region((5, 6, 7, 8), "b"),
    ], "a label belongs to its own object"


@pytest.mark.parametrize("text", ["[]", "```json\n[]\n```", "No objects.", "none", "[ ]"])
def test_no_region_is_an_answer(text: str) -> None:
    assert read_regions(text) == []


@pytest.mark.parametrize("text", ["", "a cat", "[1, 2, 3]", "[1, 2, 3, 4, 5]", "[nan, 1, 2, 3]", "[1e999, 1]", "1, 2"])
def test_text_without_a_region(text: str) -> None:
    assert read_regions(text) is None


def test_answer_of_thousands_of_boxes_is_rejected() -> None:
    assert read_regions("[1, 2]" * MAX_REGIONS) is not None
    assert read_regions("[1, 2]" * (MAX_REGIONS + 1)) is None


@pytest.mark.parametrize("text", ["[1," * 30_000, "(1, 2, " * 20_000, '{"label": "' * 9_000 + "[1, 2]" * 400])
def test_parsing_time_is_linear_in_the_text(text: str) -> None:
    started = time.perf_counter()
    read_regions(text)
    assert time.perf_counter() - started < 1.5


def test_the_last_answer_block_counts() -> None:
    assert answer_part("<think>[1, 2]</think>a<answer>[3, 4]</answer><answer>[5, 6]</answer>") == "[5, 6]"
    assert answer_part("<think>[1, 2]</think>[3, 4]") == "[3, 4]"


@pytest.mark.parametrize(
    "answer",
    [[1, 2, 3, 4], [[1, 2, 3, 4]], "[1, 2, 3, 4]", {"bbox_2d": [1, 2, 3, 4]}, '[{"bbox_2d": [1, 2, 3, 4]}]'],
)
def test_gold_of_every_format(answer: Any) -> None:
    assert gold_regions(answer) == [Region((1, 2, 3, 4))]


@pytest.mark.parametrize("answer", ["the cat", [1, 2, 3], [[1, 2, 3, 4], [1, 2, 3]], {"label": "cat"}, 5])
def test_unreadable_gold_is_an_error(answer: Any) -> None:
    with pytest.raises(ValueError, match="`answer` must be"):
        gold_regions(answer)


def test_coordinate_scales() -> None:
    """In a 200 x 100 picture, (100, 50) is the middle: 0.5 and 0.5, or 500 and 500 of 1000."""
    assert to_unit([Region((100, 50))], "pixels", [200, 100]) == [Region((0.5, 0.5))]
    found, gold = same_scale(
        [Region((500, 500, 1000, 1000))], [Region((100, 50, 200, 100))], "0-1000", "pixels", (200, 100)
    )
    assert found == gold == [Region((0.5, 0.5, 1.0, 1.0))]
    assert same_scale([Region((7, 8))], [Region((9, 9))], "pixels", None, None) == ([Region((7, 8))], [Region((9, 9))])
    with pytest.raises(ValueError, match="image_size"):
        same_scale([], [], "0-1000", "pixels", None)


def test_matching_is_optimal() -> None:
    """Compared with every assignment of small tables; taking the largest value first is worse on [[3, 2], [2, 0]]."""
    assert best_pairs([[3, 2], [2, 0]]) == [(0, 1), (1, 0)]
    assert best_pairs([[0, 0]]) == best_pairs([]) == best_pairs([[]]) == []
    draw = random.Random(0)
    for _ in range(200):
        rows, columns = draw.randint(1, 4), draw.randint(1, 5)
        table = [[draw.choice([0.0, 1.0, draw.random()]) for _ in range(columns)] for _ in range(rows)]
        pairs = best_pairs(table)
        wide = table if rows <= columns else [list(column) for column in zip(*table, strict=True)]
        best = max(
            sum(row[place] for row, place in zip(wide, places, strict=True))
            for places in itertools.permutations(range(len(wide[0])), len(wide))
        )
        assert sum(table[i][j] for i, j in pairs) == pytest.approx(best)
        assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)


def test_many_regions_are_matched_quickly() -> None:
    draw = random.Random(1)
    started = time.perf_counter()
    best_pairs([[draw.random() for _ in range(MAX_REGIONS)] for _ in range(100)])
    assert time.perf_counter() - started < 2


def test_properties_of_overlaps() -> None:
    """GIoU is at most IoU; both are 1 for identical boxes and invariant under scaling both axes."""
    draw = random.Random(2)
    for _ in range(100):
        a, b = (
            (x, y, x + draw.uniform(1, 5), y + draw.uniform(1, 5))
            for x, y in [(draw.uniform(0, 5), draw.uniform(0, 5)) for _ in "ab"]
        )
        assert -1 <= boxes.giou(a, b) <= boxes.iou(a, b) <= 1
        assert boxes.iou(a, b) == pytest.approx(boxes.iou(b, a))
        scaled = [tuple(n * (3.0 if i % 2 else 7.0) for i, n in enumerate(box)) for box in (a, b)]
        assert boxes.iou(*scaled) == pytest.approx(boxes.iou(a, b))
        assert boxes.giou(*scaled) == pytest.approx(boxes.giou(a, b))
        assert boxes.iou(a, a) == boxes.giou(a, a) == boxes.edge_agreement(a, a) == 1


def test_greedy_matching_would_be_worse() -> None:
    """Prediction a overlaps gold 1 (0.6) and gold 2 (0.5), prediction b only gold 1: both pairs are possible."""
    gold = [Region((0, 0, 10, 10)), Region((0, 0, 5, 10))]
    found = [Region((0, 0, 7, 10)), Region((0, 0, 10, 8))]
    scores = boxes.detection(found, gold, threshold=0.6)
    assert scores == {"f1": 1.0, "precision": 1.0, "recall": 1.0, "iou": pytest.approx((5 / 7 + 0.8) / 2)}


def test_point_in_a_gold_of_boxes_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds a point"):
        boxes.mean_overlap([Region((0, 0, 1, 1))], [Region((1, 1))])


def test_naming_every_box_is_not_rewarded() -> None:
    gold, wrong = [Region((0, 0, 1, 1))], [Region((i, 0, i + 1, 1)) for i in range(5, 9)]
    assert boxes.mean_overlap([*wrong, *gold], gold) == 0.2
    assert boxes.points_in_boxes([*wrong, *gold], gold) == 0.2
    assert boxes.detection([*wrong, *gold], gold)["f1"] == pytest.approx(1 / 3)


def test_formats_are_distinguished() -> None:
    written = {
        "bbox_2d": json.dumps([{"bbox_2d": [1, 2, 3, 4]}]),
        "point_2d": json.dumps({"point_2d": [1, 2]}),
        "box_tag": "<|object_ref_start|>a<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>",
        "list": "[1, 2, 3, 4]",
    }
    for form, text in written.items():
        assert [other for other in written if boxes.has_form(text, other)] == [form]  # type: ignore[arg-type]
    assert boxes.has_form(f"\n```json\n{written['list']}\n```\n", "list")
    assert not boxes.has_form("```json" + "\n" * 20_000 + written["list"], "list"), (
        "a block without end, in linear time"
    )


@pytest.mark.parametrize("answer", [None, float("nan"), "nan", "None", " null ", ""])
def test_empty_gold_gives_no_score(answer: Any) -> None:
    assert gold_regions(answer) is None
    assert gold_regions("[]") == gold_regions([]) == []
