"""Evaluation during training: before the first step, every `eval.every` steps, and at the end.

Evaluation does not affect training: it uses separate seeds and only reads weights. The best evaluation so far and the
number of evaluations since then are in the checkpoint's State, so a resumed run keeps the same best model and stops at
the same step as an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from posttrain.batch import Prompt, Rollout
from posttrain.data.prepare import Prepared
from posttrain.errors import count_noun
from posttrain.evaluate.estimators import bootstrap_ci, drop_unscored, mean, pass_contributions
from posttrain.evaluate.run import grade
from posttrain.models.load import LoadedModel
from posttrain.recipe.eval_sections import TrainingEval
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.engine import Engine
from posttrain.rollout.hf import eval_mode
from posttrain.run.atomic_io import write_json
from posttrain.run.directory import RunDirectory
from posttrain.run.watchdog import Watchdog
from posttrain.seeds import derive
from posttrain.train import data_parallel, distributed
from posttrain.train.checkpoint import State
from posttrain.train.collate import IGNORED
from posttrain.train.image_batches import image_inputs
from posttrain.train.model_folder import save_model
from posttrain.verify.score import Scorer

BEST = "best"  # folder of the model with the best evaluation
SAMPLES = 4  # completions per evaluation written to samples.jsonl
RESAMPLES = 2000  # bootstrap resamples; the interval is computed at every evaluation
LOWER_IS_BETTER = ("loss",)

Values = dict[str, Any]
Record = dict[str, Any]
Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]
Sums = dict[str, float]
Measure = Callable[[int], tuple[Values, list[Record]]]  # step -> metrics without `eval/`, and samples


class Evaluation:
    """Evaluations of one run. Every rank calls it after the same steps.

    measures: functions that compute metrics, called in this order.
    """

    watchdog: Watchdog

    def __init__(
        self, settings: TrainingEval, directory: RunDirectory, loaded: LoadedModel, measures: Sequence[Measure]
    ) -> None:
        self.settings, self.directory, self.loaded, self.measures = settings, directory, loaded, measures

    def attach(self, watchdog: Watchdog) -> None:
        """Set the watchdog of the training loop. Call this before the first evaluation."""
        self.watchdog = watchdog

    def is_due(self, state: State, *, last: bool = False) -> bool:
        """Return whether an evaluation is due after the finished steps. last: no step follows.

        A run therefore begins with an evaluation, and a run that failed during an evaluation repeats it when resumed.
        """
        return state.evaluated < state.step and (last or state.step % self.settings.every == 0)

    def evaluate(self, state: State) -> tuple[Values, list[Record]]:
        """Run all measures, save the best weights, and set `state.stopped_early` if the run should stop.

        Returns metrics, all under `eval/` except `time/eval`, and samples.
        """
        started = time.perf_counter()
        values: Values = {}
        records: list[Record] = []
        with self.watchdog.phase("evaluate"):
            for measure in self.measures:
                found, samples = measure(state.step)
                values |= {f"eval/{name}": value for name, value in found.items()}
                records += samples
        better = update_best(state, self.settings.judged_by, values.get(f"eval/{self.settings.judged_by}"))
        if better and state.step and self.settings.keep_best:
            with self.watchdog.phase("save"):
                save_model(self.loaded, self.directory.path / BEST)
                distributed.run_on_rank0(write_json, self.directory.path / f"{BEST}.json", state.best)
        if self.settings.patience and state.step and state.since_best >= self.settings.patience:
            state.stopped_early = early_stop_message(state)
        state.evaluated = state.step
        values["time/eval"] = distributed.broadcast_from_rank0(time.perf_counter() - started)
        state.eval_seconds += values["time/eval"]
        return values, records

    def summary(self, state: State) -> Values:
        """Return the entries of the run's summary about its evaluations."""
        if state.best is None or not (self.settings.keep_best or self.settings.patience):
            return {}
        saved = self.settings.keep_best and state.best["step"]
        model = str(self.directory.path / BEST) if saved else None
        found: Values = {"best_checkpoint": {**state.best, "model": model}}
        return {**found, **({"stopped_early": state.stopped_early} if state.stopped_early else {})}


def update_best(state: State, metric: str, value: float | None) -> bool:
    """Return whether an evaluation is the best so far, and update `state`.

    An evaluation without a value is never the best.
    """
    best = state.best
    sign = -1 if metric in LOWER_IS_BETTER else 1
    if value is None or (best is not None and sign * value <= sign * best["value"]):
        state.since_best += best is not None
        return False
    state.best = {"step": state.step, "metric": f"eval/{metric}", "value": value}
    state.since_best = 0
    return True


def evaluation_notes(state: State, values: Mapping[str, Any]) -> list[str]:
    """Return the terminal lines of an evaluation: its values, and whether it stops the run."""
    interval = ""
    if values.get("eval/accuracy/low") is not None:
        interval = f" [{values['eval/accuracy/low']:.3f}, {values['eval/accuracy/high']:.3f}]"
    names = ("accuracy", "reward", "loss", "clipped_ratio")
    parts = [
        f"{name} {value:.3f}{interval if name == 'accuracy' else ''}"
        for name in names
        if (value := values.get(f"eval/{name}")) is not None
    ]
    numbers = ", ".join(parts) or "nothing could be judged"
    line = f"evaluation after step {state.step}: {numbers} ({values['time/eval']:.1f} s)"
    return [line, state.stopped_early] if state.stopped_early else [line]


