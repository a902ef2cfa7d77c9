"""The optimiser updates of one RL step: minibatches, micro-batches, loss, gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.batch import RolloutBatch, on_device
from posttrain.errors import NonFiniteError
from posttrain.loss.aggregate import Totals
from posttrain.seeds import derive
from posttrain.train import distributed, optim, sharding
from posttrain.train.collate import Sequences
from posttrain.train.collectives import local
from posttrain.train.context import TrainContext
from posttrain.train.objective import token_sum
from posttrain.train.own_rows import OwnRows
from posttrain.train.policy import compute_logprobs, current, micro_batches_of, prompts_of, shortest
from posttrain.train.rl_metrics import Mismatch, update_metrics


class Sums(dict[str, Any]):
    """Sums by name. Tensors stay on their device until the numbers are read: micro-batches never wait for the GPU."""

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            self[name] = self.get(name, 0.0) + (value.detach().double() if isinstance(value, Tensor) else value)


@dataclass
class Tally:
    """What the updates of a step measure. logp [N,T]: each row's log-probs when it was last trained on, 0 if never."""

    logp: Tensor
    sums: Sums = field(default_factory=Sums)
    norms: list[float] = field(default_factory=list)
    adapter_norms: dict[str, list[float]] = field(default_factory=dict)  # of each of several adapters
    mismatch: Mismatch = field(default_factory=Mismatch)


def rows_of_step(p: TrainContext, batch: RolloutBatch, step: int) -> OwnRows:
    """The rows of each update of a step, all of them this process's; `own_rows.deal_rows` divides them among several.
    batch: with its advantages."""
    seeds = [derive(p.recipe.run.seed, "minibatch", step, epoch) for epoch in range(p.recipe.batch.epochs)]
    count, whole = p.recipe.batch.minibatches, p.objective.whole_groups
    parts = [rows for seed in seeds for rows in minibatches(batch.group_ids, count, seed, whole=whole)]
    active = frozenset(p.objective.has_signal(batch).nonzero()[:, 0].tolist())
    return OwnRows(p.ranks, len(batch), parts, active, [0] * len(batch), range(len(batch)))


def update(
    p: TrainContext, batch: RolloutBatch, sequences: Sequences, step: int, rows_of: OwnRows
) -> tuple[dict[str, Any], RolloutBatch, Tensor]:
    """All optimiser updates of one step. Rows without signal are skipped; the denominators count them.

    What the objective needs of passes before the first update is measured first. `old_logp` of the rows of that update
    comes from their own training pass, which is at the weights of the start; with dropout it is not of the policy that
    others are compared with, so all rows are measured.

    batch, sequences: of this rank's rows. Dropout, where the model has it, is drawn from (seed, step) and rank.
    Returns the metrics, of all ranks, the batch with what was measured, and the log-probs [n,T] of the last update of
    each row.
    """
    p.loaded.model.train()
    seed = derive(p.recipe.run.seed, "dropout", step)
    torch.manual_seed(seed if p.ranks.is_main else derive(seed, "rank", p.ranks.number))
    active, first = rows_of.active, set[int]()  # first: rows whose `old_logp` their first training pass gives
    measured = [place for place, row in enumerate(rows_of.mine) if row in active]
    if active:
        batch = compute_logprobs(p, batch, sequences, measured, p.objective.needs)
        if batch.old_logp is None and p.needs_old_logp:
            if not p.has_dropout:
                first |= next(set(rows) for rows in rows_of.parts if not active.isdisjoint(rows))
            measured = [place for place in measured if rows_of.mine[place] not in first]
            if not active <= first:
                batch = compute_logprobs(p, batch, sequences, measured, {"old_logp"})
    tally = Tally(torch.zeros(batch.mask.shape, device=batch.mask.device))
    if batch.old_logp is not None and batch.rollout_logp is not None:
        tally.mismatch.add(batch.old_logp[measured], batch.rollout_logp[measured], fresh_tokens(batch)[measured])
    made = 0
    for done, rows in enumerate(rows_of.parts, step * p.updates_per_step):
        lr = optim.set_lr(p.optimizer, p.recipe.optim, done, p.steps * p.updates_per_step)
        at_start = not first.isdisjoint(rows)
        given = batch.replace(old_logp=None) if at_start else batch
        made += update_once(p, given, sequences, rows, step, tally, rows_of) and lr > 0
        if at_start and len(rows_of.parts) > 1:
            own = tally.logp.clone()  # of these rows alone: no other was trained on yet
            batch, first = batch.replace(old_logp=own if batch.old_logp is None else batch.old_logp + own), set()
    mismatch = tally.mismatch
    if p.ranks.count > 1:
        mismatch = Mismatch.combine(p.ranks.gather(mismatch.to_numbers())[:: p.ranks.model_parallel_size])
    return (
        {
            **update_metrics(tally.sums, tally.norms, lr=lr, updates=made),
            **{f"grad_norm/{name}": sum(own) / len(own) for name, own in tally.adapter_norms.items()},
            **mismatch.metrics(),
        },
        batch,
        tally.logp,
    )


