"""Selection of preference pairs among a prompt's answers: pure functions of scores and flags, without tokens or models.

A table has one list for each of B prompts, with one value for each of its G answers; G may differ between prompts.
Answers are named by their index in the group. Ties go to the first answer. None is a missing score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from posttrain.errors import DataError, count_noun

Table = Sequence[Sequence[Any]]
T = TypeVar("T")


class Choice(NamedTuple):
    """One pair of answers to a prompt, by index."""

    prompt: int
    chosen: int
    rejected: int


# --- from verified answers


def right_wrong(
    correct: Table,
    lengths: Table,
    truncated: Table | None = None,
    *,
    max_pairs: int = 10,
    reject_truncated: bool = False,
) -> list[Choice]:
    """Return pairs of a correct and a wrong answer, at most `max_pairs` per prompt; a prompt needs both kinds.

    Pairs of similar length come first, so that length reveals little about the side, and every answer is used once
    before any is reused. A truncated answer is never chosen, and rejected only with `reject_truncated`.
    """
    pairs: list[Choice] = []
    for prompt, flags in enumerate(correct):
        cut = truncated[prompt] if truncated is not None else [False] * len(flags)
        right = [i for i, c in enumerate(flags) if c and not cut[i]]
        wrong = [i for i, c in enumerate(flags) if c is not None and not c and (reject_truncated or not cut[i])]
        pairs += [Choice(prompt, r, w) for r, w in _closest(right, wrong, lengths[prompt])[:max_pairs]]
    return pairs


def _closest(right: Sequence[int], wrong: Sequence[int], lengths: Sequence[float]) -> list[tuple[int, int]]:
    """Return all (right, wrong) pairs by increasing length difference, in rounds that use each answer at most once."""
    remaining = sorted(((r, w) for r in right for w in wrong), key=lambda p: (abs(lengths[p[0]] - lengths[p[1]]), p))
    ordered: list[tuple[int, int]] = []
    while remaining:
        used: set[int] = set()
        later = []
        for pair in remaining:
            if used & set(pair):
                later.append(pair)
            else:
                used |= set(pair)
                ordered.append(pair)
        remaining = later
    return ordered


def short_long(correct: Table, lengths: Table, truncated: Table | None = None, *, min_gap: float = 1.0) -> list[Choice]:
    """Pair the shortest correct answer with the longest correct one, if they differ by at least `min_gap` tokens."""
    pairs: list[Choice] = []
    for prompt, flags in enumerate(correct):
        cut = truncated[prompt] if truncated is not None else [False] * len(flags)
        right = [i for i, c in enumerate(flags) if c and not cut[i]]
        if not right:
            continue
        short, long = (pick(right, key=lambda i: lengths[prompt][i]) for pick in (min, max))
        if lengths[prompt][long] - lengths[prompt][short] >= max(min_gap, 1e-9):
            pairs.append(Choice(prompt, short, long))
    return pairs


class Labeled(NamedTuple):
    """Class labels of reasoning chains and rewards of the predictions [N][G]."""

    labels: list[int]  # 0 correct and from a batch prompt, 1 correct and from a single prompt, 2 wrong
    rewards: list[list[float]]  # of predicted labels: 1 if the prediction equals the label


def concise_labels(correct: Sequence[Any], from_batch: Sequence[Any], predicted: Table) -> Labeled:
    """Label reasoning chains for DRQA (arXiv 2508.17803) and reward correct predictions of these labels.

    Chains from prompts with several questions are naturally short; the model learns to distinguish them from long
    correct and from wrong ones. predicted [N][G], -1 = unparsable. Label letters and the 0/1 reward are recalled from
    the paper, not checked.
    """
    labels = [2 if not c else 0 if b else 1 for c, b in zip(correct, from_batch, strict=True)]
    return Labeled(labels, [[float(p == label) for p in row] for label, row in zip(labels, predicted, strict=True)])


def own_failures(
    correct: Table, teacher_correct: Sequence[Any], truncated: Table | None = None, *, prefer_teacher: bool = True
) -> list[list[int]]:
    """Return Light-R1's semi-on-policy pairs (arXiv 2503.10460).

    Each is [prompt, 1 = chosen is the teacher's, chosen, rejected]. Every own answer that is wrong and not truncated is
    rejected once, against the teacher's answer (chosen -1) if that is correct, else the first correct own answer;
    `prefer_teacher` false swaps the two. The fallback is this project's choice.
    """
    rows: list[list[int]] = []
    for prompt, flags in enumerate(correct):
        cut = truncated[prompt] if truncated is not None else [False] * len(flags)
        own = next((i for i, c in enumerate(flags) if c and not cut[i]), None)
        teacher = -1 if teacher_correct[prompt] else None
        order = (teacher, own) if prefer_teacher else (own, teacher)
        chosen = next((c for c in order if c is not None), None)
        wrong = [i for i, c in enumerate(flags) if not c and not cut[i]]
        rows += [[prompt, int(chosen == -1), chosen, w] for w in wrong if chosen is not None]
    return rows


def after_verification(
    correct: Table, consistent: Table, repetitive: Table, reflective: Table, lengths: Table, *, min_length: float = 0
) -> list[list[int]]:
    """Return VerIPO's pairs from GRPO's own rollouts (arXiv 2505.19000): [prompt, type, chosen, rejected].

    An answer is good if it is correct, consistent with its reasoning, not repetitive, and long enough. Type 0: longest
    good answer over the shortest that is wrong, repetitive or too short. Type 1: longest good answer over the first
    that is correct by luck. Type 2: longest good answer that checks itself over the shortest wrong one that does not.
    The exact selection is this project's choice.
    """
    rows: list[list[int]] = []
    for prompt, size in enumerate(lengths):
        indices = range(len(size))
        right, sound = correct[prompt], consistent[prompt]
        loops, checks = repetitive[prompt], reflective[prompt]
        usable = [not loops[i] and size[i] >= min_length for i in indices]
        good = [i for i in indices if right[i] and sound[i] and usable[i]]
        sides = [
            (good, [i for i in indices if not right[i] or not usable[i]]),
            (good, [i for i in indices if right[i] and not sound[i] and usable[i]][:1]),
            ([i for i in good if checks[i]], [i for i in indices if not right[i] and not checks[i]]),
        ]
        for kind, (better, worse) in enumerate(sides):
            if better and worse:
                chosen = max(better, key=lambda i: size[i])
                rows.append([prompt, kind, chosen, min(worse, key=lambda i: size[i])])
    return rows


# --- from scores and judges


class Judged(NamedTuple):
    """Per prompt; chosen and rejected are -1 if `keep` is 0. A mean is None if no judgment could be parsed."""

    mean_scores: list[list[float | None]]
    chosen: list[int]
    rejected: list[int]
    keep: list[int]


def best_worst(judge_scores: Sequence[Table]) -> Judged:
    """Pair the answers with best and worst mean judgment (self-rewarding, arXiv 2401.10020).

    judge_scores: K judgments [B][N][K], None = unparsable.
    """
    means = [[_mean(votes) for votes in answers] for answers in judge_scores]
    chosen, rejected = [], []
    for row in means:
        scored = [i for i, score in enumerate(row) if score is not None]
        best = max(scored, key=lambda i: row[i] or 0.0, default=-1)
        worst = min(scored, key=lambda i: row[i] or 0.0, default=-1)
        tied = best == worst or row[best] == row[worst]
        chosen.append(-1 if tied else best)
        rejected.append(-1 if tied else worst)
    return Judged(means, chosen, rejected, [int(c >= 0) for c in chosen])


def _mean(votes: Iterable[float | None]) -> float | None:
    """Return the mean of the available values, or None."""
    available = [v for v in votes if v is not None]
    return sum(available) / len(available) if available else None


class Temporal(NamedTuple):
    """Per prompt. Sources: 0 the current model, 1 the initial one, 2 the model trained in phase 1."""

    phase1_chosen: list[int]
    phase1_rejected: list[int]
    phase1_rejected_source: list[int]
    phase1_keep: list[int]
    phase2_chosen: list[int]
    phase2_chosen_source: list[int]
    phase2_keep: list[int]


def past_and_future(scores_current: Table, scores_anchor: Table, scores_future: Table) -> Temporal:
    """Pair past (rejected) with future (chosen) answers: temporal self-rewarding (arXiv 2508.06026).

    Phase 1: the current model's best answer over the initial model's worst, or over its own worst if the initial
    model's is not worse. Phase 2: the same rejected answer; the best answer of the model trained in phase 1 is chosen
    if it beats the current best. A prompt that fails phase 1 may pass phase 2 (this project's choice).
    """
    rows = [_past_and_future(*prompt) for prompt in zip(scores_current, scores_anchor, scores_future, strict=True)]
    return Temporal(*([row[column] for row in rows] for column in range(len(Temporal._fields))))


def _past_and_future(current: Sequence[float], initial: Sequence[float], future: Sequence[float]) -> tuple[int, ...]:
    """Return the fields of `Temporal` for one prompt."""
    best, ahead = max(current), max(future)
    from_past = min(initial) < min(current)
    worst_of = initial if from_past else current
    worst = min(worst_of)
    from_future = ahead > best
    chosen2 = future.index(ahead) if from_future else current.index(best)
    return (
        current.index(best),
        worst_of.index(worst),
        int(from_past),
        int(best > worst),
        chosen2,
        2 if from_future else 0,
        int(max(best, ahead) > worst),
    )


class WinRates(NamedTuple):
    """Win rates of the answers to each prompt against each other."""

    pairwise: list[list[list[float]]]  # [B][K][K] probability that i beats j
    win: list[list[float]]  # [B][K] mean over j, including i itself (1/2)
    chosen: list[int]  # [B] highest score
    rejected: list[int]  # [B] lowest score; equal to chosen if all tie: no pair


def win_rates(scores: Table) -> WinRates:
    """Return the win rates of each prompt's answers against each other from scalar scores (SPPO, arXiv 2405.00675)."""
    pairwise = [[[_sigmoid(a - b) for b in row] for a in row] for row in scores]
    win = [[sum(row) / len(row) for row in table] for table in pairwise]
    chosen = [max(range(len(row)), key=lambda i: row[i]) for row in scores]
    rejected = [min(range(len(row)), key=lambda i: row[i]) for row in scores]
    return WinRates(pairwise, win, chosen, rejected)


def _sigmoid(x: float) -> float:
    """Return the logistic function without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


class Tournament(NamedTuple):
    """Result of a knock-out tournament between the answers to one prompt."""

    chosen: int
    rejected: int
    keep: int  # 1 if the chosen answer strictly beats the rejected one
    comparisons: int


def tournament(pref: Table) -> Tournament:
    """Return INPO's best and worst of K = 2^m answers (arXiv 2407.00617) without all K(K-1)/2 judgments: pref [K][K].

    After a first round of neighbors, winners play winners and losers play losers until one of each is left; these two
    play for the pair. The first entrant wins a tie. Raises DataError if the number of answers is not 2, 4, 8, ...
    """
    size = len(pref)
    if size < 2 or size & (size - 1):
        raise DataError(f"a tournament of {count_noun(size, 'answer')}", allowed="2, 4, 8, ... answers per prompt")
    matches = 0

    def play(players: Sequence[int]) -> list[tuple[int, int]]:
        nonlocal matches
        matches += len(players) // 2
        duels = zip(players[::2], players[1::2], strict=True)
        return [(a, b) if pref[a][b] >= 0.5 else (b, a) for a, b in duels]

    first = play(range(size))
    best, worst = [w for w, _ in first], [x for _, x in first]
    while len(best) > 1:
        best, worst = [w for w, _ in play(best)], [x for _, x in play(worst)]
    return Tournament(best[0], worst[0], int(pref[best[0]][worst[0]] > 0.5), matches + 1)


def large_margin(
    scores: Sequence[float],
    is_teacher: Sequence[Any],
    defective: Sequence[Any],
    *,
    min_positive: float = 5,
    margin: float = 2,
    margin_student: float = 1,
) -> list[list[int]]:
    """Return DNO's pairs of one prompt (arXiv 2404.03715): [positive, negative] by a judge's score from 0 to 6.

    A positive scores at least `min_positive` and is not defective (full of repeated n-grams). A negative is `margin`
    lower, or `margin_student` lower if the positive is not the teacher's; a defective answer is a negative of any
    positive.
    """
    indices = range(len(scores))
    gaps = [margin if t else margin_student for t in is_teacher]
    return [
        [i, j]
        for i in indices
        if scores[i] >= min_positive and not defective[i]
        for j in indices
        if j != i and (defective[j] or scores[i] - scores[j] >= gaps[i])
    ]


# --- format corruption


Broken = Literal["no_opening", "no_closing", "early_closing", "swapped", "answer_outside"]


def broken_formats(text: str) -> dict[Broken, str]:
    """Return a well-formed answer with its format broken in five ways, content unchanged (SPECS, 2510.25801).

    Raises DataError if the text is not <think>reasoning</think><answer>answer</answer>. The list of five is this
    project's choice.
    """
    try:
        _, rest = text.split("<think>")
        reasoning, rest = rest.split("</think>")
        _, rest = rest.split("<answer>")
        answer, _ = rest.split("</answer>")
    except ValueError:
        raise DataError("only a well-formed answer can be broken", where=text[:60]) from None
    half = len(reasoning) // 2
    thought, tagged = f"<think>{reasoning}</think>", f"<answer>{answer}</answer>"
    return {
        "no_opening": text.replace("<think>", ""),
        "no_closing": text.replace("</think>", ""),
        "early_closing": f"<think>{reasoning[:half]}</think>{reasoning[half:]}{tagged}",
        "swapped": f"{tagged}{thought}",
        "answer_outside": f"{thought}<answer></answer>{answer}",
    }


def format_pair(
    text: str, well_formed: Callable[[str], bool], extract: Callable[[str], Any], number: int
) -> str | None:
    """Return the rejected side for a well-formed `text`: broken in format, with the same extracted answer.

    Broken forms are tried in rotation, starting with the `number`-th. None if no form qualifies.
    """
    forms = list(broken_formats(text).values())
    rotated = forms[number % len(forms) :] + forms[: number % len(forms)]
    return next((f for f in rotated if not well_formed(f) and extract(f) == extract(text)), None)


def generalization_factor(gain_id: Sequence[float], gain_ood: Sequence[float], *, beta: float = 2.0) -> list[float]:
    """Compute (1 + b^2) g h / (b^2 g + h), or 0 if the divisor is 0.

    g, h: gains over the base in and out of distribution.
    """
    factors = []
    for inside, outside in zip(gain_id, gain_ood, strict=True):
        divisor = beta**2 * inside + outside
        factors.append((1 + beta**2) * inside * outside / divisor if divisor else 0.0)
    return factors


# --- rules for pairs of any builder


class Texts(NamedTuple):
    """Prompt and both sides of one pair as texts."""

    prompt: str
    chosen: str
    rejected: str


def repeats(pairs: Iterable[Texts], earlier: Iterable[Texts] = ()) -> list[str | None]:
    """Return for each pair the reason to drop it, or None.

    Dropped are pairs with equal sides, repeated pairs (also repeats of `earlier` rounds), and reversed pairs, which
    contradict an earlier kept pair. Texts are compared without surrounding white space.
    """
    seen = {_key(pair) for pair in earlier}
    causes: list[str | None] = []
    for pair in pairs:
        prompt, chosen, rejected = _key(pair)
        if chosen == rejected:
            causes.append("equal sides")
        elif (prompt, chosen, rejected) in seen:
            causes.append("repeated")
        elif (prompt, rejected, chosen) in seen:
            causes.append("contradicts a kept pair")
        else:
            seen.add((prompt, chosen, rejected))
            causes.append(None)
    return causes


def _key(pair: Texts) -> tuple[str, str, str]:
    """Return the texts of a pair without surrounding white space."""
    return pair.prompt.strip(), pair.chosen.strip(), pair.rejected.strip()


def balance_by_length(pairs: Sequence[T], gap: Callable[[T], float]) -> list[T]:
    """Drop pairs until as many have a longer chosen side as a longer rejected side; ties and order stay.

    gap: returns length of chosen - length of rejected. Of the more frequent kind, pairs with the largest gap are
    dropped.
    """
    longer = [i for i, pair in enumerate(pairs) if gap(pair) > 0]
    shorter = [i for i, pair in enumerate(pairs) if gap(pair) < 0]
    quota = min(len(longer), len(shorter))
    dropped: set[int] = set()
    for kind in (longer, shorter):
        dropped |= set(sorted(kind, key=lambda i: abs(gap(pairs[i])))[quota:])
    return [pair for i, pair in enumerate(pairs) if i not in dropped]
