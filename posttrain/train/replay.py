"""Stored rollouts in a step of rl (`replay`): they join it, are weighed by the policy that sampled them, and fresh ones
are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.batch import Rollout, RolloutBatch
from posttrain.recipe.replay_checks import compares_with_sampler
from posttrain.train.collate import rollout_batch
from posttrain.train.context import TrainContext
from posttrain.train.logprobs import Sequences
from posttrain.train.policy import compute_logprobs
from posttrain.train.saved_rollouts import Saved


def inject(ctx: TrainContext, step: int, fresh: list[Rollout]) -> list[Rollout]:
    """The rollouts of a step, in the same places, with stored ones instead of some."""
    return fresh if ctx.replay is None else ctx.replay.inject(fresh, step)


def with_stored_logps(
    ctx: TrainContext, scored: RolloutBatch, sequences: Sequences, rollouts: Sequence[Rollout]
) -> RolloutBatch:
    """The batch with `old_logp`: for replayed rows what they were stored with, so that the ratio is to the policy that
    sampled them; for the others as measured now.

    A loss that reads the sampler's log-probs (`rollout_logp`) beside `old_logp` keeps the two apart itself: there
    `old_logp` is the policy at the start of the step for all rows.
    """
    if scored.replayed is None or compares_with_sampler(ctx.recipe):
        return scored
    scored = compute_logprobs(ctx, scored, sequences, range(len(scored)), {"old_logp"})
    assert scored.old_logp is not None
    old = scored.old_logp.clone()
    for row, rollout in enumerate(rollouts):
        if rollout.stored is not None:
            old[row, : len(rollout.stored.logps)] = torch.tensor(rollout.stored.logps).to(old)
    return scored.replace(old_logp=old)


def as_sampled(batch: RolloutBatch, rollouts: Sequence[Rollout], sampled: Sequence[Rollout]) -> RolloutBatch:
    """The batch for metrics of what the policy has sampled: rows that gave way to stored ones are back in their places.

    rollouts: those of the batch; sampled: those of the step before any was replaced.
    """
    gone = [n for n, rollout in enumerate(rollouts) if rollout.stored is not None]
    if not gone:
        return batch
    own = rollout_batch([sampled[n] for n in gone]).to(batch.mask.device)
    assert batch.components is not None and batch.rewards is not None and own.rewards is not None
    assert batch.correct is not None and own.correct is not None
    assert batch.truncated is not None and own.truncated is not None
    rows = torch.tensor(gone, device=batch.mask.device)
    components = {
        name: column.index_copy(0, rows, own.components[name].to(column)) if name in own.components else column
        for name, column in batch.components.items()
    }
    return batch.replace(
        rewards=batch.rewards.index_copy(0, rows, own.rewards.to(batch.rewards)),
        correct=batch.correct.index_copy(0, rows, own.correct.to(batch.correct)),
        truncated=batch.truncated.index_copy(0, rows, own.truncated),
        components=components,
    )


def fresh_rows(batch: RolloutBatch) -> RolloutBatch:
    """The rows that were sampled for the step."""
    return batch if batch.replayed is None else batch.select(~batch.replayed)


def store(ctx: TrainContext, step: int, rollouts: Sequence[Rollout], saved: Saved) -> dict[str, float]:
    """Store what the kind wants of a step that is done; returns what metrics say of replay. saved: its numbers, with
    the log-probs of the policy at its start."""
    if ctx.replay is None:
        return {}
    assert saved.batch.old_logp is not None
    fresh = [n for n, rollout in enumerate(rollouts) if rollout.stored is None]
    logps = [saved.batch.old_logp[n, : len(rollouts[n].ids)].tolist() for n in fresh]
    ctx.replay.store([rollouts[n] for n in fresh], logps, step)
    replayed = [rollout for rollout in rollouts if rollout.stored is not None]
    ages = [step - rollout.stored.step for rollout in replayed if rollout.stored is not None]
    rewards = [rollout.reward for rollout in replayed if rollout.reward is not None]
    return {
        "replay/rows": len(replayed),
        "replay/stored": len(ctx.replay.rollouts),
        **({"replay/age": sum(ages) / len(ages)} if ages else {}),
        **({"replay/reward": sum(rewards) / len(rewards)} if rewards else {}),
    }
