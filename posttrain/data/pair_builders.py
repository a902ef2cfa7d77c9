"""Pair builders: select (chosen, rejected) pairs among the answers to one prompt, from records of completions.

A pool is the list of all answers to one prompt, each a record with `source`: `own` (the policy's), `past`, `future`,
`teacher` or `gold`. Every builder returns indices into the pool, or the reason why it finds no pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from posttrain import source_locations
from posttrain.data import pairs
from posttrain.errors import DataError
from posttrain.recipe.builder_keys import Builder

Record = Mapping[str, Any]
Flag = Literal["consistent", "repetitive", "reflective"]

Attempts = Sequence[Sequence[bool | float | None]]  # outcomes of the attempts at each task; None = not judged
Source = Literal["guided", "first"]


class BuildResult(NamedTuple):
    """(chosen, rejected) indices into the pool; `reason` explains an empty list."""

    choices: list[tuple[int, int]]
    reason: str = ""


@dataclass(frozen=True)
class Options:
    """Options of the pair builders."""

    max_pairs: int = 10
    prefer_teacher: bool = True
    min_positive: float = 5.0
    margin: float = 2.0
    margin_student: float = 1.0
    min_length: float = 0.0
    flags: Mapping[Flag, str] = field(default_factory=dict)  # flag -> name of the reward component that holds it


def build(pool: list[Record], builder: Builder, options: Options) -> BuildResult:
    """Return the pairs of one prompt. `broken_format` appends the broken answers to the pool."""
    own = _indices_of(pool, "own")
    if builder not in ("gold_vs_own", "versus_past") and own and all(_is_truncated(pool[i]) for i in own):
        return BuildResult([], "all answers truncated")
    found = _BUILDERS[builder](pool, options)
    return found if found.choices else BuildResult([], found.reason or "no pair by the builder's rules")


def _right_wrong(pool: list[Record], options: Options) -> BuildResult:
    """Pair correct answers with wrong ones."""
    own = _unique_texts(pool, _indices_of(pool, "own"))
    correct, lengths = _score_table(pool, own, "correct"), _score_table(pool, own, "tokens")
    truncated = [[_is_truncated(pool[i]) for i in own]]
    choices = pairs.right_wrong(correct, lengths, truncated, max_pairs=options.max_pairs)
    return BuildResult([(own[c.chosen], own[c.rejected]) for c in choices], _explain_one_sided(pool, own))


def _short_long(pool: list[Record], options: Options) -> BuildResult:
    """Pair the shortest correct answer with the longest correct one."""
    del options
    own = _indices_of(pool, "own")
    correct, lengths = _score_table(pool, own, "correct"), _score_table(pool, own, "tokens")
    truncated = [[_is_truncated(pool[i]) for i in own]]
    choices = pairs.short_long(correct, lengths, truncated)
    right = any(pool[i]["correct"] for i in own)
    return BuildResult(
        [(own[c.chosen], own[c.rejected]) for c in choices],
        "right answers of one length" if right else "no right answer",
    )


def _best_worst(pool: list[Record], options: Options) -> BuildResult:
    """Pair the answer with the highest reward with the one with the lowest."""
    del options
    own = _indices_of(pool, "own")
    judged = pairs.best_worst([[_judgment(pool[i]) for i in own]])
    if not judged.keep[0]:
        return BuildResult([], "all scores equal")
    return BuildResult([(own[judged.chosen[0]], own[judged.rejected[0]])])


def _tournament(pool: list[Record], options: Options) -> BuildResult:
    """Pair the winner and the loser of a tournament (INPO).

    The players are the first 2^m distinct scored answers; i beats j with probability sigmoid(score_i - score_j).
    """
    del options
    scored = [i for i in _unique_texts(pool, _indices_of(pool, "own")) if _judgment(pool[i])[0] is not None]
    if len(scored) < 2:
        return BuildResult([], "fewer than two different answers with a score")
    players = scored[: 1 << (len(scored).bit_length() - 1)]
    found = pairs.tournament(pairs.win_rates([[pool[i]["reward"] for i in players]]).pairwise[0])
    if not found.keep:
        return BuildResult([], "all scores equal")
    return BuildResult([(players[found.chosen], players[found.rejected])])


def _large_margin(pool: list[Record], options: Options) -> BuildResult:
    """Pair answers with a large score margin (DNO); truncated answers count as defective."""
    indices = [i for i in _indices_of(pool, "own", "teacher") if _read_score(pool[i], "reward") is not None]
    choices = pairs.large_margin(
        [pool[i]["reward"] for i in indices],
        [pool[i]["source"] == "teacher" for i in indices],
        [_is_truncated(pool[i]) or _read_flag(pool[i], "repetitive", options, False) for i in indices],
        min_positive=options.min_positive,
        margin=options.margin,
        margin_student=options.margin_student,
    )
    return BuildResult([(indices[i], indices[j]) for i, j in choices], "no score high enough above another")


def _build_verified_pairs(pool: list[Record], options: Options) -> BuildResult:
    """Pair every wrong own answer with the teacher's correct answer, or the first correct own answer (Light-R1)."""
    own = _unique_texts(pool, _indices_of(pool, "own"))
    teacher = [i for i in _indices_of(pool, "teacher") if _is_correct(pool[i]) and not _is_truncated(pool[i])]
    rows = pairs.own_failures(
        _score_table(pool, own, "correct"),
        [bool(teacher)],
        [[_is_truncated(pool[i]) for i in own]],
        prefer_teacher=options.prefer_teacher,
    )
    choices = [(teacher[0] if chosen == -1 else own[chosen], own[wrong]) for _, _, chosen, wrong in rows]
    return BuildResult(choices, _explain_one_sided(pool, own))


