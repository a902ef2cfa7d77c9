"""Evaluation while training: before the first step, every `eval.every` steps, and at the end.

What is measured does not change what is trained: seeds are of their own, and weights are only read. The best
evaluation so far and the count since then are in the checkpoint's State, so a resumed run keeps, and stops at, what an
unbroken one does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from posttrain.batch import Prompt, Rollout
from posttrain.data.prepare import Prepared
from posttrain.errors import count_noun
from posttrain.evaluate.estimators import bootstrap_ci, drop_unscored, mean, pass_contributions
from posttrain.evaluate.run import grade
from posttrain.models.load import LoadedModel
from posttrain.recipe.eval_sections import TrainingEval
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.engine import Engine
from posttrain.run.atomic_io import write_json
from posttrain.run.directory import RunDirectory
from posttrain.run.watchdog import Watchdog
from posttrain.seeds import derive
from posttrain.train import distributed
from posttrain.train.checkpoint import State
from posttrain.train.model_folder import save_model
from posttrain.verify.score import Scorer

BEST = "best"  # the folder of the model with the best evaluation
SAMPLES = 4  # completions of an evaluation that go to samples.jsonl
RESAMPLES = 2000  # of the interval, which is computed at every evaluation
LOWER_IS_BETTER = ("loss",)

Values = dict[str, Any]
Record = dict[str, Any]
Measure = Callable[[int], tuple[Values, list[Record]]]  # step -> metrics without `eval/`, and samples


class Evaluation:
    """The evaluations of one run. Every rank calls it after the same steps.

    measures: what is measured, in this order.
    """

    watchdog: Watchdog

    def __init__(
        self, settings: TrainingEval, directory: RunDirectory, loaded: LoadedModel, measures: Sequence[Measure]
    ) -> None:
        self.settings, self.directory, self.loaded, self.measures = settings, directory, loaded, measures

    def attach(self, watchdog: Watchdog) -> None:
        """Give it what the loop has. Call this before the first evaluation."""
        self.watchdog = watchdog

    def is_due(self, state: State, *, last: bool = False) -> bool:
        """Whether the steps that are done call for an evaluation that was not made. last: no step follows.

        So a run begins with one, and a run that failed in one makes it when it resumes.
        """
        return state.evaluated < state.step and (last or state.step % self.settings.every == 0)

    def evaluate(self, state: State) -> tuple[Values, list[Record]]:
        """Measure; keep the best weights, and say in `state` if the run should stop.

        Returns metrics, all of them under `eval/` but `time/eval`, and samples.
        """
        started = time.perf_counter()
        values: Values = {}
        records: list[Record] = []
        with self.watchdog.phase("evaluate"):
            for measure in self.measures:
                found, samples = measure(state.step)
                values |= {f"eval/{name}": value for name, value in found.items()}
                records += samples
        better = judge(state, self.settings.judged_by, values.get(f"eval/{self.settings.judged_by}"))
        if better and state.step and self.settings.keep_best:
            self._keep_best(state)
        if self.settings.patience and state.step and state.since_best >= self.settings.patience:
            state.stopped_early = given_up(state)
        state.evaluated = state.step
        values["time/eval"] = distributed.broadcast_from_rank0(time.perf_counter() - started)
        state.eval_seconds += values["time/eval"]
        return values, records

    def _keep_best(self, state: State) -> None:
        with self.watchdog.phase("save"):
            save_model(self.loaded, self.directory.path / BEST)
            distributed.run_on_rank0(write_json, self.directory.path / f"{BEST}.json", state.best)

    def summary(self, state: State) -> Values:
        """What the run's summary says of its evaluations."""
        if state.best is None or not (self.settings.keep_best or self.settings.patience):
            return {}
        kept = self.settings.keep_best and state.best["step"]
        model = str(self.directory.path / BEST) if kept else None
        found: Values = {"best_checkpoint": {**state.best, "model": model}}
        return {**found, **({"stopped_early": state.stopped_early} if state.stopped_early else {})}


def judge(state: State, metric: str, value: float | None) -> bool:
    """Whether an evaluation is the best so far; counts it in `state`. One without a number is not."""
    before = state.best
    sign = -1 if metric in LOWER_IS_BETTER else 1
    if value is None or (before is not None and sign * value <= sign * before["value"]):
        state.since_best += before is not None
        return False
    state.best = {"step": state.step, "metric": f"eval/{metric}", "value": value}
    state.since_best = 0
    return True


