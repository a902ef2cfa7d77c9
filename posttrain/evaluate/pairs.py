"""The pairs stage: builds preference pairs from completions of an evaluation or generation, in pairs.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import terminal, thoughts
from posttrain.batch.records import sample_fields_of_record
from posttrain.data.pair_builders import Options
from posttrain.data.pair_rows import PairRows, pair_rows
from posttrain.data.rows import format_causes
from posttrain.data.separability import FEWEST_PAIRS, separability, style_features
from posttrain.errors import DataError, count_noun
from posttrain.evaluate.compare import PROBLEMS
from posttrain.evaluate.sampling import COMPLETIONS
from posttrain.path_resolution import find
from posttrain.recipe.stages import PairsRecipe
from posttrain.run.atomic_io import write_text
from posttrain.run.directory import RunDirectory
from posttrain.run.jsonl import read_rows, to_lines
from posttrain.run.resolved_recipe import read_model_section
from posttrain.verify.load import check_columns, load_reward
from posttrain.verify.score import Sample, Scorer

PAIRS_FILE = "pairs.jsonl"
BUILDER_OPTIONS = ("max_pairs", "prefer_teacher", "min_positive", "margin", "margin_student", "min_length", "flags")
MAX_PROBE_PAIRS = 300  # pairs that the style probe is tested on
OTHER_COMPLETIONS = ("past", "future", "teacher")

Row = dict[str, Any]


def run(recipe: PairsRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Write pairs.jsonl and return counts. Raises DataError with the causes by prompt if no pair could be made."""
    sources, records = read_completions(recipe.completions, recipe)
    others = {
        name: read_completions(path, recipe)[1]
        for name in OTHER_COMPLETIONS
        if (path := getattr(recipe, name)) is not None
    }
    found = pair_rows(
        sources,
        records,
        recipe.builder,
        others=others,
        options=Options(**{name: getattr(recipe, name) for name in BUILDER_OPTIONS}),
        balance_lengths=recipe.balance_lengths,
        max_gap=recipe.max_gap,
        earlier=[row for path in recipe.not_in for row in read_earlier_pairs(path, recipe.base_dir)],
    )
    write_text(directory.path / PAIRS_FILE, to_lines(found.rows))
    summary = {
        "pairs": len(found.rows),
        "completions": len(records),
        "right": mean_known([r["correct"] and r["finish"] == "stop" for r in records if r.get("correct") is not None]),
        "longer_chosen": found.longer_chosen,
        "score_gap": mean_known([_score_gap(row) for row in found.rows]),
        "style_accuracy": measure_style_accuracy(found.rows),
        "dropped": {cause: len(uids) for cause, uids in found.dropped.items()},
        "file": str(directory.path / PAIRS_FILE),
    }
    for line in remarks(found, summary, recipe.separability):
        terminal.note(line)
    return summary


def read_completions(path: str, recipe: PairsRecipe) -> tuple[dict[str, Row], list[Row]]:
    """Read the prompts' rows (uid -> row) and the graded completions of an eval or generate run directory.

    Raises DataError if it is not the run of a finished eval or generate.
    """
    found = find(path, recipe.base_dir, "completions", DataError)
    folder = found.parent if found.is_file() else found
    file = found if found.is_file() else folder / COMPLETIONS
    problems, records = read_rows(folder / PROBLEMS), read_rows(file)
    if not problems or not records or "prompt" not in problems[0]:
        raise DataError(
            "not the run of a finished eval or generate",
            where=str(folder),
            allowed=f"looked for {file.name} and {PROBLEMS}, one line per problem",
            hint="name the run directory of `posttrain eval` or `posttrain generate`",
        )
    sources = {str(p["uid"]): {**p.get("row", {}), "uid": p["uid"], "prompt": p["prompt"]} for p in problems}
    for row in sources.values():
        row.pop("messages", None)  # already in the prompt, without the answer
    if "correct" not in records[0] and recipe.rewards:
        if marks := read_model_section(folder).get("thoughts"):
            thoughts.add_format(*marks)  # rewards may name them, as they do in the run
        records = grade_records(records, {str(p["uid"]): p["row"] for p in problems}, recipe)
    return sources, records


def grade_records(records: Sequence[Row], rows: Mapping[str, Row], recipe: PairsRecipe) -> list[Row]:
    """Return the records of a generation with scores, reward and correct."""
    rewards = [load_reward(reward, recipe.base_dir) for reward in recipe.rewards]
    check_columns(rewards, {column for row in rows.values() for column in row})
    samples = [
        Sample(
            completion=r["completion"],
            row=rows[str(r["uid"])],
            prompt=r["prompt"],
            finish=r["finish"],
            token_count=r["tokens"],
            group=r["problem"],
            **sample_fields_of_record(r),
        )
        for r in records
    ]
    with Scorer(recipe.rewards, recipe.scoring, recipe.base_dir) as scorer:
        scores = scorer.score(samples)
        scorer.failures(enough=scores.calls.prompts, unit="pass").add(scores.calls)
    return [
        {
            **record,
            "scores": {name: column[i] for name, column in scores.components.items()},
            "reward": scores.rewards[i],
            "correct": scores.correct[i],
        }
        for i, record in enumerate(records)
    ]


def read_earlier_pairs(path: str, base_dir: Path) -> list[Row]:
    """Read the pairs in a file, or in a run directory of this stage."""
    found = find(path, base_dir, "pairs", DataError)
    return read_rows(found / PAIRS_FILE if found.is_dir() else found)


def measure_style_accuracy(rows: Sequence[Row]) -> float | None:
    """Compute the accuracy of a linear probe on letter trigrams at predicting the chosen side of held-out pairs.

    None with too few pairs.
    """
    probed = rows[:: max(1, len(rows) // MAX_PROBE_PAIRS)][:MAX_PROBE_PAIRS]
    if len(probed) < FEWEST_PAIRS:
        return None
    found = separability(*([style_features(row[side]) for row in probed] for side in ("chosen", "rejected")))
    return None if found is None else found.loo_accuracy


def mean_known(values: Sequence[float | bool | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    known = [float(v) for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _score_gap(row: Row) -> float | None:
    """Return the chosen minus the rejected score; None if either is missing."""
    scores = row["chosen_score"], row["rejected_score"]
    return None if None in scores else scores[0] - scores[1]


def remarks(found: PairRows, summary: Mapping[str, Any], threshold: float | None) -> list[str]:
    """Return sentences on the pairs made, the rows dropped, and what to check before training."""
    lines = [
        f"{count_noun(summary['pairs'], 'pair')} from {count_noun(summary['completions'], 'completion')}, "
        f"{summary['longer_chosen']:.0%} with a longer chosen side"
    ]
    if found.dropped:
        lines.append(f"left out: {format_causes(found.dropped)}")
    probe = summary["style_accuracy"]
    if probe is not None and threshold is not None and probe > threshold:
        lines.append(
            f"LOOK: letter trigrams alone predict {probe:.0%} of held-out pairs: the model may learn the style "
            "instead of correctness; sample both sides from the same model"
        )
    return lines
