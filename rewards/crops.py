r"""What a part of a picture that the model asked for is worth (`tools: [{use: crop}]`).

rewards:
  - {use: numeric.count, weight: 0}     # is the answer right? (any reward that says so)
  - {use: crops.outcome}                # right pays, a little less where a tool was needed
  - {use: crops.region, weight: 0}      # for advantage `decoupled_turns`: does the part hold what matters?
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify.boxes import area
from posttrain.verify.regions import Coordinates, Region, gold_regions, to_unit

Calls = Sequence[Mapping[str, Any]]


def outcome(
    completion: str, correct: bool | None, tool_calls: Calls | None = None, *, call: float = 0.1
) -> float | None:
    """1 for a right answer, 1 - call if a tool was called for it, 0 for a wrong one; None if that is unknown.

    AdaptVision (2512.03794), after its code: its reward of the answer, without its penalty for lucky guesses.
    """
    del completion
    if correct is None:
        return None
    return (1.0 - call if tool_calls else 1.0) if correct else 0.0


def region(
    completion: str,
    tool_calls: Calls | None = None,
    box: Any = None,
    correct: bool | None = None,
    image_size: Sequence[float] | None = None,
    *,
    coordinates: Coordinates = "0-1000",
    box_coordinates: Coordinates = "0-1000",
    hit: float = 0.1,
    size: float = 0.2,
    covered: float = 0.5,
) -> dict[str, float]:
    """hit if the first part asked for holds what matters, minus size times its share of the picture; 0 without a call.

    A share `covered` of the column `box` must lie in it; without such a column a right answer says that it did.
    AdaptVision (2512.03794), after its code, in which a judge that sees says so. Logged parts: covered, area.
    """
    del completion
    asked = [one for call in tool_calls or () if (one := _read(call)) is not None][:1]
    if not asked:
        return {"reward": 0.0, "covered": 0.0, "area": 0.0}
    (part,) = to_unit([Region(asked[0])], coordinates, image_size)
    left, top, right, bottom = (min(max(n, 0.0), 1.0) for n in part.numbers)
    gold = gold_regions(box)
    if gold:
        (whole,) = to_unit(gold[:1], box_coordinates, image_size)
        a, b, c, d = whole.numbers
        common = (max(a, left), max(b, top), min(c, right), min(d, bottom))
        share = area(common) / area(whole.numbers) if area(whole.numbers) and common[0] < common[2] else 0.0
    else:
        share = float(bool(correct))
    taken = area((left, top, right, bottom))
    return {"reward": hit * (share >= covered) - size * taken, "covered": share, "area": taken}


def _read(call: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The box that a call asks for, if it is one of the row's own image."""
    given = call.get("arguments") or {}
    asked = given.get("bbox_2d")
    if not isinstance(asked, list | tuple) or len(asked) != 4:
        return None
    try:  # the tool takes numbers in quotes, too
        box, image = tuple(map(float, asked)), float(given.get("image", 1))
    except (TypeError, ValueError):
        return None
    return box if image == 1 and box[0] < box[2] and box[1] < box[3] else None


def _call(*box: float) -> dict[str, Any]:
    return {"tool_calls": [{"name": "crop", "arguments": {"bbox_2d": list(box)}, "result": "<image>", "kind": "ok"}]}


EXAMPLES = {
    "outcome": [
        ("4", {"correct": True}, 1.0),
        ("4", {"correct": True, **_call(0, 0, 500, 500)}, 0.9),
        ("5", {"correct": False, **_call(0, 0, 500, 500)}, 0.0),
        ("", {"correct": None}, None),
    ],
    "region": [
        ("", {"box": "[0, 0, 500, 500]"}, {"reward": 0.0, "covered": 0.0, "area": 0.0}),
        ("4", {"box": [0, 0, 500, 500], **_call(0, 0, 500, 500)}, {"reward": 0.05, "covered": 1.0, "area": 0.25}),
        (
            "4",
            {"box": [500, 500, 1000, 1000], **_call(0, 0, 500, 500)},
            {"reward": -0.05, "covered": 0.0, "area": 0.25},
        ),
        ("4", {"correct": True, **_call(0, 0, 1000, 1000)}, {"reward": -0.1, "covered": 1.0, "area": 1.0}),
        (
            "4",
            {"correct": True, "tool_calls": [{"arguments": {"bbox_2d": [0, 0, 500, "500"], "image": "1"}}]},
            {"reward": 0.05, "covered": 1.0, "area": 0.25},
        ),
    ],
}

ROWS = {
    "outcome": [{"prompt": f"What is {i} + 7?", "answer": str(i + 7)} for i in range(11, 15)],
    "region": {
        "rows": [{"prompt": f"What is {i} + 7?", "answer": str(i + 7), "box": [0, 0, 500, 500]} for i in range(11, 15)],
        "correct": "math.accuracy",
    },
}