def update_once(
    p: TrainContext,
    batch: RolloutBatch,
    sequences: Sequences,
    rows: Sequence[int],
    step: int,
    tally: Tally,
    rows_of: OwnRows,
) -> bool:
    """One optimiser update on `rows`, or none if no row has a signal. Returns whether it followed a gradient.

    Every rank runs forward and backward on those that are its own. If one fails there, all raise its error: they would
    wait for its gradient.
    """
    if rows_of.active.isdisjoint(rows):
        return False
    chosen = set(rows)
    own = [place for place, row in enumerate(rows_of.mine) if row in chosen]
    active = [place for place in own if rows_of.mine[place] in rows_of.active]
    totals = {name: p.objective.totals(batch.select(places)) for name, places in sequences.by_adapter(own).items()}
    if p.ranks.count > 1:
        totals = add_totals(p.ranks.gather(totals)[:: p.ranks.model_parallel_size])
    tally.logp[active] = 0.0
    trained = [p.loaded.model, *([p.critic] if p.critic is not None else [])]
    tally.sums.add(p.ranks.sum_passes(trained, passes, p, batch, sequences, active, totals, tally))
    p.scaler.unscale_(p.optimizer)
    most = p.recipe.optim.max_grad_norm
    by_adapter = optim.clip_adapters(p.loaded.model, most) if hasattr(p.loaded.model, "peft_config") else {}
    norm, *others = [
        math.hypot(*by_adapter.values()) if by_adapter and module is p.loaded.model
        else float(optim.clip_gradients(module, most))
        for module in trained
    ]  # fmt: skip
    finite = all(map(math.isfinite, (norm, *others)))
    overflow = p.scaler.get_scale() > 1 and not finite  # float16: no update, a smaller scale for the next
    if not math.isfinite(tally.sums["loss"]) or not (overflow or finite):
        raise non_finite(p, batch.select(own), sequences.select(own), step, tally.sums["loss"], norm)
    p.scaler.step(p.optimizer)
    p.scaler.update()
    p.optimizer.zero_grad(set_to_none=True)  # here, so that their memory is free until the next update
    if overflow:
        tally.sums.add({"skipped": 1.0})
        return False
    if p.proximal is not None:
        p.proximal.follow(p.loaded.model)
    tally.norms.append(norm)
    for name, length in by_adapter.items():
        tally.adapter_norms.setdefault(name, []).append(length)
    return any(length > 0 for length in (norm, *others))


def add_totals(parts: Sequence[Mapping[str | None, Totals]]) -> dict[str | None, Totals]:
    """The denominators of an update by adapter, of those of each rank's rows."""
    found: dict[str | None, Totals] = {}
    for part in parts:
        found |= {name: found[name] + totals if name in found else totals for name, totals in part.items()}
    return found