def _after_verification(pool: list[Record], options: Options) -> BuildResult:
    """Pair verified rollouts (VerIPO); truncated answers are neither chosen nor rejected."""
    own = [i for i in _indices_of(pool, "own") if not _is_truncated(pool[i])]

    def read_flags(name: Flag, default: bool) -> list[list[bool]]:
        return [[_read_flag(pool[i], name, options, default) for i in own]]

    rows = pairs.after_verification(
        _score_table(pool, own, "correct"),
        read_flags("consistent", True),
        read_flags("repetitive", False),
        read_flags("reflective", False),
        _score_table(pool, own, "tokens"),
        min_length=options.min_length,
    )
    return BuildResult([(own[chosen], own[wrong]) for _, _, chosen, wrong in rows], _explain_one_sided(pool, own))


def _temporal(pool: list[Record], options: Options) -> BuildResult:
    """Pair past and future answers (temporal self-rewarding): phase 2 with future answers, else phase 1."""
    del options
    own, past, future = (
        [i for i in _indices_of(pool, s) if _judgment(pool[i])[0] is not None] for s in ("own", "past", "future")
    )
    if not own or not past:
        return BuildResult([], "an answer of the policy or of the past is missing or truncated")
    ahead = future or own  # without future answers, own answers reduce phase 2 to phase 1
    scores = ([[float(pool[i]["reward"]) for i in indices]] for indices in (own, past, ahead))
    found = pairs.past_and_future(*scores)
    if not found.phase2_keep[0]:
        return BuildResult([], "nothing scores above the rejected answer")
    chosen_from = ahead if found.phase2_chosen_source[0] == 2 else own
    rejected_from = past if found.phase1_rejected_source[0] else own
    return BuildResult([(chosen_from[found.phase2_chosen[0]], rejected_from[found.phase1_rejected[0]])])


def _versus_past(pool: list[Record], options: Options) -> BuildResult:
    """Pair each answer of the policy with one of the reference (XPO); the higher score is chosen."""
    # the shorter list sets the number of pairs
    both = zip(_indices_of(pool, "own"), _indices_of(pool, "past"), strict=False)
    scored = [(a, b, _read_score(pool[a], "reward"), _read_score(pool[b], "reward")) for a, b in both]
    ranked = [((a, b) if x > y else (b, a)) for a, b, x, y in scored if x is not None and y is not None and x != y]
    return BuildResult([c for c in ranked if not _is_truncated(pool[c[0]])][: options.max_pairs], "all scores equal")


def _gold_vs_own(pool: list[Record], options: Options) -> BuildResult:
    """Pair the row's completion with the policy's answers (SePPO, SPIN)."""
    gold = _indices_of(pool, "gold")
    if not gold:
        return BuildResult([], "no `completion` in the row")
    return BuildResult([(gold[0], i) for i in _unique_texts(pool, _indices_of(pool, "own"))][: options.max_pairs])


def _broken_format(pool: list[Record], options: Options) -> BuildResult:
    """Pair a correct, well-formed answer with itself in a broken format (SPECS); the kind of break rotates."""
    choices: list[tuple[int, int]] = []
    own = _unique_texts(pool, _indices_of(pool, "own"))
    right = [i for i in own if _is_correct(pool[i]) and _well_formed(pool[i]["completion"])]
    for number, index in enumerate(right[: options.max_pairs]):
        text = pool[index]["completion"]
        broken = pairs.format_pair(text, _well_formed, _read_answer_tag, len(str(pool[index]["uid"])) + number)
        if broken is not None:
            choices.append((index, len(pool)))
            pool.append({**pool[index], "completion": broken, "source": "broken", "reward": None})
    return BuildResult(choices, "no right, well-formed answer")


