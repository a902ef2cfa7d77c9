"""Rollouts that continue in the next step (`rollout.shape: windows`), stored in `State.unfinished` between steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from posttrain.batch import Rollout
from posttrain.rollout.continuation import generate_shaped
from posttrain.rollout.engine import GenerationBatch
from posttrain.seeds import derive
from posttrain.train.checkpoint import State
from posttrain.train.context import TrainContext
from posttrain.train.roles import GROUP_STRIDE
from posttrain.train.rollout_values import rollout_from_dict, rollout_to_dict
from posttrain.train.scoring import score_while_sampling
from posttrain.verify.failures import Calls, Failures, combine_calls


def leave_room(ctx: TrainContext, state: State) -> TrainContext:
    """Return the context with fewer prompts per step, since unfinished rollouts take the place of some; possibly 0."""
    if not state.unfinished:
        return ctx
    rollout = ctx.recipe.rollout
    prompts = max(0, rollout.prompts_per_step - -(-len(state.unfinished) // rollout.group_size))
    fewer = rollout.model_copy(update={"prompts_per_step": prompts})
    return dataclasses.replace(ctx, recipe=ctx.recipe.model_copy(update={"rollout": fewer}))


def gather_unfinished(
    ctx: TrainContext, state: State, failures: Failures, counts: dict[str, Any]
) -> tuple[list[Rollout], list[Calls]]:
    """Continue the rollouts that the previous step has not finished, and gather them from all ranks.

    Returns all of them, with scores if they end now, and the reward calls as one entry, which is counted in `failures`.
    Adds counts of this rank to `counts`.
    """
    found = ctx.ranks.gather_rollouts(ctx.watchdog.phase("gather"), False, continue_share, ctx, state, counts)
    continued = sorted(itertools.chain(*(rollouts for rollouts, _ in found)), key=lambda r: r.group)
    calls = [call for _, reward_calls in found for call in reward_calls]
    if calls:
        calls = [combine_calls(calls)]
        ctx.ranks.run(failures.add, calls[0])
    return continued, calls


def continue_share(ctx: TrainContext, state: State, counts: dict[str, Any]) -> tuple[list[Rollout], list[Calls]]:
    """Continue this rank's share of the unfinished rollouts; return them with their reward calls. No communication."""
    prompts = {prompt.uid: prompt for prompt in ctx.prompts}
    begun = [rollout_from_dict(row, prompts[row["prompt"]]) for row in state.unfinished]
    assert ctx.shape is not None
    with ctx.watchdog.phase("rollout"), score_while_sampling(ctx, state.step) as scored:
        fresh = generate_shaped(
            ctx.engine,
            ctx.shape,
            GenerationBatch(
                [prompts[rollout.prompt.uid] for rollout in begun],
                1,
                ctx.recipe.rollout,
                seed=derive(ctx.recipe.run.seed, "go on", state.step),
                first_group=ctx.recipe.rollout.prompts_per_step,
                share=range(ctx.ranks.number, len(begun), ctx.ranks.count),
            ),
            group_stride=GROUP_STRIDE,
            grade=scored.grade,
            metrics=counts,
            begun=[rollout.segments for rollout in begun],
        )
        ended = [rollout for rollout in fresh if rollout.scored]
        calls = [scored.finish(ended, counts)] if ended else []
    return fresh, calls


def keep_unfinished(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Return `State.unfinished` after a step with these rollouts, as JSON values.

    Each segment gets the policy version of each token, since tokens of the next step have another version.
    """
    kept = []
    for rollout in (rollout for rollout in rollouts if rollout.unfinished):
        segments = tuple(
            segment
            if segment.versions
            else dataclasses.replace(segment, versions=(rollout.version,) * len(segment.ids))
            for segment in rollout.segments
        )
        kept.append(rollout_to_dict(dataclasses.replace(rollout, segments=segments)))
    return kept


def window_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Count the rollouts that began before this step, and those that continue after it; {} without either."""
    older, unfinished = sum(r.older > 0 for r in rollouts), sum(r.unfinished for r in rollouts)
    return {"rollout/continued": older, "rollout/unfinished": unfinished} if older or unfinished else {}
