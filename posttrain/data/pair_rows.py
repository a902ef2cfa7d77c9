"""Preference rows from graded completions, with a report of prompts and pairs that were left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.data import pairs
from posttrain.data.messages import get_answer
from posttrain.data.pair_builders import Options, Record, build
from posttrain.data.pairs import Texts
from posttrain.data.rows import format_causes
from posttrain.errors import DataError
from posttrain.recipe.builder_keys import OTHERS, Builder

Row = dict[str, Any]

RECORD = ("uid", "completion", "finish", "tokens")  # keys of a completion record that every builder reads
_NO_RECORD = "give the completions.jsonl of a `posttrain eval` or `posttrain generate`"


@dataclass
class PairRows:
    """Rows for `posttrain dpo`, and dropped uids by cause.

    dropped: cause -> uids of the prompts without a pair, and one uid for each dropped pair.
    """

    rows: list[Row]
    dropped: dict[str, list[str]] = field(default_factory=dict)

    @property
    def longer_chosen(self) -> float:
        """Share of pairs whose chosen side is longer; far from 1/2, length alone separates the sides."""
        return sum(length_gap(row) > 0 for row in self.rows) / max(len(self.rows), 1)


def pair_rows(
    sources: Mapping[str, Mapping[str, Any]],
    records: Sequence[Record],
    builder: Builder = "right_wrong",
    *,
    others: Mapping[str, Sequence[Record]] | None = None,
    options: Options | None = None,
    balance_lengths: bool = False,
    max_gap: float | None = None,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> PairRows:
    """Build preference pairs from each prompt's completions: the source row plus chosen and rejected.

    sources: uid -> row. records: uid, completion, finish, tokens, reward and correct of each completion. others:
    records of other policies (past, future, teacher), for builders that read them. Truncated completions are never
    chosen. Each row also gets, for both sides, _score (reward), _win (win rate among the policy's rewards for the
    prompt), _tokens and _source, and for `versus_past` ref_sample_is_chosen. max_gap: drops pairs whose longer side has
    more than this times the tokens of the shorter one. earlier: rows of earlier rounds, which are not built again.

    Raises DataError if no pair is left or a completion belongs to no row.
    """
    found = PairRows([])
    for uid, pool in _collect_pools(sources, records, builder, others or {}).items():
        made = build(pool, builder, options or Options())
        if not made.choices:
            found.dropped.setdefault(f"prompts: {made.reason}", []).append(uid)
        for chosen, rejected in made.choices:
            found.rows.append({**_build_row(sources[uid], pool, chosen, rejected), "uid": uid})
    kept = [row for row in found.rows if row["chosen"].strip() and row["rejected"].strip()]
    _keep_rows(found, kept, "pairs: an empty side")
    _drop_known(found, earlier)
    if max_gap is not None:
        lengths = ((row, _lengths(row)) for row in found.rows)
        kept = [row for row, sides in lengths if max(sides) / max(min(sides), 1) <= max_gap]
        _keep_rows(found, kept, "pairs: lengths too far apart")
    if balance_lengths:
        _keep_rows(found, pairs.balance_by_length(found.rows, length_gap), "pairs: left out to balance lengths")
    if not found.rows:
        raise DataError(
            f"no pair is left: {format_causes(found.dropped) or 'there are no completions'}",
            hint=_hint(found.dropped),
        )
    found.rows = [{key: value for key, value in row.items() if key != "uid"} for row in found.rows]
    return found


def length_gap(row: Mapping[str, Any]) -> float:
    """Return the chosen side's length minus the rejected side's, in tokens (characters if unknown)."""
    chosen, rejected = _lengths(row)
    return chosen - rejected


def _lengths(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lengths of the chosen and rejected side."""
    tokens = row["chosen_tokens"], row["rejected_tokens"]
    return tokens if None not in tokens else (len(row["chosen"]), len(row["rejected"]))


