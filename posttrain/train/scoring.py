"""Scoring of one round of rollouts: if the rewards allow it, they run while other rollouts are generated."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, Self

from posttrain import thoughts
from posttrain.batch import Rollout
from posttrain.batch.records import sample_fields
from posttrain.errors import RewardError
from posttrain.recipe.stages import RlRecipe
from posttrain.shapes.protocol import Grade
from posttrain.train.context import TrainContext
from posttrain.verify.completion_steps import Split, ends_of, problem
from posttrain.verify.failures import Calls, combine_calls
from posttrain.verify.score import Sample, Scorer
from posttrain.verify.worker import Result

TIMES = "time/rewards"
Results = list[list[Result]]  # [component][sample]
BY_TOKEN = ("gae", "reinforce_pp")  # advantages that read per-token rewards if there are any, but do not need them
MAX_CACHED = 1 << 20  # tokens and token pairs whose length is cached


class EarlyScoring:
    """Runs the reward calls of groups of samples in a thread as groups are added; groups that wait are run together.

    Only for rewards that score single rows (`Scorer.by_row`): a call does not see other rows, so early results equal
    those of scoring all rows together.
    """

    def __init__(self, scorer: Scorer, step: int) -> None:
        self._scorer, self._step = scorer, step
        self._added: queue.SimpleQueue[tuple[int, Sequence[Sample]] | None] = queue.SimpleQueue()
        self._results: dict[int, Results] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None  # started by the first group

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the calls in progress; their own time limits bound this."""
        if self._thread is not None:
            self._added.put(None)
            self._thread.join()

    def add(self, group: int, samples: Sequence[Sample]) -> None:
        """Queue a group's samples for scoring. Each group is added once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="early rewards", daemon=True)
            self._thread.start()
        self._added.put((group, samples))

    def results(self) -> dict[int, Results]:
        """Return the results by group. Call this after the `with` block. Raises what a call's contract raised."""
        if self._error is not None:
            raise self._error
        return self._results

    def _run(self) -> None:
        more = True
        while more:
            waiting = [self._added.get()]
            while not self._added.empty():
                waiting.append(self._added.get())
            groups = [entry for entry in waiting if entry is not None]
            more = len(groups) == len(waiting)
            if not groups or self._error is not None:
                continue
            try:
                samples = [sample for _, members in groups for sample in members]
                columns, start = self._scorer.results(samples, self._step), 0
                for group, members in groups:
                    self._results[group] = [column[start : start + len(members)] for column in columns]
                    start += len(members)
            except BaseException as error:
                self._error = error


