"""Preference pairs as questions to a referee, for training a model to judge (URPO's ranking items, arXiv 2507.17515).

    data:
      mix:
        - {source: problems.jsonl}
        - {source: ../data/referee.py:judgements, size: 500, params: {pairs: /data/pairs.jsonl}}
    rewards:
      - {use: math.accuracy}          # None for rows without `answer`
      - {use: referee.order}          # None for rows without `truth`

Groups never mix kinds, since a group is the completions of one row. That a model also pays itself for open prompts, as
in the paper, is not built.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

ASK = """\
Question:
{question}

{answers}

How good is each answer, from 0 to 10? Write one line an answer, its number and its score, as in `1: 7`."""


def judgements(size: int, seed: int, *, pairs: Path) -> Iterator[dict[str, object]]:
    """{prompt, truth} of the first rows {prompt, chosen, rejected} of the file `pairs`, the answers in a drawn order.

    Rows of one prompt may also have a list `ranked`, best first, instead of chosen and rejected. truth: 1 for the best
    answer down to 0 for the worst.
    """
    lines = pairs.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines[:size]):
        row = json.loads(line)
        ranked = row.get("ranked") or [row["chosen"], row["rejected"]]
        worth = [1 - place / max(len(ranked) - 1, 1) for place in range(len(ranked))]
        order = list(range(len(ranked)))
        random.Random(f"referee/{seed}/{number}").shuffle(order)
        answers = "\n\n".join(f"Answer {n}:\n{ranked[place]}" for n, place in enumerate(order, start=1))
        yield {
            "prompt": ASK.format(question=row["prompt"], answers=answers),
            "truth": [worth[place] for place in order],
        }
