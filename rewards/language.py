r"""Is the thought written in the asked language? The share of its words in the right script.

rewards:
  - use: language.language_consistency
    weight: 0.1                   # R1 reports a slight cost in accuracy
    params: {language: zh}        # or a column `language` in the data

Languages in Latin script are not told apart.
"""

from collections.abc import Sequence

from posttrain.verify.language import language_share


def language_consistency(completion: str, language: str = "en", *, forbid_scripts: Sequence[str] = ()) -> float:
    """Share of the words and characters of the last thought (of all, without one) in the language's scripts.

    Maths, code, LaTeX commands and tags are not counted; nothing to count gives 1. forbid_scripts: names as Unicode has
    them (CJK, CYRILLIC, ...); one letter of them gives 0.
    """
    return language_share(completion, language=language, forbid_scripts=forbid_scripts)


EXAMPLES = [
    ("<think>We compute the sum 然后 done</think><answer>5</answer>", {}, 5 / 7),
    ("<think>We compute the sum 然后 done</think>", {}, 0.0, {"forbid_scripts": ["CJK"]}),
    ("我们有 $x+y=\\alpha$ 所以 x 是 \\boxed{3}", {"language": "zh"}, 1.0),
    ("Well-known: it's fine", {}, 1.0),
    ("Это хорошо", {"language": "ru"}, 1.0),
    ("Это хорошо", {"language": "en"}, 0.0),
    ("$x^2$", {"language": "zh"}, 1.0),
    ("", {}, 1.0),
]

ROWS = {
    "rows": [{"prompt": f"What is {i} + 7?", "answer": str(i + 7)} for i in range(11, 15)],
    "correct": "math.accuracy",
}
