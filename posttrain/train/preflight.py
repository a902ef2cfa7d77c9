"""Estimate of an rl run from a few rollouts of its start model: signal, pass rates, truncation, tokens, hours.

Everything is built as the run builds it, and then discarded: the weights are updated once, to time the update, and not
saved. Only the start model is measured. A run that works moves away from it, and completions may grow.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain import terminal
from posttrain.advantage.gate import count_correct
from posttrain.batch import Rollout, RolloutBatch
from posttrain.curriculum.protocol import Plan
from posttrain.recipe.stages import RlRecipe
from posttrain.run.directory import RunDirectory
from posttrain.run.watchdog import Watchdog
from posttrain.train.assemble import audit_rewards, build_context, prepare_run
from posttrain.train.checkpoint import State
from posttrain.train.collate import sequences_of
from posttrain.train.collect import batch_of, sample_share, sync_engine
from posttrain.train.context import TrainContext
from posttrain.train.library_logging import quiet
from posttrain.train.pass_checks import check_start
from posttrain.train.policy import compute_logprobs
from posttrain.train.rl_metrics import rollout_metrics, thought_metrics
from posttrain.train.update import rows_of_step, update
from posttrain.verify.captured_output import OutputLog
from posttrain.verify.score import Scorer

Report = dict[str, Any]

BUCKETS = 5  # of the pass-rate histogram, besides the buckets of exactly 0 and 1
GROUP_FACTORS = (2, 4)  # multiples of the group size for which the share of groups with a signal is estimated
HIGH_TRUNCATION, LOW_SIGNAL, MANY_EASY = 0.1, 0.5, 0.3  # shares beyond which `advice` suggests a change
MIN_GAIN = 0.1  # increase of the share of groups with a signal that makes a larger group worth suggesting


def preflight(recipe: RlRecipe, directory: RunDirectory, prompts: int) -> Report:
    """Sample and score the first `prompts` prompts of the run as one batch; then time one optimizer step on them.

    Keys: prompts, rollouts, signal (shares of groups, `signal/*` of metrics.jsonl), pass_rates [[low, high, groups]],
    correct, reward, cut, lengths, tokens and seconds (of a step and of the run), steps, advice. Raises what a run
    raises before its first step, and RunError if too many reward calls fail.
    """
    quiet()
    work = prepare_run(recipe)
    output_log = OutputLog(directory.logs, "rewards", terminal.note)
    with (
        Scorer(recipe.rewards, recipe.scoring, recipe.base_dir, output_log) as scorer,
        Watchdog(directory.logs, recipe.run.hang_minutes) as watchdog,
    ):
        audit_rewards(recipe, work, scorer, terminal.note)
        with build_context(recipe, directory, work, scorer, watchdog, terminal.note) as ctx:
            check_start(ctx)
            return measure_start(ctx, min(prompts, len(ctx.prompts)))


def measure_start(ctx: TrainContext, prompts: int) -> Report:
    """Return the report of `preflight`, given the context of a step."""
    state, rollout = State(), ctx.recipe.rollout
    sync_engine(ctx, 0)
    started = time.perf_counter()
    rollouts = sample(ctx, state, prompts)
    sampling = time.perf_counter() - started
    if not ctx.engine.generates_during_updates:
        ctx.engine.sleep()
    batch = batch_of(ctx, rollouts, state).to(ctx.loaded.device)
    started = time.perf_counter()
    batch, sequences, metrics = train_once(ctx, batch, rollouts)
    training = time.perf_counter() - started
    share = rollout.prompts_per_step / prompts  # ratio of a step's size to the sample's
    rounds = generation_rounds(batch, rollout.max_gen_batches) if rollout.max_gen_batches > 1 else 1.0
    sampled = sum(len(r.sampled_ids) for r in rollouts)
    report: Report = {
        "prompts": prompts,
        "rollouts": len(rollouts),
        "signal": {key: value for key, value in metrics.items() if key.startswith("signal/")},
        "pass_rates": pass_rates(batch),
        "correct": metrics["correct"],
        "reward": metrics["reward"],
        "rewards": {k.split("/")[1]: v for k, v in metrics.items() if k.startswith("rewards/") and k.endswith("/mean")},
        "cut": metrics["completions/clipped_ratio"],
        "lengths": length_stats(rollouts, rollout.max_new_tokens),
        "generation_rounds": rounds,
        "larger_groups": larger_groups(batch, rollout.group_size),
        "tokens": {
            "a_step": share * sum(sequences.lengths),
            "sampled_a_step": share * rounds * sampled,
            "run": ctx.steps * share * sum(sequences.lengths),
        },
        "seconds": {"sampling": share * rounds * sampling, "training": share * training},
        "steps": ctx.steps,
    }
    seconds = sum(report["seconds"].values()) * ctx.steps
    limit = ctx.recipe.run.max_minutes
    report["hours"] = min(seconds, 60 * limit) / 3600 if limit else seconds / 3600
    report["cut_by_max_minutes"] = bool(limit and seconds > 60 * limit)
    return {**report, "advice": advice(report, ctx.recipe)}


def sample(ctx: TrainContext, state: State, prompts: int) -> list[Rollout]:
    """Return the scored rollouts of the run's first prompts. Raises RunError if too many reward calls fail."""
    plan = Plan(ctx.order.take(0, prompts), [ctx.recipe.rollout.group_size] * prompts)
    share = sample_share(ctx, state, plan, {})
    failures = ctx.scorer.failures()
    for calls in share.calls:
        failures.add(calls)
    return share.rollouts


