"""Stored rollouts in a step of rl (`replay`): they join it, are weighed by the policy that sampled them, and fresh ones
are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.batch import Rollout, RolloutBatch, Stored
from posttrain.recipe.replay_checks import compares_with_sampler
from posttrain.train.checkpoint import State
from posttrain.train.collate import join_batches, rollout_batch, sequences_of
from posttrain.train.collect import batch_of
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


def add_rows(
    ctx: TrainContext,
    state: State,
    rollouts: list[Rollout],
    sequences: Sequences,
    scored: RolloutBatch,
    batch: RolloutBatch,
) -> tuple[list[Rollout], Sequences, RolloutBatch, RolloutBatch]:
    """The rollouts of a step, their sequences and their batches (before and after advantages were assigned), with the
    stored rows that come on top: these bring their advantages, and are measured as the others are."""
    if ctx.replay is None:
        return rollouts, sequences, scored, batch
    advantages = batch.advantages
    assert advantages is not None
    more = ctx.replay.draw(rollouts, [sum(own) / max(len(own), 1) for own in _advantages(batch, rollouts)], state.step)
    if not more:
        return rollouts, sequences, scored, batch
    if any(len(one.stored.advantages) > 1 for one in more if one.stored) and advantages.dim() == 1:
        advantages = advantages[:, None].expand(batch.mask.shape)  # of a step whose rows were all dropped
        batch = batch.replace(advantages=advantages)
    needs, device = ctx.objective.needs_before_the_loss, scored.mask.device
    joined = batch_of(ctx, more, state).to(device)
    if not compares_with_sampler(ctx.recipe):
        needs = needs | {"old_logp"}
        scored = compute_logprobs(ctx, scored, sequences, range(len(scored)), {"old_logp"})
        batch = batch.replace(old_logp=scored.old_logp)
    their = sequences_of(more)
    joined = compute_logprobs(ctx, joined, their, range(len(more)), needs)
    joined = with_stored_logps(ctx, joined, their, more)
    cut = torch.zeros_like(joined.group_ids, dtype=torch.bool)
    if ctx.objective.mask_truncated and joined.truncated is not None:
        cut = joined.truncated
    assigned = joined.replace(
        advantages=_stored_advantages(more, like=advantages, width=joined.mask.shape[1]),
        mask=joined.mask & ~cut[:, None],
        keep=torch.ones_like(cut),
    )
    rollouts = [*rollouts, *more]
    return rollouts, sequences_of(rollouts), join_batches(scored, joined), join_batches(batch, assigned)


def _stored_advantages(rollouts: Sequence[Rollout], *, like: Tensor, width: int) -> Tensor:
    """The advantages that replayed rollouts were stored with, [N], or [N,width] where `like` has one a token."""
    found = torch.zeros((len(rollouts), width), dtype=like.dtype)
    for row, rollout in enumerate(rollouts):
        own = rollout.stored.advantages if rollout.stored is not None else ()
        found[row, : len(own) if len(own) > 1 else width] = torch.tensor(own or (0.0,), dtype=like.dtype)
    return (found if like.dim() == 2 else found[:, 0]).to(like.device)


def _advantages(batch: RolloutBatch, rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
    """The advantages of each row: one, or one a token of its completion; none where a row is not trained on."""
    assert batch.advantages is not None
    values, trained = batch.advantages.tolist(), batch.mask.any(-1).tolist()
    if batch.advantages.dim() == 1:
        return [(value,) if ok else () for value, ok in zip(values, trained, strict=True)]
    return [tuple(own[: len(r.ids)]) if ok else () for own, ok, r in zip(values, trained, rollouts, strict=True)]


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


def store(
    ctx: TrainContext, step: int, rollouts: Sequence[Rollout], saved: Saved, batch: RolloutBatch
) -> dict[str, float]:
    """Store what the kind wants of a step that is done; returns what metrics say of replay. saved: its numbers, with
    the log-probs of the policy at its start. batch: with its advantages."""
    if ctx.replay is None:
        return {}
    assert saved.batch.old_logp is not None
    fresh = [n for n, rollout in enumerate(rollouts) if rollout.stored is None]
    logps, advantages = saved.batch.old_logp, _advantages(batch, rollouts)
    with_what = [Stored(step, tuple(logps[n, : len(rollouts[n].ids)].tolist()), advantages[n]) for n in fresh]
    ctx.replay.store([rollouts[n] for n in fresh], with_what, step)
    replayed = [rollout for rollout in rollouts if rollout.stored is not None]
    ages = [step - rollout.stored.step for rollout in replayed if rollout.stored is not None]
    rewards = [rollout.reward for rollout in replayed if rollout.reward is not None]
    return {
        "replay/rows": len(replayed),
        "replay/stored": len(ctx.replay.rollouts),
        **({"replay/age": sum(ages) / len(ages)} if ages else {}),
        **({"replay/reward": sum(rewards) / len(rewards)} if rewards else {}),
    }
