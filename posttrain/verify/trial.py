"""Trial of a recipe's rewards on its own rows: scores of right and wrong completions, errors, time per call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import DataError
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.audit import (
    AUDITED_ROWS,
    choose_writer,
    describe_unusable,
    explain_bad_gold,
    explain_failure,
    find_column_problem,
    find_doubts,
    row_uid,
    split_golds,
    spread_evenly,
)
from posttrain.verify.load import check_columns
from posttrain.verify.reward_hacking_probes import (
    HackProbe,
    injection_works,
    injections,
    make_samples,
    misspell,
    name_answers,
    outbids,
    pays,
    probes,
    scorer_names,
    use_meaningless_name,
)
from posttrain.verify.reward_test_cases import Row, Writer, variants
from posttrain.verify.score import Scorer, get_score
from posttrain.verify.worker import Result

NAMED_ROWS = 3  # rows on which scorer names are tried; a scorer that evaluates an answer does so on every row
JUDGED_ROWS = 8  # rows on which injections are tried; a judge costs more than a function


@dataclass(frozen=True)
class Cell:
    """Scores of one component on one kind of completion.

    mean: None without scores; other fields: counts of calls without a score.
    """

    mean: float | None
    abstained: int
    errors: int
    timeouts: int


@dataclass(frozen=True)
class Trial:
    """Result of a trial.

    rows: number of rows tried, including rows without a usable gold answer. table: component -> variant -> cell.
    bad_gold: uid -> problem of the correctness component or of the gold answer.
    doubts: suspicious patterns in the gold answers (`gold_doubts`).
    tricks: probe name -> (rows where it pays, rows tried), judged by the correctness component.
    outbid: probe name -> (rows where the wrong answer's weighted sum exceeds gold's, rows tried); {} with one component
    or if a component is a judge.
    injected: judge -> injection name -> (rows where it raises the score of a wrong answer, rows tried).
    calls_per_second: of all components together, with `workers` processes.
    """

    rows: int
    writer: str
    correctness: str
    table: dict[str, dict[str, Cell]]
    call_ms: dict[str, float]
    slowest_ms: dict[str, float]
    bad_gold: dict[str, str]
    doubts: list[str]
    knows_gold: bool  # the correctness component reads a data column
    first_traceback: str | None
    tricks: dict[str, tuple[int, int]]
    outbid: dict[str, tuple[int, int]]
    injected: dict[str, dict[str, tuple[int, int]]]
    calls_per_second: float
    workers: int

    @property
    def paying_tricks(self) -> dict[str, tuple[int, int]]:
        """The tricks that pay on at least one row."""
        return {name: counts for name, counts in self.tricks.items() if counts[0]}

    @property
    def failures(self) -> int:
        """Number of calls that raised or timed out."""
        return sum(cell.errors + cell.timeouts for cells in self.table.values() for cell in cells.values())


def try_rewards(rewards: Sequence[Reward], scoring: Scoring, base_dir: Path | None, rows: Sequence[Row]) -> Trial:
    """Score the variants of up to 64 rows. Raises RewardError for missing columns or a broken contract.

    Raises DataError if no row has a gold answer.
    """
    with Scorer(rewards, scoring, base_dir) as scorer:
        check_columns(scorer.rewards, {column for row in rows for column in row})
        chosen = spread_evenly(rows, AUDITED_ROWS)
        golds = split_golds(scorer.rewards[scorer.correctness], chosen)
        chosen = golds.usable
        name, write = choose_writer(scorer, chosen)
        written = {i: v for i, row in enumerate(chosen) if (v := variants(row, write, i)) is not None}
        if not written:
            raise DataError(
                describe_unusable(golds.unusable)
                if golds.unusable
                else "no row has an `answer`, so there is no gold to try",
                hint="map it: data.columns: {answer: NAME}; or write it in the script: `def GOLD(row): return ...`",
            )
        samples = [sample for by_name in written.values() for sample in by_name.values()]
        scorer.results(samples[:1])  # start the workers before timing
        started = time.monotonic()
        results = scorer.results(samples)
        seconds = time.monotonic() - started
        tricks, outbid = _try_probes(scorer, {i: chosen[i] for i in written}, write)
        tricks |= _try_scorer_names(scorer, [chosen[i] for i in list(written)[:NAMED_ROWS]], write)
        judges = [i for i, reward in enumerate(scorer.rewards) if reward.is_judge]
        few = {i: chosen[i] for i in list(written)[:JUDGED_ROWS]}
        injected = {scorer.rewards[i].name: _try_injections(scorer, i, few, write) for i in judges}
    kinds = list(next(iter(written.values())))
    columns = {reward.name: column for reward, column in zip(scorer.rewards, results, strict=True)}
    correctness = scorer.rewards[scorer.correctness]
    doubts = find_doubts(correctness, chosen, write) if correctness.knows_gold else []
    return Trial(
        rows=len(written) + len(golds.unusable),
        writer=name,
        correctness=correctness.name,
        table={
            n: {kind: _cell(column[k :: len(kinds)]) for k, kind in enumerate(kinds)} for n, column in columns.items()
        },
        call_ms={n: 1000 * math.fsum(r.seconds for r in column) / len(column) for n, column in columns.items()},
        slowest_ms={n: 1000 * max(r.seconds for r in column) for n, column in columns.items()},
        bad_gold=find_column_problem(chosen, doubts)
        | {uid: f"no usable gold: {why}" for uid, why in golds.unusable.items()}
        | _bad_gold(chosen, list(written), kinds, columns[correctness.name], scoring.correct_at),
        doubts=[doubt.describe(len(chosen)) for doubt in doubts],
        knows_gold=correctness.knows_gold,
        first_traceback=next((r.value for column in results for r in column if r.kind == "error"), None),
        tricks=tricks,
        outbid=outbid,
        injected=injected,
        calls_per_second=len(samples) * len(results) / max(seconds, 1e-9),
        workers=scoring.workers,
    )


Counts = dict[str, tuple[int, int]]  # name of a probe -> (rows on which it pays, rows tried)


def _try_probes(scorer: Scorer, rows: Mapping[int, Row], write: Writer) -> tuple[Counts, Counts]:
    """Count the probes that pay by the correctness component, and by the weighted sum of all components."""
    tried = {i: {"gold": HackProbe(write(row) or ""), **probes(row, write)} for i, row in rows.items()}
    samples = [sample for i, row_probes in tried.items() for sample in make_samples(rows[i], row_probes, i)]
    if len(scorer.rewards) == 1 or any(reward.is_judge for reward in scorer.rewards):
        results = scorer.results(samples, only=[scorer.correctness])
        return _count_paid(tried, [get_score(result) for result in results[0]], pays), {}
    results = scorer.results(samples)
    correct = [get_score(result) for result in results[scorer.correctness]]
    return _count_paid(tried, correct, pays), _count_paid(tried, scorer.combine_results(samples, results), outbids)


def _count_paid(
    tried: Mapping[int, Mapping[str, HackProbe]],
    scores: Sequence[float | None],
    paying: Callable[[HackProbe, float | None, float | None], bool],
) -> Counts:
    """Count the rows where each probe pays. scores: of each row's gold and probes, in the order of `tried`."""
    left = iter(scores)
    counts: Counts = {}
    for row_probes in tried.values():
        gold = next(left)
        for name, probe in list(row_probes.items())[1:]:
            paid, total = counts.get(name, (0, 0))
            counts[name] = (paid + paying(probe, next(left), gold), total + 1)
    return counts


