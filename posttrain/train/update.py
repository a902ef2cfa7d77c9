"""Optimizer updates of one RL step: minibatches, micro-batches, loss, gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, to_device
from posttrain.errors import NonFiniteError
from posttrain.loss.aggregate import Totals
from posttrain.seeds import derive
from posttrain.train import distributed, optim, sharding
from posttrain.train.collate import Sequences
from posttrain.train.collectives import local
from posttrain.train.context import TrainContext
from posttrain.train.objective import token_sum
from posttrain.train.own_rows import OwnRows
from posttrain.train.policy import compute_logprobs, current_logprobs, micro_batches_of, prompts_of, shortest
from posttrain.train.rl_metrics import Mismatch, update_metrics


class Sums(dict[str, Any]):
    """Sums by name. Tensors stay on their device until the numbers are read: micro-batches never wait for the GPU."""

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add values by name; tensors are detached and summed in float64."""
        for name, value in values.items():
            self[name] = self.get(name, 0.0) + (value.detach().double() if isinstance(value, Tensor) else value)


@dataclass
class UpdateStats:
    """Statistics accumulated over the updates of a step.

    logp [N,T]: log-probs of each row when it was last trained on, 0 if never.
    """

    logp: Tensor
    sums: Sums = field(default_factory=Sums)
    norms: list[float] = field(default_factory=list)
    adapter_norms: dict[str, list[float]] = field(default_factory=dict)  # gradient norms by adapter, if several
    mismatch: Mismatch = field(default_factory=Mismatch)


def rows_of_step(p: TrainContext, batch: RolloutBatch, step: int) -> OwnRows:
    """Return the rows of each update of a step, all assigned to this process (for several: `own_rows.assign_rows`).

    batch: with its advantages.
    """
    seeds = [derive(p.recipe.run.seed, "minibatch", step, epoch) for epoch in range(p.recipe.batch.epochs)]
    count, whole = p.recipe.batch.minibatches, p.objective.whole_groups
    parts = [rows for seed in seeds for rows in minibatches(batch.group_ids, count, seed, whole=whole)]
    active = frozenset(p.objective.has_signal(batch).nonzero()[:, 0].tolist())
    return OwnRows(p.ranks, len(batch), parts, active, [0] * len(batch), range(len(batch)))


def update(
    p: TrainContext, batch: RolloutBatch, sequences: Sequences, step: int, rows_of: OwnRows
) -> tuple[dict[str, Any], RolloutBatch, Tensor]:
    """Make all optimizer updates of one step. Rows without signal are skipped, but the denominators count them.

    What the objective needs from passes before the first update is computed first. The `old_logp` of the rows of the
    first update comes from their training pass, which runs at the step's starting weights. With dropout that pass would
    not give the log-probs of the deterministic policy that ratios compare with, so `old_logp` is computed for all rows
    up front.

    batch, sequences: of this rank's rows. Dropout, if the model has it, is seeded by (seed, step) and the rank. Returns
    the metrics over all ranks, the batch with the computed log-probs, and the log-probs [n,T] of each row in its last
    update.
    """
    p.loaded.model.train()
    seed = derive(p.recipe.run.seed, "dropout", step)
    torch.manual_seed(seed if p.ranks.is_main else derive(seed, "rank", p.ranks.number))
    active, first = rows_of.active, set[int]()  # first: rows whose `old_logp` comes from their first training pass
    indices = [i for i, row in enumerate(rows_of.mine) if row in active]  # rows with log-probs computed before training
    if active:
        batch = compute_logprobs(p, batch, sequences, indices, p.objective.needs)
        if batch.old_logp is None and p.needs_old_logp:
            if not p.has_dropout:
                first |= next(set(rows) for rows in rows_of.parts if not active.isdisjoint(rows))
            indices = [i for i in indices if rows_of.mine[i] not in first]
            if not active <= first:
                batch = compute_logprobs(p, batch, sequences, indices, {"old_logp"})
    stats = UpdateStats(torch.zeros(batch.mask.shape, device=batch.mask.device))
    if batch.old_logp is not None:
        stats.mismatch.add(batch.old_logp[indices], batch, indices)
    updates = 0
    for number, rows in enumerate(rows_of.parts, step * p.updates_per_step):
        lr = optim.set_lr(p.optimizer, p.recipe.optim, number, p.steps * p.updates_per_step)
        at_start = not first.isdisjoint(rows)
        update_batch = batch.replace(old_logp=None) if at_start else batch
        updates += update_once(p, update_batch, sequences, rows, step, stats, rows_of) and lr > 0
        if at_start and len(rows_of.parts) > 1:
            logp = stats.logp.clone()  # nonzero for these rows only: no other row was trained on yet
            batch, first = batch.replace(old_logp=logp if batch.old_logp is None else batch.old_logp + logp), set()
    mismatch = stats.mismatch
    if p.ranks.count > 1:
        mismatch = Mismatch.combine(p.ranks.gather(mismatch.to_numbers())[:: p.ranks.model_parallel_size])
    return (
        {
            **update_metrics(stats.sums, stats.norms, lr=lr, updates=updates),
            **{f"grad_norm/{name}": sum(norms) / len(norms) for name, norms in stats.adapter_norms.items()},
            **mismatch.metrics(),
        },
        batch,
        stats.logp,
    )


