"""Scoring of completions: run the reward scripts in worker processes and combine their scores.

`combine` is the only place where components are summed into one reward per row.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from posttrain import source_locations
from posttrain.errors import Problem, RewardError
from posttrain.recipe import reward_checks
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.recipe.section import OnNone
from posttrain.verify import correctness, trl_form
from posttrain.verify.captured_output import OutputLog
from posttrain.verify.completion_steps import parts_of
from posttrain.verify.contract import BrokenContract, ByTurn, checked_batch
from posttrain.verify.failures import WINDOW_PROMPTS, Calls, Failures
from posttrain.verify.load import LoadedReward, load_reward
from posttrain.verify.pool import Pool, make_calls, make_target, split_result
from posttrain.verify.reward_inputs import Sample, built_in, view_sample
from posttrain.verify.worker import Call, Result

Column = Sequence[float | None]  # scores of a component, one per row
Gate = tuple[str, float]  # name of a component, minimum score
ABSENT = Result(0, "value", None, 0.0)  # for a row whose role the reward does not read


@dataclass(frozen=True)
class Scores:
    """Scores of N samples, in their order.

    components: name -> [N], None if a component does not apply or failed; the parts of a component that returns several
    numbers are stored as `name/part`. rewards: weighted sum, None = not scored. correct: verdict of the correctness
    component, None = unknown. calls (with failures) and abstained: counts by component.
    """

    components: dict[str, list[float | None]]
    rewards: list[float | None]
    correct: list[bool | None]
    calls: Calls
    abstained: dict[str, int]
    first_traceback: str | None
    seconds: float
    call_seconds: dict[str, float] = field(default_factory=dict)  # mean over the calls of a component
    # Per-turn rewards: name -> one number per part of the row, () if the row has none. turn_rewards: their weighted
    # sum, which is included in `rewards`.
    turn_scores: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    turn_rewards: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def errors(self) -> dict[str, int]:
        return self.calls.errors

    @property
    def timeouts(self) -> dict[str, int]:
        return self.calls.timeouts


class Scorer:
    """Context manager that holds the worker processes and scores samples.

    The constructor loads all scripts and checks their parameters. output_log: receives the output of the workers; None
    writes it to stderr.
    """

    def __init__(
        self, rewards: Sequence[Reward], scoring: Scoring, base_dir: Path | None, output_log: OutputLog | None = None
    ) -> None:
        self.sections, self.scoring = list(rewards), scoring
        self.rewards = [load_reward(section, base_dir) for section in rewards]
        self.per_turn = [i for i, reward in enumerate(self.rewards) if reward.per_turn]
        _check_rewards(self.sections, self.rewards)
        self.correctness = correctness.position(self.sections, self.rewards)
        self.weights = {r.name: s.weight for r, s in zip(self.rewards, self.sections, strict=True)}
        self.pool = Pool(
            [make_target(r, r.limit(s)) for r, s in zip(self.rewards, self.sections, strict=True) if not r.in_trainer],
            scoring.workers,
            scoring.memory_mb,
            output_log,
        )
        pooled = [i for i, r in enumerate(self.rewards) if not r.in_trainer]
        self._target = {i: n for n, i in enumerate(pooled)}  # index of a reward -> its index in the pool
        self.busy_seconds = 0.0  # total seconds with calls in progress
        self._lock = threading.Lock()  # rollouts of several steps may be scored concurrently

    @cached_property
    def by_row(self) -> bool:
        """Whether rows can be scored independently.

        Not with batched rewards, whose results depend on the rows in the call, nor with models in this process.
        """
        return not any(reward.batched or reward.in_trainer for reward in self.rewards)

    def __enter__(self) -> Self:
        for reward in self.rewards:
            if reward.in_trainer:
                reward.function.posttrain_in_trainer[0](**reward.params)  # type: ignore[attr-defined]
        if self._target:
            self.pool.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes and free reward models. A later `score` starts and loads them again."""
        self.pool.close()
        for reward in self.rewards:
            if reward.in_trainer:
                reward.function.posttrain_in_trainer[1]()  # type: ignore[attr-defined]

    def score(self, samples: Sequence[Sample], step: int = 0, results: list[list[Result]] | None = None) -> Scores:
        """Score all samples. results: results of their calls, if the calls were made before.

        Raises RewardError if a script breaks its contract or a component with `on_none: error` returns None. Failed
        calls are counted; `failures` decides when there are too many.
        """
        started = time.monotonic()
        results = self.results(samples, step) if results is None else results
        named = [(reward.name, column) for reward, column in zip(self.rewards, results, strict=True)]
        components: dict[str, list[float | None]] = {}
        for name, column in named:
            components[name] = [get_score(r) for r in column]
            dicts = [r.value if r.kind == "value" and isinstance(r.value, dict) else {} for r in column]
            parts = dict.fromkeys(part for values in dicts for part in values if part != "reward")
            components |= {f"{name}/{part}": [values.get(part) for values in dicts] for part in parts}
        rewards = self.combine_results(samples, results)
        judged = components[self.rewards[self.correctness].name]
        errors, timeouts = (
            {name: sum(r.kind == kind for r in column) for name, column in named} for kind in ("error", "timeout")
        )
        failed = any(errors.values()) or any(timeouts.values())
        return Scores(
            components=components,
            rewards=rewards,
            correct=[None if x is None else x >= self.scoring.correct_at for x in judged],
            calls=Calls(
                step=step,
                prompts=len({s.group for s in samples}),
                calls=len(samples),
                errors=errors,
                timeouts=timeouts,
                first={n: text for n, column in named if (text := _describe_first_failure(samples, column))}
                if failed
                else {},
            ),
            abstained={
                name: sum(
                    r.kind == "value" and score is None and r is not ABSENT
                    for r, score in zip(column, components[name], strict=True)
                )
                for name, column in named
            },
            first_traceback=_first_traceback(samples, results) if failed else None,
            seconds=time.monotonic() - started,
            call_seconds={name: math.fsum(r.seconds for r in column) / max(1, len(column)) for name, column in named},
            turn_scores={self.rewards[i].name: _turn_parts(results[i]) for i in self.per_turn},
            turn_rewards=self._turn_rewards(results, rewards) if self.per_turn else [()] * len(rewards),
        )

    def combine_results(self, samples: Sequence[Sample], results: Sequence[Sequence[Result]]) -> list[float | None]:
        """Return the reward of each sample: the weighted sum of its components, None = not scored."""
        named = list(zip((r.name for r in self.rewards), self.sections, results, strict=True))
        return combine(
            {
                name: self._sum_turns(i, column) if i in self.per_turn else [get_score(r) for r in column]
                for i, (name, _, column) in enumerate(named)
            },
            {name: section.weight for name, section, _ in named},
            {name: section.on_none for name, section, _ in named},
            [s.group for s in samples],
            failed={name: [r.kind != "value" for r in column] for name, _, column in named},
            absent={name: [r is ABSENT for r in column] for name, _, column in named},
            uids=[str(s.row.get("uid", i)) for i, s in enumerate(samples)],
            clips={
                name: section.clip
                for i, (name, section, _) in enumerate(named)
                if section.clip and i not in self.per_turn  # per-turn rewards are clipped turn by turn
            },
            conditions={
                name: (section.condition.on, section.condition.min)
                for name, section, _ in named
                if section.condition is not None
            },
        )

    def _sum_turns(self, component: int, column: Sequence[Result]) -> list[float | None]:
        """Return the scores of a per-turn reward, summed over turns after clipping."""
        sums = [math.fsum(parts) for parts in by_turn(_turn_parts(column), self.sections[component].clip)]
        return [None if get_score(r) is None else total for r, total in zip(column, sums, strict=True)]

    def _turn_rewards(
        self, results: Sequence[Sequence[Result]], rewards: Sequence[float | None]
    ) -> list[tuple[float, ...]]:
        """Return the weighted sum of the per-turn rewards; () for a row that has none or is not scored."""
        rewards_by_turn: list[tuple[float, ...]] = [()] * len(rewards)
        names = [r.name for r in self.rewards]
        for i in self.per_turn:
            section = self.sections[i]
            open_rows: Sequence[float | None] = [1.0] * len(rewards)
            if gate := section.condition:
                keys = {gate.on: [get_score(r) for r in results[names.index(gate.on)]]}
                open_rows = apply_gate(open_rows, keys, (gate.on, gate.min))
            for row, parts in enumerate(by_turn(_turn_parts(results[i]), section.clip)):
                if section.weight and parts and open_rows[row] and rewards[row] is not None:
                    rewards_by_turn[row] = tuple(
                        before + section.weight * part
                        for before, part in zip(rewards_by_turn[row] or (0.0,) * len(parts), parts, strict=True)
                    )
        return rewards_by_turn

    def results(
        self, samples: Sequence[Sample], step: int = 0, only: Sequence[int] | None = None
    ) -> list[list[Result]]:
        """Run the reward calls and return their results, [component][sample].

        Raises RewardError only for a broken contract.

        Components that read `correct` run after the correctness component. only: indices of the components to run.
        Thread-safe; calls from several threads run one after the other.
        """
        samples = [self._split_completion(sample) for sample in samples] if self.per_turn else samples
        which = range(len(self.rewards)) if only is None else only
        late = [i for i in which if "correct" in self.rewards[i].built_ins]
        early = [i for i in which if i not in late]
        if late and self.correctness not in early:
            early.append(self.correctness)
        with self._lock:
            started = time.monotonic()
            results = self._run(early, samples, step, [None] * len(samples))
            if late:
                results |= self._run(late, samples, step, self._judge_correct(results[self.correctness]))
            self.busy_seconds += time.monotonic() - started
        return [results[i] for i in which]

    def _split_completion(self, sample: Sample) -> Sample:
        """Split the completion into parts by `scoring.split` if the sample has no turns."""
        return sample if sample.parts else replace(sample, parts=parts_of(sample.completion, self.scoring.split))

    def _run(
        self, which: Sequence[int], samples: Sequence[Sample], step: int, correct: Sequence[bool | None]
    ) -> dict[int, list[Result]]:
        calls: list[Call] = []
        locations: list[tuple[int, int]] = []  # call number -> (component, row)
        every = dict(enumerate(samples))
        of_roles = [i for i in which if self.sections[i].roles is not None or self.sections[i].reads is not None]
        read = {i: self._view_samples(i, samples) if i in of_roles else every for i in which}
        for i in (i for i in which if i in self._target):
            reward, seen = self.rewards[i], list(read[i].values())
            given = [arguments(reward, result, step, correct[row]) for row, result in read[i].items()]
            form = trl_form.completion if reward.trl_form else lambda _, text: text
            written = [form(s.row, s.completion) for s in seen]
            calls += make_calls(reward, self._target[i], len(locations), written, given)
            locations += [(i, row) for row in read[i]]
        results = {i: [ABSENT] * len(samples) for i in which}
        for call, result in zip(calls, self.pool.run(calls) if calls else [], strict=True):
            i, row = locations[call.number]
            if result.kind == "broken":
                batch = "batch from " if len(call.completion) > 1 and self.rewards[i].batched else ""
                where = f"reward {self.rewards[i].name}"
                raise RewardError(
                    f"{batch}{source_locations.describe_row(_uid(samples[row], row))}: {result.value}", where=where
                )
            for k, of_row in enumerate(split_result(call, result) if self.rewards[i].batched else [result]):
                results[i][locations[call.number + k][1]] = of_row
        for i in (i for i in which if i not in self._target):
            own = self._run_in_trainer(self.rewards[i], list(read[i].values()), step, [correct[row] for row in read[i]])
            for row, of_row in zip(read[i], own, strict=True):
                results[i][row] = of_row
        return results

    def _view_samples(self, component: int, samples: Sequence[Sample]) -> dict[int, Sample]:
        """Return row -> the sample as the reward sees it, for the rows that the reward applies to."""
        section = self.sections[component]
        seen = {row: view_sample(sample, section.roles, section.reads) for row, sample in enumerate(samples)}
        return {row: sample for row, sample in seen.items() if sample is not None}

    def _run_in_trainer(
        self, reward: LoadedReward, samples: Sequence[Sample], step: int, correct: Sequence[bool | None]
    ) -> list[Result]:
        """Run an in-trainer reward on all samples in one call. Its exceptions are not caught."""
        given = [arguments(reward, s, step, right) for s, right in zip(samples, correct, strict=True)]
        results = []
        for call in make_calls(reward, 0, 0, [sample.completion for sample in samples], given) if samples else []:
            started = time.monotonic()
            returned = reward.function(call.completion, **call.arguments, **reward.params)
            try:
                values = checked_batch(returned, len(call.completion))
            except BrokenContract as error:
                raise RewardError(str(error), where=f"reward {reward.name}") from error
            results += split_result(call, Result(call.number, "value", values, time.monotonic() - started))
        return results

    def _judge_correct(self, results: Sequence[Result]) -> list[bool | None]:
        scores = [get_score(r) for r in results]
        return [None if x is None else x >= self.scoring.correct_at for x in scores]

    def failures(self, *, enough: int = WINDOW_PROMPTS, unit: str = "step", history: Iterable[Any] = ()) -> Failures:
        """Return the monitor that stops a run when too many calls of a reward fail (`failures.Failures`)."""
        targets = {reward.name: reward.target for reward in self.rewards}
        return Failures(targets, self.scoring.max_error_rate, enough=enough, unit=unit, history=history)