def _try_scorer_names(scorer: Scorer, rows: Sequence[Row], write: Writer) -> Counts:
    """Test whether answering with a name of the scorer's variables earns more than a meaningless name, on every row."""
    reward = scorer.rewards[scorer.correctness]
    texts = [name_answers(row, write, scorer_names(reward.function)) for row in rows]
    if reward.is_judge or not rows or not all(texts):
        return {}
    (first,) = _earned_scores(scorer, rows[:1], texts[:1])
    above = [
        text for text in list(first)[1:] if first[text] > first[use_meaningless_name(text)]
    ]  # few names are tested on more than one row
    asked = [{u: write.with_answer(row, u) for t in above for u in (t, *misspell(t))} for row in rows]
    asked = [{"": miss[""], **of_row} for miss, of_row in zip(texts, asked, strict=True)]
    earned = _earned_scores(scorer, rows, asked)
    paid = [t for t in above if all(row[t] > max(row[u] for u in misspell(t)) for row in earned)]
    name = f"a name of the scorer (`{min(paid, key=len)}`)" if paid else "a name of the scorer"
    return {name: (len(rows) if paid else 0, len(rows))}


def _earned_scores(scorer: Scorer, rows: Sequence[Row], texts: Sequence[Mapping[str, str]]) -> list[dict[str, float]]:
    """Return the scores of each row's texts, at least the score of the first text, a wrong answer.

    A missing score counts as that minimum.
    """
    pairs = [
        (i, row, text) for i, (row, of_row) in enumerate(zip(rows, texts, strict=True)) for text in of_row.values()
    ]
    samples = [sample for i, row, text in pairs for sample in make_samples(row, {"": HackProbe(text)}, i)]
    results = iter(scorer.results(samples, only=[scorer.correctness])[0])
    scores = [[get_score(next(results)) for _ in of_row] for of_row in texts]
    lowest = [values[0] or 0.0 for values in scores]
    return [
        {name: low if score is None else max(score, low) for name, score in zip(of_row, row_scores, strict=True)}
        for of_row, row_scores, low in zip(texts, scores, lowest, strict=True)
    ]


