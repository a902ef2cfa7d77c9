r"""Is the final answer right? 1 or 0, whatever its notation: 1/2 = 0.5 = \frac{1}{2}.

rewards:
  - use: math.accuracy                            # reads the columns `answer`
    params: {extract: [boxed, answer_tag]}        # where the answer may stand; the first that finds something decides
"""

from collections.abc import Sequence

from posttrain.verify.extract import THINK_END, Extractor
from posttrain.verify.math import grade, prepare


def accuracy(
    completion: str,
    answer: str,
    *,
    extract: Sequence[Extractor] = ("boxed",),
    require_think: bool = False,
    think_delimiter: str = THINK_END,
    decimals: int = 6,
) -> float | None:
    """1 if the answer equals the gold, else 0; None if the gold is empty or cannot be parsed.

    extract: boxed, answer_tag, hash, anchor, last_number. The default is strict: fewer ways to be right by accident.
    require_think: a completion without `think_delimiter` scores 0. decimals: rounding when a side is a decimal.
    docs/verifier.md says what equals what.
    """
    graded = grade(
        completion,
        answer,
        extract=extract,
        require_think=require_think,
        think_delimiter=think_delimiter,
        decimals=decimals,
    )
    return graded["reward"]


def setup() -> None:
    """Called once in each worker, outside the time limit of a call."""
    prepare()


EXAMPLES = [
    (r"Half of it, so \boxed{\frac{1}{2}}.", {"answer": "0.5"}, 1.0),
    (r"First \boxed{4}. Wait: \boxed{5}.", {"answer": "5"}, 1.0),
    (r"So \boxed{(2, 1)}", {"answer": "(1, 2)"}, 0.0),
    (r"<think>\boxed{7}</think> I do not know.", {"answer": "7"}, 0.0),
    (r"\boxed{72}", {"answer": "48 + 24 = 72\n#### 72"}, 1.0),
    (r"\boxed{71}", {"answer": "72"}, 0.0),
    ("", {"answer": "72"}, 0.0),
    (r"so the answer is \boxed{7", {"answer": "72"}, 0.0),
    (r"\boxed{72}", {"answer": ""}, None),
    (r"\boxed{72}", {"answer": None}, None),
    ("<think>8+7=15</think><answer>825</answer>", {"answer": "825"}, 1.0, {"extract": ["answer_tag"]}),
    ("**The answer is 12.**", {"answer": "12"}, 1.0, {"extract": ["boxed", "anchor"]}),
    ("### Final Answer: 12 eggs.", {"answer": "12"}, 1.0, {"extract": ["anchor"]}),
    (r"It is \boxed{1} or \boxed{-2}.", {"answer": r"$\boxed{1}$ and $\boxed{-2}$"}, 1.0),
    (r"\boxed{(A) B}", {"answer": "B"}, 0.0),
    (r"\boxed{72}", {"answer": "72"}, 0.0, {"require_think": True}),
]

ROWS = [
    {"prompt": "What is 8 + 64?", "answer": "72"},
    {"prompt": "What is 3 - 8?", "answer": "-5"},
    {"prompt": "Half of what is 1?", "answer": r"\frac{1}{2}"},
    {"prompt": "Which point is it?", "answer": "(1, 2)"},
]
