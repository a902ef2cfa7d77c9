r"""Do thought, answer and second look agree?

rewards:
  - use: reasoning.taco_tac       # instead of accuracy: a right answer that its thought contradicts earns less
  - use: reasoning.dianjin        # form and accuracy in one, 0, 1 or 2
  - use: reasoning.srpo_reflection
  - use: reasoning.critique_rl    # for critiques of given answers; column `original_correct`
  - use: reasoning.acre           # a choice made twice; with `rollout.shape: shuffled_options` alone
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.verify import math
from posttrain.verify import reasoning as pure
from posttrain.verify.extract import after_think, answer_tag

_SECOND = re.compile(r'\n<second permutation="([\d ]*)">(.*)</second>\Z', re.DOTALL)


def dianjin(completion: str, answer: Any, prefilled_think: bool = False) -> dict[str, float | None] | None:
    """1 for one thought and one answer block, neither blank, and 1 for a right answer: DianJin-R1 (2504.15716).

    Answers are compared as in math.accuracy; None without a gold. Logged parts: format, accuracy.
    """
    found = pure.format_and_accuracy("<think>" + completion if prefilled_think else completion, answer)
    return None if found["reward"] is None else found


def taco_tac(
    completion: str, answer: Any, *, values: Sequence[float] = (1.0, 0.5, 0.0)
) -> dict[str, float | None] | None:
    """A right answer earns values[0], one that its thought contradicts values[1], a wrong one values[2]: TACO.

    2505.20777, from its abstract: how a thought's conclusion is found (its last box, else after "answer is") and the
    values are guesses. None without a gold. Logged part: consistent (none: nothing to compare).
    """
    found = pure.think_answer_consistency(completion, answer, values=values)
    return None if found["reward"] is None else {k: found[k] for k in ("reward", "consistent")}


def srpo_reflection(
    completion: str,
    answer: Any,
    token_count: int = 0,
    token_ends: Sequence[int] = (),
    *,
    keep: float = 0.75,
    fix: float = 1.0,
    mislead: float = 0.25,
    still_wrong: float = 0.0,
    single: float = 0.5,
    format_weight: float = 0.5,
    length_weight: float = 0.1,
    compare: Literal["maths", "words"] = "maths",
) -> dict[str, float | None] | None:
    """Form, accuracy before and after a reflection, and twice the length of the first answer: SRPO (2506.01713).

    The text is thought, answer, reflection, thought, answer. With fix above keep a policy can earn by being wrong
    first: watch the first answers, or set fix to 0.75. Lengths are tokens, or words where tokens have no places.
    compare: maths is math.accuracy, with exact match for words; words is the exact match of all, which knows no minus.
    An answer block inside a thought is none.
    """
    first_part = pure.first_part(completion)
    if token_ends:
        total, first = float(token_count or len(token_ends)), float(bisect_right(token_ends, len(first_part)))
    else:
        total, first = float(len(completion.split())), float(len(first_part.split()))
    found = pure.reflection(
        completion,
        answer,
        total,
        first,
        keep=keep,
        fix=fix,
        mislead=mislead,
        still_wrong=still_wrong,
        single=single,
        format_weight=format_weight,
        length_weight=length_weight,
        **({"same": pure.same_maths} if compare == "maths" else {}),
    )
    return None if found["reward"] is None else found


def critique_rl(completion: str, original_correct: float | bool | str | None) -> float | None:
    """1 if the critique's "Correctness of the final answer: Correct|Wrong" is true, else -1: Critique-RL, stage 1.

    Column `original_correct`: whether the answer that the prompt shows is right (1, true, correct, or 0, false, wrong;
    null and NaN: no score; anything else is an error). Stage 2 needs the answer that an actor
    gives after the critique: `posttrain.verify.reasoning.critique`.
    """
    truth = pure.truth_of(original_correct)
    return None if truth is None else float(pure.critique(completion, truth, stage=1)["reward"])


def acre(
    completion: str, answer: str | None, truncated: bool = False, *, values: Sequence[float] = (1.0, 0.5, 0.0, 0.0)
) -> dict[str, float | None] | None:
    """values for both choices right, only the first, only the second, neither: ACRE (2510.10104).

    For `rollout.shape: shuffled_options`, which asks the second time and writes that answer behind the completion;
    without it the policy could write one itself. A completion that was cut is wrong twice. The values are guesses. None
    without a gold letter. Logged part: consistent.
    """
    if pure.letter_of(answer) is None:
        return None
    found = _SECOND.search(completion)
    body, written, second = (completion, "", None) if found is None else (completion[: found.start()], *found.groups())
    first = None if truncated else answer_tag(after_think(body))
    permutation = [int(number) for number in written.split()]
    again = None if truncated or not second else answer_tag(second) or second
    judged = pure.shuffled_consistency(first, again, permutation, str(answer), values=values)
    return {"reward": float(judged["reward"]), "consistent": float(judged["consistent"])}


def setup() -> None:
    """Called once in each worker, outside the time limit of a call."""
    math.prepare()


_TWICE = "<think>x</think>\n<answer>%s</answer>\n<reflection>check</reflection>\n<think>y</think>\n<answer>%s</answer>"
_CHOSEN = '<think>x</think><answer>%s</answer>\n<second permutation="%s">%s</second>'
_LONGER = 0.1 * 0.36787944117144233  # 5 words where twice the first 2 would be best: exp(-((5 - 4) / 1)^2)

EXAMPLES = {
    "dianjin": [
        ("<think>because</think>\n<answer>\\boxed{B}</answer>", {"answer": "B"}, 2.0),
        ("because</think>\n<answer>B</answer>", {"answer": "B", "prefilled_think": True}, 2.0),
        (
            "note <think>because</think>\n<answer>B</answer>",
            {"answer": "B"},
            {"reward": 1.0, "format": 0.0, "accuracy": 1.0},
        ),
        ("<think>because</think>\n<answer>C</answer>", {"answer": "B"}, 1.0),
        ("", {"answer": "B"}, 0.0),
        ("", {"answer": None}, None),
    ],
    "taco_tac": [
        ("<think>2+2, so the answer is 4.</think><answer>4</answer>", {"answer": "4"}, 1.0),
        ("<think>so the answer is 5.</think><answer>4</answer>", {"answer": "4"}, {"reward": 0.5, "consistent": 0.0}),
        ("<think>hm</think><answer>4</answer>", {"answer": "4"}, {"reward": 1.0, "consistent": None}),
        ("<think>so the answer is 5.</think><answer>5</answer>", {"answer": "4"}, 0.0),
        (r"<think>the answer is 5 \boxed{}</think><answer>4</answer>", {"answer": "4"}, 0.5),
        ("<think>the answer is 5. The answer is ...</think><answer>4</answer>", {"answer": "4"}, 0.5),
        ("<answer>4</answer>", {"answer": {"value": "4"}}, None),
        ("", {"answer": "4"}, 0.0),
        ("<answer>4</answer>", {"answer": ""}, None),
    ],
    "srpo_reflection": [
        (_TWICE % (3, 4), {"answer": "4"}, {"reward": 1.5 + _LONGER, "format": 0.5, "accuracy": 1.0}),
        (_TWICE % (4, 4), {"answer": "4"}, {"reward": 1.25 + _LONGER, "accuracy": 0.75}),
        (_TWICE % (4, 3), {"answer": "4"}, {"reward": 0.75 + _LONGER, "accuracy": 0.25}),
        ("<think>x</think><answer>4</answer>", {"answer": "4"}, {"reward": 0.5, "length": 0.0}),
        ("<think><answer>3</answer></think><answer>4</answer>", {"answer": "4"}, 0.5),
        (_TWICE % ("x", "x"), {"answer": "-x"}, 0.5 + _LONGER),
        (_TWICE % ("-x", "-x"), {"answer": "-x"}, 1.25 + _LONGER),
        (_TWICE % ("y=x", "oslo!"), {"answer": "Oslo"}, 1.5 + _LONGER),
        ("", {"answer": "4"}, 0.0),
        ("", {"answer": None}, None),
    ],
    "acre": [
        (_CHOSEN % ("B", "2 0 1", "C"), {"answer": "B"}, {"reward": 1.0, "consistent": 1.0}),
        (_CHOSEN % ("B", "2 0 1", "B"), {"answer": "B"}, {"reward": 0.5, "consistent": 0.0}),
        (_CHOSEN % ("A", "1 0", "(a)"), {"answer": "B"}, {"reward": 0.0, "consistent": 0.0}),
        (_CHOSEN % ("A", "1 0", "B"), {"answer": "B"}, {"reward": 0.0, "consistent": 1.0}),
        (_CHOSEN % ("B", "1 0", "A"), {"answer": "B", "truncated": True}, 0.0),
        (_CHOSEN % ("B", "1 0", ""), {"answer": "B"}, 0.5),
        ("<think>x</think><answer>B</answer>", {"answer": "B"}, 0.5),
        ("", {"answer": "B"}, 0.0),
        ("", {"answer": None}, None),
    ],
    "critique_rl": [
        ("Step 2 is off.\nCorrectness of the final answer: Wrong", {"original_correct": 0}, 1.0),
        ("**Correctness of the final answer:** Correct", {"original_correct": 0}, -1.0),
        ("Looks good.", {"original_correct": 1}, -1.0),
        ("Correctness of the final answer: Wrong", {"original_correct": "false"}, 1.0),
        ("Correctness of the final answer: Wrong", {"original_correct": "0"}, 1.0),
        ("Correctness of the final answer: Wrong", {"original_correct": float("nan")}, None),
        ("", {"original_correct": 1}, -1.0),
        ("", {"original_correct": None}, None),
    ],
}


def _looked_at_twice(row: Mapping[str, Any]) -> str | None:
    return None if row.get("answer") is None else _TWICE % (row["answer"], row["answer"])


def _critique(row: Mapping[str, Any]) -> str | None:
    return None if row.get("answer") is None else f"Step 2.\nCorrectness of the final answer: {row['answer']}"


def _chosen_twice(row: Mapping[str, Any]) -> str | None:
    return None if row.get("answer") is None else _CHOSEN % (row["answer"], "0 1 2 3", row["answer"])


GOLD = {"srpo_reflection": _looked_at_twice, "critique_rl": _critique, "acre": _chosen_twice}

_ROWS = [{"prompt": f"What is {i} + 7?", "answer": str(i + 7)} for i in range(11, 15)]
ROWS = {
    "dianjin": _ROWS,
    "acre": [{"prompt": "Which one? A. 1 B. 2 C. 3 D. 4", "answer": letter} for letter in "ABCD"],
    "taco_tac": _ROWS,
    "srpo_reflection": _ROWS,
    "critique_rl": [{"original_correct": 1, "answer": "Correct"}, {"original_correct": 0, "answer": "Wrong"}],
}
