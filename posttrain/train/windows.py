"""Rollouts that go on in the next step (`rollout.shape: windows`): they are in `State.unfinished` between two steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from posttrain.batch import Rollout, Segment
from posttrain.rollout.continuation import generate_shaped
from posttrain.rollout.engine import GenerationBatch
from posttrain.seeds import derive
from posttrain.train.checkpoint import State
from posttrain.train.context import TrainContext
from posttrain.train.rollout_values import rollout_from_dict, rollout_to_dict
from posttrain.train.scoring import score_while_sampling
from posttrain.train.variants import APART
from posttrain.verify.failures import Calls, Failures, combine_calls


def leave_room(ctx: TrainContext, state: State) -> TrainContext:
    """The context with fewer prompts a step, by those whose rollouts the unfinished ones replace; maybe none."""
    if not state.unfinished:
        return ctx
    rollout = ctx.recipe.rollout
    prompts = max(0, rollout.prompts_per_step - -(-len(state.unfinished) // rollout.group_size))
    fewer = rollout.model_copy(update={"prompts_per_step": prompts})
    return dataclasses.replace(ctx, recipe=ctx.recipe.model_copy(update={"rollout": fewer}))


def gather_unfinished(
    ctx: TrainContext, state: State, failures: Failures, counts: dict[str, Any]
) -> tuple[list[Rollout], list[Calls]]:
    """The rollouts that the step before has not ended, of all ranks, with what the policy of this step adds; those that
    end now are scored. With the calls that scored them as one entry, counted in `failures`. Adds counts of this rank to
    `counts`."""
    found = ctx.ranks.gather_rollouts(ctx.watchdog.phase("gather"), False, go_on, ctx, state, counts)
    going = sorted(itertools.chain(*(rollouts for rollouts, _ in found)), key=lambda r: r.group)
    calls = [one for _, made in found for one in made]
    if calls:
        calls = [combine_calls(calls)]
        ctx.ranks.run(failures.add, calls[0])
    return going, calls


def go_on(ctx: TrainContext, state: State, counts: dict[str, Any]) -> tuple[list[Rollout], list[Calls]]:
    """This rank's share of `gather_unfinished`, and the calls that scored it; talks to no other rank."""
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
            apart=APART,
            grade=scored.grade,
            metrics=counts,
            begun=[rollout.segments for rollout in begun],
        )
        ended = [rollout for rollout in fresh if rollout.scored]
        calls = [scored.finish(ended, counts)] if ended else []
    return fresh, calls


def keep_unfinished(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """What `State.unfinished` is after a step with these rollouts, as values of JSON."""
    return [rollout_to_dict(_with_versions(rollout)) for rollout in rollouts if rollout.unfinished]


def _with_versions(rollout: Rollout) -> Rollout:
    """The rollout with the policy version at each token: what follows has another one."""
    segments = tuple(_add_version(segment, rollout.version) for segment in rollout.segments)
    return dataclasses.replace(rollout, segments=segments)


def _add_version(segment: Segment, version: int) -> Segment:
    return segment if segment.versions else dataclasses.replace(segment, versions=(version,) * len(segment.ids))


def count_older(rollouts: Sequence[Rollout]) -> int:
    """Prompt and completion tokens of a step's rollouts that earlier steps have counted."""
    return sum(len(rollout.prompt.ids) + rollout.older for rollout in rollouts if rollout.older)


def window_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How many rollouts of a step were begun before it, and how many go on after it; nothing without either."""
    older, going = sum(r.older > 0 for r in rollouts), sum(r.unfinished for r in rollouts)
    return {"rollout/continued": older, "rollout/unfinished": going} if older or going else {}
