"""Which answers of one prompt make pairs, by the name of a builder: from records of completions, whoever wrote them.

A pool is all answers to one prompt, each a record with `source`: `own` (the policy's), or `past`, `future`, `teacher`,
`gold`. Every builder returns places in the pool, and where it finds no pair the reason in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from posttrain import source_locations
from posttrain.data import pairs
from posttrain.data.guidance import guided_pairs
from posttrain.errors import DataError
from posttrain.recipe.builder_keys import Builder

Record = Mapping[str, Any]
Flag = Literal["consistent", "repetitive", "reflective"]


class Found(NamedTuple):
    """(chosen, rejected) places in the pool; `why` there are none."""

    choices: list[tuple[int, int]]
    why: str = ""


@dataclass(frozen=True)
class Options:
    """What the builders may be told."""

    max_pairs: int = 10
    prefer_teacher: bool = True
    min_positive: float = 5.0
    margin: float = 2.0
    margin_student: float = 1.0
    min_length: float = 0.0
    flags: Mapping[Flag, str] = field(default_factory=dict)  # name of the reward component that says it


def build(pool: list[Record], builder: Builder, options: Options) -> Found:
    """The pairs of one prompt. `broken_format` adds the broken answers to the pool."""
    own = _of(pool, "own")
    if builder not in ("gold_vs_own", "versus_past") and own and all(_cut(pool[i]) for i in own):
        return Found([], "all answers truncated")
    found = _BUILDERS[builder](pool, options)
    return found if found.choices else Found([], found.why or "no pair by the builder's rules")


def _right_wrong(pool: list[Record], options: Options) -> Found:
    own = _once(pool, _of(pool, "own"))
    table = _table(pool, own, "correct"), _table(pool, own, "tokens"), [[_cut(pool[i]) for i in own]]
    choices = pairs.right_wrong(*table, max_pairs=options.max_pairs)
    return Found([(own[c.chosen], own[c.rejected]) for c in choices], _one_kind(pool, own))


def _short_long(pool: list[Record], options: Options) -> Found:
    del options
    own = _of(pool, "own")
    table = _table(pool, own, "correct"), _table(pool, own, "tokens"), [[_cut(pool[i]) for i in own]]
    choices = pairs.short_long(*table)
    right = any(pool[i]["correct"] for i in own)
    return Found(
        [(own[c.chosen], own[c.rejected]) for c in choices],
        "right answers of one length" if right else "no right answer",
    )


def _best_worst(pool: list[Record], options: Options) -> Found:
    del options
    own = _of(pool, "own")
    judged = pairs.best_worst([[_votes(pool[i]) for i in own]])
    if not judged.keep[0]:
        return Found([], "all scores equal")
    return Found([(own[judged.chosen[0]], own[judged.rejected[0]])])


def _tournament(pool: list[Record], options: Options) -> Found:
    """INPO: the first 2^m different answers with a score play; i beats j with chance sigmoid(score_i - score_j)."""
    del options
    able = [i for i in _once(pool, _of(pool, "own")) if _votes(pool[i])[0] is not None]
    if len(able) < 2:
        return Found([], "fewer than two different answers with a score")
    players = able[: 1 << (len(able).bit_length() - 1)]
    found = pairs.tournament(pairs.win_rates([[pool[i]["reward"] for i in players]]).pairwise[0])
    if not found.keep:
        return Found([], "all scores equal")
    return Found([(players[found.chosen], players[found.rejected])])


def _large_margin(pool: list[Record], options: Options) -> Found:
    """DNO: a truncated answer counts as defective."""
    places = [i for i in _of(pool, "own", "teacher") if _score(pool[i], "reward") is not None]
    choices = pairs.large_margin(
        [pool[i]["reward"] for i in places],
        [pool[i]["source"] == "teacher" for i in places],
        [_cut(pool[i]) or _flag(pool[i], "repetitive", options, False) for i in places],
        min_positive=options.min_positive,
        margin=options.margin,
        margin_student=options.margin_student,
    )
    return Found([(places[i], places[j]) for i, j in choices], "no score high enough above another")


def _build_verified_pairs(pool: list[Record], options: Options) -> Found:
    """Light-R1: every own wrong answer against the teacher's right one, or the first own right one."""
    own, teacher = (
        _once(pool, _of(pool, "own")),
        [i for i in _of(pool, "teacher") if _right(pool[i]) and not _cut(pool[i])],
    )
    rows = pairs.own_failures(
        _table(pool, own, "correct"),
        [bool(teacher)],
        [[_cut(pool[i]) for i in own]],
        prefer_teacher=options.prefer_teacher,
    )
    choices = [(teacher[0] if chosen == -1 else own[chosen], own[wrong]) for _, _, chosen, wrong in rows]
    return Found(choices, _one_kind(pool, own))


def _after_verification(pool: list[Record], options: Options) -> Found:
    """VerIPO: truncated answers count as too short to be good, and are never rejected."""
    own = [i for i in _of(pool, "own") if not _cut(pool[i])]

    def read_flags(name: Flag, default: bool) -> list[list[bool]]:
        return [[_flag(pool[i], name, options, default) for i in own]]

    rows = pairs.after_verification(
        _table(pool, own, "correct"),
        read_flags("consistent", True),
        read_flags("repetitive", False),
        read_flags("reflective", False),
        _table(pool, own, "tokens"),
        min_length=options.min_length,
    )
    return Found([(own[chosen], own[wrong]) for _, _, chosen, wrong in rows], _one_kind(pool, own))


