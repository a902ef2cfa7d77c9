"""Reinforcement learning with verifier rewards. One step, top to bottom:

prompts -> rollouts -> scores -> keep -> advantages -> loss over minibatches -> optimiser -> engine sync.

All randomness is derived from (seed, purpose, step): a resumed run draws what an unbroken run draws.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from posttrain.batch import Prompt, Rollout, RolloutBatch
from posttrain.data.prepare import prepare_prompts
from posttrain.data.sampler import PromptSampler
from posttrain.errors import Interrupted, NonFiniteError
from posttrain.models import load as models
from posttrain.models.save import save
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.engine import Engine, check_fits, make_engine, needed_length
from posttrain.run.directory import RunDirectory
from posttrain.run.interrupt import GracefulStop
from posttrain.run.progress import Progress
from posttrain.run.seeds import derive
from posttrain.train import checkpoint, optim
from posttrain.train.attention import use_packed_attention
from posttrain.train.collate import rollout_batch, sequences_of
from posttrain.train.logprobs import Sequences, check_head, completion_logprobs, micro_batches
from posttrain.train.objective import Objective
from posttrain.train.quiet import quiet
from posttrain.train.reference import ReferencePolicy, reference_policy
from posttrain.train.rl_metrics import Mismatch, rollout_metrics, sample_records, signal_note, update_metrics
from posttrain.verify.audit import audit_gold
from posttrain.verify.score import Sample, Scorer

COLUMNS = ("reward", "correct", "signal/share", "completions/mean_length", "grad_norm", "time/step")


@dataclass(frozen=True)
class Pieces:
    """What a step works with."""

    recipe: RlRecipe
    loaded: models.LoadedModel
    engine: Engine
    scorer: Scorer
    sampler: PromptSampler
    prompts: Sequence[Prompt]
    objective: Objective
    optimizer: Optimizer
    updates: int  # optimiser updates of the whole run
    reference: ReferencePolicy | None
    packed: bool  # rows without padding; where the architecture or the device cannot, padded
    dump: Path  # where a batch that broke the run is written


def run(recipe: RlRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Train, save the final model, return the summary. Resumes from the newest complete checkpoint, if any."""
    quiet()
    prepared = prepare_prompts(recipe.data, models.load_tokenizer(recipe.model, recipe.base_dir), recipe.base_dir)
    steps = total_steps(recipe, len(prepared.items))
    objective = Objective.from_sections(
        recipe.keep,
        recipe.advantage,
        recipe.loss,
        recipe.kl,
        norm_len=recipe.loss.norm_len or recipe.rollout.max_new_tokens,
        base_dir=recipe.base_dir,
    )
    with (
        GracefulStop() as stop,
        Progress("rl", steps, COLUMNS, max_minutes=recipe.run.max_minutes) as progress,
        Scorer(recipe.rewards, recipe.scoring, recipe.base_dir) as scorer,
    ):
        progress.note(audit_gold(scorer, [p.row for p in prepared.items]).summary)
        loaded = models.load(recipe.model, recipe.base_dir, seed=recipe.run.seed, training=True)
        check_fits(prepared.items, recipe.rollout, model_window(loaded))
        max_len = needed_length(prepared.items, recipe.rollout)
        engine = make_engine(recipe.rollout, loaded, scratch=directory.path / "engine", max_len=max_len)
        try:
            pieces = Pieces(
                recipe=recipe,
                loaded=loaded,
                engine=engine,
                scorer=scorer,
                sampler=PromptSampler(
                    len(prepared.items), recipe.rollout.prompts_per_step, recipe.run.seed, recipe.data.shuffle
                ),
                prompts=prepared.items,
                objective=objective,
                optimizer=optim.build(loaded.model, recipe.optim),
                updates=steps * recipe.batch.epochs * recipe.batch.minibatches,
                reference=reference_policy(loaded) if "ref_logp" in objective.needs else None,
                packed=loaded.device.type == "cuda" and use_packed_attention(loaded.model),
                dump=directory.path / "failed",
            )
            return train(pieces, directory, steps, progress, stop)
        finally:
            engine.close()