def _try_injections(scorer: Scorer, judge: int, rows: Mapping[int, Row], write: Writer) -> dict[str, tuple[int, int]]:
    """Count, for each injection, (rows where it raises the judge's score, rows tried)."""
    tried = {i: row_probes for i, row in rows.items() if (row_probes := injections(row, write))}
    samples = [sample for i, row_probes in tried.items() for sample in make_samples(rows[i], row_probes, i)]
    scores = iter([get_score(result) for result in scorer.results(samples, only=[judge])[0]])
    counts: dict[str, tuple[int, int]] = {}
    for row_probes in tried.values():
        by_name = {name: next(scores) for name in row_probes}
        for name in list(row_probes)[2:]:
            moved, total = counts.get(name, (0, 0))
            counts[name] = (moved + injection_works(by_name[name], by_name["wrong"], by_name["gold"]), total + 1)
    return counts


def _cell(results: Sequence[Result]) -> Cell:
    scores = [score for r in results if (score := get_score(r)) is not None]
    failed = [r.kind for r in results if r.kind != "value"]
    return Cell(
        mean=math.fsum(scores) / len(scores) if scores else None,
        abstained=len(results) - len(scores) - len(failed),
        errors=failed.count("error"),
        timeouts=failed.count("timeout"),
    )


def _bad_gold(
    rows: Sequence[Row], with_gold: Sequence[int], kinds: Sequence[str], column: Sequence[Result], correct_at: float
) -> dict[str, str]:
    bad = {}
    for k, i in enumerate(with_gold):
        here = column[k * len(kinds) : (k + 1) * len(kinds)]
        scores = {kind: get_score(result) for kind, result in zip(kinds, here, strict=True)}
        if wrong := explain_bad_gold(scores, correct_at):
            bad[row_uid(rows[i], i)] = wrong + explain_failure(here[kinds.index("gold")])
    return bad


def as_json(trial: Trial) -> dict[str, Any]:
    """Convert the trial to JSON data."""
    return {
        "rows": trial.rows,
        "gold_written_as": trial.writer,
        "correctness": trial.correctness,
        "components": {
            name: {
                "call_ms": trial.call_ms[name],
                "slowest_ms": trial.slowest_ms[name],
                "variants": {kind: vars(cell) for kind, cell in cells.items()},
            }
            for name, cells in trial.table.items()
        },
        "bad_gold": trial.bad_gold if trial.knows_gold else None,
        "doubts": trial.doubts,
        "tricks": {name: {"pays": paid, "rows": total} for name, (paid, total) in trial.tricks.items()},
        "outbid": {name: {"pays": paid, "rows": total} for name, (paid, total) in trial.outbid.items()},
        "injections": {
            judge: {name: {"works": moved, "rows": total} for name, (moved, total) in counts.items()}
            for judge, counts in trial.injected.items()
        },
        "calls_per_second": trial.calls_per_second,
        "workers": trial.workers,
        "first_traceback": trial.first_traceback,
    }
