r"""How an answer was reached: its mode of thinking, its tool calls, and the redundant part of its thought.

Annotations have weight 0; group rewards and advantages read them by name.

rewards:
  - use: math.accuracy
  - use: efficiency.mode                     # for group_rewards format_diversity (ARM): which format was chosen
    weight: 0
    params: {markers: ["<ANSWER>", "<COT>", "<CODE>", "<LONG_COT>"]}
  - use: efficiency.mode_table               # instead of accuracy (Thinkless): right and short pays most
  - use: efficiency.tool_calls               # for group_rewards optimal_tool_calls (OTC)
    weight: 0
  - use: efficiency.inverse_calls            # a channel of its own (HDPO)
    weight: 0
  - use: efficiency.necessary_prefix         # for advantage decs: where the answer was first reached
    weight: 0
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify import efficiency


def mode(completion: str, *, markers: Sequence[str] = ("[Easy]", "[Hard]")) -> float:
    """The number of the marker that the completion starts with, from 0; -1 if it starts with none.

    Markers must be ordinary text: special tokens are not part of a completion's text.
    """
    return float(efficiency.first_mode(completion, markers))


def mode_table(
    completion: str,
    correct: bool | None,
    prefilled_think: bool = False,
    *,
    short: str = "<short>",
    think: str = "<think>",
    correct_short: float = 1.0,
    correct_think: float = 0.5,
    wrong_short: float = -1.0,
    wrong_think: float = -1.0,
    missing_mode: float = -1.0,
) -> float | None:
    """A reward by mode, which the first word chooses, and correctness; None if correctness is unknown.

    Thinkless (2505.13379), after its code. Should the model collapse to short answers, raise correct_think to 0.7-0.8.
    """
    chosen = 1 if prefilled_think else efficiency.first_mode(completion, (short, think))
    return efficiency.mode_reward(
        chosen,
        correct,
        correct_short=correct_short,
        correct_think=correct_think,
        wrong_short=wrong_short,
        wrong_think=wrong_think,
        missing_mode=missing_mode,
    )


def outcome(completion: str, correct: bool | None, *, right: float = 1.0, wrong: float = -1.0) -> float | None:
    """`right` or `wrong` by correctness; None if it is unknown. AdaCtrl's accuracy reward is 1 or -1."""
    return None if correct is None else (right if correct else wrong)


def tool_calls(
    completion: str, tool_calls: Sequence[Mapping[str, Any]] | None = None, *, opening: str = "<tool_call>"
) -> float:
    """How often a tool was called, failed calls too; counted in the text where no tool was offered."""
    return float(completion.count(opening) if tool_calls is None else len(tool_calls))


def inverse_calls(
    completion: str,
    correct: bool | None,
    tool_calls: Sequence[Mapping[str, Any]] | None = None,
    *,
    opening: str = "<tool_call>",
) -> float | None:
    """1 / (tool calls + 1) if the answer is right, else 0; None if that is unknown.

    HDPO (2604.08545): the reward of its efficiency channel, compared among right answers only.
    """
    calls = completion.count(opening) if tool_calls is None else len(tool_calls)
    return efficiency.inverse_calls(correct, calls)


def necessary_prefix(
    completion: str,
    answer: Any,
    correct: bool | None,
    token_count: int,
    token_ends: Sequence[int] = (),
    *,
    words: Sequence[str] = efficiency.TURNS,
    think_end: str = "</think>",
) -> dict[str, float] | None:
    """Share of the thought's chunks up to the first that mentions the answer; None for wrong answers.

    DECS (2509.25827) asks a fine-tuned judge; this matches the reference answer's text instead. Parts `start` and `end`
    are the token positions of the redundant part, start -1 if there is none. Without token_ends positions are taken in
    proportion to the text.
    """
    if not correct or answer is None:
        return None
    start, end, share = efficiency.necessary_prefix(completion, str(answer), words=words, think_end=think_end)
    ends = token_ends or [len(completion) * (i + 1) // max(token_count, 1) for i in range(token_count)]
    return {
        "reward": share,
        "start": float(efficiency.token_position(start, ends)),
        "end": float(efficiency.token_position(end, ends)),
    }


def segment_importance(
    completion: str, correct: bool | None, *, scorer: str = "", weight: float = 0.2, max_score: float = 5
) -> float | None:
    """1 - weight * (share of filler) for a right answer, 0 for a wrong one.

    SCMA (2601.21919), reconstructed: the paper does not state the form nor the weight. `scorer` is `file.py:function`
    of yours, completion -> [(segment, importance 1..max_score)]; segments that are not the completion, put together,
    count as one essential segment. Lengths are in characters. Training the segmenting and scoring roles is not part.
    """
    if correct is None:
        return None
    lengths, scores = efficiency.scored_segments(completion, scorer)
    return efficiency.segment_reward(float(correct), lengths, scores, weight=weight, max_score=max_score)


_THOUGHT = "2 and 2\nmake 4.\nWait, is it 4?\nyes\n</think>4"

EXAMPLES = {
    "mode": [
        ("[Hard] hm", {}, 1.0),
        (" [Easy]", {}, 0.0),
        ("", {}, -1.0),
        ("<AB>", {}, 1.0, {"markers": ["<A>", "<AB>"]}),
    ],
    "mode_table": [
        ("<short>4", {"correct": True}, 1.0),
        ("<think>hm</think>4", {"correct": True}, 0.5),
        ("<think>hm</think>5", {"correct": False}, -1.0),
        ("", {"correct": False}, -1.0),
        ("hm</think>4", {"correct": True, "prefilled_think": True}, 0.5),
        ("<short>4", {"correct": None}, None),
    ],
    "outcome": [("4", {"correct": True}, 1.0), ("", {"correct": False}, -1.0), ("4", {"correct": None}, None)],
    "tool_calls": [("<tool_call>a</tool_call><tool_call>", {}, 2.0), ("", {"tool_calls": [{}]}, 1.0), ("", {}, 0.0)],
    "inverse_calls": [
        ("<tool_call>a</tool_call> 4", {"correct": True}, 0.5),
        ("", {"correct": False}, 0.0),
        ("4", {"correct": None}, None),
    ],
    "necessary_prefix": [
        (_THOUGHT, {"answer": 4, "correct": True, "token_count": 42}, {"reward": 0.5, "start": 16.0, "end": 34.0}),
        ("", {"answer": 4, "correct": True, "token_count": 0}, {"reward": 1.0, "start": -1.0, "end": -1.0}),
        (_THOUGHT, {"answer": 5, "correct": False, "token_count": 42}, None),
    ],
    "segment_importance": [
        ("4", {"correct": True}, 1.0),
        ("", {"correct": False}, 0.0),
        ("4", {"correct": None}, None),
    ],
}

_ROWS = [{"prompt": f"What is {i} + 7?", "answer": str(i + 7)} for i in range(11, 15)]
_BESIDE = {"rows": _ROWS, "correct": "math.accuracy"}

ROWS = {
    "mode": _BESIDE,
    "mode_table": _ROWS,
    "outcome": _ROWS,
    "tool_calls": _BESIDE,
    "inverse_calls": _ROWS,
    "necessary_prefix": _ROWS,
    "segment_importance": _ROWS,
}