def arguments(reward: LoadedReward, sample: Sample, step: int, correct: bool | None) -> dict[str, Any]:
    """Build the keyword arguments of one call. A column that the row lacks is None, or omitted if optional."""
    row = sample.row
    given = {name: built_in(name, sample, step, correct) for name in reward.built_ins}
    if reward.trl_form and "prompts" in given and (asked := trl_form.conversation(row)) is not None:
        given["prompts"] = asked
    given |= {name: row.get(name) for name in reward.columns if name not in reward.params}
    given |= {name: row[name] for name in reward.optional_columns if row.get(name) is not None}
    if reward.all_columns:
        taken = (*reward.params, *(("prompt", "completion") if reward.trl_form else ()))
        given = {**{k: v for k, v in row.items() if k not in taken}, **given}
    return given


def _check_rewards(sections: Sequence[Reward], rewards: Sequence[LoadedReward]) -> None:
    """Raise RewardError for a list of rewards that `recipe validate` rejects."""
    found = [*reward_checks.problems(sections)] or [*correctness.problems(sections, rewards)]
    if found:
        raise RewardError.of([Problem(f"rewards.{key}", what, hint=right) for key, what, right in found])


def get_score(result: Result) -> float | None:
    """Return the score of a result; None if the call abstained or failed."""
    if result.kind != "value":
        return None
    if isinstance(result.value, ByTurn):
        return result.value.total
    return result.value["reward"] if isinstance(result.value, dict) else result.value