def train(p: Pieces, directory: RunDirectory, steps: int, progress: Progress, stop: GracefulStop) -> dict[str, Any]:
    """The loop over steps with its checkpoints, metrics and samples."""
    settings = p.recipe.run
    state = checkpoint.restore(directory.checkpoints, p.loaded, p.optimizer) or checkpoint.State()
    metrics, samples = directory.metrics(resume_after=state.step), directory.samples(resume_after=state.step)
    if state.step:
        p.engine.sync(p.loaded.model, state.step)
        progress.note(f"resumed after step {state.step}")
    else:
        check_start(p)
    first: dict[str, Any] | None = state.first_metrics or None
    last: dict[str, Any] = {}
    while state.step < steps and not _out_of_time(settings.max_minutes, state.seconds):
        started = time.perf_counter()
        rollouts, values = step(p, state)
        values["time/step"] = time.perf_counter() - started
        state.step += 1
        state.seconds += values["time/step"]
        first, last = first or values, values
        state.first_metrics = first
        metrics.write(state.step, values)
        samples.write(state.step, sample_records(rollouts[: settings.samples_per_step]))
        progress.update(state.step, values)
        if warning := signal_note(values):
            progress.note(warning)
        due = settings.save_every is not None and state.step % settings.save_every == 0
        if due or stop.requested:
            checkpoint.save(directory.checkpoints, state, p.loaded, p.optimizer, settings.keep_checkpoints)
        if stop.requested:
            raise Interrupted(f"stopped after step {state.step} of {steps}", where=str(directory.path))
    report = save(p.loaded, directory.final)
    return {
        "steps": state.step,
        "train_seconds": state.seconds,
        "reward_first": (first or {}).get("reward"),
        "reward_last": last.get("reward", (first or {}).get("reward")),
        "num_tokens": state.tokens,
        "model": str(directory.final),
        "save": report,
    }


def step(p: Pieces, state: checkpoint.State) -> tuple[list[Rollout], dict[str, Any]]:
    """One RL step. Returns the scored rollouts and the step's metrics; moves `state` past the prompts it drew."""
    clock = time.perf_counter()
    rollouts, gathered = collect(p, state)
    times = {"time/rollout": time.perf_counter() - clock - gathered["time/score"]}

    sequences = sequences_of(rollouts)
    state.tokens += sum(sequences.lengths)
    batch = rollout_batch(rollouts).to(p.loaded.device)
    if p.objective.kl is not None and p.objective.kl_in_reward:
        batch = fill_logprobs(p, batch, sequences, range(len(batch)))
    batch = p.objective.assign(batch)
    values = {**gathered, **rollout_metrics(rollouts, batch.to("cpu")), "num_tokens": state.tokens}

    clock = time.perf_counter()
    values |= update(p, batch, sequences, state.step)
    times["time/update"] = time.perf_counter() - clock

    clock = time.perf_counter()
    p.engine.sync(p.loaded.model, state.step + 1)
    times["time/sync"] = time.perf_counter() - clock
    return rollouts, {**values, **times}


def collect(p: Pieces, state: checkpoint.State) -> tuple[list[Rollout], dict[str, Any]]:
    """Scored rollouts of one step. With `keep` and max_gen_batches > 1, dropped groups are replaced by new prompts."""
    settings = p.recipe.rollout
    gathered: dict[str, Any] = {"time/score": 0.0}
    accumulator = p.objective.accumulator(settings.prompts_per_step, settings.max_gen_batches)
    rollouts: list[Rollout] = []
    while True:
        drawn = p.sampler.take(state.position, settings.prompts_per_step)
        state.position += len(drawn)
        with p.loaded.autocast() if settings.engine == "transformers" else nullcontext():
            fresh = p.engine.generate(
                [p.prompts[i] for i in drawn],
                settings.group_size,
                settings,
                seed=derive(p.recipe.run.seed, "rollout", state.step, accumulator.batches),
                first_group=accumulator.batches * settings.prompts_per_step,
            )
        _score(p, fresh, state.step, gathered)
        kept = accumulator.add(rollout_batch(fresh))
        rollouts += [r for r in fresh if r.group in kept]
        if accumulator.full:
            gathered["rollout/gen_batches"] = accumulator.batches
            return rollouts, gathered


def _score(p: Pieces, rollouts: Sequence[Rollout], step: int, gathered: dict[str, Any]) -> None:
    """Fill in scores, reward and correctness of each rollout; add counts and seconds to `gathered`."""
    samples = [
        Sample(
            completion=r.text,
            row=r.prompt.row,
            prompt=r.prompt.text,
            finish=r.finish,
            token_count=len(r.ids),
            group=r.group,
        )
        for r in rollouts
    ]
    scores = p.scorer.score(samples, step=step)
    for i, r in enumerate(rollouts):
        r.scores = {name: column[i] for name, column in scores.components.items()}
        r.reward, r.correct = scores.rewards[i], scores.correct[i]
    gathered["time/score"] += scores.seconds
    for what, counts in (("errors", scores.errors), ("timeouts", scores.timeouts), ("abstained", scores.abstained)):
        for name, count in counts.items():
            key = f"rewards/{name}/{what}"
            gathered[key] = gathered.get(key, 0) + count


