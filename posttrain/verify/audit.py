"""Gold audit: check before training, on the run's own rows, that the reward scores gold answers above wrong answers."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from posttrain import source_locations
from posttrain.errors import RewardError, count_noun
from posttrain.registry import resolve_annotations
from posttrain.verify import math as maths
from posttrain.verify.gold_doubts import Doubt, detect_doubts, find_column_doubt
from posttrain.verify.golds import accepts_type, explain_unusable, is_no_answer
from posttrain.verify.load import LoadedReward, check_columns, load_script
from posttrain.verify.reward_test_cases import WRITERS, Row, Writer, describe_writer, near_miss, variants
from posttrain.verify.score import Scorer, get_score
from posttrain.verify.worker import Result

AUDITED_ROWS = 64
SHOWN = 5
GOLD_KEYS = ("ground_truth", "answer", "final_answer", "gold", "target", "value", "text", "label")  # likely first


@dataclass(frozen=True)
class Audit:
    """Result of the gold audit.

    checked: number of rows that should have a gold answer. bad: uid -> problem, including rows without a usable gold
    answer. unusable: uid -> reason. skipped: why nothing was audited. doubts: suspicious patterns in the gold answers.
    """

    checked: int
    bad: Mapping[str, str]
    writer: str = ""
    skipped: str = ""
    unusable: Mapping[str, str] = field(default_factory=dict)
    doubts: Sequence[str] = ()

    @property
    def summary(self) -> str:
        if self.skipped:
            return f"gold not audited: {self.skipped}"
        rest = f"; {describe_unusable(self.unusable)}" if self.unusable else ""
        best = self.checked - len(self.bad)
        doubts = "".join(f"; {doubt}" for doubt in self.doubts)
        scored = f"gold scores best on {best} of {count_noun(self.checked, 'row')}"
        return f"{scored} (gold written {describe_writer(self.writer)}){rest}{doubts}"


def describe_unusable(unusable: Mapping[str, str]) -> str:
    """Format the rows without usable gold answers: `3 rows have no usable gold (null: 2, `see figure`: 1)`."""
    reasons = Counter(unusable.values()).most_common(SHOWN)
    have = "has" if len(unusable) == 1 else "have"
    return (
        f"{count_noun(len(unusable), 'row')} {have} no usable gold ({', '.join(f'{why}: {n}' for why, n in reasons)})"
    )


def audit_gold(scorer: Scorer, rows: Sequence[Row]) -> Audit:
    """Check that the correctness component scores the gold answer as correct and above every wrong completion.

    Audits up to 64 evenly spaced rows. Every row counts, including a row without a usable gold answer
    (`golds.explain_unusable`), unless another reward judges the row (`judged_elsewhere`). Suspicious patterns in the
    gold answers (`gold_doubts`) are reported; if all gold answers are ids, placeholders or identical, every row is bad.

    A correctness component that reads no data column cannot know the gold answer, and neither can a judge: both are
    skipped.

    Raises RewardError if a column is missing, the contract is broken, the gold column holds dicts that the reward does
    not accept, or the share of rows whose gold answer is wrong or not best exceeds scoring.max_bad_gold.
    """
    check_columns(scorer.rewards, {column for row in rows for column in row})
    reward = scorer.rewards[scorer.correctness]
    if not reward.knows_gold:
        why = "is a judge" if reward.is_judge else "reads no data column"
        why = "reads the calls of a workflow" if reward.reads_workflow else why
        return Audit(0, {}, skipped=f"{reward.name} {why}")
    chosen = spread_evenly([row for row in rows if not judged_elsewhere(scorer, row)] or rows, AUDITED_ROWS)
    golds = split_golds(reward, chosen)
    check_gold_calls(scorer, golds.usable)
    name, write = choose_writer(scorer, golds.usable)
    cases = {i: v for i, row in enumerate(golds.usable) if (v := variants(row, write, i)) is not None}
    if not cases and not golds.unusable:
        return Audit(0, {}, skipped="no row has an `answer`; GOLD(row) in the reward's script may write it")
    calls = call_correctness(scorer, list(cases.values()))
    bad, unusable = {}, dict(golds.unusable)
    for i, results in zip(cases, calls, strict=True):
        uid, by_name = row_uid(golds.usable[i], i), {variant: get_score(result) for variant, result in results.items()}
        if by_name["gold"] is None and is_no_answer(str(golds.usable[i].get(write.column))):
            unusable[uid] = "prose"  # the math verifier returned None
        elif wrong := explain_bad_gold(by_name, scorer.scoring.correct_at):
            bad[uid] = wrong + explain_failure(results["gold"])
    bad |= {uid: f"no usable gold: {why}" for uid, why in unusable.items()}
    doubts = find_doubts(reward, golds.usable, write)
    bad = find_column_problem(golds.usable, doubts) | bad
    descriptions = [doubt.describe(len(golds.usable)) for doubt in doubts]
    audit = Audit(len(cases) + len(golds.unusable), bad, name, unusable=unusable, doubts=descriptions)
    if len(bad) > scorer.scoring.max_bad_gold * audit.checked:
        raise _bad_gold_error(audit, reward.name, write.column, scorer.scoring.max_bad_gold)
    return audit


def find_doubts(reward: LoadedReward, rows: Sequence[Row], write: Writer) -> list[Doubt]:
    """Find suspicious patterns in the gold answers that the reward reads, and the doubts of its script.

    A script with `ROW_PROBLEM` has none.
    """
    if callable(_script_attribute(reward, "ROW_PROBLEM")):
        return []
    of_script = script_doubts(reward, rows, write.column)
    if write.column not in (*reward.columns, *reward.optional_columns):
        return of_script
    return [*detect_doubts(rows, write.column, maths=reads_maths(reward)), *of_script]


def script_doubts(reward: LoadedReward, rows: Sequence[Row], column: str) -> list[Doubt]:
    """Collect the results of the script's `DOUBT(row, **params)`, which returns "" for a good gold answer.

    These doubts never stop a run.
    """
    doubt = _script_attribute(reward, "DOUBT")
    row_numbers: dict[str, list[int]] = {}
    for number, row in enumerate(rows if callable(doubt) else ()):
        if what := doubt(row, **reward.params):
            row_numbers.setdefault(what, []).append(number)
    return [
        Doubt(what, tuple(numbers), tuple(str(rows[i].get(column)) for i in numbers[:3]), wrong=False)
        for what, numbers in row_numbers.items()
    ]


def _script_attribute(reward: LoadedReward, name: str) -> Any:
    """Return the top-level `name` of the reward's script; if it is a dict, return the reward's entry."""
    left, _, function = reward.target.rpartition(":")
    module: Mapping[str, Any] = load_script(Path(left)) if left.endswith(".py") else vars(sys.modules[left])
    given = module.get(name)
    return given.get(function) if isinstance(given, Mapping) else given


def find_column_problem(rows: Sequence[Row], doubts: Sequence[Doubt]) -> dict[str, str]:
    """Return uid -> problem for every row if a doubt invalidates all gold answers, else {}."""
    doubt = find_column_doubt(doubts, len(rows))
    return {} if doubt is None else {row_uid(row, i): f"the golds {doubt.what}" for i, row in enumerate(rows)}


def reads_maths(reward: LoadedReward) -> bool:
    """Return whether the reward's script uses the math verifier."""
    script_globals = getattr(reward.function, "__globals__", {}).values()
    return any(value is maths or getattr(value, "__module__", "") == maths.__name__ for value in script_globals)