def _turn_parts(results: Sequence[Result]) -> list[tuple[float, ...]]:
    """Return the per-turn numbers of each result; () if the call abstained or failed."""
    return [r.value.parts if r.kind == "value" and isinstance(r.value, ByTurn) else () for r in results]


def _first_traceback(samples: Sequence[Sample], results: Sequence[Sequence[Result]]) -> str | None:
    """Return the first error with the row where it occurred."""
    return next((text for column in results if (text := _first_failure(samples, column, "error"))), None)


def _first_failure(samples: Sequence[Sample], column: Sequence[Result], kind: str) -> str:
    """Describe the first result of this kind: `on ROW`, for errors with the traceback; empty if there is none."""
    index = next((i for i, result in enumerate(column) if result.kind == kind), None)
    if index is None:
        return ""
    where = source_locations.describe_row(_uid(samples[index], index))
    return f"on {where}:\n{column[index].value}" if kind == "error" else f"on {where}"


def _describe_first_failure(samples: Sequence[Sample], column: Sequence[Result]) -> str:
    """Describe the first failure of a reward; empty if there is none."""
    trace, late = (_first_failure(samples, column, kind) for kind in ("error", "timeout"))
    return f"the first error, {trace}" if trace else f"the first time-out, {late}" if late else ""


def _uid(sample: Sample, index: int) -> str:
    return str(sample.row.get("uid", index))


