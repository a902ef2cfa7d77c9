"""Overlap metrics and rewards for boxes and points. Areas are continuous (no +1). Pure functions.

A box is (x1, y1, x2, y2); `regions.py` parses boxes from text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from posttrain.verify.extract import after_think, last_tag
from posttrain.verify.matching import best_pairs
from posttrain.verify.regions import Numbers, Region, gold_regions

Form = Literal["bbox_2d", "point_2d", "box_tag", "list"]

_FORM = re.compile(r"<think>(?:(?!</think>\s*+<answer>).)*+</think>\s*+<answer>.*</answer>", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?(.*)```", re.DOTALL)
_PAIR = r"\(\s*\d+\s*,\s*\d+\s*\)"
_TAGS = re.compile(
    rf"(?:\s*+(?:<ref>[^<]*</ref>|<\|object_ref_start\|>[^<]*<\|object_ref_end\|>)?+\s*+"
    rf"(?:<box>|<\|box_start\|>)\s*{_PAIR}\s*,\s*{_PAIR}\s*(?:</box>|<\|box_end\|>))+\s*"
)


class Found(NamedTuple):
    """A box with the model's stated confidence, in [0, 1]."""

    box: Numbers
    confidence: float


def area(box: Numbers) -> float:
    """Return width times height, 0 if either is negative."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _common_area(a: Numbers, b: Numbers) -> float:
    return area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))


def iou(a: Numbers, b: Numbers) -> float:
    """Compute intersection over union; 0 if the union is empty. A box with swapped corners has no area."""
    common = _common_area(a, b)
    union = area(a) + area(b) - common
    return common / union if union > 0 else 0.0


def giou(a: Numbers, b: Numbers) -> float:
    """Compute the generalized IoU, in [-1, 1] (1902.09630).

    It is IoU minus the share of the enclosing box that neither box covers.

    Unlike IoU, it increases as disjoint boxes approach each other. -1 for a box without area.
    """
    if not area(a) or not area(b):
        return -1.0
    union = area(a) + area(b) - _common_area(a, b)
    hull = area((min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])))
    return iou(a, b) - max(0.0, hull - union) / hull  # rounding may give < 0 if nested


def holds(box: Numbers, point: Numbers) -> bool:
    """Return whether a point lies in a box, including its border."""
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def mean_overlap(
    found: Sequence[Region], gold: Sequence[Region], value: Callable[[Numbers, Numbers], float] = iou
) -> float:
    """Compute the sum of values of the best one-to-one matching / the larger number of boxes, in [0, 1].

    value: function of two boxes with values in [0, 1]. A surplus or missing box counts as a pair without overlap. Two
    empty lists give 1. Found points overlap with nothing. Raises ValueError for a gold point.
    """
    boxes = _only_boxes(gold)
    if not found or not boxes:
        return float(not found and not boxes)
    table = [[value(region.numbers, box) if region.is_box else 0.0 for box in boxes] for region in found]
    return math.fsum(table[i][j] for i, j in best_pairs(table)) / max(len(found), len(boxes))


def detection(
    found: Sequence[Region], gold: Sequence[Region], *, threshold: float = 0.5, labels: bool = False
) -> dict[str, float]:
    """Compute {"f1", "precision", "recall", "iou"} for several boxes under a one-to-one matching.

    A pair matches if its IoU is at least `threshold` and, with `labels`, both labels are equal (ignoring case). The
    matching has as many pairs as possible and, among these, the largest total IoU. iou: mean over matched pairs, 0
    without pairs. Two empty lists give 1 for all. Raises ValueError for a gold point.
    """
    boxes = _only_boxes(gold)
    if not found and not boxes:
        return dict.fromkeys(("f1", "precision", "recall", "iou"), 1.0)
    overlaps = [[iou(region.numbers, box) if region.is_box else 0.0 for box in boxes] for region in found]
    same = [[not labels or _name(region) == _name(target) for target in gold] for region in found]
    table = [
        [len(boxes) + overlap if overlap >= threshold and alike else 0.0 for overlap, alike in zip(*rows, strict=True)]
        for rows in zip(overlaps, same, strict=True)
    ]
    pairs = best_pairs(table)
    matched = len(pairs)
    return {
        "f1": 2 * matched / (len(found) + len(boxes)),
        "precision": matched / len(found) if found else 0.0,
        "recall": matched / len(boxes) if boxes else 0.0,
        "iou": math.fsum(overlaps[i][j] for i, j in pairs) / matched if matched else 0.0,
    }


def _name(region: Region) -> str:
    return (region.label or "").strip().casefold()


def _only_boxes(gold: Sequence[Region]) -> list[Numbers]:
    if point := next((region for region in gold if not region.is_box), None):
        raise ValueError(f"the gold holds a point, {list(point.numbers)}; boxes are needed, [x1, y1, x2, y2]")
    return [region.numbers for region in gold]


def points_in_boxes(found: Sequence[Region], gold: Sequence[Region], *, radius: float = 0.0) -> float:
    """Compute (points matched to distinct gold boxes that contain them) / (larger number of points and golds).

    A found box is represented by its center. A gold point matches points within `radius`. Two empty lists give 1.
    """
    if not found or not gold:
        return float(not found and not gold)
    table = [[float(hits(region.center, target.numbers, radius)) for target in gold] for region in found]
    return len(best_pairs(table)) / max(len(found), len(gold))


def hits(point: Numbers, target: Numbers, radius: float) -> bool:
    """Return whether a point lies in a box, or within `radius` of a point."""
    if len(target) == 4:
        return holds(target, point)
    return math.dist(point, target) <= radius


def edge_agreement(a: Numbers, b: Numbers) -> float:
    """Compute 4 / the sum over the four coordinates of larger / smaller, in [0, 1]: 1 for equal boxes (GUI-G1).

    Coordinates below 1 count as 1. A box without area, such as one with swapped corners, gives 0.
    """
    if not area(a) or not area(b):
        return 0.0
    ratios = [max(x, y) / min(x, y) for x, y in ((max(m, 1.0), max(n, 1.0)) for m, n in zip(a, b, strict=True))]
    return 4 / math.fsum(ratios)


def gui_g1(found: Sequence[Region], gold: Numbers, *, weights: Sequence[float] = (1.0, 0.25, 0.125)) -> dict[str, Any]:
    """Score one box on a screen (GUI-G1, 2505.15810): {"reward", "hit", "iou", "size"}.

    reward: weighted sum of hit (the box's center lies in the gold box), IoU and edge agreement. The last two keep the
    policy from shrinking its boxes for the hit or growing them for the IoU. Anything but exactly one box earns 0.
    """
    if len(found) != 1 or not found[0].is_box:
        return {"reward": 0.0, "hit": 0.0, "iou": 0.0, "size": 0.0}
    box = found[0].numbers
    parts = (float(holds(gold, found[0].center)), iou(box, gold), edge_agreement(box, gold))
    reward = math.fsum(weight * part for weight, part in zip(weights, parts, strict=True))
    return {"reward": reward, "hit": parts[0], "iou": parts[1], "size": parts[2]}


def has_form(text: str, form: Form) -> bool:
    """Return whether an answer consists of boxes or points in the given format and nothing else.

    bbox_2d, point_2d: a JSON object or a list of objects, each with that key and 4 or 2 numbers, alone or as one fenced
    block. box_tag: `<box>(x1,y1),(x2,y2)</box>` or `<|box_start|>..<|box_end|>`, each preceded by its reference, if
    any. list: `[x1, y1, x2, y2]` or a list of these. An empty list fits every format except box_tag.
    """
    if form == "box_tag":
        return _TAGS.fullmatch(text) is not None
    fenced = _FENCE.fullmatch(text.strip())
    try:
        held = json.loads(fenced[1].strip() if fenced else text)
    except (ValueError, RecursionError):  # the model's text is not JSON
        return False
    if form == "list":
        return isinstance(held, list) and (_is_numbers(held, 4) or all(_is_numbers(entry, 4) for entry in held))
    entries = held if isinstance(held, list) else [held]
    count = {"bbox_2d": 4, "point_2d": 2}[form]
    return all(isinstance(entry, Mapping) and _is_numbers(entry.get(form), count) for entry in entries)


def _is_numbers(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(type(n) in (int, float) for n in value)


def read_boxes(text: str) -> list[Found] | None:
    """Parse [{'Position': [x1, y1, x2, y2], 'Confidence': c}, ...], c = 1 if missing; None for anything else.

    Single quotes and a missing final `]` are accepted; "No Objects" gives an empty list. Of equal positions only the
    first counts. Confidence is clipped to [0, 1], because the reward increases with it.
    """
    written = text.strip()
    if written.strip(" .[]'\"").lower() == "no objects":
        return []
    try:
        listed = json.loads((written if written.endswith("]") else written + "]").replace("'", '"'))
        boxes = [_read(entry) for entry in listed]
    except (ValueError, TypeError, KeyError, RecursionError):  # not in the requested format
        return None
    first: dict[Numbers, Found] = {}
    for item in boxes:
        first.setdefault(item.box, item)
    return list(first.values())


def _read(entry: Mapping[str, Any]) -> Found:
    (box,), confidence = _only_boxes(gold_regions(entry["Position"]) or []), float(entry.get("Confidence", 1.0))
    if not math.isfinite(confidence):
        raise ValueError("no number")
    return Found(box, min(max(confidence, 0.0), 1.0))


def box_reward(completion: str, answer: Any, *, threshold: float = 0.5) -> dict[str, float]:
    """Score predicted boxes, in [0, 3] (Visual-RFT): {"reward": sum of the parts, "iou", "confidence", "format"}.

    In order of decreasing confidence, each predicted box is matched with the free gold box of the largest IoU, if above
    the threshold. iou: total IoU of the matches / the larger number of boxes. confidence: mean of c for matched and of
    1 - c for unmatched boxes. If both lists are empty, both are 1. format: a thought, then an answer.
    """
    gold = _only_boxes(gold_regions(answer) or [])
    block = last_tag(after_think(completion), "answer")
    found = None if block is None else read_boxes(block)
    overlap, confidence = (0.0, 0.0) if found is None else _match_boxes(found, gold, threshold)
    form = float(_FORM.fullmatch(completion.strip()) is not None)
    return {"reward": overlap + confidence + form, "iou": overlap, "confidence": confidence, "format": form}


def _match_boxes(found: Sequence[Found], gold: Sequence[Numbers], threshold: float) -> tuple[float, float]:
    if not found or not gold:
        both_empty = float(not found and not gold)
        return both_empty, both_empty
    free, overlaps, sure = list(range(len(gold))), 0.0, 0.0
    for item in sorted(found, key=lambda f: -f.confidence):
        best = max(free, key=lambda k: iou(item.box, gold[k]), default=None)
        overlap = 0.0 if best is None else iou(item.box, gold[best])
        if best is not None and overlap > threshold:
            free.remove(best)
            overlaps += overlap
            sure += item.confidence
        else:
            sure += 1 - item.confidence
    return min(1.0, overlaps / max(len(gold), len(found))), sure / len(found)
