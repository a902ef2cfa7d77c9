"""Boxes that a model wrote as text, against gold boxes. A box is [x1, y1, x2, y2]; areas are continuous. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.verify.extract import after_think, last_tag

Box = tuple[float, float, float, float]
_FORM = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


class Found(NamedTuple):
    """A box and how sure the model says it is, in [0, 1]."""

    box: Box
    confidence: float


def iou(a: Box, b: Box) -> float:
    """Intersection over union; 0 if the union is empty. A box with its corners exchanged has no area."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    common = max(0.0, width) * max(0.0, height)
    union = area(a) + area(b) - common
    return common / union if union > 0 else 0.0


def area(box: Box) -> float:
    """Width times height, 0 where one is negative."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def read_boxes(text: str) -> list[Found] | None:
    """The boxes of [{'Position': [x1, y1, x2, y2], 'Confidence': c}, ...], c = 1 if missing; None for anything else.

    Single quotes and a missing `]` at the end are forgiven; "No Objects" is an empty list. Of equal positions the first
    counts. A confidence beyond [0, 1] counts as the nearer end: the reward would grow with it.
    """
    written = text.strip()
    if written.strip(" .[]'\"").lower() == "no objects":
        return []
    try:
        listed = json.loads((written if written.endswith("]") else written + "]").replace("'", '"'))
        found = [_read(entry) for entry in listed]
    except (ValueError, TypeError, KeyError, RecursionError):  # not the list that was asked for
        return None
    first: dict[Box, Found] = {}
    for item in found:
        first.setdefault(item.box, item)
    return list(first.values())


def _read(entry: Mapping[str, Any]) -> Found:
    box, confidence = gold_box(entry["Position"]), float(entry.get("Confidence", 1.0))
    if not math.isfinite(confidence):
        raise ValueError("no number")
    return Found(box, min(max(confidence, 0.0), 1.0))


def gold_box(entry: Any) -> Box:
    """Four numbers as a box, of a list or of {"Position": list}. Raises ValueError for anything else."""
    numbers = entry["Position"] if isinstance(entry, Mapping) else entry
    if not isinstance(numbers, list | tuple) or len(numbers) != 4:
        raise ValueError(f"a box must be [x1, y1, x2, y2], not {numbers!r:.80}")
    x1, y1, x2, y2 = (float(n) for n in numbers)
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        raise ValueError(f"a box has 4 finite numbers, not {numbers!r}")
    return x1, y1, x2, y2


def box_reward(completion: str, answer: Sequence[Any], *, threshold: float = 0.5) -> dict[str, float]:
    """{"reward": iou + confidence + format, "iou", "confidence", "format"} in [0, 3] (Visual-RFT).

    By falling confidence each predicted box takes the gold box that overlaps it most of those still free, if their IoU
    is above the threshold. iou: sum of those / the larger number of boxes. confidence: mean of c for matched boxes and
    of 1 - c for the others. No box where there is none to find: both 1. format: a thought, then an answer.
    """
    gold = [gold_box(entry) for entry in answer]
    block = last_tag(after_think(completion), "answer")
    found = None if block is None else read_boxes(block)
    overlap, confidence = (0.0, 0.0) if found is None else _match_boxes(found, gold, threshold)
    form = float(_FORM.fullmatch(completion.strip()) is not None)
    return {"reward": overlap + confidence + form, "iou": overlap, "confidence": confidence, "format": form}


def _match_boxes(found: Sequence[Found], gold: Sequence[Box], threshold: float) -> tuple[float, float]:
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