def _build_guided_pairs(pool: list[Record], options: Options) -> BuildResult:
    """Pair guided attempts with failures (Agent-RLVR).

    `teacher` holds the attempts with guidance in the prompt; the pair's prompt is the one without guidance.
    """
    del options
    own, guided = _unique_texts(pool, _indices_of(pool, "own")), _unique_texts(pool, _indices_of(pool, "teacher"))
    indices = {"first": own, "guided": guided}
    rows = guided_pairs(_score_table(pool, own, "correct"), _score_table(pool, guided, "correct"))
    choices = [(guided[row.chosen], indices[row.rejected_source][row.rejected]) for row in rows]
    return BuildResult(
        choices, "no guided attempt was right" if not any(_is_correct(pool[i]) for i in guided) else "no failure"
    )


_BUILDERS: dict[Builder, Callable[[list[Record], Options], BuildResult]] = {
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


def _indices_of(pool: Sequence[Record], *sources: str) -> list[int]:
    """Return the indices of the records from the given sources."""
    return [i for i, record in enumerate(pool) if record["source"] in sources]


def _unique_texts(pool: Sequence[Record], indices: Sequence[int]) -> list[int]:
    """Return the indices of distinct texts, keeping the first of each: a repeated answer yields no second pair."""
    first: dict[str, int] = {}
    for index in indices:
        first.setdefault(pool[index]["completion"].strip(), index)
    return list(first.values())


def _is_truncated(record: Record) -> bool:
    """Return whether the completion ended at the length limit."""
    return bool(record["finish"] == "length")


def _is_correct(record: Record) -> bool:
    """Return whether the answer is graded correct."""
    return bool(_read_score(record, "correct"))


def _score_table(pool: Sequence[Record], indices: Sequence[int], key: str) -> list[list[Any]]:
    """Return one score column as a table with a single prompt, as the functions of `pairs` take it."""
    return [[_read_score(pool[i], key) for i in indices]]


def _judgment(record: Record) -> list[float | None]:
    """Return the reward as the only judgment of an answer; None for a truncated answer."""
    return [None if _is_truncated(record) else _read_score(record, "reward")]


def _read_score(record: Record, key: str) -> Any:
    """Return a score of a record. Raises DataError if the record lacks it."""
    if key not in record:
        raise DataError(
            f"this builder needs `{key}` of every completion",
            where=source_locations.describe_row(record["uid"]),
            hint="`posttrain eval` writes it; completions of `generate` are graded by a pairs stage with rewards",
        )
    return record[key]


def _read_flag(record: Record, name: Flag, options: Options, default: bool) -> bool:
    """Return a flag of a record from the reward component that holds it, or `default` if no component is set."""
    component = options.flags.get(name)
    if component is None:
        return default
    scores = record.get("scores") or {}
    if component not in scores:
        raise DataError(
            f"no reward `{component}` in the completions", allowed=f"rewards: {', '.join(scores) or 'none'}"
        )
    return bool(scores[component])


def _explain_one_sided(pool: Sequence[Record], own: Sequence[int]) -> str:
    """Return the reason if all judged answers are correct or all are wrong, else ""."""
    judged = [
        bool(pool[i]["correct"]) for i in own if pool[i].get("correct") is not None and not _is_truncated(pool[i])
    ]
    return "no right answer" if not any(judged) else "no wrong answer" if all(judged) else ""


def _well_formed(text: str) -> bool:
    """Return whether a text is <think>...</think> <answer>...</answer> and can be broken."""
    try:
        pairs.broken_formats(text)
    except DataError:
        return False
    return re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", text, re.DOTALL) is not None


def _read_answer_tag(text: str) -> str | None:
    """Return the text inside the answer tags, or None."""
    found = re.search(r"<answer>(.+?)</answer>", text, re.DOTALL)
    return found[1].strip() if found else None


# --- pairs from tasks that an agent solves only with guidance (Agent-RLVR) ---


class GuidedPair(NamedTuple):
    """A passed guided attempt (chosen) and a failed attempt at the same task (rejected), by task and attempt index."""

    task: int
    chosen_source: Source
    chosen: int
    rejected_source: Source
    rejected: int


def guided_pairs(first_pass: Attempts, guided_pass: Attempts) -> list[GuidedPair]:
    """Pair passed guided attempts in order with failed ones: failed guided attempts first, then failed first attempts.

    Each attempt is used once. A task without a passed guided attempt or without a failure yields no pair; surplus
    passes are not used. The order is this project's guess: the paper does not state it.
    """
    built = []
    for task, (first, guided) in enumerate(zip(first_pass, guided_pass, strict=True)):
        wins = [n for n, ok in enumerate(guided) if ok]
        failures: list[tuple[Source, int]] = [("guided", n) for n, ok in enumerate(guided) if ok is not None and not ok]
        failures += [("first", n) for n, ok in enumerate(first) if ok is not None and not ok]
        built += [GuidedPair(task, "guided", win, *failure) for win, failure in zip(wins, failures, strict=False)]
    return built