class Scoring:
    """Scores the rollouts of one round: `on_complete` takes a prompt's rollouts as they finish, `finish` scores all.

    open_early: exit stack that closes when all rollouts are generated; None: nothing is scored before `finish`.
    """

    def __init__(self, p: TrainContext, step: int, open_early: contextlib.ExitStack | None) -> None:
        self._p, self._step, self._open_early = p, step, open_early
        self.on_complete = None if open_early is None else self._add_early  # the callback `done` of `Engine.generate`
        self._early: EarlyScoring | None = None  # created by the first group
        self._busy_before = p.scorer.busy_seconds
        self._early_samples: dict[int, list[Sample]] = {}  # by group
        self._needs_token_ends = any("token_ends" in reward.built_ins for reward in p.scorer.rewards)
        self._graded: dict[Hashable, tuple[Sample, list[Result]]] = {}  # scored by `grade`: a result per component

    def _add_early(self, rollouts: list[Rollout]) -> None:
        assert self._open_early is not None
        if rollouts:
            self._early = self._early or self._open_early.enter_context(EarlyScoring(self._p.scorer, self._step))
            group = rollouts[0].group
            self._early_samples[group] = self._samples(rollouts)
            self._early.add(group, self._early_samples[group])

    def grade(self, rollouts: Sequence[Rollout]) -> list[Grade]:
        """Score rollouts found by a search; `finish` does not score the same rollouts again.

        Raises RewardError if a reward reads many rows in a call (`check_grading`).
        """
        check_grading(self._p.scorer)
        samples = self._samples(rollouts)
        columns = self._p.scorer.results(samples, self._step)
        scores = self._p.scorer.score(samples, step=self._step, results=columns)
        for rollout, sample, *results in zip(rollouts, samples, *columns, strict=True):
            self._graded[_identity(rollout)] = (sample, results)
        return [Grade(reward, correct) for reward, correct in zip(scores.rewards, scores.correct, strict=True)]

    def finish(self, rollouts: Sequence[Rollout], gathered: dict[str, Any]) -> Calls:
        """Set scores, reward and correctness of each rollout, group by group, and add counts to `gathered`.

        Returns how many reward calls were made, and which failed.
        """
        samples: list[Sample] = []
        for group, rows in itertools.groupby(rollouts, key=lambda r: r.group):
            samples += self._early_samples.get(group) or self._samples(list(rows))
        early = {} if self._early is None or self._graded else self._early.results()
        results = self._join_results(rollouts, samples, early) if early or self._graded else None
        scores = self._p.scorer.score(samples, step=self._step, results=results)
        split = self._p.recipe.scoring.split
        steps = split is not None and "turn_ids" in self._p.objective.needs
        for i, r in enumerate(rollouts):
            if scores.turn_scores or steps:
                r.part_ends = ends_of_parts(r, split, self._p.loaded.tokenizer)
            if scores.turn_scores:
                r.turn_scores = {name: column[i] for name, column in scores.turn_scores.items()}
                r.turn_rewards = scores.turn_rewards[i]
            r.scores = {name: column[i] for name, column in scores.components.items()}
            r.reward, r.correct = scores.rewards[i], scores.correct[i]
        counted = {"errors": scores.calls.errors, "timeouts": scores.calls.timeouts, "abstained": scores.abstained}
        added: dict[str, float] = {}
        for what, counts in counted.items():
            added |= {f"rewards/{name}/{what}": count for name, count in counts.items()}
        added |= {f"{TIMES}/{name}": seconds * len(rollouts) for name, seconds in scores.call_seconds.items()}
        added |= {TIMES: self._p.scorer.busy_seconds - self._busy_before, f"{TIMES}/rows": len(rollouts)}
        for key, number in added.items():
            gathered[key] = gathered.get(key, 0) + number
        trained = {_identity(r) for r in rollouts if r.call is None} if self._graded else ()
        untrained = [graded for key, graded in self._graded.items() if key not in trained]
        if not untrained:
            return scores.calls
        others = self._p.scorer.score([s for s, _ in untrained], self._step, _by_component([r for _, r in untrained]))
        return combine_calls([scores.calls, others.calls])

    def _join_results(
        self, rollouts: Sequence[Rollout], samples: Sequence[Sample], early: dict[int, Results]
    ) -> Results:
        """Return results for all rollouts: early ones by group, and the remaining rollouts scored now, together."""
        if self._graded:
            return self._graded_results(rollouts, samples)
        unscored = [s for r, s in zip(rollouts, samples, strict=True) if r.group not in early]
        late = [iter(column) for column in self._p.scorer.results(unscored, self._step)]
        by_group = {group: [iter(column) for column in columns] for group, columns in early.items()}
        return [
            [next(by_group.get(r.group, late)[component]) for r in rollouts]
            for component in range(len(self._p.scorer.rewards))
        ]

    def _graded_results(self, rollouts: Sequence[Rollout], samples: Sequence[Sample]) -> Results:
        """Return results for all rollouts, scoring now, together, those that no search has graded.

        Calls of a workflow are always scored now, since their rewards may read what came after the call.
        """
        known = [self._graded.get(_identity(r)) if r.call is None else None for r in rollouts]
        ungraded = [s for s, graded in zip(samples, known, strict=True) if graded is None]
        late = zip(*self._p.scorer.results(ungraded, self._step), strict=True) if ungraded else iter(())
        return _by_component([list(next(late)) if graded is None else graded[1] for graded in known])

    def _samples(self, rollouts: Sequence[Rollout]) -> list[Sample]:
        return [
            Sample(
                completion=r.text,
                row=r.prompt.row,
                prompt=r.prompt.text,
                finish=r.finish,
                token_count=len(r.sampled_ids),
                group=r.group,
                token_ids=r.sampled_ids,
                token_ends=completion_token_ends(r, self._p.loaded.tokenizer)[1:]
                if self._needs_token_ends and not r.turns
                else (),
                **(sample_fields(r) if r.turns or r.call else {}),
            )
            for r in rollouts
        ]


def _identity(rollout: Rollout) -> Hashable:
    """Return a key that distinguishes any two rows of a step that differ in what a reward may see."""
    return rollout.group, rollout.prompt.ids, rollout.ids, rollout.text


def _by_component(rows: Sequence[Sequence[Result]]) -> Results:
    """Transpose results from [row][component] to [component][row]."""
    return [list(column) for column in zip(*rows, strict=True)]


def ends_of_parts(rollout: Rollout, split: Split | None, tokenizer: Any) -> tuple[int, ...]:
    """Return the token index at which each part ends: each turn of the model, or each step of a single turn.

    -1 for a step within the beginning of an answer that belongs to the prompt (`Variant.begin`).
    """
    if rollout.turns or (rollout.call is not None and len(rollout.segments) > 1):
        ends = itertools.accumulate(len(s.ids) for s in rollout.segments)
        return tuple(end - 1 for end, s in zip(ends, rollout.segments, strict=True) if s.kind == "model")
    if split is None:
        return (len(rollout.ids) - 1,)
    characters = completion_token_ends(rollout, tokenizer)
    last = len(rollout.ids) - 1
    return (*(min(bisect_left(characters, end) - 1, last) for end in ends_of(rollout.text, split)[:-1]), last)