def judged_elsewhere(scorer: Scorer, row: Row) -> bool:
    """Return whether another reward judges this row of mixed data.

    A column of the correctness component is null in the row, and another component with nonzero weight that knows gold
    answers has all its columns.
    """

    def applies(reward: LoadedReward) -> bool:
        return all(row.get(column) is not None for column in reward.columns)

    others = [
        reward
        for number, reward in enumerate(scorer.rewards)
        if number != scorer.correctness and reward.columns and reward.knows_gold and scorer.sections[number].weight
    ]
    return not applies(scorer.rewards[scorer.correctness]) and any(map(applies, others))


class Golds(NamedTuple):
    """Audited rows split by whether their gold answer is usable.

    usable: rows to audit. unusable: uid -> reason, for rows that should have a gold answer and have none.
    """

    usable: list[Row]
    unusable: dict[str, str]


def split_golds(reward: LoadedReward, rows: Sequence[Row]) -> Golds:
    """Split the rows by whether a completion can be compared with their gold answer.

    Rows count as unusable only if the reward reads the gold column. A script's `ROW_PROBLEM(row)` decides instead, for
    scripts whose `GOLD` cannot write a completion for every valid row: such a row is not audited.

    Raises RewardError if the column holds dicts and the reward's annotation does not accept dicts.
    """
    if callable(explain_problem := _script_attribute(reward, "ROW_PROBLEM")):
        problems = [explain_problem(row) for row in rows]
        unusable = {row_uid(row, i): why for i, (row, why) in enumerate(zip(rows, problems, strict=True)) if why}
        return Golds([row for row, why in zip(rows, problems, strict=True) if not why], unusable)
    writer = find_script_writer(reward, rows)
    column = writer.column if writer else "answer"
    _refuse_dicts(reward, rows, column)
    takes_lists = writer is not None or accepts_type(resolve_annotations(reward.function).get(column), list)
    needed = column in reward.columns or (column in reward.optional_columns and any(column in row for row in rows))
    usable, unusable = [], {}
    for number, row in enumerate(rows):
        gold = row.get(column)
        why = explain_unusable(gold) or ("" if takes_lists or not isinstance(gold, list | tuple) else "a list")
        if not why and writer is not None and writer(row) is None:
            why = gold_error(reward, row) or "GOLD(row) of the script is None"
        if not why or not needed:
            usable.append(row)
        else:
            unusable[row_uid(row, number)] = why
    return Golds(usable, unusable)


