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

    LaTeX commands, tags, and Latin and Greek letters in maths (`$...$`) and fenced code are not counted, unless the
    maths is a sentence or holds words in `\\text{}`; letters of other scripts are counted there too. Nothing to count
    gives 1. forbid_scripts: names as Unicode has them (CJK, CYRILLIC, ...); one letter of them gives 0. What is not
    seen: comments in fenced code, an empty thought (1), and what stands before the last thought.
    """
    return language_share(completion, language=language, forbid_scripts=forbid_scripts)


EXAMPLES = [
    ("<think>We compute the sum 然后 done</think><answer>5</answer>", {}, 5 / 7),
    ("<think>We compute the sum 然后 done</think>", {}, 0.0, {"forbid_scripts": ["CJK"]}),
    ("我们有 $x+y=\\alpha$ 所以 x 是 \\boxed{3}", {"language": "zh"}, 1.0),
    ("Well-known: it's fine", {}, 1.0),
    ("$我们先算$ then `x`", {}, 1 / 5),
    ("```\nprint(x)  # 先算\n``` done", {}, 1 / 3),
    ("所以 $\\text{we now compute the sum}$", {"language": "zh"}, 2 / 7),
    ("It was $5, 然后 $6", {}, 2 / 4),
    ("所以 $\\sin(xy) + \\text{mod } n$ 和 $\\alpha\\beta$", {"language": "zh"}, 1.0),
    ("It was $5 now.\n\nAnd 先 it is $6.", {}, 6 / 7),
    ("所以 w e t h i n k", {"language": "zh"}, 2 / 3),
    (
        "所以 \U0001d430\U0001d41e\U0001d42d",
        {"language": "zh"},
        2 / 3,
    ),
    ("所以 <we think that this is so>", {"language": "zh"}, 2 / 8),
    ('所以 <a href="x y">', {"language": "zh"}, 1.0),
    ("所以 $\\text{so we}$", {"language": "zh"}, 2 / 4),
    ("所以 a b c", {"language": "zh"}, 1.0),
    ("Это хорошо", {"language": "ru"}, 1.0),
    ("Это хорошо", {"language": "en"}, 0.0),
    ("$x^2$", {"language": "zh"}, 1.0),
    ("", {}, 1.0),
]

ROWS = {
    "rows": [{"prompt": f"What is {i} + 7?", "answer": str(i + 7)} for i in range(11, 15)],
    "correct": "math.accuracy",
}