def combine(
    components: Mapping[str, Column],
    weights: Mapping[str, float],
    on_none: Mapping[str, OnNone],
    groups: Sequence[int],
    *,
    failed: Mapping[str, Sequence[bool]] | None = None,
    absent: Mapping[str, Sequence[bool]] | None = None,
    uids: Sequence[str] | None = None,
    clips: Mapping[str, Sequence[float]] | None = None,
    conditions: Mapping[str, Gate] | None = None,
) -> list[float | None]:
    """Compute the weighted sum of the components [N]; None = not scored (advantage 0, outside all statistics).

    Components with weight 0 are only logged. A score of None means that the component does not apply to the row:
      auto              no row of the group has a score: the component is left out for the group; some have: rows of the
                        group without a score are not scored
      skip_row          the row is not scored
      ignore_component  the component is left out for the row
      zero              counts as 0
      error             RewardError
    failed: rows where a component raised or timed out. Such a row is never scored, whatever `on_none` says, and does
    not count as a row with a score for `auto`. A row for which every component was left out is not scored.
    absent: rows that a component is not for, such as rows of another role; the component is left out there.
    clips: scores are clipped to [low, high] before they are weighted.
    conditions: if the component named in the condition has no score or a score below the minimum, the gated component
    counts as 0, whatever its score; if the condition's component failed, the row is not scored.
    Raises RewardError for a None of a component whose `on_none` is `error`.
    """
    conditions, failed, absent = conditions or {}, failed or {}, absent or {}
    limited = {**components, **{name: clip_scores(components[name], limits) for name, limits in (clips or {}).items()}}
    gated = {name: apply_gate(limited[name], components, gate) for name, gate in conditions.items()}
    components = {**limited, **gated}
    sums, counted, dropped = [0.0] * len(groups), [False] * len(groups), [False] * len(groups)
    for name, scores in components.items():
        if weights[name] == 0:
            continue
        depends_on = [name, conditions[name][0]] if name in conditions else [name]
        failed_rows = [failed[name] for name in depends_on if name in failed]
        has_score = {g for g, score in zip(groups, scores, strict=True) if score is not None}
        for i, score in enumerate(scores):
            policy = on_none[name]
            if name in absent and absent[name][i]:
                continue
            if any(rows[i] for rows in failed_rows):
                dropped[i] = True
            elif score is not None:
                sums[i] += weights[name] * score
                counted[i] = True
            elif policy == "error":
                row = source_locations.describe_row(uids[i] if uids else i)
                raise RewardError(
                    f"reward {name} returned None for {row}", hint="its `on_none` is `error`; see the row, or change it"
                )
            elif policy == "zero":
                counted[i] = True
            elif policy == "skip_row" or (policy == "auto" and groups[i] in has_score):
                dropped[i] = True
    return [None if dropped[i] or not counted[i] else sums[i] for i in range(len(groups))]


def by_turn(parts: Sequence[Sequence[float]], limits: Sequence[float] | None) -> list[tuple[float, ...]]:
    """Clip the per-turn numbers of each row to [low, high]; a clip applies to each turn, not to the sum."""
    if limits is None:
        return [tuple(row) for row in parts]
    low, high = limits
    return [tuple(min(max(part, low), high) for part in row) for row in parts]


def clip_scores(scores: Column, limits: Sequence[float]) -> Column:
    """Clip the scores to [low, high]; None stays None."""
    low, high = limits
    return [None if score is None else min(max(score, low), high) for score in scores]


def apply_gate(scores: Column, components: Mapping[str, Column], gate: Gate) -> Column:
    """Return the scores, with 0 where the gate's component has no score or a score below the minimum."""
    name, least = gate
    return [
        score if key is not None and key >= least else 0.0 for score, key in zip(scores, components[name], strict=True)
    ]
