"""Stored rollouts in an RL step (`replay`).

Stored rollouts join the step, weighted by the policy that sampled them, and fresh rollouts are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.batch import Rollout, RolloutBatch, Stored
from posttrain.train.checkpoint import State
from posttrain.train.collate import Sequences, join_batches, rollout_batch, sequences_of
from posttrain.train.collect import batch_of
from posttrain.train.context import TrainContext
from posttrain.train.own_rows import assign_rows
from posttrain.train.policy import compute_logprobs
from posttrain.train.replay_store import mean
from posttrain.train.update import UpdateStats, update_once


def with_stored_logps(
    ctx: TrainContext, scored: RolloutBatch, sequences: Sequences, rollouts: Sequence[Rollout]
) -> RolloutBatch:
    """Return the batch with `old_logp`: stored log-probs for replayed rows, freshly computed ones for other rows.

    Thus the ratio of a replayed row is to the policy that sampled it.

    A loss that reads the sampler's log-probs (`rollout_logp`) besides `old_logp` distinguishes the two itself: then
    `old_logp` is the policy at the start of the step for all rows.
    """
    if scored.replayed is None or ctx.recipe.compares_with_sampler:
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
    """Add the rows that the replay kind chooses to a step (`join_stored`)."""
    assert ctx.replay is not None
    more = ctx.replay.draw(rollouts, [mean(own) for own in _advantages(batch, rollouts)], state.step)
    return join_stored(ctx, state, more, rollouts, sequences, scored, batch)


def join_stored(
    ctx: TrainContext,
    state: State,
    more: list[Rollout],
    rollouts: list[Rollout],
    sequences: Sequences,
    scored: RolloutBatch,
    batch: RolloutBatch,
) -> tuple[list[Rollout], Sequences, RolloutBatch, RolloutBatch]:
    """Add stored rows to a step: return rollouts, sequences and batches (before and after advantages) of all rows.

    more: the stored rows. They bring their advantages; their log-probs are computed like those of the other rows.
    """
    advantages = batch.advantages
    assert advantages is not None
    if not more:
        return rollouts, sequences, scored, batch
    if any(len(rollout.stored.advantages) > 1 for rollout in more if rollout.stored) and advantages.dim() == 1:
        advantages = advantages[:, None].expand(batch.mask.shape)  # [N] in a step whose rows were all dropped
        batch = batch.replace(advantages=advantages)
    needs = ctx.objective.needs_before_the_loss
    if not ctx.recipe.compares_with_sampler:
        needs = needs | {"old_logp"}
        scored = compute_logprobs(ctx, scored, sequences, range(len(scored)), {"old_logp"})
        batch = batch.replace(old_logp=scored.old_logp)
    joined, assigned = _stored_batches(ctx, state, more, needs, like=advantages)
    rollouts = [*rollouts, *more]
    return rollouts, sequences_of(rollouts), join_batches(scored, joined), join_batches(batch, assigned)


def _stored_batches(
    ctx: TrainContext, state: State, rollouts: list[Rollout], needs: Collection[str], *, like: Tensor
) -> tuple[RolloutBatch, RolloutBatch]:
    """Build the batch of stored rows, without and with their stored advantages. like: the step's advantages."""
    sequences = sequences_of(rollouts)
    scored = batch_of(ctx, rollouts, state).to(ctx.loaded.device)
    scored = compute_logprobs(ctx, scored, sequences, range(len(scored)), needs)
    scored = with_stored_logps(ctx, scored, sequences, rollouts)
    advantages = _stored_advantages(rollouts, like=like, width=scored.mask.shape[1])
    cut = _is_cut(ctx, scored)
    return scored, scored.replace(advantages=advantages, mask=scored.mask & ~cut[:, None], keep=torch.ones_like(cut))


def _is_cut(ctx: TrainContext, batch: RolloutBatch) -> Tensor:
    """Return the rows [N] that `loss.mask_truncated` removes."""
    if ctx.objective.mask_truncated and batch.truncated is not None:
        return batch.truncated
    return torch.zeros_like(batch.group_ids, dtype=torch.bool)


def train_apart(ctx: TrainContext, state: State, rollouts: list[Rollout], batch: RolloutBatch) -> dict[str, Any]:
    """Make one optimizer update on stored rows that the replay kind trains on separately; return its metrics.

    The learning rate is that of the step's last update. rollouts, batch: the step's, with their advantages.
    """
    if ctx.replay is None or not ctx.replay.trains_apart:
        return {}
    assert batch.advantages is not None
    fresh = [(rollout, mean(own)) for rollout, own in zip(rollouts, _advantages(batch, rollouts), strict=True)
             if rollout.stored is None]  # fmt: skip
    more = ctx.replay.draw([rollout for rollout, _ in fresh], [average for _, average in fresh], state.step, apart=True)
    if not more:
        return {"replay/apart_rows": 0, "replay/updates": 0}
    by_token = any(len(rollout.stored.advantages) > 1 for rollout in more if rollout.stored)
    like = batch.advantages.new_zeros((1, 1) if by_token else 1)
    assigned = _stored_batches(ctx, state, more, ctx.objective.needs, like=like)[1]
    sequences, rows = sequences_of(more), list(range(len(more)))
    rows_of = assign_rows(ctx, assigned, sequences.lengths, [rows])
    own = rows_of.select_batch(assigned)
    stats = UpdateStats(torch.zeros(own.mask.shape, device=own.mask.device))
    updates = update_once(ctx, own, rows_of.select_sequences(sequences), rows, state.step, stats, rows_of)
    ages = [state.step - rollout.stored.step for rollout in more if rollout.stored is not None]
    return {
        "replay/apart_rows": len(more),
        "replay/apart_age": sum(ages) / len(ages),
        "replay/apart_loss": float(stats.sums.get("loss", 0.0)),
        "replay/apart_grad_norm": mean(stats.norms),
        "replay/updates": int(updates),
    }


