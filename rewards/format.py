r"""Is the completion built as thinking and answer? 1 or 0 (`tag_count`: quarters).

rewards:
  - use: format.structure
    weight: 0.1                   # small beside accuracy: format alone must never pay as much as a right answer
    params: {mode: r1}
"""

import re
from typing import Literal

from posttrain.verify.extract import after_think, last_boxed

R1 = re.compile(r"<think>(.*)</think>\s*<answer>(.*)</answer>", re.DOTALL)
OPEN_R1 = re.compile(r"^<think>\n(?>.*?\n</think>\n<answer>\n).*?\n</answer>$", re.DOTALL | re.MULTILINE)
THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
_BLANK = re.compile(r"(?:[\s.,;:!?~$]|\\[ ,;:!]|\\q?quad\b|\\(?:text|mbox|phantom)\{\s*\})*")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TAG_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")


def structure(
    completion: str,
    prefilled_think: bool = False,
    *,
    mode: Literal["r1", "open_r1", "think", "tag_count", "boxed"] = "r1",
    allow_empty_think: bool = True,
) -> float:
    r"""1 if the completion has the form of `mode`, else 0.

    r1: `<think>T</think> <answer>A</answer>` and nothing else, each tag once, A not blank (T only with
    allow_empty_think false). open_r1: the same with newlines around T and A, as open-r1 matches it (further lines may
    follow). think: starts with a thought and opens no second one (TRL). tag_count: a quarter for each of the four tags
    that stands exactly once on its line (open-r1). In both, blank blocks count, as they do there: pair them with a
    reward that knows the answer. boxed: a box after the thought holds more than blanks and full stops.
    prefilled_think: the prompt already ends in `<think>`; posttrain fills it in.
    """
    text = "<think>" + completion if prefilled_think else completion
    if mode == "r1":
        return float(_r1(text.strip(), allow_empty_think))
    if mode == "open_r1":
        return float(OPEN_R1.match(text) is not None)
    if mode == "think":
        return float(THINK.match(text) is not None)
    if mode == "tag_count":
        return 0.25 * sum(text.count(tag) == 1 for tag in TAG_LINES)
    if mode == "boxed":
        return float(_BLANK.fullmatch(last_boxed(after_think(text)) or "") is None)
    raise ValueError(f"unknown mode {mode!r}")


def _r1(text: str, allow_empty_think: bool) -> bool:
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    match = R1.fullmatch(text)
    return match is not None and bool(match[2].strip()) and (allow_empty_think or bool(match[1].strip()))


EXAMPLES = [
    ("<think>a b</think>\n<answer>7</answer>", {}, 1.0),
    ("  <think></think><answer>7</answer>\n", {}, 1.0),
    ("<think></think><answer>7</answer>", {}, 0.0, {"allow_empty_think": False}),
    ("<think>a</think><answer> </answer>", {}, 0.0),
    ("<think>a</think><answer>7</answer><answer>8</answer>", {}, 0.0),
    ("<think>a</think><answer>7</answer> so there", {}, 0.0),
    ("<think>a</think><answer>7", {}, 0.0),
    ("", {}, 0.0),
    ("a</think><answer>7</answer>", {"prefilled_think": True}, 1.0),
    ("<think>a</think>\n<answer>7</answer>", {}, 0.0, {"mode": "open_r1"}),
    ("<think>\na\n</think>\n<answer>\n7\n</answer>", {}, 1.0, {"mode": "open_r1"}),
    ("<think>a</think> 7", {}, 1.0, {"mode": "think"}),
    ("<think>a<think>b</think> 7", {}, 0.0, {"mode": "think"}),
    ("<think>\nx\n</think>\n<answer>\n3", {}, 0.75, {"mode": "tag_count"}),
    (r"<think>a</think> \boxed{7}", {}, 1.0, {"mode": "boxed"}),
    (r"<think>a</think> \boxed{\ }", {}, 0.0, {"mode": "boxed"}),
    (r"<think>a</think> \boxed{.\,}", {}, 0.0, {"mode": "boxed"}),
    (r"<think>a</think> \boxed{\emptyset}", {}, 1.0, {"mode": "boxed"}),
    (r"<think>\boxed{7}</think> seven", {}, 0.0, {"mode": "boxed"}),
]

ROWS = {
    "rows": [{"prompt": f"What is {i} + 7?", "answer": str(i + 7)} for i in range(11, 15)],
    "correct": "math.accuracy",
}