def train_once(
    ctx: TrainContext, scored: RolloutBatch, rollouts: Sequence[Rollout]
) -> tuple[RolloutBatch, Any, dict[str, Any]]:
    """Run the passes and updates of one step; return the batch with advantages, its sequences and metrics."""
    sequences = sequences_of(rollouts)
    with ctx.watchdog.phase("measure"), ctx.compiled():
        scored = compute_logprobs(ctx, scored, sequences, range(len(scored)), ctx.objective.needs_before_the_loss)
    batch = ctx.objective.compute_advantages(scored)
    metrics = rollout_metrics(rollouts, batch) | thought_metrics(rollouts)
    with ctx.watchdog.phase("update"), ctx.compiled():
        update(ctx, batch, sequences, 0, rows_of_step(ctx, batch, 0))
    return batch, sequences, metrics


def generation_rounds(batch: RolloutBatch, most: int) -> float:
    """Estimate how many sampling rounds fill a step if groups that `keep` drops are replaced.

    1 / (share of groups kept), at most `most`. batch: with advantages.
    """
    if batch.keep is None:
        return 1.0
    groups = batch.group_ids.unique()
    kept = batch.group_ids[batch.keep].unique()
    return min(most, len(groups) / len(kept)) if len(kept) else float(most)


def correct_by_group(batch: RolloutBatch) -> list[tuple[int, int]]:
    """Return (correct answers, judged answers) of each group with any judged answer."""
    assert batch.correct is not None
    _, right, judged = count_correct(batch.correct, batch.group_ids)
    return [(int(r), int(of)) for r, of in zip(right.tolist(), judged.tolist(), strict=True) if of]


def pass_rates(batch: RolloutBatch) -> list[list[float]]:
    """Return a histogram [low, high, groups] of the groups' pass rates: 0, five buckets in between, and 1."""
    counts: Counter[int] = Counter()
    for right, of in correct_by_group(batch):
        counts[0 if right == 0 else BUCKETS + 1 if right == of else 1 + min(BUCKETS - 1, right * BUCKETS // of)] += 1
    edges = [(0.0, 0.0), *((i / BUCKETS, (i + 1) / BUCKETS) for i in range(BUCKETS)), (1.0, 1.0)]
    return [[low, high, counts[i]] for i, (low, high) in enumerate(edges)]


def larger_groups(batch: RolloutBatch, size: int) -> dict[int, float]:
    """Estimate the share of groups with correct and wrong answers if groups were larger: group size -> share.

    Empty if all answers are right or all are wrong: the estimate would be that of the prior alone.
    """
    found = correct_by_group(batch)
    if size < 2 or sum(c for c, _ in found) in (0, sum(k for _, k in found)):
        return {}
    return {
        n * size: math.fsum(probability_mixed(c, k, n * size) for c, k in found) / len(found)
        for n in (1, *GROUP_FACTORS)
    }


def probability_mixed(right: int, of: int, size: int) -> float:
    """Return the probability that `size` answers are neither all correct nor all wrong, given `right` of `of` correct.

    The pass rate has the posterior Beta(right + 1/2, wrong + 1/2) of Jeffreys' prior; E[p^n] and E[(1-p)^n] are
    quotients of Beta functions.
    """
    a, b = right + 0.5, of - right + 0.5

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    return 1 - sum(math.exp(log_beta(*both) - log_beta(a, b)) for both in ((a + size, b), (a, b + size)))


def length_stats(rollouts: Sequence[Rollout], limit: int) -> dict[str, float]:
    """Return the sampled tokens of a completion: mean, median, 95th percentile, maximum, and the limit."""
    ordered = sorted(len(r.sampled_ids) for r in rollouts)

    def percentile(share: float) -> int:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    mean = sum(ordered) / len(ordered)
    return {"mean": mean, "median": percentile(0.5), "p95": percentile(0.95), "max": ordered[-1], "limit": limit}


def advice(report: Mapping[str, Any], recipe: RlRecipe) -> list[str]:
    """Return what to change before the run, the most important first; empty if nothing stands out."""
    advice, signal, rollout = [], report["signal"], recipe.rollout
    if report["cut"] > HIGH_TRUNCATION:
        advice.append(
            f"{report['cut']:.0%} of the completions are cut: rollout.max_new_tokens={2 * rollout.max_new_tokens} or a "
            "stop string, or SFT on complete answers first"
        )
    if signal["signal/share"] < LOW_SIGNAL:
        advice.append(_more_signal(report, rollout.group_size))
    if signal["signal/too_easy"] > MANY_EASY:
        advice.append(f"{signal['signal/too_easy']:.0%} of the groups are all right: use harder prompts")
    if signal["signal/unscored"] > 0:
        advice.append("some answers could not be scored: `posttrain reward test RECIPE` shows why")
    if signal["signal/dropped"] > MANY_EASY and rollout.max_gen_batches == 1:
        advice.append("`keep` drops groups that differ, and nothing replaces them: rollout.max_gen_batches=4")
    if report["generation_rounds"] >= rollout.max_gen_batches > 1:
        advice.append(
            f"`keep` passes too few groups to fill a step in {rollout.max_gen_batches} rounds: the run would stop. Use "
            "prompts of middling difficulty, or raise rollout.max_gen_batches"
        )
    return advice


def _more_signal(report: Mapping[str, Any], size: int) -> str:
    signal = report["signal"]
    text = f"only {signal['signal/share']:.0%} of the groups have a signal"
    current = report["larger_groups"].get(size, 0.0)
    better = {n: share for n, share in report["larger_groups"].items() if n > size and share > current + MIN_GAIN}
    if better:
        n = min(better)
        text += f"; with rollout.group_size={n} about {better[n]:.0%} would hold right and wrong answers"
    if signal["signal/too_hard"] > signal["signal/too_easy"]:
        return f"{text}; warm up with SFT, or use easier prompts"
    return f"{text}; use harder prompts, or leave out those that are always solved"