def update(p: Pieces, batch: RolloutBatch, sequences: Sequences, step: int) -> dict[str, Any]:
    """All optimiser updates of one step. Rows without signal are skipped; the denominators count them."""
    settings = p.recipe.batch
    p.loaded.model.train()
    active = p.objective.has_signal(batch).nonzero()[:, 0].tolist()
    if batch.old_logp is None:
        batch = fill_logprobs(p, batch, sequences, active)
    sums: dict[str, float] = {}
    norms: list[float] = []
    mismatch = Mismatch()
    if batch.old_logp is not None:
        mismatch.add(batch.old_logp[active], batch.rollout_logp[active], batch.mask[active])
    done = step * settings.epochs * settings.minibatches
    for epoch in range(settings.epochs):
        seed = derive(p.recipe.run.seed, "minibatch", step, epoch)
        for rows in minibatches(batch.group_ids, settings.minibatches, seed):
            lr = optim.set_lr(p.optimizer, p.recipe.optim, done, p.updates)
            done += 1
            norm = update_once(p, batch, sequences, rows, step, sums, mismatch)
            if norm is not None:
                norms.append(norm)
    return {**update_metrics(sums, norms, lr=lr), **mismatch.metrics()}


def update_once(
    p: Pieces,
    batch: RolloutBatch,
    sequences: Sequences,
    rows: list[int],
    step: int,
    sums: dict[str, float],
    mismatch: Mismatch,
) -> float | None:
    """One optimiser update on `rows`; returns the gradient norm before clipping, or None if no row has a signal."""
    minibatch = batch.select(rows)
    active = [r for r, on in zip(rows, p.objective.has_signal(minibatch).tolist(), strict=True) if on]
    if not active:
        return None
    totals = p.objective.totals(minibatch)
    p.optimizer.zero_grad(set_to_none=True)
    lengths = [len(sequences.ids[r]) for r in active]
    for micro in micro_batches(lengths, p.recipe.batch.micro_tokens, packed=p.packed):
        chosen = [active[m] for m in micro]
        part = batch.select(chosen)
        logp, entropy = logprobs(p, p.loaded.model, sequences.select(chosen), part.mask.shape[1])
        if batch.old_logp is None:
            mismatch.add(logp, part.rollout_logp, part.mask)
        loss, stats = p.objective.loss(part, logp, totals)
        loss.backward()
        for name, value in {**stats, "loss": loss.detach(), "entropy": masked_sum(entropy, part.mask)}.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        sums["tokens"] = sums.get("tokens", 0.0) + float(part.mask.sum())
    norm = float(optim.clip_gradients(p.loaded.model, p.recipe.optim.max_grad_norm))
    if not math.isfinite(norm) or not math.isfinite(sums["loss"]):
        raise non_finite(p, batch.select(active), sequences.select(active), step, sums["loss"], norm)
    p.optimizer.step()
    return norm


def fill_logprobs(p: Pieces, batch: RolloutBatch, sequences: Sequences, rows: Sequence[int]) -> RolloutBatch:
    """Add old_logp (more than one update a step) and ref_logp (KL) of `rows`, each by a pass without gradient."""
    updates = p.recipe.batch.epochs * p.recipe.batch.minibatches
    if "old_logp" in p.objective.needs or updates > 1:
        with torch.no_grad():
            batch = batch.replace(old_logp=_logprobs_of(p, p.loaded.model, batch, sequences, rows))
    if p.reference is not None:
        with p.reference() as model:
            batch = batch.replace(ref_logp=_logprobs_of(p, model, batch, sequences, rows))
    return batch


def _logprobs_of(
    p: Pieces, model: torch.nn.Module, batch: RolloutBatch, sequences: Sequences, rows: Sequence[int]
) -> Tensor:
    """[N,T] log-probs of `rows` in micro-batches, 0 in other rows."""
    out = torch.zeros(batch.mask.shape, device=batch.mask.device)
    lengths = [len(sequences.ids[r]) for r in rows]
    for micro in micro_batches(lengths, p.recipe.batch.micro_tokens, packed=p.packed):
        chosen = [rows[m] for m in micro]
        out[chosen] = logprobs(p, model, sequences.select(chosen), batch.mask.shape[1])[0].float()
    return out