def completion_token_ends(rollout: Rollout, tokenizer: Any) -> list[int]:
    """Return the character of the rollout's text at which its first token begins, and at which each token ends.

    The text of a variant begins with tokens that may belong to the prompt.
    """
    variant = rollout.variant
    begin = variant.begin if variant is not None and variant.begin_is == "prompt" else ()
    return [0, *token_ends((*begin, *rollout.ids), tokenizer)][len(begin) :]


def check_grading(scorer: Scorer) -> None:
    """Raise RewardError if a reward reads many rows in a call: its score of a row would depend on other rows."""
    if name := next((r.name for r in scorer.rewards if r.batched and not r.in_trainer), ""):
        raise RewardError(
            f"{name} reads many rows in a call, but a search scores rows one by one",
            hint="score single completions, or leave `rollout.shape` out",
        )


def check_turns(recipe: RlRecipe, scorer: Scorer, needs: Collection[str]) -> str | None:
    """Check that rewards by turn and an advantage that reads them come together.

    Raises RewardError if one is given without the other. Returns a note if the advantage sums a row's turns, else None.
    """
    names = [scorer.rewards[i].name for i in scorer.per_turn]
    use, params = recipe.advantage.use, recipe.advantage.params
    key, what, right = problem(
        names, use, params, needs, environment=recipe.environment is not None, split=recipe.scoring.split
    )
    if what:
        raise RewardError(f"{key}: {what}", hint=right)
    if names and use not in BY_TOKEN and not {"turn_ids", "token_rewards", "turn_scores"} & set(needs):
        return f"{', '.join(names)}: advantage `{use}` gives a row one value, from the sum of its turns"
    return None


def reward_cost_metrics(gathered: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return `gathered` summed over ranks, with the cost of a step's rewards.

    time/rewards: seconds per rank during which reward calls were running, which may overlap with generation.
    rows_per_s: rows scored per such second, by all ranks. NAME/seconds: seconds in calls of that reward, summed over
    workers. NAME/call: seconds of one call.
    """
    values = {key: number for key, number in gathered.items() if not key.startswith(TIMES)}
    rows, busy = gathered.get(f"{TIMES}/rows", 0), gathered.get(TIMES, 0.0) / ranks
    if not rows:
        return values
    values |= {TIMES: busy, f"{TIMES}/rows_per_s": rows / max(busy, 1e-9)}
    for key in gathered.keys() - values.keys() - {f"{TIMES}/rows"}:
        values |= {f"{key}/seconds": gathered[key], f"{key}/call": gathered[key] / rows}
    return values


@contextlib.contextmanager
def score_while_sampling(p: TrainContext, step: int) -> Iterator[Scoring]:
    """Context manager around the generation of one round; call `finish` of the Scoring after the block."""
    with contextlib.ExitStack() as early:
        yield Scoring(p, step, early if p.scorer.by_row else None)


def token_ends(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Return the character of a completion's text at which each token ends.

    Computed from what a token adds to the previous one, not from the token alone: some tokenizers drop the leading
    space of a single token, and a character may consist of two tokens. A character of more tokens (rare scripts, emoji)
    may shift the ends after it by a character or two.
    """
    rows: list[tuple[int, ...]] = [*zip(ids, strict=True), *itertools.pairwise(ids)]
    known = _lengths(tokenizer)
    lengths: list[Any] = list(map(known.get, rows))
    if None in lengths:
        new = list(dict.fromkeys(row for row, length in zip(rows, lengths, strict=True) if length is None))
        measured = dict(
            zip(new, map(len, thoughts.decode(tokenizer, list(map(list, new)), standard=False)), strict=True)
        )
        if len(known) > MAX_CACHED:
            known.clear()
        known.update(measured)
        lengths = [measured[row] if length is None else length for row, length in zip(rows, lengths, strict=True)]
    alone, pairs = lengths[: len(ids)], lengths[len(ids) :]
    added = [*alone[:1], *(both - first for both, first in zip(pairs, alone, strict=False))]
    ends = list(itertools.accumulate(added))
    form = thoughts.thought_format(tokenizer)
    if form is thoughts.STANDARD:
        return ends
    (text,) = thoughts.decode(tokenizer, [ids], standard=False)
    return thoughts.move_offsets(ends, form.edits(text))


@functools.lru_cache(maxsize=1)
def _lengths(tokenizer: Any) -> dict[tuple[int, ...], int]:
    """Return the cache of the text lengths of single tokens and of pairs: most pairs of a text were seen before."""
    del tokenizer
    return {}
