r"""Is the completion written as its prompt's template asks? For `prompt_variants: prior_instruction` and `templates`.

rewards:
  - {use: math.accuracy, weight: 0.5}
  - {use: templates.prior, weight: 0.5, params: {style: planning}}

rewards:
  - {use: math.accuracy}
  - {use: templates.augmented}    # reads which template the prompt was written with
"""

import re
from typing import Literal

SECTIONS = {
    "reasoning": "think",
    "planning": "plan",
    "code": "code",
    "knowledge": "knowledge",
    "perception": "description",
    "null_example": "examples",
}
RULES = {
    "free": (),
    "open-r1": ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"),
    "deepseek-r1": ("<think>", "</think>", "<answer>", "</answer>"),
    "reflective": ("<solution>\n", "\n</solution>\n", "\n<check>\nLet's verify step by step", "\n</check>"),
    "final-answer-line": ("The final answer is:",),
}


def prior(
    completion: str,
    *,
    style: Literal["reasoning", "planning", "code", "knowledge", "perception", "null_example"] = "reasoning",
) -> float:
    """1 if the completion is the style's tagged section and then `<answer>`, each tag once and nothing outside, else 0.

    That nothing may stand outside the tags is our reading. Empty sections pass.
    """
    tag = SECTIONS[style]
    tags = (f"<{tag}>", f"</{tag}>", "<answer>", "</answer>")
    if any(completion.count(one) != 1 for one in tags):
        return 0.0
    return float(re.fullmatch(rf"\s*<{tag}>.*</{tag}>\s*<answer>.*</answer>\s*", completion, re.DOTALL) is not None)


def augmented(completion: str, template: str = "free") -> float:
    """The share of the template's required strings that occur exactly once; 1 for a free template.

    template: the rule's name, which `prompt_variants: templates` puts there; with `-teacher` behind it the first string
    stands in the prompt and is not counted. The literal strings are the authors': one newline between two tags
    satisfies one of them.
    """
    rule = template.removesuffix("-teacher")
    required = RULES.get(rule, ())
    required = required[1:] if rule != template else required
    return sum(completion.count(text) == 1 for text in required) / len(required) if required else 1.0


EXAMPLES = {
    "prior": [
        ("<think>a</think>\n<answer>1</answer>", {}, 1.0),
        ("<think>a</think><answer>1</answer>", {}, 0.0, {"style": "planning"}),
        (" <examples>e</examples> <answer>2</answer>\n", {}, 1.0, {"style": "null_example"}),
        ("<description>two cats</description>\n<answer>2</answer>", {}, 1.0, {"style": "perception"}),
        ("so <think>a</think><answer>1</answer>", {}, 0.0),
        ("", {}, 0.0),
    ],
    "augmented": [
        ("anything", {}, 1.0),
        ("", {"template": "deepseek-r1"}, 0.0),
        ("<think>a</think> b <answer>1", {"template": "deepseek-r1"}, 0.75),
        ("a</think><answer>1</answer>", {"template": "deepseek-r1-teacher"}, 1.0),
        ("", {"template": "deepseek-r1"}, 0.0),
        ("The final answer is: 3", {"template": "final-answer-line"}, 1.0),
        ("The final answer is: 3. The final answer is: 4", {"template": "final-answer-line"}, 0.0),
    ],
}

_ROWS = [
    {"prompt": f"What is {i} + 7?", "answer": str(i + 7), "template": template}
    for i, template in enumerate(("free", "deepseek-r1", "reflective", "final-answer-line"), 11)
]

ROWS = {
    "prior": {"rows": _ROWS, "correct": "math.accuracy"},
    "augmented": {"rows": _ROWS, "correct": "math.accuracy"},
}