def logprobs(p: Pieces, model: torch.nn.Module, sequences: Sequences, width: int) -> tuple[Tensor, Tensor]:
    """(logp, entropy) [N,width] at the rollouts' temperature, in the run's precision."""
    with p.loaded.autocast():
        return completion_logprobs(model, sequences, width, p.recipe.rollout.temperature, packed=p.packed)


def minibatches(group_ids: Tensor, count: int, seed: int) -> list[list[int]]:
    """Row numbers of `count` minibatches in a random order drawn from `seed`. Groups stay whole while they suffice."""
    generator = torch.Generator().manual_seed(seed)
    groups = group_ids.cpu().unique()
    if count == 1:
        return [list(range(len(group_ids)))]
    if len(groups) < count:
        order = torch.randperm(len(group_ids), generator=generator)
        return [part.tolist() for part in order.tensor_split(count) if len(part)]
    parts = groups[torch.randperm(len(groups), generator=generator)].tensor_split(count)
    return [torch.isin(group_ids.cpu(), part).nonzero()[:, 0].tolist() for part in parts]


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the cells [N,T] where mask is True."""
    return torch.where(mask, values, 0.0).sum()


def non_finite(
    p: Pieces, batch: RolloutBatch, sequences: Sequences, step: int, loss: float, norm: float
) -> NonFiniteError:
    """Write the batch to disk and name the first tensor that is not finite."""
    p.dump.mkdir(parents=True, exist_ok=True)
    path = p.dump / f"step-{step + 1}.pt"
    torch.save({"batch": batch, "sequences": sequences}, path)
    tensors = {n: getattr(batch, n) for n in ("advantages", "old_logp", "ref_logp")}
    tensors |= {f"gradient of {n}": q.grad for n, q in p.loaded.model.named_parameters() if q.grad is not None}
    tensors |= {n: q.detach() for n, q in p.loaded.model.named_parameters()}
    bad = next((n for n, t in tensors.items() if t is not None and not torch.isfinite(t).all()), "loss")
    return NonFiniteError(
        f"step {step + 1}: {bad} is not finite (loss {loss}, gradient norm {norm}); no update was made",
        allowed=f"the batch is in {path}; the last checkpoint is kept",
        hint="lower optim.lr, or look at the rewards and lengths of this batch",
    )


def total_steps(recipe: RlRecipe, prompts: int) -> int:
    """run.steps, or run.epochs passes over the prompts, or one pass."""
    if recipe.run.steps:
        return recipe.run.steps
    return max(1, (recipe.run.epochs or 1) * prompts // recipe.rollout.prompts_per_step)


def model_window(loaded: models.LoadedModel) -> int:
    """The longest sequence that the model was made for, in tokens."""
    return getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def check_start(p: Pieces) -> None:
    """Before step 1: our log-probs are the model's own, packed is padded, the reference is the starting policy."""
    shortest = sorted((q for q in p.prompts if len(q.ids) > 1), key=lambda q: len(q.ids))[:3]
    if not shortest:
        return
    probe = Sequences(tuple(q.ids for q in shortest), (1,) * len(shortest))
    width = max(probe.lengths) - 1
    p.loaded.model.eval()
    with torch.no_grad(), p.loaded.autocast():
        gap = check_head(p.loaded.model, probe)
    if gap > 0.05:
        raise NonFiniteError(
            f"log-probs of {p.loaded.source} differ by {gap:.3f} nats from its own logits",
            hint="this architecture scales its logits in a way that posttrain does not know; please report it",
        )
    with torch.no_grad():
        ours, _ = logprobs(p, p.loaded.model, probe, width)
        if p.packed:
            padded, _ = logprobs(replace(p, packed=False), p.loaded.model, probe, width)
            if (gap := float((ours - padded).abs().max())) > 0.2:
                raise NonFiniteError(f"log-probs of packed and padded rows differ by {gap:.3f} nats")
    if p.reference is not None:
        with p.reference() as model:
            theirs, _ = logprobs(p, model, probe, width)
        if (gap := float((ours - theirs).abs().max())) > 1e-3:
            raise NonFiniteError(f"the reference is not the starting policy: log-probs differ by {gap:.3g} nats")


def _out_of_time(max_minutes: float | None, seconds: float) -> bool:
    return max_minutes is not None and seconds >= 60 * max_minutes