def early_stop_message(state: State) -> str:
    """Return the message of a run stopped by its evaluations."""
    best = state.best or {}
    return (
        f"stopped after step {state.step}: {count_noun(state.since_best, 'evaluation')} in a row not better than "
        f"{best.get('metric')} {best.get('value', float('nan')):.4g} after step {best.get('step')} (eval.patience)"
    )


@dataclass
class Completions:
    """Samples and scores completions of held-out prompts.

    sync: updates the engine to the weights of a step. scorer: scores with the grading rewards.
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
        samples = [r for r in records if r["sample"] == 0][:SAMPLES]
        return completion_metrics(records, self.n, self.seed), samples

    def _grade_share(self) -> list[Record]:
        """Sample and grade this rank's completions.

        The seeds are the same in every evaluation, so that two evaluations differ only by their weights.
        """
        rollouts = self.engine.generate(
            self.prompts,
            self.n,
            self.sampling,
            seed=derive(self.seed, "evaluation"),
            logprobs=False,
            share=data_parallel.my_shard(len(self.prompts)),
        )
        grades = grade(self.scorer, rollouts, self.failures) if rollouts else []
        return [_record(r, i % self.n, grade) for i, (r, grade) in enumerate(zip(rollouts, grades, strict=True))]


def _record(rollout: Rollout, sample: int, grade: Mapping[str, Any]) -> Record:
    return {
        "eval": True,
        "problem": rollout.group,
        "uid": rollout.prompt.uid,
        "sample": sample,
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
        "finish": rollout.finish,
        "tokens": len(rollout.sampled_ids),
        "reward": grade["reward"],
        "correct": grade["correct"],
        "scores": grade["scores"],
    }


def completion_metrics(records: Sequence[Record], n: int, seed: int) -> Values:
    """Compute metrics of the completions of all prompts; accuracy is the mean over prompts, with its interval.

    A truncated completion counts as wrong, as in `posttrain eval`; a completion that could not be judged is excluded
    and counted.
    """
    by_prompt: dict[int, list[bool | None]] = {}
    for record in records:
        right = None if record["correct"] is None else record["correct"] and record["finish"] != "length"
        by_prompt.setdefault(record["problem"], []).append(right)
    judged = [found for verdicts in by_prompt.values() if (found := drop_unscored(verdicts))]
    interval = bootstrap_ci([sum(verdicts) / len(verdicts) for verdicts in judged], resamples=RESAMPLES, seed=seed)
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
        rights = [round(sum(verdicts)) for verdicts in judged]
        values[f"pass@{n}"] = mean(pass_contributions([len(verdicts) for verdicts in judged], rights, n))
    return values


def describe_dropped_rows(prepared: Prepared[Any]) -> str:
    """Return a line about held-out rows that cannot be used; empty if all can."""
    dropped = sum(len(uids) for uids in prepared.dropped.values())
    causes = ", ".join(prepared.dropped)
    return (
        f"evaluation: {len(prepared.items)} of {count_noun(len(prepared.rows), 'row')} are used; {causes}"
        if dropped
        else ""
    )


def make_sync(engine: Engine, loaded: LoadedModel) -> Callable[[int], None]:
    """Return a function that syncs an engine to the weights of a step unless it already has them."""

    def sync(step: int) -> None:
        if engine.version != step:
            distributed.run_all_or_raise(partial(engine.sync, loaded.model, step))

    return sync


# --- validation losses of sft and dpo ---


def batches_of(lengths: Sequence[int], micro: int) -> list[list[int]]:
    """Divide row numbers into forward passes of at most `micro` rows, longest rows first."""
    order = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
    return [order[at : at + micro] for at in range(0, len(order), micro)]


def sum_over_rows(
    loaded: LoadedModel, rows: Any, batches: Sequence[Sequence[int]], collate: Collate, sums: Callable[[Any], Sums]
) -> Sums:
    """Sum numbers over all rows, without gradients or dropout. Each rank runs a share of the batches.

    rows: indexed by number. sums: returns the sums of one collated batch, whose tensors are on the model's device.
    """
    from accelerate.utils import send_to_device  # here: rl imports this module, and would wait for accelerate

    sums_by_batch: list[Sums] = []
    with torch.no_grad(), eval_mode(loaded.model), loaded.autocast():
        for number in data_parallel.my_pass_shard(len(batches)):
            batch = collate([rows[n] for n in batches[number]])
            sums_by_batch.append(sums(send_to_device(batch, loaded.device)))
    every = [
        part for share in distributed.gather(sums_by_batch)[:: data_parallel.model_parallel_size()] for part in share
    ]
    return {name: sum(part[name] for part in every) for name in (every[0] if every else {})}


def token_sums(loaded: LoadedModel) -> Callable[[Any], Sums]:
    """Return a function that sums an sft batch's negative log-probs, correct greedy predictions, and trained tokens."""

    def sums(batch: dict[str, Any]) -> Sums:
        labels = batch["labels"][..., 1:]
        mask = labels != IGNORED
        inputs = image_inputs(loaded.model, {name: value for name, value in batch.items() if name != "labels"})
        logits = loaded.model(**inputs, use_cache=False).logits[:, :-1][mask].float()
        targets = labels[mask]
        return {
            "loss": float(functional.cross_entropy(logits, targets, reduction="sum")),
            "right": float((logits.argmax(-1) == targets).sum()),
            "tokens": float(mask.sum()),
        }

    return sums