def passes(
    p: TrainContext,
    batch: RolloutBatch,
    sequences: Sequences,
    active: Sequence[int],
    totals: Mapping[str | None, Totals],
    tally: Tally,
) -> dict[str, float]:
    """Forward and backward on the `active` rows of this rank; returns sums over their tokens. totals: the denominators
    of each adapter's rows.

    With a divided model, which needs the same number of passes on all ranks, idle ones fill up."""
    sums, several = Sums(), p.ranks.count > 1
    parts = micro_batches_of(p, sequences, active, batch.group_ids.tolist() if p.objective.whole_groups else None)
    if several:
        parts += [[]] * p.ranks.idle_passes(len(parts))
    for left, chosen in zip(reversed(range(len(parts))), parts, strict=True):
        if several:
            sharding.sum_over_copies(p.loaded.model, left == 0)
        if not chosen:
            idle_pass(p, batch, sequences)
            continue
        logp, entropy, part = current(p, batch.select(chosen), sequences.select(chosen))
        tally.logp.index_copy_(0, on_device(chosen, tally.logp.device), logp.detach().float())
        if batch.old_logp is None:
            tally.mismatch.add(logp, part.rollout_logp, fresh_tokens(part))
        (adapter,) = sequences.by_adapter(chosen)
        loss, stats = p.objective.loss(part, logp, totals[adapter])
        p.scaler.scale(loss * p.ranks.loss_share).backward()
        sums.add(stats)
        sums.add({"loss": loss, "entropy": token_sum(entropy, part.mask), "tokens": part.mask.sum()})
        if p.shares:
            sums.add(passed_tokens(p, sequences.select(chosen)))
    return {name: float(value) for name, value in sums.items()}


def fresh_tokens(batch: RolloutBatch) -> Tensor:
    """The trained tokens [N,T] that were sampled for this step: of others the engine has older log-probs."""
    mask = batch.mask if batch.new_tokens is None else batch.mask & batch.new_tokens
    return mask if batch.replayed is None else mask & ~batch.replayed[:, None]


def passed_tokens(p: TrainContext, sequences: Sequences) -> dict[str, float]:
    """The tokens of these rows, and how many of them need no pass of their own."""
    prompts = prompts_of(p, sequences)
    skipped = 0 if prompts is None else sum(prompts.shared_token_counts(range(len(sequences))))
    return {"rows_tokens": sum(sequences.lengths), "shared_tokens": skipped}


def idle_pass(p: TrainContext, batch: RolloutBatch, sequences: Sequences) -> None:
    """Forward and backward that add nothing to the gradient, while other ranks have one more micro-batch."""
    row = [shortest(sequences)]
    with sharding.keep_without_gradient(p.loaded.model):
        logp, _, _ = current(p, batch.select(row), sequences.select(row))
        (logp.sum() * 0).backward()


def minibatches(group_ids: Tensor, count: int, seed: int, *, whole: bool = False) -> list[list[int]]:
    """Row numbers of `count` minibatches, in a random order drawn from `seed`.

    Groups stay whole unless there are fewer groups than minibatches. whole: they always do, and then there are fewer
    minibatches.
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


def non_finite(
    p: TrainContext, batch: RolloutBatch, sequences: Sequences, step: int, loss: float, norm: float
) -> NonFiniteError:
    """Write this rank's batch to disk and name the first tensor that is not finite on any."""
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
    if bad == "loss" and math.isfinite(loss):  # the sum of squares has overflowed
        sizes = {n: float(t.abs().max()) for n, t in parts.items() if n.startswith("gradient") and t.numel()}
        largest = max(sizes, key=sizes.__getitem__)
        bad = f"the norm of all gradients, of which the {largest} is largest ({sizes[largest]:.3g}),"
    bad = next((name for name in p.ranks.gather(bad) if name != "loss"), "loss")
    return NonFiniteError(
        f"step {step + 1}: {bad} is not finite (loss {loss}, gradient norm {norm}); no update was made",
        allowed=f"the batch is in {path}; the last checkpoint is kept",
        hint="lower optim.lr, or look at the rewards and lengths of this batch",
    )
