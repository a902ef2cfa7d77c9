"""DRQA (2508.17803): chains to judge as right and concise, right and verbose, or wrong.

Used as `source: ../data/concise.py:chains` with `params: {alone: RUN, together: RUN}`: run directories of two
evaluations of the same problems, whose prompts asked one question and several at once (`bundles` makes such prompts).
Chains that answer several questions in one prompt are naturally short. A model that learns to tell them from long and
from wrong ones is to write them itself. Score the letter with `qa.search_r1`, exact match of the last `<answer>`.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.data.pairs import concise_labels
from posttrain.verify.load import shipped_function

LETTERS = "ABC"
ASK = (
    "{question}\n\nA solution:\n{chain}\n\nWhich holds? A: right and concise, B: right and verbose, C: wrong. "
    "Answer with the letter in <answer> </answer>."
)
_HEAD = re.compile(r"^\s*Answer (\d+):\s*", re.MULTILINE)


def bundles(size: int, seed: int = 0, *, file: Path, count: int = 2) -> Iterator[dict[str, Any]]:
    """Prompts with `count` questions each, of a JSONL file of {prompt, answer}: what `together` evaluates.

    Columns: prompt, answer (the JSON list of theirs), questions.
    """
    rows = _lines(file)
    random.Random(seed).shuffle(rows)
    for start in range(0, min(size * count, len(rows) - count + 1), count):
        taken = rows[start : start + count]
        listed = "\n".join(f"Question {n}: {row['prompt']}" for n, row in enumerate(taken, 1))
        yield {
            "prompt": f"Answer each question under a heading of its own, `Answer 1:` and so on.\n{listed}",
            "answer": json.dumps([str(row["answer"]) for row in taken]),
            "questions": [row["prompt"] for row in taken],
        }


def parts_of(completion: str, count: int) -> list[str] | None:
    """The answers under the headings `Answer 1:` to `Answer N:`; None where these are not all there, once, in order."""
    found = list(_HEAD.finditer(completion))
    if [int(match[1]) for match in found] != list(range(1, count + 1)):
        return None
    ends = [*[match.start() for match in found[1:]], len(completion)]
    return [completion[match.end() : end].strip() for match, end in zip(found, ends, strict=True)]


def chains(size: int | None = None, seed: int = 0, *, alone: Path, together: Path) -> Iterator[dict[str, str]]:
    """The first `size` rows (None: all) {prompt, answer}, the labels in turn until one runs out of chains.

    A chain of several answers in one prompt counts only where it is shorter than those of the question alone.
    """
    single = list(_alone(alone))
    longest: dict[str, int] = {}
    for question, chain, _ in single:
        longest[question] = max(longest.get(question, 0), len(chain))
    joint = [one for one in _together(together) if len(one[1]) < longest.get(one[0], 0)]
    made = [*single, *joint]
    from_batch = [False] * len(single) + [True] * len(joint)
    labels = concise_labels([right for _, _, right in made], from_batch, [[]] * len(made)).labels
    by_label: dict[int, list[tuple[str, str]]] = {0: [], 1: [], 2: []}
    for (question, chain, _), label in zip(made, labels, strict=True):
        by_label[label].append((question, chain))
    for found in by_label.values():
        random.Random(seed).shuffle(found)
    for number in itertools.count() if size is None else range(size):
        label = number % 3
        if number // 3 >= len(by_label[label]):
            return
        question, chain = by_label[label][number // 3]
        yield {"prompt": ASK.format(question=question, chain=chain), "answer": LETTERS[label]}


def _alone(run: Path) -> Iterator[tuple[str, str, bool]]:
    """(question, chain, right) of each judged completion of an evaluation."""
    asked = {row["uid"]: row["row"]["prompt"] for row in _lines(run / "problems.jsonl")}
    for record in _lines(run / "completions.jsonl"):
        if record.get("correct") is not None:
            yield asked[record["uid"]], record["completion"], bool(record["correct"])


def _together(run: Path) -> Iterator[tuple[str, str, bool]]:
    """The same of each part of the completions of bundles; those that cannot be divided are left out."""
    asked = {row["uid"]: row["row"] for row in _lines(run / "problems.jsonl")}
    for record in _lines(run / "completions.jsonl"):
        row = asked[record["uid"]]
        parts = parts_of(record["completion"], len(row["questions"]))
        for question, gold, part in zip(row["questions"], json.loads(row["answer"]), parts or [], strict=False):
            score = shipped_function("math.accuracy")(part, gold)
            if score is not None:
                yield question, part, score == 1


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