def update_once(
    p: TrainContext,
    batch: RolloutBatch,
    sequences: Sequences,
    rows: Sequence[int],
    step: int,
    stats: UpdateStats,
    rows_of: OwnRows,
) -> bool:
    """Make one optimizer update on `rows`, or none if no row has a signal. Return whether its gradient was not zero.

    Every rank runs forward and backward on its share of `rows`. If a rank fails there, all ranks raise its error,
    because they would wait for its gradient.
    """
    if rows_of.active.isdisjoint(rows):
        return False
    chosen = set(rows)
    own = [i for i, row in enumerate(rows_of.mine) if row in chosen]
    active = [i for i in own if rows_of.mine[i] in rows_of.active]
    totals = {name: p.objective.totals(batch.select(indices)) for name, indices in sequences.by_adapter(own).items()}
    if p.ranks.count > 1:
        totals = add_totals(p.ranks.gather(totals)[:: p.ranks.model_parallel_size])
    stats.logp[active] = 0.0
    trained = [p.loaded.model, *([p.critic] if p.critic is not None else [])]
    stats.sums.add(p.ranks.sum_passes(trained, run_micro_batches, p, batch, sequences, active, totals, stats))
    p.scaler.unscale_(p.optimizer)
    max_norm = p.recipe.optim.max_grad_norm
    by_adapter = optim.clip_adapters(p.loaded.model, max_norm) if hasattr(p.loaded.model, "peft_config") else {}
    norm, *critic_norms = [
        math.hypot(*by_adapter.values()) if by_adapter and module is p.loaded.model
        else float(optim.clip_gradients(module, max_norm))
        for module in trained
    ]  # fmt: skip
    finite = all(map(math.isfinite, (norm, *critic_norms)))
    overflow = p.scaler.get_scale() > 1 and not finite  # float16: skip the update and lower the scale for the next one
    if not math.isfinite(stats.sums["loss"]) or not (overflow or finite):
        raise non_finite_error(p, batch.select(own), sequences.select(own), step, stats.sums["loss"], norm)
    p.scaler.step(p.optimizer)
    p.scaler.update()
    p.optimizer.zero_grad(set_to_none=True)  # frees the gradients' memory until the next update
    if overflow:
        stats.sums.add({"skipped": 1.0})
        return False
    if p.proximal is not None:
        p.proximal.follow(p.loaded.model)
    stats.norms.append(norm)
    for name, adapter_norm in by_adapter.items():
        stats.adapter_norms.setdefault(name, []).append(adapter_norm)
    return any(value > 0 for value in (norm, *critic_norms))


def add_totals(parts: Sequence[Mapping[str | None, Totals]]) -> dict[str | None, Totals]:
    """Sum the loss denominators of an update over ranks, by adapter. parts: denominators of each rank's rows."""
    sums: dict[str | None, Totals] = {}
    for part in parts:
        sums |= {name: sums[name] + totals if name in sums else totals for name, totals in part.items()}
    return sums


