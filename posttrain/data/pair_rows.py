"""From graded completions of an evaluation to preference rows, with an account of what made no pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.data import pairs
from posttrain.data.pairs import Choice, Texts
from posttrain.errors import DataError

Builder = Literal["right_wrong", "short_long", "best_worst"]
Record = Mapping[str, Any]


@dataclass
class PairRows:
    """Rows for `posttrain dpo`, and how many prompts or pairs were left out by cause."""

    rows: list[dict[str, Any]]
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def longer_chosen(self) -> float:
        """Share of pairs whose chosen side has more tokens: far from 1/2, length alone tells the sides apart."""
        longer = sum(row["chosen_tokens"] > row["rejected_tokens"] for row in self.rows)
        return longer / max(len(self.rows), 1)


def pair_rows(
    sources: Mapping[str, Mapping[str, Any]],
    records: Sequence[Record],
    builder: Builder = "right_wrong",
    *,
    max_pairs: int = 10,
    balance_lengths: bool = False,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> PairRows:
    """Pairs of each prompt's completions, as its source row with chosen and rejected.

    sources: uid -> row. records: uid, completion, finish, tokens, reward and correct of each completion. right_wrong:
    right over wrong ones, `max_pairs` a prompt; short_long: the shortest right one over the longest; best_worst: the
    best reward over the worst. Truncated completions are never chosen, and best_worst leaves them out. Each row also
    gets chosen_score and rejected_score (rewards), chosen_win and rejected_win (win rates among the prompt's rewards),
    chosen_tokens and rejected_tokens. `earlier`: rows of earlier rounds, not to be made again.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record["uid"]), []).append(record)
    found = PairRows([])
    for uid, group in groups.items():
        if uid not in sources:
            raise DataError(f"no row `{uid}` in the recipe's data", hint="give the recipe that the completions are of")
        choices = _choices(group, builder, max_pairs)
        if not choices:
            _count(found, "prompts without a pair", 1)
        found.rows += [_row(sources[uid], group, choice) for choice in choices]
    found.rows = _distinct(found, earlier)
    if balance_lengths:
        kept = pairs.length_balanced(found.rows, lambda row: row["chosen_tokens"] - row["rejected_tokens"])
        _count(found, "pairs left out to balance lengths", len(found.rows) - len(kept))
        found.rows = kept
    if not found.rows:
        raise DataError("no pair is left: " + "; ".join(f"{count} {cause}" for cause, count in found.dropped.items()))
    return found


def _choices(group: Sequence[Record], builder: Builder, max_pairs: int) -> list[Choice]:
    """The pairs of one prompt."""
    lengths = [[r["tokens"] for r in group]]
    cut = [[r["finish"] == "length" for r in group]]
    if builder == "best_worst":
        votes = [[None if r["finish"] == "length" else _score(r, "reward", builder)] for r in group]
        judged = pairs.best_worst([votes])
        return [Choice(0, judged.chosen[0], judged.rejected[0])] if judged.keep[0] else []
    correct = [[_score(r, "correct", builder) for r in group]]
    if builder == "short_long":
        return pairs.short_long(correct, lengths, cut)
    return pairs.right_wrong(correct, lengths, cut, max_pairs=max_pairs)


def _score(record: Record, key: str, builder: str) -> Any:
    if key not in record:
        raise DataError(
            f"builder {builder} needs `{key}` of every completion",
            where=f"row {record['uid']}",
            hint="completions of `posttrain eval` have it; those of `generate` are not graded",
        )
    return record[key]


def _row(source: Mapping[str, Any], group: Sequence[Record], choice: Choice) -> dict[str, Any]:
    scores = [r.get("reward") for r in group]
    scored = [i for i, score in enumerate(scores) if score is not None]
    wins = dict(zip(scored, pairs.win_rates([[scores[i] for i in scored]]).win[0], strict=True)) if scored else {}
    row = {key: value for key, value in source.items() if key not in ("uid", "completion")}
    for side, place in (("chosen", choice.chosen), ("rejected", choice.rejected)):
        record = group[place]
        row |= {side: record["completion"], f"{side}_tokens": record["tokens"]}
        row |= {f"{side}_score": scores[place], f"{side}_win": wins.get(place)}
    return row


def _distinct(found: PairRows, earlier: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows whose texts are new, each once."""
    by_texts = {_texts(row): row for row in reversed(found.rows)}
    kept, dropped = pairs.distinct([_texts(row) for row in found.rows], [_texts(row) for row in earlier])
    for cause, count in dropped.items():
        _count(found, f"pairs: {cause}", count)
    return [by_texts[texts] for texts in kept]


def _texts(row: Mapping[str, Any]) -> Texts:
    prompt = row["prompt"] if row.get("prompt") is not None else row.get("messages")
    return Texts(str(prompt), row["chosen"], row["rejected"])


def _count(found: PairRows, cause: str, number: int) -> None:
    if number:
        found.dropped[cause] = found.dropped.get(cause, 0) + number
