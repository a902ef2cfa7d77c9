r"""Tool calls with partial credit: the name, the argument names and each argument value earn something.

rewards:
  - use: tools.toolrl             # `answer`: {"tools": [{"name", "parameters"}], "response": bool}, or its text
    params: {schedule: smooth}

"ToolRL: Reward is All Tool Learning Needs", 2504.13958, after its code. Logged parts: format, correctness, length.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from posttrain.verify.extract import outside_thoughts
from posttrain.verify.structured import from_json
from posttrain.verify.structured import same_json as same

_GOLD_FORM = 'an object {"tools": [...], "response": bool}'
Schedule = Literal["none", "two_stage", "smooth"]

# (has calls, has a reply) -> pattern, and the tags that must each occur once
FORMS = {
    (True, False): (r"^<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>$", ("tool_call",)),
    (False, True): (r"^<think>.*?</think>\n<response>.*?</response>$", ("response",)),
    (True, True): (
        r"^<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>\n<response>.*?</response>$",
        ("tool_call", "response"),
    ),
    (False, False): (r"^<think>.*?</think>$", ()),
}


def toolrl(
    completion: str,
    answer: Mapping[str, Any] | str | None,
    step: int = 0,
    *,
    granularity: Literal["fine", "intermediate", "coarse"] = "fine",
    match: Literal["jaccard", "exact"] = "jaccard",
    schedule: Schedule = "none",
    smooth_steps: int = 150,
    stage_step: int = 30,
    length_target: float = 0,
) -> dict[str, float] | None:
    """format + correctness (+ length) in [-3, 4]; None if the row has no gold.

    granularity: fine scores arguments one by one, intermediate a call as a whole, coarse all calls as a whole.
    match: how sets of names are compared, by their overlap (jaccard) or all or nothing (exact). schedule: how the
    limits of the parts move over the steps, see `toolrl_scale`. length_target: words of thought for full length credit
    of 1 (the code has 512; the paper found that it hurts), 0 = off.
    """
    if answer is None:
        return None
    gold = from_json(answer, Mapping, _GOLD_FORM)
    tools, reply = list(gold.get("tools") or []), bool(gold.get("response"))
    limits = toolrl_scale(step, schedule=schedule, smooth_steps=smooth_steps, stage_step=stage_step)
    low, high = limits["correct_min"], limits["correct_max"]
    parts = {
        "format": limits["format_max"] if well_formed(completion, bool(tools), reply) else limits["format_min"],
        "correctness": low + (high - low) * correctness(completion, tools, granularity, match) if tools else 0.0,
        "length": thought_length(completion, length_target) if length_target else 0.0,
    }
    return {"reward": sum(parts.values()), **parts}


def toolrl_scale(
    step: float = 0,
    *,
    schedule: Schedule = "none",
    smooth_steps: int = 150,
    stage_step: int = 30,
    format_max: float = 1.0,
    format_min: float = 0.0,
    correct_max: float = 3.0,
    correct_min: float = -3.0,
) -> dict[str, float]:
    """The limits of the format and the correctness part at a training step.

    two_stage: correctness limits are a third before stage_step, format limits a half from then on. smooth: both start
    at -2..2; format narrows to -1..1 and correctness widens to -3..3 over smooth_steps.
    """
    if schedule == "two_stage":
        if step < stage_step:
            correct_max, correct_min = correct_max / 3, correct_min / 3
        else:
            format_max, format_min = format_max / 2, format_min / 2
    elif schedule == "smooth":
        f = step / smooth_steps
        format_max = max(1.0, 2 - (2 - format_max) * f)
        format_min = min(-1.0, -2 + (2 + format_min) * f)
        correct_max = min(3.0, 2 + (correct_max - 2) * f)
        correct_min = max(-3.0, -2 + (correct_min + 2) * f)
    elif schedule != "none":
        raise ValueError(f"unknown schedule {schedule!r}")
    return {
        "format_max": format_max,
        "format_min": format_min,
        "correct_max": correct_max,
        "correct_min": correct_min,
    }


def well_formed(completion: str, calls: bool, reply: bool) -> bool:
    """Thought, then a tool_call block if the gold has calls, then a response block if it wants a reply."""
    pattern, tags = FORMS[calls, reply]
    once = all(completion.count(tag) == 1 for t in tags for tag in (f"<{t}>", f"</{t}>"))
    return once and re.search(pattern, completion, re.DOTALL) is not None


def correctness(completion: str, gold: list[Any], granularity: str, match: str) -> float:
    """Share of the credit earned by the predicted calls, in [0, 1]; calls that cannot be read earn none."""
    predicted = read_calls(completion)
    if predicted is None:
        return 0.0
    if same(predicted, gold):
        return 1.0
    if granularity == "coarse":
        return 0.0
    overlap = exact if match == "exact" else jaccard
    score = overlap([g["name"] for g in gold], [p["name"] for p in predicted])
    best_possible = 1.0
    unused = list(predicted)
    for call in gold:
        best_possible += 1 if granularity == "intermediate" else 1 + len(call["parameters"])
        found = [
            (credit(call["parameters"], p["parameters"], granularity, overlap), p)
            for p in unused
            if p["name"] == call["name"]
        ]
        earned, taken = max(found, key=lambda pair: pair[0], default=(0.0, None))
        if earned > 0:
            score += earned
            unused = [p for p in unused if p is not taken]
    return score / best_possible


def credit(
    gold: Mapping[str, Any], predicted: Mapping[str, Any], granularity: str, overlap: Callable[..., float]
) -> float:
    """What one predicted call earns against a gold call of the same name."""
    if granularity == "intermediate":
        return float(same(predicted, gold))
    values = sum(key in predicted and same(predicted[key], value) for key, value in gold.items())
    return overlap(list(gold), list(predicted)) + values


def read_calls(completion: str) -> list[dict[str, Any]] | None:
    """The calls in the first tool_call block, a JSON object a line; None without a block or if a line is no call.

    A block in a closed thought is no call.
    """
    text = outside_thoughts(completion)
    if "<tool_call>" not in text or "</tool_call>" not in text:
        return None
    block = text.partition("<tool_call>")[2].partition("</tool_call>")[0]
    calls = []
    for line in block.split("\n"):
        if not line.strip():
            continue
        try:
            call = json.loads(line)
        except (ValueError, RecursionError):  # what the model wrote is no JSON, or too deep to read
            return None
        if not (
            isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("parameters"), dict)
        ):
            return None
        calls.append(call)
    return calls


def jaccard(a: list[str], b: list[str]) -> float:
    """Overlap of two multisets: common / (all - common); two empty ones are equal."""
    common = sum((Counter(a) & Counter(b)).values())
    return common / (len(a) + len(b) - common) if a or b else 1.0


def exact(a: list[str], b: list[str]) -> float:
    """1 if the multisets are equal, else 0."""
    return float(Counter(a) == Counter(b))


def thought_length(completion: str, target: float) -> float:
    """min(1, words of the thought / target), rounded to two places as the code does; 0 without a thought."""
    if "<think>" not in completion or "</think>" not in completion:
        return 0.0
    thought = completion.rpartition("<think>")[2].partition("</think>")[0]
    return min(1.0, round(len(thought.split()) / target, 2))


def GOLD(row: Mapping[str, Any]) -> str | None:
    """A completion that earns full marks on this row."""
    answer = row.get("answer")
    if answer is None:
        return None
    gold = from_json(answer, Mapping, _GOLD_FORM)
    blocks = ["<think>so</think>"]
    if gold.get("tools"):
        blocks += ["<tool_call>", *(json.dumps(call) for call in gold["tools"]), "</tool_call>"]
    if gold.get("response"):
        blocks.append("<response>done</response>")
    return "\n".join(blocks)


_WEATHER = {"name": "weather", "parameters": {"city": "Paris", "unit": "C"}}
_GOLD = {"tools": [_WEATHER], "response": False}
_CALL = (
    "<think>need data</think>\n<tool_call>\n"
    '{"name": "weather", "parameters": {"city": "%s", "unit": "C"}}'
    "\n</tool_call>"
)

EXAMPLES = {
    "toolrl": [
        (_CALL % "Paris", {"answer": _GOLD}, {"reward": 4.0, "format": 1.0, "correctness": 3.0, "length": 0.0}),
        (_CALL % "Paris", {"answer": json.dumps(_GOLD)}, 4.0),
        (
            _CALL % "Rome",
            {"answer": _GOLD},
            2.5,
        ),  # 1 name + 1 keys + 1 of 2 values of 4: -3 + 6 * 3/4, + 1 for the form
        (_CALL % "Rome", {"answer": _GOLD}, -2.0, {"granularity": "coarse"}),
        (_CALL % "Rome", {"answer": _GOLD}, 1.0, {"granularity": "intermediate"}),  # 1 of 2
        ("<think>a</think>\n<response>Hi</response>", {"answer": {"tools": [], "response": True}}, 1.0),
        ("", {"answer": _GOLD}, -3.0),
        ((_CALL % "Paris")[:-20], {"answer": _GOLD}, -3.0),
        ((_CALL % "Paris").replace("</think>", "") + "</think>", {"answer": _GOLD}, {"reward": -3.0, "format": 0.0}),
        (_CALL % "Paris", {"answer": None}, None),
    ],
}

_TIME = {"tools": [{"name": "time", "parameters": {"zone": "CET"}}], "response": True}

ROWS = {
    "toolrl": [
        {"prompt": "What is the weather in Paris?", "answer": _GOLD},
        {"prompt": "And the time?", "answer": _TIME},
    ]
}