def evaluation_notes(state: State, values: Mapping[str, Any]) -> list[str]:
    """The lines of an evaluation on the terminal: its numbers, and that it ends the run, if it does."""
    interval = ""
    if values.get("eval/accuracy/low") is not None:
        interval = f" [{values['eval/accuracy/low']:.3f}, {values['eval/accuracy/high']:.3f}]"
    names = ("accuracy", "reward", "loss", "clipped_ratio")
    told = [(name, values.get(f"eval/{name}")) for name in names]
    parts = [f"{name} {value:.3f}{interval if name == 'accuracy' else ''}" for name, value in told if value is not None]
    numbers = ", ".join(parts) or "nothing could be judged"
    line = f"evaluation after step {state.step}: {numbers} ({values['time/eval']:.1f} s)"
    return [line, state.stopped_early] if state.stopped_early else [line]


def given_up(state: State) -> str:
    """The sentence on a run that its evaluations have stopped."""
    best = state.best or {}
    return (
        f"stopped after step {state.step}: {count_noun(state.since_best, 'evaluation')} in a row not better than "
        f"{best.get('metric')} {best.get('value', float('nan')):.4g} after step {best.get('step')} (eval.patience)"
    )


@dataclass
class Completions:
    """Completions of held-out prompts, scored.

    sync: gives the engine the weights of a step. scorer: of the rewards that grade.
    """

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    seed: int
    engine: Engine
    sync: Callable[[int], None]
    scorer: Scorer

    def __post_init__(self) -> None:
        self.failures = self.scorer.failures(unit="evaluation")

    def measure(self, step: int) -> tuple[Values, list[Record]]:
        """See `Measure`. Each rank samples and grades its share of the prompts."""
        self.sync(step)
        found = distributed.gather_or_raise(distributed.capture(self._grade_share))
        records = sorted((record for share in found for record in share), key=lambda r: (r["problem"], r["sample"]))
        shown = [r for r in records if r["sample"] == 0][:SAMPLES]
        return completion_metrics(records, self.n, self.seed), shown

    def _grade_share(self) -> list[Record]:
        """This rank's completions. The draws are those of every evaluation, so that two of them differ by their weights
        alone."""
        rollouts = self.engine.generate(
            self.prompts,
            self.n,
            self.sampling,
            seed=derive(self.seed, "evaluation"),
            logprobs=False,
            share=distributed.my_shard(len(self.prompts)),
        )
        grades = grade(self.scorer, rollouts, self.failures) if rollouts else []
        return [_record(r, i % self.n, found) for i, (r, found) in enumerate(zip(rollouts, grades, strict=True))]


def _record(rollout: Rollout, sample: int, found: Mapping[str, Any]) -> Record:
    return {
        "eval": True,
        "problem": rollout.group,
        "uid": rollout.prompt.uid,
        "sample": sample,
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
        "finish": rollout.finish,
        "tokens": len(rollout.sampled),
        "reward": found["reward"],
        "correct": found["correct"],
        "scores": found["scores"],
    }


def completion_metrics(records: Sequence[Record], n: int, seed: int) -> Values:
    """Metrics of the completions of all prompts; accuracy is the mean over prompts, with its interval.

    A completion that was cut is wrong, as in `posttrain eval`; one that could not be judged is left out and counted.
    """
    by_prompt: dict[int, list[bool | None]] = {}
    for record in records:
        right = None if record["correct"] is None else record["correct"] and record["finish"] != "length"
        by_prompt.setdefault(record["problem"], []).append(right)
    judged = [found for verdicts in by_prompt.values() if (found := drop_unscored(verdicts))]
    interval = bootstrap_ci([sum(found) / len(found) for found in judged], resamples=RESAMPLES, seed=seed)
    values: Values = {
        "accuracy": interval.mean,
        "accuracy/low": interval.low if interval.informative else None,
        "accuracy/high": interval.high if interval.informative else None,
        "reward": mean(drop_unscored([record["reward"] for record in records])),
        "mean_length": mean([record["tokens"] for record in records]),
        "clipped_ratio": mean([float(record["finish"] == "length") for record in records]),
        "unscored": sum(record["correct"] is None for record in records),
    }
    if n > 1:
        rights = [round(sum(found)) for found in judged]
        values[f"pass@{n}"] = mean(pass_contributions([len(found) for found in judged], rights, n))
    return values


def left_out(prepared: Prepared[Any]) -> str:
    """A line on held-out rows that cannot be used, empty where all can."""
    lost = sum(len(uids) for uids in prepared.dropped.values())
    causes = ", ".join(prepared.dropped)
    return (
        f"evaluation: {len(prepared.items)} of {count_noun(len(prepared.rows), 'row')} are used; {causes}"
        if lost
        else ""
    )


def make_sync(engine: Engine, loaded: LoadedModel) -> Callable[[int], None]:
    """A function that gives an engine the weights of a step, unless it has them."""

    def sync(step: int) -> None:
        if engine.version != step:
            distributed.run_all_or_raise(partial(engine.sync, loaded.model, step))

    return sync
