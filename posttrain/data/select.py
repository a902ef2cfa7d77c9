"""`data.select`: filters rows before a run by benchmark overlap, earlier pass rates, and amount of reasoning."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.curriculum.selection import choose_pass_rates, fold_copies, select_lowest_pass_rates, split_by_reasoning
from posttrain.data.duplicates import flag_contaminated
from posttrain.errors import DataError, count_noun
from posttrain.path_resolution import find
from posttrain.recipe.select_sections import Decontaminate, Failed, PassRate, Reasoning, Selection

Row = dict[str, Any]

log = logging.getLogger(__name__)


def select_rows(
    rows: Sequence[Row], section: Selection, base_dir: Path, load: Callable[[Any], Sequence[Row]]
) -> list[Row]:
    """Return the rows that pass every rule of the section, in their original order (also after `pass_rate.lowest`).

    load: reads the rows of a benchmark. Raises DataError if no row is left, or if a rule lacks the data it needs.
    """
    kept = list(rows)
    rules: list[tuple[str, Any]] = [("decontaminate", section.decontaminate)]
    rules += [("pass_rate", rule) for rule in section.pass_rate]
    rules += [("reasoning", section.reasoning), ("failed", section.failed)]
    for name, rule in rules:
        if rule is None:
            continue
        before = len(kept)
        match rule:
            case Decontaminate():
                kept = drop_contaminated(kept, rule, load)
            case PassRate():
                kept = keep_pass_rates(kept, rule, base_dir)
            case Reasoning():
                kept = keep_reasoning_side(kept, rule)
            case Failed():
                kept = keep_failed(kept, rule, base_dir)
        if not kept:
            raise DataError(
                f"data.select.{name} leaves no row of {before}",
                hint="loosen its bounds, or check the scores that it reads",
            )
        log.warning("data.select.%s: %d of %s stay", name, len(kept), count_noun(before, "row"))
    return kept


def prompt_text(row: Mapping[str, Any]) -> str:
    """Return the prompt of a row as text: the last user message of a conversation."""
    prompt = row.get("prompt") if row.get("messages") is None else row["messages"]
    if isinstance(prompt, str) or prompt is None:
        return str(prompt or row.get("text") or "")
    return next((str(m.get("content") or "") for m in reversed(prompt) if m.get("role") == "user"), "")


def drop_contaminated(rows: Sequence[Row], rule: Decontaminate, load: Callable[[Any], Sequence[Row]]) -> list[Row]:
    """Return the rows whose prompt occurs in no benchmark."""
    bench = [prompt_text(row) for source in rule.benchmarks for row in load(source)]
    marks = flag_contaminated([prompt_text(row) for row in rows], bench, ngram=rule.ngram, skip_empty=rule.skip_empty)
    return [row for row, mark in zip(rows, marks, strict=True) if not mark]


def read_pass_rates(run: str, base_dir: Path) -> dict[str, float]:
    """Return uid -> pass rate of the problems of a finished evaluation. Raises DataError if there is none."""
    found = find(run, base_dir, "evaluation", DataError)
    path = found / "problems.jsonl" if found.is_dir() else found
    if not path.is_file():
        raise DataError("not the run of a finished evaluation", where=str(found))
    problems = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if any("accuracy" not in problem for problem in problems):
        raise DataError("not the run of a finished evaluation", where=str(found))
    return {p["uid"]: float(p["accuracy"]) for p in problems if p["accuracy"] is not None}


def pass_rates_of(rows: Sequence[Row], run: str, base_dir: Path) -> dict[str, float]:
    """Return uid -> pass rate of the evaluation. Raises DataError if any of the rows has none."""
    rates = read_pass_rates(run, base_dir)
    missing = [row["uid"] for row in rows if row["uid"] not in rates]
    if missing:
        raise DataError(
            f"{run} has pass rates of {len(rows) - len(missing)} of {count_noun(len(rows), 'row')}",
            hint="evaluate the same `data` (source, skip, size); rows that could not be scored have no rate",
        )
    return rates


def keep_pass_rates(rows: Sequence[Row], rule: PassRate, base_dir: Path) -> list[Row]:
    """Return the rows whose pass rate is within the bounds, and of these only the `lowest` with the lowest rates."""
    rates = pass_rates_of(rows, rule.run, base_dir)
    indices = choose_pass_rates([rates[row["uid"]] for row in rows], low=rule.low, high=rule.high)
    band = [rows[n] for n in indices]
    if rule.lowest is None:
        return band
    chosen = set(select_lowest_pass_rates(range(len(band)), lambda n: rates[band[n]["uid"]], rule.lowest))
    return [row for n, row in enumerate(band) if n in chosen]


def keep_reasoning_side(rows: Sequence[Row], rule: Reasoning) -> list[Row]:
    """Return the rows of one side (sft or rl) of a split by reasoning score.

    An RL row without an `answer` moves to SFT if it has a completion. Raises DataError if a side is empty, a score is
    no number, or no row has one.
    """
    scores = [row.get(rule.column) for row in rows]
    if strange := [s for s in scores if s is not None and not isinstance(s, int | float)]:
        raise DataError(f"data.select.reasoning: column {rule.column} holds {strange[0]!r:.40}, no number")
    if all(score is None for score in scores):
        raise DataError(
            f"data.select.reasoning: no row has a score in its column {rule.column}",
            allowed="1 (recall) to 5 (many steps)",
            hint="name the column: `data.select.reasoning.column`",
        )
    split = split_by_reasoning(scores, sft_max=rule.sft_max, rl_min=rule.rl_min, middle=rule.middle)
    checkable = [n for n in split.rl if rows[n].get("answer") is not None]
    moved = [n for n in split.rl if n not in set(checkable) and rows[n].get("completion") is not None]
    sides = {"sft": sorted([*split.sft, *moved]), "rl": checkable}
    if empty := [side for side, indices in sides.items() if not indices]:
        raise DataError(
            f"data.select.reasoning: no row for {empty[0]} ({count_noun(len(split.dropped), 'row')} without a score)",
            allowed=f"up to {rule.sft_max:g} is for sft, from {rule.rl_min:g} on for rl, with an `answer`",
        )
    return [rows[n] for n in sides[rule.part]]


def keep_failed(rows: Sequence[Row], rule: Failed, base_dir: Path) -> list[Row]:
    """Return the rows that a model did not solve in an evaluation; hard rows are repeated."""
    rates = pass_rates_of(rows, rule.run, base_dir)
    solved = [float(rates[row["uid"]] >= rule.solved) for row in rows]
    hard = [float(bool(row.get(rule.hard))) if rule.hard else 0.0 for row in rows]
    selected = []
    for row, times in zip(rows, fold_copies(solved, hard, rule.copies), strict=True):
        selected += [{**row, "uid": row["uid"] if not n else f"{row['uid']}.{n}"} for n in range(times)]
    return selected
