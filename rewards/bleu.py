r"""How close is the answer to a reference? Smoothed BLEU, for open tasks without a reward model.

rewards:
  - use: bleu.bleuberi            # `answer`: a reference, or a list of them

"BLEUBERI", 2505.11080, after its code. A short answer that matches nothing still earns something: watch the lengths.
"""

from collections.abc import Sequence

from posttrain.verify.bleu import reference_bleu


def bleuberi(completion: str, answer: Sequence[str] | str | None) -> float | None:
    """BLEU in [0, 1] of the text in the first answer tag (all of it without the tag); 0 if blank, None without gold."""
    return reference_bleu(completion, answer)


EXAMPLES = [
    ("The cat sat on the mat.", {"answer": "The cat sat on the mat."}, 1.0),
    ("<answer>The cat sat on the mat.</answer> Done.", {"answer": ["The cat sat on the mat."]}, 1.0),
    ("the cat sat", {"answer": ["the cat sat on the mat"]}, 0.36787944117144233),  # all right, half as long: exp(-1)
    ("one two three four five", {"answer": "six seven eight nine ten"}, 0.2295748846661433),
    ("", {"answer": "The cat sat on the mat."}, 0.0),
    ("anything", {"answer": [" "]}, None),
]

ROWS = [
    {"prompt": "Where did the cat sit?", "answer": "The cat sat on the mat."},
    {"prompt": "Name a river.", "answer": ["The Nile flows north to the sea.", "The Nile is a river in Africa."]},
]
