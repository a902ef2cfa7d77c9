"""Does the reward know a right answer when it sees one? Asked before training, on the run's own rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain import whereabouts
from posttrain.errors import Problem, RewardError, counted
from posttrain.verify.load import LoadedReward, check_columns, load_script
from posttrain.verify.score import Scorer, score_of
from posttrain.verify.variants import WRITERS, Row, Writer, near_miss, variants

AUDITED_ROWS = 64
SHOWN = 5


@dataclass(frozen=True)
class Audit:
    """What became of the gold answers. checked: rows that have one; bad: uid -> what is wrong; skipped: why."""

    checked: int
    bad: Mapping[str, str]
    writer: str = ""
    skipped: str = ""

    @property
    def summary(self) -> str:
        if self.skipped:
            return f"gold not audited: {self.skipped}"
        return (
            f"gold scores best on {self.checked - len(self.bad)} of {counted(self.checked, 'row')} (as {self.writer})"
        )


def audit_gold(scorer: Scorer, rows: Sequence[Row]) -> Audit:
    """Check that gold is right, and scores above every wrong completion, by the correctness component.

    Up to 64 rows, evenly spaced. Raises RewardError when a column is missing, the contract is broken, or gold is not
    best on a larger share of rows than scoring.max_bad_gold. A correctness component that reads no data column cannot
    know gold, and neither can a judge: they are not audited.
    """
    check_columns(scorer.rewards, {column for row in rows for column in row})
    reward = scorer.rewards[scorer.correctness]
    if not reward.knows_gold:
        why = "is a judge" if reward.is_judge else "reads no data column"
        return Audit(0, {}, skipped=f"{reward.name} {why}")
    chosen = spread(rows, AUDITED_ROWS)
    refuse_slow(scorer, chosen)
    name, write = choose_writer(scorer, chosen)
    found = {i: v for i, row in enumerate(chosen) if (v := variants(row, write, i)) is not None}
    if not found:
        return Audit(0, {}, skipped="no row has an `answer`; GOLD(row) in the reward's script may write it")
    scores = grade(scorer, list(found.values()))
    bad = {
        str(chosen[i].get("uid", i)): wrong
        for i, by_name in zip(found, scores, strict=True)
        if (wrong := what_is_wrong(by_name, scorer.scoring.correct_at))
    }
    audit = Audit(len(found), bad, name)
    if len(bad) > scorer.scoring.max_bad_gold * len(found):
        raise _refusal(audit, reward.name, scorer.scoring.max_bad_gold)
    return audit


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """At most `count` rows, evenly spaced."""
    if len(rows) <= count:
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def refuse_slow(scorer: Scorer, rows: Sequence[Row]) -> None:
    """Raise RewardError when every way to write the first gold answer takes longer than a call may."""
    row = next((row for row in rows if WRITERS["plain"](row) is not None), None)
    if row is None:
        return
    golds = [v["gold"] for write in WRITERS.values() if (v := variants(row, write)) is not None]
    results = scorer.results(golds, only=[scorer.correctness])[0]
    if all(result.kind == "timeout" for result in results):
        reward, section = scorer.rewards[scorer.correctness], scorer.sections[scorer.correctness]
        raise RewardError(
            f"every gold answer of {whereabouts.row(row.get('uid', 0))} takes longer than {reward.limit(section):g} s",
            where=f"reward {reward.name}",
            hint="make it faster, or raise its `timeout_s`",
        )


def choose_writer(scorer: Scorer, rows: Sequence[Row]) -> tuple[str, Writer]:
    """The script's own `GOLD(row) -> completion`, or the way of marking an answer that does best on four rows."""
    own = own_writer(scorer.rewards[scorer.correctness], rows)
    if own is not None:
        return "GOLD of the script", own
    sample = [row for row in rows if WRITERS["plain"](row) is not None][:4]
    ranks: dict[str, tuple[int, float]] = {}  # rows that it does well on, then what gold earns in it
    for name, write in WRITERS.items():
        written = [v for row in sample if (v := variants(row, write)) is not None]
        scores = grade(scorer, written)
        earned = math.fsum(s["gold"] or 0.0 for s in scores)
        ranks[name] = (sum(not what_is_wrong(s, scorer.scoring.correct_at) for s in scores), earned)
    best = max(ranks, key=lambda name: ranks[name])
    return best, WRITERS[best]


def own_writer(reward: LoadedReward, rows: Sequence[Row]) -> Writer | None:
    """`GOLD` of the reward's script: a function, or by name of the reward one for each.

    Its column is `answer`, or the one that gold follows of those that the reward reads.
    """
    left, _, name = reward.target.rpartition(":")
    module: Mapping[str, Any] = load_script(Path(left)) if left.endswith(".py") else vars(sys.modules[left])
    write = module.get("GOLD")
    write = write.get(name) if isinstance(write, Mapping) else write
    if not callable(write):
        return None
    columns = ("answer", *reward.columns, *reward.optional_columns)
    row = next((row for row in rows if write(row) is not None), {})
    column = next((name for name in columns if name in row and _follows(write, row, name)), "answer")
    return Writer(write, column)


def _follows(write: Callable[[Row], str | None], row: Row, column: str) -> bool:
    return write({**row, column: near_miss(row[column])}) != write(row)


def grade(scorer: Scorer, written: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None]]:
    """Name of a variant -> its score by the correctness component, for each row."""
    samples = [sample for by_name in written for sample in by_name.values()]
    results = iter(scorer.results(samples, only=[scorer.correctness])[0])
    return [{name: score_of(next(results)) for name in by_name} for by_name in written]


def what_is_wrong(scores: Mapping[str, float | None], correct_at: float) -> str:
    """Why gold does not score best, or ''. A variant without a score (None, error, time-out) is no rival."""
    gold = scores["gold"]
    if gold is None:
        return "gold has no score"
    if gold < correct_at:
        return f"gold scores {gold:g}, right is {correct_at:g}"
    rivals = [name for name, score in scores.items() if name != "gold" and score is not None and score >= gold]
    return f"{' and '.join(rivals)} score{'s' if len(rivals) == 1 else ''} as much as gold" if rivals else ""


def _refusal(audit: Audit, name: str, limit: float) -> RewardError:
    shown = [Problem(whereabouts.row(uid), what) for uid, what in list(audit.bad.items())[:SHOWN]]
    head = Problem(
        f"reward {name}",
        f"gold does not score best on {len(audit.bad)} of {counted(audit.checked, 'row')}"
        f" (scoring.max_bad_gold {limit:g})",
        f"gold was written as: {audit.writer}",
        "see `posttrain reward test RECIPE`; a script may say how its gold looks: `def GOLD(row): return completion`",
    )
    return RewardError.of([head, *shown])