def run_micro_batches(
    p: TrainContext,
    batch: RolloutBatch,
    sequences: Sequences,
    active: Sequence[int],
    totals: Mapping[str | None, Totals],
    stats: UpdateStats,
) -> dict[str, float]:
    """Run forward and backward on the `active` rows of this rank in micro-batches; return sums over their tokens.

    totals: loss denominators of each adapter's rows. A divided model needs the same number of passes on all ranks, so
    ranks with fewer micro-batches run idle passes.
    """
    sums, several = Sums(), p.ranks.count > 1
    parts = micro_batches_of(p, sequences, active, batch.group_ids.tolist() if p.objective.whole_groups else None)
    if several:
        parts += [[]] * p.ranks.idle_passes(len(parts))
    for remaining, chosen in zip(reversed(range(len(parts))), parts, strict=True):
        if several:
            sharding.sum_over_copies(p.loaded.model, remaining == 0)
        if not chosen:
            idle_pass(p, batch, sequences)
            continue
        logp, entropy, part = current_logprobs(p, batch.select(chosen), sequences.select(chosen))
        stats.logp.index_copy_(0, to_device(chosen, stats.logp.device), logp.detach().float())
        if batch.old_logp is None:
            stats.mismatch.add(logp, part)
        (adapter,) = sequences.by_adapter(chosen)
        loss, loss_stats = p.objective.loss(part, logp, totals[adapter])
        p.scaler.scale(loss * p.ranks.loss_share).backward()
        sums.add(loss_stats)
        sums.add({"loss": loss, "entropy": token_sum(entropy, part.mask), "tokens": part.mask.sum()})
        if p.shares:
            chosen_sequences = sequences.select(chosen)
            prompts = prompts_of(p, chosen_sequences)  # tokens shared with another row's prompt need no pass
            shared = 0 if prompts is None else sum(prompts.shared_token_counts(range(len(chosen))))
            sums.add({"rows_tokens": sum(chosen_sequences.lengths), "shared_tokens": shared})
    return {name: float(value) for name, value in sums.items()}


def idle_pass(p: TrainContext, batch: RolloutBatch, sequences: Sequences) -> None:
    """Run forward and backward that add nothing to the gradient, while other ranks have one more micro-batch."""
    row = [shortest(sequences)]
    with sharding.keep_without_gradient(p.loaded.model):
        logp, _, _ = current_logprobs(p, batch.select(row), sequences.select(row))
        (logp.sum() * 0).backward()


def minibatches(group_ids: Tensor, count: int, seed: int, *, whole: bool = False) -> list[list[int]]:
    """Return the row numbers of `count` minibatches, in a random order that `seed` determines.

    Groups stay whole unless there are fewer groups than minibatches. whole: groups always stay whole, which may give
    fewer than `count` minibatches.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = group_ids.cpu().unique()
    if count == 1:
        return [list(range(len(group_ids)))]
    if len(groups) < count and not whole:
        order = torch.randperm(len(group_ids), generator=generator)
        return [part.tolist() for part in order.tensor_split(count) if len(part)]
    parts = groups[torch.randperm(len(groups), generator=generator)].tensor_split(min(count, len(groups)))
    return [torch.isin(group_ids.cpu(), part).nonzero()[:, 0].tolist() for part in parts]


def non_finite_error(
    p: TrainContext, batch: RolloutBatch, sequences: Sequences, step: int, loss: float, norm: float
) -> NonFiniteError:
    """Write this rank's batch to disk; return an error that names the first tensor that is not finite on any rank."""
    path = p.dump / f"step-{step + 1}.pt"
    p.dump.mkdir(parents=True, exist_ok=True)
    torch.save({"batch": batch, "sequences": sequences}, distributed.rank_path(path))
    tensors = {n: getattr(batch, n) for n in ("advantages", "old_logp", "ref_logp")}
    named = dict(p.loaded.model.named_parameters())
    named |= {f"critic.{n}": q for n, q in p.critic.named_parameters()} if p.critic is not None else {}
    tensors |= {f"gradient of {n}": q.grad for n, q in named.items() if q.grad is not None}
    tensors |= {n: q.detach() for n, q in named.items()}
    parts = {n: local(t) for n, t in tensors.items() if t is not None}
    bad = next((n for n, t in parts.items() if not torch.isfinite(t).all()), "loss")
    if bad == "loss" and math.isfinite(loss):  # the sum of squared gradients has overflowed
        sizes = {n: float(t.abs().max()) for n, t in parts.items() if n.startswith("gradient") and t.numel()}
        largest = max(sizes, key=sizes.__getitem__)
        bad = f"the norm of all gradients, of which the {largest} is largest ({sizes[largest]:.3g}),"
    bad = next((name for name in p.ranks.gather(bad) if name != "loss"), "loss")
    return NonFiniteError(
        f"step {step + 1}: {bad} is not finite (loss {loss}, gradient norm {norm}); no update was made",
        allowed=f"the batch is in {path}; the last checkpoint is kept",
        hint="lower optim.lr, or look at the rewards and lengths of this batch",
    )
