"""Critique fine-tuning (2506.03295): a solution to judge is asked for, a critique whose verdict is right is imitated.

Used as `source: ../data/critiques.py:critiques` with `params: {file: FILE}`. A line of FILE: question, solution,
critique (a teacher's), correct (whether the solution is right, as a verifier said; null where it could not say). Of
recipes/sft/critiques.yaml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ASK = (
    "{question}\n\nA proposed solution:\n{solution}\n\nCritique it step by step. "
    "End with `Conclusion: right` or `Conclusion: wrong`.\n"
)
VERDICT = re.compile(r"Conclusion:\s*(right|wrong)\b", re.IGNORECASE)


def critiques(size: int | None = None, seed: int = 0, *, file: Path) -> Iterator[dict[str, str]]:
    """The first `size` rows (None: all) {prompt, completion} of a JSONL file, in its order."""
    del seed
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, row in enumerate(keep_right_verdicts(json.loads(line) for line in lines if line.strip())):
        if number == size:
            return
        yield row


def keep_right_verdicts(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Critiques whose last verdict is that of the verifier, one a solution; the text behind the verdict is cut off."""
    seen: set[tuple[str, str]] = set()
    for row in rows:
        verdict = list(VERDICT.finditer(row["critique"]))
        key = (row["question"], " ".join(row["solution"].split()))
        if not verdict or row["correct"] is None or key in seen:
            continue
        if (verdict[-1][1].lower() == "right") == bool(row["correct"]):
            seen.add(key)
            prompt = ASK.format(question=row["question"], solution=row["solution"])
            yield {"prompt": prompt, "completion": row["critique"][: verdict[-1].end()]}
