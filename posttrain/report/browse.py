"""Self-contained offline page with every completion of an evaluation, or of two evaluations side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.report.page import render_page
from posttrain.run.jsonl import read_rows

COMPLETIONS = "completions.jsonl"
_COLUMNS = ("sample", "completion", "correct", "reward", "tokens", "finish", "answer", "scores")

Problem = dict[str, Any]


def write_page(runs: Sequence[Path], page: Path) -> dict[str, int]:
    """Write the page; return counts {problems, completions, only_one_run}. Raises UserError without completions."""
    sides = [read_problems(run) for run in runs]
    problems = join_runs(sides)
    data = {"runs": [str(run) for run in runs], "problems": problems}
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(data), encoding="utf-8")
    return {
        "problems": len(problems),
        "completions": sum(len(side) for problem in problems for side in problem["sides"]),
        "only_one_run": sum(not all(problem["sides"]) for problem in problems),
    }


def read_problems(run: Path) -> dict[tuple[str, int], Problem]:
    """Return (uid, number of earlier problems with it) -> prompt and completions of an evaluation or `generate` run.

    Raises UserError if there are no completions.
    """
    path = run / COMPLETIONS
    if not path.is_file():
        raise UserError(
            f"no {COMPLETIONS} here", where=str(run), hint="name the run directory of `posttrain eval` or `generate`"
        )
    numbered: dict[int, list[Mapping[str, Any]]] = {}
    for row in read_rows(path):
        numbered.setdefault(row["problem"], []).append(row)
    problems: dict[tuple[str, int], Problem] = {}
    seen: dict[str, int] = {}
    for rows in numbered.values():
        uid = str(rows[0]["uid"])
        key = (uid, seen.get(uid, 0))
        seen[uid] = key[1] + 1
        ordered = sorted(rows, key=lambda row: row["sample"])
        pictures: list[str] = next((row["pictures"] for row in ordered if row.get("pictures")), [])
        completions = [{name: row[name] for name in _COLUMNS if name in row} for row in ordered]
        problems[key] = {"prompt": rows[0]["prompt"], "pictures": pictures, "completions": completions}
    if not problems:
        raise UserError(f"{COMPLETIONS} is empty", where=str(run))
    return problems


def join_runs(sides: Sequence[Mapping[tuple[str, int], Problem]]) -> list[dict[str, Any]]:
    """Return one entry per problem, in the order of the first run.

    Each has uid, prompt, pictures, and the completions of each run (an empty list if the run lacks the problem).
    """
    keys = list(dict.fromkeys(key for side in sides for key in side))
    return [
        {
            "uid": key[0],
            **next({name: side[key][name] for name in ("prompt", "pictures")} for side in sides if key in side),
            "sides": [side[key]["completions"] if key in side else [] for side in sides],
        }
        for key in keys
    ]


def render(data: Mapping[str, Any]) -> str:
    """Return the page as text. Model output is stored as JSON and displayed as text, never as HTML."""
    choices = [
        ("all", "all problems"),
        ("mixed", "right and wrong samples"),
        ("wrong", "never right"),
        ("cut", "cut off"),
    ]
    if len(data["runs"]) > 1:
        choices += [("better", "second run better"), ("worse", "second run worse")]
    values = {"title": " · ".join(data["runs"]), "choices": choices, "data": data}
    return render_page("browse.html.j2", ("browse.js",), ("report.css",), values)