def row_uid(row: Row, number: int) -> str:
    """Return the row's uid, or its number if it has none."""
    return str(row.get("uid", number))


def _refuse_dicts(reward: LoadedReward, rows: Sequence[Row], column: str) -> None:
    found = next((row for row in rows if isinstance(row.get(column), Mapping)), None)
    if found is None or accepts_type(resolve_annotations(reward.function).get(column), dict):
        return
    keys = list(found[column])
    key = next((k for k in (*GOLD_KEYS, *keys) if k in keys), "KEY")
    raise RewardError(
        f"the column `{column}` holds dicts, and {reward.name} takes one answer",
        where=source_locations.describe_row(found.get("uid", 0)),
        allowed=f"its keys: {', '.join(map(str, keys))}",
        hint=f"take one of them: data.columns: {{{column}: THEIR_COLUMN.{key}}}",
    )


def spread_evenly(rows: Sequence[Row], count: int) -> list[Row]:
    """Return at most `count` rows, evenly spaced."""
    if len(rows) <= count:
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def check_gold_calls(scorer: Scorer, rows: Sequence[Row]) -> None:
    """Raise RewardError if every way of writing the first gold answer raises or exceeds the time limit."""
    row = next((row for row in rows if WRITERS["plain"](row) is not None), None)
    if row is None:
        return
    golds = [v["gold"] for write in WRITERS.values() if (v := variants(row, write)) is not None]
    results = scorer.results(golds, only=[scorer.correctness])[0]
    reward, section = scorer.rewards[scorer.correctness], scorer.sections[scorer.correctness]
    if results and all(result.kind == "error" for result in results):
        raise RewardError(
            f"every call on {source_locations.describe_row(row.get('uid', 0))} raised",
            where=f"reward {reward.name}",
            allowed="\n  ".join(str(results[0].value).strip().splitlines()),
        )
    if all(result.kind == "timeout" for result in results):
        raise RewardError(
            f"every gold answer of {source_locations.describe_row(row.get('uid', 0))} takes longer than"
            f" {reward.limit(section):g} s",
            where=f"reward {reward.name}",
            hint="make it faster, or raise its `timeout_s`",
        )


def choose_writer(scorer: Scorer, rows: Sequence[Row]) -> tuple[str, Writer]:
    """Return the script's own `GOLD(row) -> completion`, or the answer format that scores best on up to four rows.

    If gold earns nothing in any format and the reward raises on one of them, return that format: the exception is the
    cause.
    """
    writer = find_script_writer(scorer.rewards[scorer.correctness], rows)
    if writer is not None:
        return "GOLD of the script", writer
    sample = [row for row in rows if WRITERS["plain"](row) is not None][:4]
    ranks: dict[str, tuple[int, bool, bool, float]] = {}  # (rows scored well, gold earns, raises, total earned)
    for name, write in WRITERS.items():
        written = [v for row in sample if (v := variants(row, write)) is not None]
        results = call_correctness(scorer, written)
        scores = [{name: get_score(result) for name, result in row_results.items()} for row_results in results]
        earned = math.fsum(s["gold"] or 0.0 for s in scores)
        good = sum(not explain_bad_gold(s, scorer.scoring.correct_at) for s in scores)
        raised = not good and any(row_results["gold"].kind == "error" for row_results in results)
        ranks[name] = (good, earned > 0, raised, earned)
    best = max(ranks, key=lambda name: ranks[name])
    return best, WRITERS[best]


