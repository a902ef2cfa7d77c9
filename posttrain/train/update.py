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
from posttrain.train import optim, sharding
from posttrain.train.collate import Sequences
from posttrain.train.collectives import local
from posttrain.train.context import TrainContext
from posttrain.train.objective import token_sum
from posttrain.train.policy import compute_logprobs, current, kept_together, micro_batches_of, prompts_of
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


def update(
    p: TrainContext, batch: RolloutBatch, sequences: Sequences, step: int
) -> tuple[dict[str, Any], RolloutBatch, Tensor]:
    """All optimiser updates of one step. Rows without signal are skipped; the denominators count them.

    Dropout, where the model has it, is drawn from (seed, step) and rank.
    Returns the metrics, the batch with what was measured, and the log-probs [N,T] of the last update of each row.
    """
    p.loaded.model.train()
    seed = derive(p.recipe.run.seed, "dropout", step)
    torch.manual_seed(seed if p.ranks.is_main else derive(seed, "rank", p.ranks.number))
    active = with_signal(p, batch)
    count, whole = p.recipe.batch.minibatches, p.objective.whole_groups
    seeds = [derive(p.recipe.run.seed, "minibatch", step, epoch) for epoch in range(p.recipe.batch.epochs)]
    parts = [rows for seed in seeds for rows in minibatches(batch.group_ids, count, seed, whole=whole)]
    batch, first = measure_before_update(p, batch, sequences, active, parts)
    tally = Tally(torch.zeros(batch.mask.shape, device=batch.mask.device))
    if batch.old_logp is not None and batch.rollout_logp is not None:
        rest = [row for row in active if row not in first]
        mine = rest if p.ranks.count == 1 else [rest[n] for n in p.ranks.my_rows([1] * len(rest))]
        tally.mismatch.add(batch.old_logp[mine], batch.rollout_logp[mine], fresh_tokens(batch)[mine])
    made = 0
    for done, rows in enumerate(parts, step * p.updates_per_step):
        lr = optim.set_lr(p.optimizer, p.recipe.optim, done, p.steps * p.updates_per_step)
        at_start = not first.isdisjoint(rows)
        given = batch.replace(old_logp=None) if at_start else batch
        made += update_once(p, given, sequences, rows, step, tally) and lr > 0
        if at_start and len(parts) > 1:
            own = p.ranks.sum(tally.logp.clone())  # of these rows alone: no other was trained on yet
            batch, first = batch.replace(old_logp=own if batch.old_logp is None else batch.old_logp + own), set()
    mismatch = tally.mismatch
    if p.ranks.count > 1:
        mismatch = Mismatch.combine(p.ranks.gather(mismatch.to_numbers())[:: p.ranks.same_rows])
    return (
        {
            **update_metrics(tally.sums, tally.norms, lr=lr, updates=made),
            **{f"grad_norm/{name}": sum(own) / len(own) for name, own in tally.adapter_norms.items()},
            **mismatch.metrics(),
        },
        batch,
        p.ranks.sum(tally.logp),
    )


def measure_before_update(
    p: TrainContext, batch: RolloutBatch, sequences: Sequences, active: Sequence[int], parts: Sequence[Sequence[int]]
) -> tuple[RolloutBatch, set[int]]:
    """The batch with what the objective needs of passes before the first update, and the rows whose `old_logp` their
    own training pass gives: those of the first update, which are trained on at the weights of the start.

    With dropout a training pass is not of the policy that others are compared with, so all rows are measured.
    """
    batch = compute_logprobs(p, batch, sequences, active, p.objective.needs)
    if batch.old_logp is not None or not p.needs_old_logp:
        return batch, set()
    first = next((set(rows) for rows in parts if not set(rows).isdisjoint(active)), set[int]())
    first = set() if p.has_dropout else first
    return compute_logprobs(p, batch, sequences, [row for row in active if row not in first], {"old_logp"}), first


