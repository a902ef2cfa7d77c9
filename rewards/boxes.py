r"""Boxes and points written as text: do they lie where the gold boxes lie?

rewards:
  - use: boxes.iou                # `answer`: [x1, y1, x2, y2], a list of these, objects with bbox_2d, or JSON text
    params: {coordinates: 0-1000} # what the model writes; gold_coordinates: what the data has, if it differs
  - {use: boxes.form, weight: 0.1, params: {form: bbox_2d}}

Every common form of boxes is read: Qwen's JSON and tags, InternVL's, Molmo's and UI-TARS's tags, lists in sentences
(posttrain/verify/regions.py names them). What stands in the thought does not count, and of an answer with an `<answer>`
block only the last one does. A box too many counts against the answer as a missing one does, so naming several does not
pay. `pixels` are those of the picture that the model sees: where it is scaled down before the model, take a relative
form, or scale the gold too. The overlap of boxes does not depend on the scale; only where `coordinates` and
`gold_coordinates` differ and one is `pixels`, the column `image_size` = [width, height] is read.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify import boxes
from posttrain.verify.regions import Coordinates, Region, answer_part, gold_regions, read_regions, same_scale


def _read(
    completion: str,
    answer: Any,
    image_size: Sequence[float] | None,
    coordinates: Coordinates,
    gold_coordinates: Coordinates | None,
) -> tuple[list[Region] | None, list[Region]] | None:
    """(found, gold) in one scale, found None where nothing can be read; None without a gold."""
    gold = gold_regions(answer)
    if gold is None:
        return None
    found = read_regions(answer_part(completion))
    compared, gold = same_scale(found or [], gold, coordinates, gold_coordinates, image_size)
    return (None if found is None else compared), gold


def iou(
    completion: str,
    answer: Any,
    image_size: Sequence[float] | None = None,
    *,
    coordinates: Coordinates = "pixels",
    gold_coordinates: Coordinates | None = None,
) -> float | None:
    """Intersection over union of the box with the gold box; of several the best matching, over the larger number.

    In [0, 1]; 0 where no box can be read, None without a gold. With an empty gold, `[]` or `No objects` is right.
    """
    both = _read(completion, answer, image_size, coordinates, gold_coordinates)
    if both is None:
        return None
    found, gold = both
    return 0.0 if found is None else boxes.mean_overlap(found, gold)


def giou(
    completion: str,
    answer: Any,
    image_size: Sequence[float] | None = None,
    *,
    coordinates: Coordinates = "pixels",
    gold_coordinates: Coordinates | None = None,
) -> dict[str, float] | None:
    """(1 + generalised IoU) / 2, in [0, 1]: boxes that do not meet the gold earn more the nearer they are (1902.09630).

    A wrong box earns more than none, so it gives a signal where IoU is 0 for all. Logged part: iou.
    """
    both = _read(completion, answer, image_size, coordinates, gold_coordinates)
    if both is None:
        return None
    found, gold = both
    if found is None:
        return {"reward": 0.0, "iou": 0.0}
    near = boxes.mean_overlap(found, gold, value=lambda a, b: (1 + boxes.giou(a, b)) / 2)
    return {"reward": near, "iou": boxes.mean_overlap(found, gold)}


def f1(
    completion: str,
    answer: Any,
    image_size: Sequence[float] | None = None,
    *,
    threshold: float = 0.5,
    labels: bool = False,
    coordinates: Coordinates = "pixels",
    gold_coordinates: Coordinates | None = None,
) -> dict[str, float] | None:
    """F1 of several boxes under the best one-to-one matching; a pair matches from an IoU of `threshold` on.

    labels: a pair must have the same label too (`label` of an object, or the reference before a tag). Logged parts:
    precision, recall, iou (of matched pairs). None without a gold.
    """
    both = _read(completion, answer, image_size, coordinates, gold_coordinates)
    if both is None:
        return None
    found, gold = both
    if found is None:
        return {"reward": 0.0, "precision": 0.0, "recall": 0.0, "iou": 0.0}
    scores = boxes.detection(found, gold, threshold=threshold, labels=labels)
    return {"reward": scores.pop("f1"), **scores}


def point(
    completion: str,
    answer: Any,
    image_size: Sequence[float] | None = None,
    *,
    radius: float = 0.0,
    coordinates: Coordinates = "pixels",
    gold_coordinates: Coordinates | None = None,
) -> float | None:
    """1 if the point lies in the gold box; of several the share that lies in a box of its own, over the larger number.

    A box counts by its middle. radius: how far from a gold point is right, in the unit of both (a share of the picture
    where they differ). None without a gold.
    """
    both = _read(completion, answer, image_size, coordinates, gold_coordinates)
    if both is None:
        return None
    found, gold = both
    return 0.0 if found is None else boxes.points_in_boxes(found, gold, radius=radius)


def gui_g1(
    completion: str,
    answer: Any,
    image_size: Sequence[float] | None = None,
    *,
    weights: Sequence[float] = (1.0, 0.25, 0.125),
    coordinates: Coordinates = "pixels",
    gold_coordinates: Coordinates | None = None,
) -> dict[str, float] | None:
    """A hit, a quarter of the IoU and an eighth of the agreement of the edges of one box on a screen: GUI-G1.

    2505.15810. The last two keep boxes from shrinking for the hit and from growing for the IoU; how edges agree is
    reconstructed. Exactly one box counts. None without a gold. Logged parts: hit, iou, size.
    """
    both = _read(completion, answer, image_size, coordinates, gold_coordinates)
    if both is None:
        return None
    found, gold = both
    if len(gold) != 1 or not gold[0].is_box:
        raise ValueError(f"GUI-G1 needs one gold box, not {answer!r:.80}")
    return boxes.gui_g1(found or [], gold[0].numbers, weights=weights)


def form(completion: str, *, form: boxes.Form = "bbox_2d") -> float:
    """1 if the answer is boxes in one form and nothing else: bbox_2d, point_2d (JSON), box_tag or list; else 0.

    An answer behind the thought, or in the last `<answer>` block. JSON may stand in one fenced block.
    """
    return float(boxes.has_form(answer_part(completion), form))


def visual_rft_iou(completion: str, answer: Any, *, threshold: float = 0.5) -> dict[str, float] | None:
    """iou + confidence + format in [0, 3] of `<answer>[{'Position': [..], 'Confidence': c}, ..]</answer>`: Visual-RFT.

    2503.01785, after its code. threshold: a box is matched if its IoU with a gold box is above it. None if the row has
    no list of boxes; with an empty one, finding nothing is right. Logged parts: iou, confidence, format.
    """
    return None if gold_regions(answer) is None else boxes.box_reward(completion, answer, threshold=threshold)


_ONE = "<think>see</think>\n<answer>[{'Position': [0, 0, 10, 10], 'Confidence': 0.9}%s]</answer>"
_SURE = "<think>see</think><answer>[{'Position': [0, 0, 10, 10], 'Confidence': %d}]</answer>"
_EXTRA = ", {'Position': [50, 50, 60, 60], 'Confidence': 0.3}"
_QWEN = '```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox_2d": [50, 50, 60, 60], "label": "dog"}]\n```'
_TWO = [{"bbox_2d": [50, 50, 60, 60], "label": "Dog"}, {"bbox_2d": [0, 0, 10, 10], "label": "cat"}]
_GOLD = {"answer": [0, 0, 10, 10]}
_PIXEL_GOLD = {"coordinates": "0-1000", "gold_coordinates": "pixels"}
_SHARES = {"coordinates": "0-1", "gold_coordinates": "0-1000"}
_PERCENT = {"coordinates": "0-100", "gold_coordinates": "0-1"}

EXAMPLES = {
    "iou": [
        ("[0, 0, 10, 10]", _GOLD, 1.0),
        ('{"bbox_2d": [0, 0, 10, 5]}', _GOLD, 0.5),
        ("<ref>cat</ref><box>(0,0),(10,5)</box>", _GOLD, 0.5),
        ("<|box_start|>(0,0),(10,8)<|box_end|>", _GOLD, 0.8),
        ("<box>[[0, 0, 10, 5]]</box>", _GOLD, 0.5),
        ("The cat is at [0.0, 0.0, 0.5, 1.0].", {"answer": [0, 0, 1000, 1000]}, 0.5, _SHARES),
        ("[0, 0, 10, 10] or [0, 0, 10, 9]", _GOLD, 0.5),
        ("<think>[0, 0, 10, 10]</think><answer>[20, 20, 30, 30]</answer>", _GOLD, 0.0),
        ("[0, 0, 500, 500]", {"answer": [0, 0, 320, 240], "image_size": [640, 480]}, 1.0, _PIXEL_GOLD),
        ("[10, 10, 0, 0]", _GOLD, 0.0),
        ("[]", {"answer": []}, 1.0),
        ("[0, 0, 1, 1]", {"answer": "[]"}, 0.0),
        ("", _GOLD, 0.0),
        ("", {"answer": None}, None),
    ],
    "giou": [
        ("[0, 0, 10, 10]", _GOLD, {"reward": 1.0, "iou": 1.0}),
        ("[10, 0, 20, 10]", _GOLD, {"reward": 0.5, "iou": 0.0}),  # side by side: the hull is covered
        ("[30, 0, 40, 10]", _GOLD, {"reward": 0.25, "iou": 0.0}),  # half of the hull is not
        ("[10, 0, 0, 10]", _GOLD, 0.0),
        ("", _GOLD, 0.0),
        ("", {"answer": None}, None),
    ],
    "f1": [
        (_QWEN, {"answer": _TWO}, {"reward": 1.0, "precision": 1.0, "recall": 1.0, "iou": 1.0}),
        (_QWEN, {"answer": _TWO}, 1.0, {"labels": True}),
        (_QWEN.replace("cat", "dog"), {"answer": _TWO}, 0.5, {"labels": True}),
        ("[0, 0, 10, 6]", {"answer": [[0, 0, 10, 10], [50, 50, 60, 60]]}, {"reward": 2 / 3, "recall": 0.5, "iou": 0.6}),
        ("[0, 0, 10, 6]", _GOLD, 0.0, {"threshold": 0.75}),
        ("nothing here", _GOLD, 0.0),
        ("", _GOLD, 0.0),
        ("", {"answer": None}, None),
    ],
    "point": [
        ("click(5, 5)", _GOLD, 1.0),
        ("<point>10 10</point>", _GOLD, 1.0),
        ('{"point_2d": [11, 5]}', _GOLD, 0.0),
        ('<point x="50" y="50" alt="a cat">a cat</point>', {"answer": [0.4, 0.4, 0.6, 0.6]}, 1.0, _PERCENT),
        ("[500, 500]", {"answer": [300, 200, 340, 280], "image_size": [640, 480]}, 1.0, _PIXEL_GOLD),
        ("[[5, 5], [50, 55]]", {"answer": [[0, 0, 10, 10], [50, 50, 60, 60]]}, 1.0),
        ("(5, 5) or (50, 55)", _GOLD, 0.5),
        ("[3, 4]", {"answer": [0, 0]}, 1.0, {"radius": 5.0}),
        ("", _GOLD, 0.0),
        ("", {"answer": None}, None),
    ],
    "gui_g1": [
        ("[100, 100, 200, 200]", {"answer": [100, 100, 200, 200]}, {"reward": 1.375, "hit": 1.0, "size": 1.0}),
        ("[100, 100, 200, 150]", {"answer": [100, 100, 200, 200]}, 1 + 0.25 * 0.5 + 0.125 * 4 / (3 + 4 / 3)),
        ("[100, 100, 200, 200] [1, 1, 9, 9]", {"answer": [100, 100, 200, 200]}, 0.0),
        ("[150, 150]", {"answer": [100, 100, 200, 200]}, 0.0),
        ("", _GOLD, 0.0),
        ("", {"answer": None}, None),
    ],
    "form": [
        (_QWEN, {}, 1.0),
        ('<think>a</think>[{"bbox_2d": [0, 0, 1, 1]}]', {}, 1.0),
        ('Here: [{"bbox_2d": [0, 0, 1, 1]}]', {}, 0.0),
        ('{"bbox_2d": [0, 0, 1]}', {}, 0.0),
        ('{"point_2d": [3, 4]}', {}, 1.0, {"form": "point_2d"}),
        ("<ref>cat</ref><box>(0,0),(10,5)</box>", {}, 1.0, {"form": "box_tag"}),
        ("[[0, 0, 1, 1], [2, 2, 3, 3]]", {}, 1.0, {"form": "list"}),
        ("", {}, 0.0),
    ],
    "visual_rft_iou": [
        (_ONE % "", {"answer": [[0, 0, 10, 8]]}, {"iou": 0.8, "confidence": 0.9, "format": 1.0, "reward": 2.7}),
        (_ONE % _EXTRA, {"answer": "[[0, 0, 10, 10]]"}, {"iou": 0.5, "confidence": 0.8, "reward": 2.3}),
        (_ONE % "", {"answer": [[20, 20, 30, 30]]}, {"iou": 0.0, "confidence": 0.1, "reward": 1.1}),
        (_SURE % 100, {"answer": [[0, 0, 10, 10]]}, 3.0),
        (_SURE % -100, {"answer": [[20, 20, 30, 30]]}, 2.0),
        ("<think>a</think><answer>No Objects</answer>", {"answer": []}, 3.0),
        ("<think>a</think><answer>the cat</answer>", {"answer": [[0, 0, 1, 1]]}, 1.0),
        ("", {"answer": [[0, 0, 1, 1]]}, 0.0),
        ("", {"answer": None}, None),
    ],
}


def _in_json(regions: Sequence[Region]) -> str:
    entries = [
        {"bbox_2d" if region.is_box else "point_2d": list(region.numbers), "label": region.label or "it"}
        for region in regions
    ]
    return f"<think>see</think>\n{json.dumps(entries)}"


def _write_boxes(row: Mapping[str, Any]) -> str | None:
    gold = gold_regions(row.get("answer"))
    return None if gold is None else _in_json(gold)


def _move_away(row: Mapping[str, Any]) -> str | None:
    """The gold moved by its own width and a little more, so that nothing overlaps."""
    moved = []
    for region in gold_regions(row.get("answer")) or []:
        width = region.numbers[2] - region.numbers[0] + 1
        moved.append(region._replace(numbers=tuple(n if i % 2 else n + width for i, n in enumerate(region.numbers))))
    return _in_json(moved) if moved else None


def _sure(row: Mapping[str, Any]) -> str | None:
    gold = gold_regions(row.get("answer"))
    found = [{"Position": list(region.numbers), "Confidence": 1.0} for region in gold or []]
    return None if gold is None else f"<think>see</think>\n<answer>{found}</answer>"


GOLD = {**dict.fromkeys(("iou", "giou", "f1", "point", "gui_g1", "form"), _write_boxes), "visual_rft_iou": _sure}
NEAR_MISS = {"f1": _move_away, "point": _move_away, "gui_g1": _move_away}

_ONES = [
    {"prompt": "Where is the cat?", "answer": [10, 10, 20, 18]},
    {"prompt": "Where is the sink?", "answer": [305, 40, 330, 90]},
]
_SEVERAL = [
    {"prompt": "Where is the cat?", "answer": [[0, 0, 10, 8]]},
    {"prompt": "Where are the dogs?", "answer": [[5, 5, 30, 40], [50, 50, 60, 60]]},
]
ROWS = {
    **dict.fromkeys(("iou", "giou", "f1", "point", "visual_rft_iou"), _SEVERAL),
    "gui_g1": _ONES,
    "form": {"rows": _SEVERAL, "correct": "boxes.iou"},
}