def find_script_writer(reward: LoadedReward, rows: Sequence[Row]) -> Writer | None:
    """Return the `GOLD` writer of the reward's script (a function or a dict by reward name), or None.

    The writer's column is the first of `answer` and the columns the reward reads that changes its output, else
    `answer`.
    """
    written = _script_attribute(reward, "GOLD")
    if not callable(written):
        return None

    def write(row: Row) -> str | None:
        with contextlib.suppress(ValueError):  # the row's gold answer is of another kind: the row has none
            return written(row)  # type: ignore[no-any-return]
        return None

    columns = ("answer", *reward.columns, *reward.optional_columns)
    row = next((row for row in rows if write(row) is not None), {})
    column = next((name for name in columns if name in row and _depends_on_column(write, row, name)), "answer")
    return Writer(write, column, _script_attribute(reward, "NEAR_MISS"))


def gold_error(reward: LoadedReward, row: Row) -> str:
    """Return the ValueError message of the script's `GOLD` on a row whose gold answer is of another kind, or ''."""
    try:
        _script_attribute(reward, "GOLD")(row)
    except ValueError as error:
        return str(error)
    return ""


def _depends_on_column(write: Callable[[Row], str | None], row: Row, column: str) -> bool:
    return write({**row, column: near_miss(row[column])}) != write(row)


def call_correctness(scorer: Scorer, written: Sequence[Mapping[str, Any]]) -> list[dict[str, Result]]:
    """Score the variants of each row with the correctness component; return variant name -> result, for each row."""
    samples = [sample for by_name in written for sample in by_name.values()]
    results = iter(scorer.results(samples, only=[scorer.correctness])[0])
    return [{name: next(results) for name in by_name} for by_name in written]


def explain_failure(result: Result) -> str:
    """Format why a call failed: `: ValueError: ...` or `: the call took too long`; '' if it did not fail."""
    if result.kind == "timeout":
        return ": the call took too long"
    lines = str(result.value).strip().splitlines() if result.kind == "error" else []
    return f": {lines[-1].strip()}" if lines else ""


NO_SCORE = "gold has no score"


def explain_bad_gold(scores: Mapping[str, float | None], correct_at: float) -> str:
    """Return why gold does not score best, or ''. A variant without a score (None, error, timeout) does not compete."""
    gold = scores["gold"]
    if gold is None:
        return NO_SCORE
    if gold < correct_at:
        return f"gold scores {gold:g}, less than scoring.correct_at {correct_at:g}"
    rivals = [name for name, score in scores.items() if name != "gold" and score is not None and score >= gold]
    return f"{' and '.join(rivals)} score{'s' if len(rivals) == 1 else ''} as much as gold" if rivals else ""


def _bad_gold_error(audit: Audit, name: str, column: str, limit: float) -> RewardError:
    """Build the RewardError for too many bad gold answers, with the first bad rows.

    column: column that holds the gold answers.
    """
    rows = [f"{source_locations.describe_row(uid)}  {what}" for uid, what in list(audit.bad.items())[:SHOWN]]
    if more := len(audit.bad) - len(rows):
        rows.append(f"and {count_noun(more, 'more row', 'more rows')}")
    golds = describe_unusable(audit.unusable) if audit.unusable else f"gold was written {describe_writer(audit.writer)}"
    hint = (
        "see `posttrain reward test RECIPE`; a script may say how its gold looks: `def GOLD(row): return completion`. A"
        " reward that does not judge answers: add one that does, e.g. {use: math.accuracy, weight: 0, correct: true},"
        " or write `scoring.max_bad_gold: 1`"
    )
    if len(audit.unusable) == len(audit.bad):
        hint = (
            f"say which column holds the answers, `data.columns: {{{column}: COLUMN}}`, or remove these rows; to train"
            " on the others all the same, raise `scoring.max_bad_gold`"
        )
    elif len(audit.bad) == audit.checked and set(audit.bad.values()) == {NO_SCORE}:
        hint = f"{name} returned None for every gold: is a `return` missing in the script? Else {hint}"
    what = f"gold does not score best on {len(audit.bad)} of {count_noun(audit.checked, 'row')}"
    return RewardError(
        f"{what} (scoring.max_bad_gold {limit:g})",
        where=f"reward {name}",
        allowed="\n  ".join([golds, *rows]),
        hint=hint,
    )