def update_once(
    p: TrainContext, batch: RolloutBatch, sequences: Sequences, rows: list[int], step: int, tally: Tally
) -> bool:
    """One optimiser update on `rows`, or none if no row has a signal. Returns whether it followed a gradient.

    Every rank holds all rows of the update, and runs forward and backward on its share of them. If one fails there, all
    raise its error: they would wait for its gradient.
    """
    minibatch = batch.select(rows)
    active = [rows[n] for n in with_signal(p, minibatch)]
    if not active:
        return False
    totals = {name: p.objective.totals(batch.select(own)) for name, own in sequences.by_adapter(rows).items()}
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
        raise non_finite(p, batch.select(active), sequences.select(active), step, tally.sums["loss"], norm)
    p.scaler.step(p.optimizer)
    p.scaler.update()
    p.optimizer.zero_grad(set_to_none=True)  # here, so that their memory is free until the next update
    if overflow:
        tally.sums.add({"skipped": 1.0})
        return False
    if p.proximal is not None:
        p.proximal.follow(p.loaded.model)
    tally.norms.append(norm)
    for name, own in by_adapter.items():
        tally.adapter_norms.setdefault(name, []).append(own)
    return any(length > 0 for length in (norm, *others))


def passes(
    p: TrainContext,
    batch: RolloutBatch,
    sequences: Sequences,
    active: Sequence[int],
    totals: Mapping[str | None, Totals],
    tally: Tally,
) -> dict[str, float]:
    """Forward and backward on this rank's part of the `active` rows; returns sums over its tokens. totals: the
    denominators of each adapter's rows.

    A loss over groups gets whole groups. With a sharded model, which needs the same number of passes on all ranks,
    empty micro-batches fill up.
    """
    sums, whole, several = Sums(), p.objective.whole_groups, p.ranks.count > 1
    mine = active
    if several:
        units = batch.group_ids[active].tolist() if whole else kept_together(p, sequences.select(active))
        mine = [active[n] for n in p.ranks.my_rows([len(sequences.ids[r]) for r in active], units)]
    parts = micro_batches_of(p, sequences, mine, batch.group_ids.tolist() if whole else None)
    parts += [list[int]()] * (p.ranks.idle_passes(len(parts)) if several else 0)
    for left, chosen in zip(reversed(range(len(parts))), parts, strict=True):
        if several:
            sharding.sum_over_copies(p.loaded.model, left == 0)
        if not chosen:
            idle_pass(p, batch, sequences, active)
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


def idle_pass(p: TrainContext, batch: RolloutBatch, sequences: Sequences, active: Sequence[int]) -> None:
    """Forward and backward that add nothing to the gradient, while other ranks have one more micro-batch."""
    row = [min(active, key=lambda r: len(sequences.ids[r]))]
    logp, _, _ = current(p, batch.select(row), sequences.select(row))
    (logp.sum() * 0).backward()


def with_signal(p: TrainContext, batch: RolloutBatch) -> list[int]:
    """Rows that have a gradient, as rank 0 finds them: rounding differs between GPUs, and all ranks must agree."""
    return p.ranks.broadcast(p.objective.has_signal(batch).nonzero()[:, 0].tolist())


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
    """Write the batch to disk and name the first tensor that is not finite."""
    path = p.dump / f"step-{step + 1}.pt"
    if p.ranks.is_main:
        p.dump.mkdir(parents=True, exist_ok=True)
        torch.save({"batch": batch, "sequences": sequences}, path)
    tensors = {n: getattr(batch, n) for n in ("advantages", "old_logp", "ref_logp")}
    named = dict(p.loaded.model.named_parameters())
    named |= {f"critic.{n}": q for n, q in p.critic.named_parameters()} if p.critic is not None else {}
    tensors |= {f"gradient of {n}": q.grad for n, q in named.items() if q.grad is not None}
    tensors |= {n: q.detach() for n, q in named.items()}
    parts = {n: local(t) for n, t in tensors.items() if t is not None}
    bad = next((n for n, t in parts.items() if not torch.isfinite(t).all()), "loss")
    return NonFiniteError(
        f"step {step + 1}: {bad} is not finite (loss {loss}, gradient norm {norm}); no update was made",
        allowed=f"the batch is in {path}; the last checkpoint is kept",
        hint="lower optim.lr, or look at the rewards and lengths of this batch",
    )
