"""A^2Search (2510.07958): alternative right answers of questions, gathered from search models and confirmed by votes.

Several models answer each question several times (`generate` or `eval`, with a search tool where they search). Answers
that no known one equals are candidates. `questions` asks a judge of each of them, with the transcript that led to it,
whether the evidence supports it (answered by `generate` with `samples: K`); `accept_answers` adds those whose share of
yes is `eta` or more to the row's answers, for RL with `qa.ansf1`. Used by recipes/a2search_tiny.yaml.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.errors import DataError
from posttrain.verify.extract import after_think, last_tag
from posttrain.verify.qa import answer_items
from posttrain.verify.text import golds_of, qa_norm

ASK = (
    "Question: {question}\n\nAn assistant searched and answered:\n{transcript}\n\nDoes the evidence that it found "
    "support the answer `{answer}`? Reply with the word yes or no."
)


class Candidate(NamedTuple):
    """An answer that the data do not know, as `qa_norm` leaves it, and the first transcript that ended in it."""

    uid: str
    answer: str
    transcript: str


def questions(
    size: int | None = None, seed: int = 0, *, runs: Sequence[Path], gold: str = "answer", ask: str = ASK
) -> Iterator[dict[str, Any]]:
    """The first `size` prompts (None: all) for the judge, one a candidate. Columns: question (its uid) and candidate.

    runs: the runs that have answered, of one or of several models, with the same data. gold: the column with the
    answers that are known. ask: the judge's prompt, with {question}, {transcript} and {answer}."""
    del seed
    folders = [_folder(run) for run in runs]
    asked = _problems(folders)
    rows = (
        {
            "prompt": _fill(ask, str(asked[one.uid]["prompt"]), one),
            "question": one.uid,
            "candidate": one.answer,
        }
        for one in candidates(folders, gold)
    )
    return itertools.islice(rows, size)


def accept_answers(
    size: int | None = None,
    seed: int = 0,
    *,
    runs: Sequence[Path],
    judged: Path,
    eta: float = 0.5,
    gold: str = "answer",
    yes: str = "yes",
    no: str = "no",
) -> Iterator[dict[str, Any]]:
    """The first `size` rows (None: all) of the runs' data, with `gold` as a list: the known answer, with its aliases,
    and each accepted candidate. judged: the run that has answered `questions` of `runs`. A vote is the last of the
    words yes and no in a reply; replies without one are no votes against, they are left out. Raises DataError for eta
    outside 0 to 1."""
    del seed
    if not 0 < eta <= 1:
        raise DataError(f"eta {eta}", allowed="above 0, up to 1")
    verdict = re.compile(rf"\b({re.escape(yes)}|{re.escape(no)})\b", re.IGNORECASE)
    votes: dict[tuple[str, str], list[bool]] = {}
    folder = _folder(judged)
    asked = {row["uid"]: row["row"] for row in _lines(folder / "problems.jsonl")}
    for record in _lines(folder / "completions.jsonl"):
        row, said = asked[record["uid"]], verdict.findall(after_think(record["completion"]))
        if said:
            votes.setdefault((row["question"], row["candidate"]), []).append(said[-1].lower() == yes.lower())
    more: dict[str, list[str]] = {}
    for (uid, answer), cast in votes.items():
        if sum(cast) / len(cast) >= eta:
            more.setdefault(uid, []).append(answer)
    rows = (
        {**problem["row"], "prompt": problem["prompt"], gold: [golds_of(problem["row"].get(gold)), *more.get(uid, [])]}
        for uid, problem in _problems([_folder(run) for run in runs]).items()
    )
    return itertools.islice(rows, size)


def candidates(folders: Sequence[Path], gold: str) -> Iterator[Candidate]:
    """Each other answer once a question, in the order in which the runs gave them. Equal is equal after `qa_norm`."""
    asked = _problems(folders)
    seen: dict[str, set[str]] = {
        uid: {qa_norm(one) for one in golds_of(problem["row"].get(gold))} | {""} for uid, problem in asked.items()
    }
    for record in itertools.chain(*(_lines(folder / "completions.jsonl") for folder in folders)):
        block = last_tag(after_think(record["completion"]), "answer")
        for item in answer_items(block) if block is not None else []:
            if item not in seen[record["uid"]]:
                seen[record["uid"]].add(item)
                yield Candidate(record["uid"], item, transcript_of(record))


def transcript_of(record: dict[str, Any]) -> str:
    """What was written, with what it was shown."""
    if not record.get("turns"):
        return str(record["completion"])
    parts = [
        (turn["text"], f"[shown]\n{turn['reply']}" if turn.get("reply") is not None else "") for turn in record["turns"]
    ]
    return "\n".join(text for pair in parts for text in pair if text)


def _fill(ask: str, question: str, one: Candidate) -> str:
    texts = {"question": question, "transcript": one.transcript, "answer": one.answer}
    return re.sub(r"\{(question|transcript|answer)\}", lambda found: texts[found[1]], ask)


def towns(size: int, seed: int) -> Iterator[dict[str, str]]:
    """`size` rows for the tiny recipe: a question with several right answers, of which the data know one."""
    lands = {"Norway": ("Oslo", "Bergen", "Molde"), "Italy": ("Rome", "Turin", "Bari")}
    for n in range(size):
        land = list(lands)[(n + seed) % 2]
        town = lands[land][(n // 2) % 3]
        yield {"prompt": f"A town in {land}?", "completion": f"<answer>{town}</answer>", "answer": lands[land][0]}


def _problems(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    return {row["uid"]: row for folder in folders for row in _lines(folder / "problems.jsonl")}


def _folder(run: Path) -> Path:
    return run.parent if run.is_file() else run


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"no finished run: {path.name} is missing", where=str(path.parent))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
