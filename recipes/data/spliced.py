"""Agent-R (2501.11425): a bad path up to its first bad step, a change of mind, then the good path.

From a file, `source: ../data/spliced.py:splice_paths` with `params: {file: FILE}`. A line of FILE: good and bad
(messages), good_reward, bad_reward, first_bad (position in `bad` of the step that a judge calls bad first, or null).
Used by recipes/sft/agent_r.yaml.

From runs, as in recipes/agent_r_tiny.yaml: paths of a search in the environment (`generate` with `tree: {shape:
episodes}`), or several episodes of each task (`eval` with the environment); the policy is asked of each step of the bad
ones (`questions`, answered by `generate`); `revise_paths` makes the rows. The environment must allow the good path
after a bad one."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.data.sft_rows import splice
from posttrain.errors import DataError

REVISIONS = (
    "Thought: My last step was a mistake. I go back to what I know and take another way.\nAction: wait",
    "Thought: This does not lead to the goal. I should correct it before I go on.\nAction: wait",
    "Thought: I see that I was wrong here. Let me do it differently.\nAction: wait",
)

ASK = (
    "An agent works on a task.\n\n{history}\n\nIts next step:\n{step}\n\nIs that step good or bad for the task? "
    "Answer with the word good or bad."
)


def splice_paths(
    size: int | None = None, seed: int = 0, *, file: Path, alpha: float = 0.5, beta: float = 0.2
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The first `size` rows (None: all) {messages} whose messages say which of them are trained on.

    alpha: a good path's reward must be above it; beta: and above the bad one's by more than this.
    """
    draw = random.Random(f"spliced/{seed}")
    made = 0
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.strip() or made == size:
            continue
        row = json.loads(line)
        turns = splice(
            row["good"],
            row["bad"],
            row["good_reward"],
            row["bad_reward"],
            row["first_bad"],
            alpha=alpha,
            beta=beta,
            revision=draw.choice(REVISIONS),
        )
        if turns is not None:
            made += 1
            yield {"messages": [turn.message for turn in turns]}


class Paths(NamedTuple):
    """The best episode of a task and a worse one, as messages."""

    number: str  # the same in every reading of the run
    good: list[dict[str, str]]
    bad: list[dict[str, str]]
    good_reward: float
    bad_reward: float


def questions(
    size: int | None = None, seed: int = 0, *, run: Path, alpha: float = 0.5, beta: float = 0.2, ask: str = ASK
) -> Iterator[dict[str, Any]]:
    """The first `size` prompts (None: all): of each step of each bad path, whether it is bad. Columns: path, place."""
    del seed
    asked = (
        {
            "prompt": ask.format(history=_as_text(paths.bad[:place]), step=paths.bad[place]["content"]),
            "path": paths.number,
            "place": place,
        }
        for paths in _pairs(run, alpha, beta)
        for place, message in enumerate(paths.bad)
        if message["role"] == "assistant"
    )
    return itertools.islice(asked, size)


def revise_paths(
    size: int | None = None,
    seed: int = 0,
    *,
    run: Path,
    judged: Path,
    alpha: float = 0.5,
    beta: float = 0.2,
    good: str = "good",
    bad: str = "bad",
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The first `size` rows (None: all) {messages}, as `splice_paths` makes them. judged: the run that has answered
    `questions` of `run`; a step is bad if of the words good and bad the last one in the answer is `bad`."""
    verdict = re.compile(rf"\b({re.escape(good)}|{re.escape(bad)})\b", re.IGNORECASE)
    first_bad: dict[str, int] = {}
    asked = {row["uid"]: row["row"] for row in _lines(_folder(judged) / "problems.jsonl")}
    for record in _lines(_folder(judged) / "completions.jsonl"):
        row, said = asked[record["uid"]], verdict.findall(record["completion"])
        if said and said[-1].lower() == bad.lower():
            first_bad[row["path"]] = min(row["place"], first_bad.get(row["path"], row["place"]))
    draw = random.Random(f"spliced/{seed}")
    made = (
        splice(
            paths.good,
            paths.bad,
            paths.good_reward,
            paths.bad_reward,
            first_bad.get(paths.number),
            alpha=alpha,
            beta=beta,
            revision=draw.choice(REVISIONS),
        )
        for paths in _pairs(run, alpha, beta)
    )
    return itertools.islice(({"messages": [turn.message for turn in turns]} for turns in made if turns), size)


def _pairs(run: Path, alpha: float, beta: float) -> Iterator[Paths]:
    """The best path of each task with each that is more than beta worse, where the best is above alpha."""
    folder = _folder(run)
    prompts = {row["uid"]: row["prompt"] for row in _lines(folder / "problems.jsonl")}
    by_task: dict[str, list[dict[str, Any]]] = {}
    for record in _with_paths(_lines(folder / "completions.jsonl")):
        if not record.get("turns") or "reward" not in record:
            raise DataError(
                "no scored episodes",
                where=str(folder),
                hint="name the run of an `eval` with an `environment`, or of a `generate` with a `tree` of `episodes`",
            )
        if record["reward"] is not None:
            by_task.setdefault(record["uid"], []).append(record)
    for uid, records in by_task.items():
        best = max(records, key=lambda record: record["reward"])
        for record in records:
            if best["reward"] > alpha and best["reward"] - record["reward"] > beta:
                good, bad = (_messages(prompts[uid], one) for one in (best, record))
                yield Paths(f"{uid}/{record['sample']}", good, bad, best["reward"], record["reward"])


def _with_paths(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records, each with a tree as its paths that ended."""
    for record in records:
        if "tree" not in record:
            yield record
        for number, path in enumerate(record["tree"]["paths"] if "tree" in record else ()):
            yield {"uid": record["uid"], "sample": f"{record['sample']}/{number}", **path}


def _messages(prompt: Any, record: dict[str, Any]) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    for turn in record["turns"]:
        messages.append({"role": "assistant", "content": turn["text"]})
        if turn.get("reply") is not None:
            messages.append({"role": "user", "content": turn["reply"]})
    return messages


def _as_text(messages: list[dict[str, str]]) -> str:
    names = {"user": "Shown", "assistant": "Agent"}
    return "\n".join(f"{names.get(m['role'], m['role'])}: {m['content']}" for m in messages)


def _folder(run: Path) -> Path:
    return run.parent if run.is_file() else run


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"no finished run: {path.name} is missing", where=str(path.parent))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