def _collect_pools(
    sources: Mapping[str, Mapping[str, Any]],
    records: Sequence[Record],
    builder: Builder,
    others: Mapping[str, Sequence[Record]],
) -> dict[str, list[Record]]:
    """Return uid -> all answers to that prompt, in the order of the policy's records."""
    reads = OTHERS.get(builder, {})
    if missing := [other for other, needed in reads.items() if needed and other not in others]:
        raise DataError(f"builder {builder} needs completions of `{missing[0]}`")
    if unread := others.keys() - reads.keys():
        raise DataError(f"builder {builder} reads no completions of `{min(unread)}`")
    pools: dict[str, list[Record]] = {}
    for source, given in {"own": records, **others}.items():
        for number, record in enumerate(given, start=1):
            if lacking := [key for key in RECORD if key not in record]:
                raise DataError(f"completion {number} has no {', '.join(lacking)}", hint=_NO_RECORD)
            uid = str(record["uid"])
            if uid not in sources:
                raise DataError(
                    f"no row `{uid}` in the recipe's data", hint="give the recipe that sampled these completions"
                )
            pools.setdefault(uid, []).append({**record, "source": source})
    for uid, pool in pools.items():
        if builder == "gold_vs_own" and (answer := _gold_answer(sources[uid])) is not None:
            gold = {"completion": answer, "finish": "stop", "tokens": None, "reward": None}
            pool.append({**gold, "uid": uid, "source": "gold"})
    return pools


def _gold_answer(row: Mapping[str, Any]) -> str | None:
    """Return the row's completion as a text; None if it has none or the completion is more than a text."""
    completion = row.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and completion[0]["role"] == "assistant":
        completion = get_answer(completion)
    return completion if isinstance(completion, str) else None


def _build_row(source: Mapping[str, Any], pool: Sequence[Record], chosen: int, rejected: int) -> Row:
    """Return the source row with both sides of a pair and their scores."""
    scores = [r.get("reward") for r in pool]
    rated = [i for i, score in enumerate(scores) if score is not None and pool[i]["source"] == "own"]
    wins = dict(zip(rated, pairs.win_rates([[scores[i] for i in rated]]).win[0], strict=True)) if rated else {}
    row = {key: value for key, value in source.items() if key not in ("uid", "completion")}
    for side, index in (("chosen", chosen), ("rejected", rejected)):
        record = pool[index]
        row |= {side: record["completion"], f"{side}_tokens": record["tokens"]}
        row |= {f"{side}_score": scores[index], f"{side}_win": wins.get(index), f"{side}_source": record["source"]}
    if {"own", "past"} == {row["chosen_source"], row["rejected_source"]}:
        row["ref_sample_is_chosen"] = row["chosen_source"] == "past"
    return row


def _drop_known(found: PairRows, earlier: Sequence[Mapping[str, Any]]) -> None:
    """Drop pairs that repeat or contradict another pair, or repeat one of an earlier round."""
    causes = pairs.repeats([_texts(row) for row in found.rows], [_texts(row) for row in earlier])
    for row, cause in zip(found.rows, causes, strict=True):
        if cause:
            found.dropped.setdefault(f"pairs: {cause}", []).append(row["uid"])
    found.rows = [row for row, cause in zip(found.rows, causes, strict=True) if cause is None]


def _texts(row: Mapping[str, Any]) -> Texts:
    """Return prompt, chosen and rejected as texts."""
    prompt = row["prompt"] if row.get("prompt") is not None else row.get("messages")
    return Texts(str(prompt), row["chosen"], row["rejected"])


def _keep_rows(found: PairRows, kept: list[Row], cause: str) -> None:
    """Keep the given rows and record the others as dropped for `cause`."""
    ids = {id(row) for row in kept}
    dropped = [row["uid"] for row in found.rows if id(row) not in ids]
    if dropped:
        found.dropped.setdefault(cause, []).extend(dropped)
    found.rows = kept


def _hint(dropped: Mapping[str, Sequence[str]]) -> str:
    """Return a hint for the most frequent cause."""
    worst = max(dropped, key=lambda cause: len(dropped[cause]), default="")
    return {
        "prompts: all answers truncated": "raise sampling.max_new_tokens",
        "prompts: no wrong answer": "take harder prompts, or a higher temperature",
        "prompts: no right answer": "take easier prompts, or more samples",
        "pairs: repeated": "all were made in an earlier round: take new prompts, or more samples",
        "prompts: all scores equal": "take more samples, or a reward with more values",
    }.get(worst, "")
