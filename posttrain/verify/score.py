"""Scoring completions with the recipe's reward scripts, in worker processes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from posttrain import source_locations
from posttrain.errors import Problem, RewardError
from posttrain.recipe import reward_checks
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify import correctness, trl_form
from posttrain.verify.captured_output import Printed
from posttrain.verify.combine import apply_gate, by_turn, combine
from posttrain.verify.completion_steps import parts_of
from posttrain.verify.contract import BrokenContract, ByTurn, checked_batch
from posttrain.verify.failures import ENOUGH, Calls, Failures
from posttrain.verify.load import LoadedReward, load_reward
from posttrain.verify.pool import Pool, calls_of, rows_of, target_of
from posttrain.verify.transcript import Message, make_transcript
from posttrain.verify.worker import Call, Result
from posttrain.verify.workflow import build_workflow


@dataclass(frozen=True)
class Sample:
    """One completion and what a reward may ask about it. Rows of one `group` are completions of one prompt."""

    completion: str
    row: Mapping[str, Any]  # the data row with all its columns
    prompt: str = ""  # as the model saw it
    finish: Literal["stop", "length"] = "stop"
    token_count: int = 0
    group: int = 0
    token_ids: Sequence[int] = ()
    token_ends: Sequence[int] = ()  # the character at which each token ends, where it was asked for
    # Of a rollout of several turns; None and () for a single one:
    messages: Sequence[Mapping[str, Any]] = ()  # the whole conversation
    tool_calls: Sequence[Mapping[str, Any]] | None = None  # {name, arguments, result, kind, turn} in order
    turns: int = 1  # of the model
    world_score: float | None = None  # of its environment
    parts: Sequence[str] = ()  # texts of the model's turns
    turn_rewards: Sequence[float | None] = ()  # of its environment, one a turn
    observations: Sequence[str | None] = ()  # what its environment showed after each turn
    transcript: Sequence[Message] = ()  # of a row that brings its own; else made of the above
    # Of a workflow: all calls of the rollout (fields of `workflow.Said`), and the place of this one.
    calls: Sequence[Mapping[str, Any]] = ()
    call: int = 0


ABSENT = Result(0, "value", None, 0.0)  # of a row that a reward does not read, because its role is another


@dataclass(frozen=True)
class Scores:
    """Scores of N samples, in their order. calls, with what failed, and abstained count calls by component.

    components: name -> [N], None where a component does not apply or failed; parts of a component that returns several
    numbers are there as `name/part`. rewards: the weighted sum, None = not scored. correct: what the correctness
    component says, None = unknown.
    """

    components: dict[str, list[float | None]]
    rewards: list[float | None]
    correct: list[bool | None]
    calls: Calls
    abstained: dict[str, int]
    first_traceback: str | None
    seconds: float
    call_seconds: dict[str, float] = field(default_factory=dict)  # mean over the calls of a component
    # Rewards by turn: name -> a number for each part of the row, () if it has none. turn_rewards: their weighted sum, a
    # part of `rewards`.
    turn_scores: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    turn_rewards: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def errors(self) -> dict[str, int]:
        return self.calls.errors

    @property
    def timeouts(self) -> dict[str, int]:
        return self.calls.timeouts


class Scorer:
    """A context manager that holds the worker processes. Scripts are loaded, and their parameters checked, at once.

    printed: where what they print goes, else to stderr."""

    def __init__(
        self, rewards: Sequence[Reward], scoring: Scoring, base_dir: Path | None, printed: Printed | None = None
    ) -> None:
        self.sections, self.scoring = list(rewards), scoring
        self.rewards = [load_reward(section, base_dir) for section in rewards]
        self.per_turn = [i for i, reward in enumerate(self.rewards) if reward.per_turn]
        _refuse(self.sections, self.rewards)
        self.correctness = correctness.position(self.sections, self.rewards)
        self.weights = {r.name: s.weight for r, s in zip(self.rewards, self.sections, strict=True)}
        self.pool = Pool(
            [target_of(r, r.limit(s)) for r, s in zip(self.rewards, self.sections, strict=True) if not r.in_trainer],
            scoring.workers,
            scoring.memory_mb,
            printed,
        )
        pooled = [i for i, r in enumerate(self.rewards) if not r.in_trainer]
        self._target = {i: n for n, i in enumerate(pooled)}  # index of a reward -> its index in the pool
        self.busy_seconds = 0.0  # with calls in progress, since the scorer was made
        self._one_at_a_time = threading.Lock()  # several steps' rollouts may be scored at once

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
        """End the worker processes and free reward models. `score` would start and load them again."""
        self.pool.close()
        for reward in self.rewards:
            if reward.in_trainer:
                reward.function.posttrain_in_trainer[1]()  # type: ignore[attr-defined]

    def score(self, samples: Sequence[Sample], step: int = 0, results: list[list[Result]] | None = None) -> Scores:
        """Score all samples; results: of their calls, where they were made before.

        Raises RewardError when a script breaks its contract or `on_none: error` is met. Calls that failed are counted;
        `failures` says when they are too many."""
        started = time.monotonic()
        results = self.results(samples, step) if results is None else results
        named = [(reward.name, column) for reward, column in zip(self.rewards, results, strict=True)]
        components = {key: values for name, column in named for key, values in _columns(name, column).items()}
        rewards = self.combine_results(samples, results)
        errors, timeouts = (
            {name: sum(r.kind == kind for r in column) for name, column in named} for kind in ("error", "timeout")
        )
        failed = any(errors.values()) or any(timeouts.values())
        return Scores(
            components=components,
            rewards=rewards,
            correct=self._correct(results[self.correctness]),
            calls=Calls(
                step=step,
                prompts=len({s.group for s in samples}),
                calls=len(samples),
                errors=errors,
                timeouts=timeouts,
                first={n: told for n, column in named if (told := _first(samples, column))} if failed else {},
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
            turn_scores={self.rewards[i].name: _parts(results[i]) for i in self.per_turn},
            turn_rewards=self._turn_rewards(results, rewards) if self.per_turn else [()] * len(rewards),
        )

    def combine_results(self, samples: Sequence[Sample], results: Sequence[Sequence[Result]]) -> list[float | None]:
        """The reward of each sample: the weighted sum of its components, None = not scored."""
        named = list(zip((r.name for r in self.rewards), self.sections, results, strict=True))
        return combine(
            {
                name: self._sums_of_turns(i, column) if i in self.per_turn else [score_of(r) for r in column]
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
                if section.clip and i not in self.per_turn  # of those by turn each number was clipped
            },
            conditions={
                name: (section.condition.on, section.condition.min)
                for name, section, _ in named
                if section.condition is not None
            },
        )

    def _sums_of_turns(self, component: int, column: Sequence[Result]) -> list[float | None]:
        """The scores of a reward by turn."""
        sums = [math.fsum(parts) for parts in by_turn(_parts(column), self.sections[component].clip)]
        return [None if score_of(r) is None else total for r, total in zip(column, sums, strict=True)]

    def _turn_rewards(
        self, results: Sequence[Sequence[Result]], rewards: Sequence[float | None]
    ) -> list[tuple[float, ...]]:
        """The weighted sum of the rewards by turn, () for a row that has none or is not scored."""
        found: list[tuple[float, ...]] = [()] * len(rewards)
        names = [r.name for r in self.rewards]
        for i in self.per_turn:
            section = self.sections[i]
            open_rows: Sequence[float | None] = [1.0] * len(rewards)
            if gate := section.condition:
                keys = {gate.on: [score_of(r) for r in results[names.index(gate.on)]]}
                open_rows = apply_gate(open_rows, keys, (gate.on, gate.min))
            for row, parts in enumerate(by_turn(_parts(results[i]), section.clip)):
                if section.weight and parts and open_rows[row] and rewards[row] is not None:
                    found[row] = tuple(
                        before + section.weight * part
                        for before, part in zip(found[row] or (0.0,) * len(parts), parts, strict=True)
                    )
        return found

    def results(
        self, samples: Sequence[Sample], step: int = 0, only: Sequence[int] | None = None
    ) -> list[list[Result]]:
        """The results of the calls, [component][sample]. Raises RewardError only for a broken contract. Several threads
        may call it; one waits for the other.

        Components that read `correct` run after the one that says it. only: the indices of the components to run.
        """
        samples = [self._split_completion(sample) for sample in samples] if self.per_turn else samples
        which = range(len(self.rewards)) if only is None else only
        late = [i for i in which if "correct" in self.rewards[i].built_ins]
        early = [i for i in which if i not in late]
        if late and self.correctness not in early:
            early.append(self.correctness)
        with self._one_at_a_time:
            started = time.monotonic()
            found = self._run(early, samples, step, [None] * len(samples))
            if late:
                found |= self._run(late, samples, step, self._correct(found[self.correctness]))
            self.busy_seconds += time.monotonic() - started
        return [found[i] for i in which]

    def _split_completion(self, sample: Sample) -> Sample:
        """The sample, with its completion divided into parts by `scoring.split` if it has no turns."""
        return sample if sample.parts else replace(sample, parts=parts_of(sample.completion, self.scoring.split))

    def _run(
        self, which: Sequence[int], samples: Sequence[Sample], step: int, correct: Sequence[bool | None]
    ) -> dict[int, list[Result]]:
        calls: list[Call] = []
        places: list[tuple[int, int]] = []  # the reward and the row of each number of a call
        read = {i: self._read_by(i, samples) for i in which}
        for i in (i for i in which if i in self._target):
            reward, seen = self.rewards[i], list(read[i].values())
            given = [arguments(reward, one, step, correct[row]) for row, one in read[i].items()]
            form = trl_form.completion if reward.trl_form else lambda _, text: text
            written = [form(s.row, s.completion) for s in seen]
            calls += calls_of(reward, self._target[i], len(places), written, given)
            places += [(i, row) for row in read[i]]
        found = {i: [ABSENT] * len(samples) for i in which}
        for call, result in zip(calls, self.pool.run(calls) if calls else [], strict=True):
            i, row = places[call.number]
            if result.kind == "broken":
                batch = "batch from " if len(call.completion) > 1 and self.rewards[i].batched else ""
                where = f"reward {self.rewards[i].name}"
                raise RewardError(
                    f"{batch}{source_locations.row(str(samples[row].row.get('uid', row)))}: {result.value}", where=where
                )
            for k, of_row in enumerate(rows_of(call, result)):
                found[i][places[call.number + k][1]] = of_row
        for i in (i for i in which if i not in self._target):
            own = self._here(self.rewards[i], list(read[i].values()), step, [correct[row] for row in read[i]])
            for row, of_row in zip(read[i], own, strict=True):
                found[i][row] = of_row
        return found

    def _read_by(self, component: int, samples: Sequence[Sample]) -> dict[int, Sample]:
        """Row -> the sample as a reward reads it, of those rows that it is for."""
        section = self.sections[component]
        seen = {row: view_sample(sample, section.roles, section.reads) for row, sample in enumerate(samples)}
        return {row: sample for row, sample in seen.items() if sample is not None}

    def _here(
        self, reward: LoadedReward, samples: Sequence[Sample], step: int, correct: Sequence[bool | None]
    ) -> list[Result]:
        """A reward that is a model, on all samples in one call. What it raises is not caught."""
        given = [arguments(reward, s, step, right) for s, right in zip(samples, correct, strict=True)]
        results = []
        for call in calls_of(reward, 0, 0, [sample.completion for sample in samples], given) if samples else []:
            started = time.monotonic()
            returned = reward.function(call.completion, **call.arguments, **reward.params)
            try:
                values = checked_batch(returned, len(call.completion))
            except BrokenContract as error:
                raise RewardError(str(error), where=f"reward {reward.name}") from error
            results += rows_of(call, Result(call.number, "value", values, time.monotonic() - started))
        return results

    def _correct(self, results: Sequence[Result]) -> list[bool | None]:
        scores = [score_of(r) for r in results]
        return [None if x is None else x >= self.scoring.correct_at for x in scores]

    def failures(self, *, enough: int = ENOUGH, unit: str = "step", history: Iterable[Any] = ()) -> Failures:
        """What stops a run when too many calls of a reward fail (`failures.Failures`)."""
        targets = {reward.name: reward.target for reward in self.rewards}
        return Failures(targets, self.scoring.max_error_rate, enough=enough, unit=unit, history=history)


def view_sample(sample: Sample, roles: Sequence[str] | None, reads: str | None) -> Sample | None:
    """The sample as a reward reads it: with the last text of the role that it reads, of what goes on from the call if
    that role is there, else of the rollout. None for a call of another role than those that it is for. A plain
    completion is read as it is."""
    if not sample.calls or (roles is None and reads is None):
        return sample
    if roles is not None and sample.calls[sample.call]["role"] not in roles:
        return None
    if reads is None:
        return sample
    of_role = [number for number, call in enumerate(sample.calls) if call["role"] == reads]
    later = {sample.call}  # the call and what goes on from it
    for number, call in enumerate(sample.calls):
        if call["parent"] in later:
            later.add(number)
    last = sample.calls[([n for n in of_role if n in later] or of_role)[-1]] if of_role else None
    if last is None:  # it was never reached
        last = {"text": "", "finish": "length"}
    parts, shown = last.get("parts", ()), last.get("shown", ())
    return replace(
        sample,
        completion=last["text"],
        finish=last.get("finish", "stop"),
        token_count=last.get("tokens", 0),
        token_ids=(),
        token_ends=(),
        parts=parts,
        observations=(*shown, None) if shown else (),
        tool_calls=[] if shown else None,
        turns=max(1, len(parts)),
    )


def arguments(reward: LoadedReward, sample: Sample, step: int, correct: bool | None) -> dict[str, Any]:
    """The named arguments of one call. A column that this row lacks is None, or left out if it is optional."""
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


def built_in(name: str, sample: Sample, step: int, correct: bool | None) -> Any:
    """The value of a built-in argument; `load.BUILT_INS` says what each means."""
    match name:
        case "prompt" | "prompts":
            return sample.prompt
        case "messages":
            asked = sample.row.get("messages") or [{"role": "user", "content": sample.row.get("prompt")}]
            return list(sample.messages) or asked
        case "finish_reason":
            return sample.finish
        case "truncated":
            return sample.finish == "length"
        case "token_count":
            return sample.token_count
        case "step":
            return step
        case "correct":
            return correct
        case "prefilled_think":
            return sample.prompt.rstrip().endswith("<think>")
        case "token_ids":
            return list(sample.token_ids)
        case "token_ends":
            return list(sample.token_ends)
        case "tool_calls":
            return None if sample.tool_calls is None else list(sample.tool_calls)
        case "turns":
            return sample.turns
        case "world_score":
            return sample.world_score
        case "parts":
            return list(sample.parts) or [sample.completion]
        case "turn_rewards":
            return list(sample.turn_rewards)
        case "transcript":
            calls, shown = sample.tool_calls, sample.observations
            made = make_transcript(sample.prompt, sample.completion, sample.parts, calls, shown)
            return list(sample.transcript) or made
        case "workflow":
            return build_workflow(sample.calls, sample.call, sample.completion)
    return trl_form.built_in(name, sample.token_ids, step)


def _refuse(sections: Sequence[Reward], rewards: Sequence[LoadedReward]) -> None:
    """Raises RewardError for a list of rewards that `recipe validate` refuses."""
    found = [*reward_checks.problems(sections)] or [*correctness.problems(sections, rewards)]
    if found:
        raise RewardError.of([Problem(f"rewards.{key}", what, hint=right) for key, what, right in found])


def score_of(result: Result) -> float | None:
    """The score itself; None if the call abstained or failed."""
    if result.kind != "value":
        return None
    if isinstance(result.value, ByTurn):
        return result.value.total
    return result.value["reward"] if isinstance(result.value, dict) else result.value


def _parts(results: Sequence[Result]) -> list[tuple[float, ...]]:
    """The numbers by turn, () where a call abstained or failed."""
    return [r.value.parts if r.kind == "value" and isinstance(r.value, ByTurn) else () for r in results]


def _columns(name: str, results: Sequence[Result]) -> dict[str, list[float | None]]:
    """The component's scores and those of its parts, as `name/part`."""
    columns = {name: [score_of(r) for r in results]}
    dicts = [r.value if r.kind == "value" and isinstance(r.value, dict) else {} for r in results]
    parts = dict.fromkeys(part for values in dicts for part in values if part != "reward")
    return columns | {f"{name}/{part}": [values.get(part) for values in dicts] for part in parts}


def _first_traceback(samples: Sequence[Sample], results: Sequence[Sequence[Result]]) -> str | None:
    """The first error with the row that it was met on."""
    return next((told for column in results if (told := _first_failure(samples, column, "error"))), None)


def _first_failure(samples: Sequence[Sample], column: Sequence[Result], kind: str) -> str:
    """`on ROW:` and the traceback, if there is one; empty where no call of the column ended so."""
    place = next((i for i, result in enumerate(column) if result.kind == kind), None)
    if place is None:
        return ""
    where = source_locations.row(_uid(samples[place], place))
    return f"on {where}:\n{column[place].value}" if kind == "error" else f"on {where}"


def _first(samples: Sequence[Sample], column: Sequence[Result]) -> str:
    """What a person is told of a reward's first failure; empty where there was none."""
    trace, late = (_first_failure(samples, column, kind) for kind in ("error", "timeout"))
    return f"the first error, {trace}" if trace else f"the first time-out, {late}" if late else ""


def _uid(sample: Sample, index: int) -> str:
    return str(sample.row.get("uid", index))