def _stored_advantages(rollouts: Sequence[Rollout], *, like: Tensor, width: int) -> Tensor:
    """Return the stored advantages of replayed rollouts: [N], or [N,width] if `like` has one per token."""
    advantages = torch.zeros((len(rollouts), width), dtype=like.dtype)
    for row, rollout in enumerate(rollouts):
        own = rollout.stored.advantages if rollout.stored is not None else ()
        advantages[row, : len(own) if len(own) > 1 else width] = torch.tensor(own or (0.0,), dtype=like.dtype)
    return (advantages if like.dim() == 2 else advantages[:, 0]).to(like.device)


def _advantages(batch: RolloutBatch, rollouts: Sequence[Rollout]) -> list[tuple[float, ...]]:
    """Return the advantages of each row: one, or one per token of its completion; () for untrained rows."""
    assert batch.advantages is not None
    values, trained = batch.advantages.tolist(), batch.mask.any(-1).tolist()
    if batch.advantages.dim() == 1:
        return [(value,) if ok else () for value, ok in zip(values, trained, strict=True)]
    return [tuple(own[: len(r.ids)]) if ok else () for own, ok, r in zip(values, trained, rollouts, strict=True)]


def as_sampled(batch: RolloutBatch, rollouts: Sequence[Rollout], sampled: Sequence[Rollout]) -> RolloutBatch:
    """Return the batch for metrics of what the policy has sampled: rows replaced by stored ones are restored.

    rollouts: those of the batch. sampled: those of the step before any was replaced.
    """
    replaced = [n for n, rollout in enumerate(rollouts) if rollout.stored is not None]
    if not replaced:
        return batch
    fresh = rollout_batch([sampled[n] for n in replaced]).to(batch.mask.device)
    assert batch.components is not None and batch.rewards is not None and fresh.rewards is not None
    assert batch.correct is not None and fresh.correct is not None
    assert batch.truncated is not None and fresh.truncated is not None
    rows = torch.tensor(replaced, device=batch.mask.device)
    components = {
        name: column.index_copy(0, rows, fresh.components[name].to(column)) if name in fresh.components else column
        for name, column in batch.components.items()
    }
    return batch.replace(
        rewards=batch.rewards.index_copy(0, rows, fresh.rewards.to(batch.rewards)),
        correct=batch.correct.index_copy(0, rows, fresh.correct.to(batch.correct)),
        truncated=batch.truncated.index_copy(0, rows, fresh.truncated),
        components=components,
    )


def store(
    ctx: TrainContext, step: int, rollouts: Sequence[Rollout], scored: RolloutBatch, logps: Tensor, batch: RolloutBatch
) -> dict[str, float]:
    """Store what the replay kind wants of a finished step; return replay metrics.

    scored, batch: before and after advantages were assigned. logps [N,T]: of the policy at the start of the step.
    """
    assert ctx.replay is not None
    fresh = [n for n, rollout in enumerate(rollouts) if rollout.stored is None]
    trained, cut = _advantages(batch, rollouts), _is_cut(ctx, scored).tolist()
    assigned = _advantages(batch.replace(mask=scored.mask), rollouts)
    left_out = [bool(assigned[n]) and not trained[n] and not cut[n] for n in range(len(rollouts))]
    advantages = [assigned[n] if left_out[n] else trained[n] for n in range(len(rollouts))]
    stored = [Stored(step, tuple(logps[n, : len(rollouts[n].ids)].tolist()), advantages[n]) for n in fresh]
    ctx.replay.store([rollouts[n] for n in fresh], stored, step, [left_out[n] for n in fresh])
    replayed = [rollout for rollout in rollouts if rollout.stored is not None]
    ages = [step - rollout.stored.step for rollout in replayed if rollout.stored is not None]
    rewards = [rollout.reward for rollout in replayed if rollout.reward is not None]
    return {
        "replay/rows": len(replayed),
        "replay/stored": len(ctx.replay.rollouts),
        **({"replay/age": sum(ages) / len(ages)} if ages else {}),
        **({"replay/reward": sum(rewards) / len(rewards)} if rewards else {}),
    }