def _temporal(pool: list[Record], options: Options) -> Found:
    """Temporal self-rewarding: phase 2 where there are answers of the future, phase 1 without."""
    del options
    own, past, future = ([i for i in _of(pool, s) if _votes(pool[i])[0] is not None] for s in ("own", "past", "future"))
    if not own or not past:
        return Found([], "an answer of the policy or of the past is missing or truncated")
    ahead = future or own  # answers that are no better change nothing: phase 1
    scores = ([[float(pool[i]["reward"]) for i in places]] for places in (own, past, ahead))
    found = pairs.past_and_future(*scores)
    if not found.phase2_keep[0]:
        return Found([], "nothing scores above the rejected answer")
    chosen_from = ahead if found.phase2_chosen_source[0] == 2 else own
    rejected_from = past if found.phase1_rejected_source[0] else own
    return Found([(chosen_from[found.phase2_chosen[0]], rejected_from[found.phase1_rejected[0]])])


def _versus_past(pool: list[Record], options: Options) -> Found:
    """XPO: one answer of the policy and one of the reference each, the better score chosen."""
    both = zip(_of(pool, "own"), _of(pool, "past"), strict=False)  # as many as the fewer have
    scored = [(a, b, _score(pool[a], "reward"), _score(pool[b], "reward")) for a, b in both]
    ranked = [((a, b) if x > y else (b, a)) for a, b, x, y in scored if x is not None and y is not None and x != y]
    return Found([c for c in ranked if not _cut(pool[c[0]])][: options.max_pairs], "all scores equal")


def _gold_vs_own(pool: list[Record], options: Options) -> Found:
    """SePPO, SPIN: the answer of the data over the policy's own."""
    gold = _of(pool, "gold")
    if not gold:
        return Found([], "no `completion` in the row")
    return Found([(gold[0], i) for i in _once(pool, _of(pool, "own"))][: options.max_pairs])


def _broken_format(pool: list[Record], options: Options) -> Found:
    """SPECS: a right, well-formed answer over itself with its format broken, another way each time."""
    choices: list[tuple[int, int]] = []
    right = [i for i in _once(pool, _of(pool, "own")) if _right(pool[i]) and _well_formed(pool[i]["completion"])]
    for number, place in enumerate(right[: options.max_pairs]):
        text = pool[place]["completion"]
        broken = pairs.format_pair(text, _well_formed, _read_answer_tag, len(str(pool[place]["uid"])) + number)
        if broken is not None:
            choices.append((place, len(pool)))
            pool.append({**pool[place], "completion": broken, "source": "broken", "reward": None})
    return Found(choices, "no right, well-formed answer")


def _build_guided_pairs(pool: list[Record], options: Options) -> Found:
    """Agent-RLVR: `teacher` holds the attempts with guidance in the prompt; the pair's prompt is that without it."""
    del options
    own, guided = _once(pool, _of(pool, "own")), _once(pool, _of(pool, "teacher"))
    places = {"first": own, "guided": guided}
    rows = guided_pairs(_table(pool, own, "correct"), _table(pool, guided, "correct"))
    choices = [(guided[row.chosen], places[row.rejected_source][row.rejected]) for row in rows]
    return Found(choices, "no guided attempt was right" if not any(_right(pool[i]) for i in guided) else "no failure")


_BUILDERS: dict[Builder, Callable[[list[Record], Options], Found]] = {
    "right_wrong": _right_wrong,
    "short_long": _short_long,
    "best_worst": _best_worst,
    "tournament": _tournament,
    "large_margin": _large_margin,
    "verified": _build_verified_pairs,
    "after_verification": _after_verification,
    "temporal": _temporal,
    "versus_past": _versus_past,
    "gold_vs_own": _gold_vs_own,
    "broken_format": _broken_format,
    "guided": _build_guided_pairs,
}


def _of(pool: Sequence[Record], *sources: str) -> list[int]:
    return [i for i, record in enumerate(pool) if record["source"] in sources]


def _once(pool: Sequence[Record], places: Sequence[int]) -> list[int]:
    """The places of different texts, each text's first: an answer given twice makes no second pair."""
    first: dict[str, int] = {}
    for place in places:
        first.setdefault(pool[place]["completion"].strip(), place)
    return list(first.values())


def _cut(record: Record) -> bool:
    return bool(record["finish"] == "length")


def _right(record: Record) -> bool:
    return bool(_score(record, "correct"))


def _table(pool: Sequence[Record], places: Sequence[int], key: str) -> list[list[Any]]:
    return [[_score(pool[i], key) for i in places]]


def _votes(record: Record) -> list[float | None]:
    """Its reward as the only judgement; a truncated answer has none."""
    return [None if _cut(record) else _score(record, "reward")]


def _score(record: Record, key: str) -> Any:
    if key not in record:
        raise DataError(
            f"this builder needs `{key}` of every completion",
            where=source_locations.row(record["uid"]),
            hint="those of `posttrain eval` have it; those of `generate` are graded by a pairs stage with rewards",
        )
    return record[key]


def _flag(record: Record, name: Flag, options: Options, default: bool) -> bool:
    component = options.flags.get(name)
    if component is None:
        return default
    scores = record.get("scores") or {}
    if component not in scores:
        raise DataError(f"no reward `{component}` in the completions", allowed=f"theirs: {', '.join(scores) or 'none'}")
    return bool(scores[component])


def _one_kind(pool: Sequence[Record], own: Sequence[int]) -> str:
    judged = [bool(pool[i]["correct"]) for i in own if pool[i].get("correct") is not None and not _cut(pool[i])]
    return "no right answer" if not any(judged) else "no wrong answer" if all(judged) else ""


def _well_formed(text: str) -> bool:
    try:
        pairs.broken_formats(text)
    except DataError:
        return False
    return re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", text, re.DOTALL) is not None


def _read_answer_tag(text: str) -> str | None:
    """What stands in the answer tags."""
    found = re.search(r"<answer>(.+?)</answer>", text, re.DOTALL)
    return found[1].strip() if found else None
