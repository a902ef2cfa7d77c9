"""Training loop shared by sft, dpo and reward models: a TRL trainer runs the steps, posttrain everything around them.

The trainer sees one pass over exactly the remaining rows. This file decides where a run starts, the order of rows,
random seeds, the denominator of the loss, metrics, checkpoints and when to stop. These are therefore the same in every
stage, and a resumed run computes the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from posttrain import source_locations
from posttrain.data.prepare import Prepared
from posttrain.data.rows import format_causes
from posttrain.errors import DataError, Interrupted, NonFiniteError, RunError, count_noun
from posttrain.models.load import LoadedModel
from posttrain.models.save import save
from posttrain.models.save_adapter import merged_note
from posttrain.run import checkpoints, ledger, status
from posttrain.run.directory import RunDirectory
from posttrain.run.interrupt import GracefulStop
from posttrain.run.jsonl import lost_rows
from posttrain.run.metrics import MetricsLog
from posttrain.run.progress import Progress
from posttrain.run.samples import SamplesLog
from posttrain.run.watchdog import Watchdog
from posttrain.seeds import PromptSampler, derive
from posttrain.train import checkpoint, compiled, data_parallel, distributed, optim, sharding, start_notes, update_check
from posttrain.train.collectives import local
from posttrain.train.emergency_checkpoint import save_before_raising
from posttrain.train.evaluation import Evaluation, evaluation_notes
from posttrain.train.image_batches import IMAGES, image_inputs
from posttrain.train.load_balancing import StepOrder
from posttrain.train.memory_plan import explain_out_of_memory, peak_memory
from posttrain.train.model_folder import save_model
from posttrain.train.ranks import ranks_of_run
from posttrain.train.row_plan import RowOrder, RowPlan, TrainRecipe, row_plan

Saver = Callable[[LoadedModel, Path], dict[str, Any]]


@dataclass
class Job:
    """One run: its parts, and its progress."""

    recipe: TrainRecipe
    directory: RunDirectory
    loaded: LoadedModel
    plan: RowPlan
    sampler: PromptSampler
    optimizer: Optimizer
    longest: int = 0  # length of the longest row in tokens
    order: StepOrder | None = None  # order of the rows within a step; None: as drawn
    state: checkpoint.State = field(default_factory=checkpoint.State)
    saving: bool = False  # True during a save, and after a failed save
    stop_signal: int = 0  # signal number by which any rank was asked to stop; 0: none
    idle_error: RunError | None = None  # error that ends the run after the step, if it trains nothing
    evaluation: Evaluation | None = None  # evaluation during training

    @classmethod
    def of(
        cls, recipe: TrainRecipe, directory: RunDirectory, loaded: LoadedModel, n_rows: int, longest: int = 0
    ) -> Job:
        planned = row_plan(recipe, n_rows)
        sampler = PromptSampler(n_rows, planned.size, recipe.run.seed, recipe.data.shuffle)
        return cls(recipe, directory, loaded, planned, sampler, optim.build(loaded.model, recipe.optim), longest)

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, the time limit is reached, or evaluations have stopped the run."""
        done = self.state.step >= self.plan.steps or bool(self.state.stopped_early)
        return done or self.state.out_of_time(self.recipe.run.max_minutes)

    def save(self, *, alone: bool = False, wait: bool = True) -> None:
        """Write a checkpoint of the finished steps. alone, wait: see `checkpoint.save`."""
        self.saving = True
        root, keep = self.directory.checkpoints, self.recipe.run.keep_checkpoints
        checkpoint.save(root, self.state, self.loaded, self.optimizer, keep, alone=alone, wait=wait)
        self.saving = False


class RunLoop(abc.ABC):
    """Mixin placed before a TRL trainer: `class Sft(RunLoop, SFTTrainer)`. Overrides public hooks of the trainer only.

    A subclass defines the denominator of its loss (`denominator`, over the whole optimizer step, so that micro-batches
    never change the result) and adds its metrics to `sums`.

    With several ranks, each rank runs some of a step's micro-batches. The trainer is unaware of this: on every rank it
    iterates over all of them, and `training_step` skips the micro-batches of other ranks.
    """

    job: Job
    metrics: MetricsLog
    samples: SamplesLog
    progress: Progress
    stop: GracefulStop
    watchdog: Watchdog
    sums: dict[str, Any]
    error: Exception | None  # error of this rank in the passes of this step
    own_batches: list[int]  # indices of this rank's micro-batches in this step
    remaining_passes = 0  # of this rank in this step, idle passes included
    initial_weights: int | None  # fingerprint of the weights before the first update; None afterwards

    def attach(
        self, metrics: MetricsLog, samples: SamplesLog, progress: Progress, stop: GracefulStop, watchdog: Watchdog
    ) -> None:
        self.metrics, self.samples, self.progress, self.stop, self.watchdog = (
            metrics, samples, progress, stop, watchdog,
        )  # fmt: skip
        if self.job.evaluation is not None:
            self.job.evaluation.attach(watchdog)

    def evaluate_due(self) -> dict[str, Any]:
        """Run an evaluation if one is due after the finished steps; return its metrics and write its samples."""
        job = self.job
        if job.evaluation is None or not job.evaluation.is_due(
            job.state, last=bool(job.state.step) and job.is_finished
        ):
            return {}
        values, samples = job.evaluation.evaluate(job.state)
        self.samples.write(job.state.step, samples)
        for line in evaluation_notes(job.state, values):
            self.progress.note(line)
        return values

    @abc.abstractmethod
    def denominator(self, batches: Sequence[dict[str, Tensor]]) -> float:
        """Return the denominator of the summed loss of one optimizer step."""

    @abc.abstractmethod
    def step_metrics(self, sums: dict[str, float]) -> Mapping[str, float | None]:
        """Compute metrics of the step from the sums accumulated by `compute_loss`."""

    def add(self, name: str, value: Tensor | float) -> None:
        """Add to a sum over the rows of this step."""
        self.sums[name] = self.sums.get(name, 0.0) + (value.detach() if isinstance(value, Tensor) else value)

    # Hooks, in the order in which the trainer calls them within a step.

    def _get_train_sampler(self, train_dataset: Any = None) -> RowOrder:
        del train_dataset
        return RowOrder(self.job.sampler, self.job.plan, self.job.state.step, self.job.order)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return an optimizer step's micro-batches and its denominator; set its learning rate and random seed."""
        self.started = time.perf_counter()
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        self.micro_batches, self.batches_seen, self.sums, self.error = batches, 0, {}, None
        self.own_batches = data_parallel.my_even_shard([batch["input_ids"].numel() for batch in batches])
        self.idle_passes = sharding.idle_passes(len(self.own_batches), self.job.loaded.is_sharded)
        self.remaining_passes = len(self.own_batches) + self.idle_passes
        step = self.job.state.step
        self.watchdog.begin_step(step)
        self.watchdog.enter("update")
        self.initial_weights = None if self.job.state.updates else update_check.fingerprint(self.job.optimizer)
        self.lr = optim.set_lr(self.job.optimizer, self.job.recipe.optim, step, self.job.plan.steps)
        torch.manual_seed(data_parallel.rank_seed(derive(self.job.recipe.run.seed, "step", step)))
        denominator = self.denominator(batches) or 1  # if it is 0, the summed loss is 0 as well
        return batches, torch.tensor(denominator, device=device)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with self.job.loaded.autocast():
            model_inputs = image_inputs(model, inputs) if IMAGES in inputs else inputs
            return super().compute_loss(model, model_inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of one micro-batch of this rank; after the last, sum gradients over ranks.

        Micro-batches of other ranks are skipped. Raises NonFiniteError before the optimizer can use a NaN. With several
        ranks, errors are exchanged after the last micro-batch, where other ranks would otherwise wait for the gradient.
        """
        loss = torch.zeros((), device=num_items_in_batch.device)
        if self.error is None and self.batches_seen in self.own_batches:
            divided = self.job.loaded.is_sharded
            result = sharding.capture_passes(divided, self._pass, model, inputs, num_items_in_batch)
            loss, self.error = (loss, result.error) if result.error else (result.value, None)
        self.batches_seen += 1
        last = self.batches_seen == len(self.micro_batches)
        if last and self.error is None:
            for _ in range(self.idle_passes):
                self._idle_pass(model, inputs, num_items_in_batch)
        if last or distributed.world() == 1:
            distributed.gather_or_raise(distributed.Captured(None, self.error))
        if last:
            data_parallel.sum_gradients(model)
            sharding.drop_unseen_gradients(model)
            if name := find_bad_gradient(model):
                raise non_finite_error(self.job, self.micro_batches, f"the gradient of {name}")
        return loss

    def _begin_pass(self) -> None:
        self.remaining_passes -= 1
        sharding.sum_over_copies(self.job.loaded.model, self.remaining_passes == 0)

    def _pass(self, model: nn.Module, inputs: dict[str, Tensor], num_items: Any) -> Tensor:
        self._begin_pass()
        if data_parallel.loss_share() == 1:
            loss: Tensor = super().training_step(model, inputs, num_items)  # type: ignore[misc]
        else:
            with self._scale_loss(data_parallel.loss_share()):
                loss = super().training_step(model, inputs, num_items)  # type: ignore[misc]
        if not torch.isfinite(loss):
            raise non_finite_error(self.job, self.micro_batches, "the loss")
        return loss

    def _idle_pass(self, model: nn.Module, inputs: dict[str, Tensor], num_items: Any) -> None:
        """Run forward and backward with the loss, including router terms, multiplied by 0."""
        self._begin_pass()
        sums = dict(self.sums)
        with self._scale_loss(0):
            super().training_step(model, inputs, num_items)  # type: ignore[misc]
        self.sums = sums

    @contextlib.contextmanager
    def _scale_loss(self, factor: float) -> Iterator[None]:
        """Multiply the losses of micro-batches by `factor` inside the block; metrics are unchanged."""
        compute = self.compute_loss
        self.compute_loss = lambda *args, **keys: compute(*args, **keys) * factor  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.compute_loss  # restores the class's method

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return optim.clip_gradients(model, self.args.max_grad_norm)  # type: ignore[attr-defined]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> float:
        return float(optim.clip_gradients(model, None) if grad_norm is None else grad_norm)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Finish an optimizer step: save if due, write its metrics, and decide whether to continue."""
        del start_time
        if "loss" not in logs:  # the trainer's closing summary; `train` builds its own
            return
        job, run, state = self.job, self.job.recipe.run, self.job.state
        self.watchdog.leave()
        values = self._finish_step(logs["loss"], logs["grad_norm"])
        values |= self.evaluate_due()
        job.idle_error = update_check.check_patience(state, run.max_idle_steps)
        job.stop_signal = max(distributed.gather(self.stop.requested_signal))
        over = bool(job.stop_signal) or job.is_finished or job.idle_error is not None
        self.progress.update(state.step, values, spent=state.seconds_towards_limit)
        if warning := update_check.update_note(values, job.recipe.optim, job.loaded.model):
            self.progress.note(warning)
        try:
            if over or (run.save_every and state.step % run.save_every == 0):
                self.metrics.sync()
                state.rows = {"metrics": self.metrics.rows}
                with self.watchdog.phase("save"):
                    job.save(wait=over)
                values |= state.count_save(distributed.broadcast_from_rank0(self.watchdog.seconds["save"]))
        finally:
            if is_logged(job, values):
                self.metrics.write(state.step, values)
        if over:
            self.control.should_training_stop = True  # type: ignore[attr-defined]

    def _finish_step(self, loss: float, grad_norm: float) -> dict[str, Any]:
        """Advance the run's counters past the step; return its metrics."""
        state, planned = self.job.state, self.job.plan
        copies = data_parallel.model_parallel_size()  # ranks that run each row, each with a share of the loss
        once = {name: float(value) / copies for name, value in self.sums.items()}
        sums = distributed.all_reduce_numbers({"loss": loss / (copies * data_parallel.loss_share()), **once})
        loss = sums.pop("loss")
        seconds = distributed.broadcast_from_rank0(time.perf_counter() - self.started)
        ranks = ranks_of_run(divided=self.job.loaded.is_sharded)
        initial = self.initial_weights
        moved = initial is None or update_check.weights_moved(initial, self.job.optimizer, ranks)
        updates = int(moved and sums["trained"] > 0 and grad_norm > 0 and self.lr > 0)
        state.count_tokens(sums["trained"], sums["tokens"], updates)
        state.count_step(seconds, updates)
        state.position = min(state.step * planned.size, planned.rows)
        state.tokens += round(sums["tokens"])
        values = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self.lr,
            "updates": updates,
            **self.step_metrics(sums),
            "trained_ratio": sums["trained"] / sums["tokens"],
            "epoch": state.position / self.job.sampler.n_items,
            "num_tokens": state.tokens,
            "time/step": seconds,
            "time/tokens_per_s": sums["tokens"] / seconds,
            **peak_memory(),
        }
        state.first_metrics, state.last_metrics = state.first_metrics or values, values
        return values


def is_logged(job: Job, values: Mapping[str, Any]) -> bool:
    """Return whether the metrics of the newest step are logged."""
    return job.state.step % job.recipe.run.log_every == 0 or job.is_finished or "time/eval" in values


def find_bad_gradient(model: nn.Module) -> str | None:
    """Return the name of the first parameter with a non-finite gradient, or None."""
    gradients = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    finite = bool(torch.isfinite(nn.utils.get_total_norm(gradients.values())))
    if not distributed.any_rank(not finite):
        return None
    return next((name for name, grad in gradients.items() if not torch.isfinite(grad).all()), "all weights together")


def non_finite_error(job: Job, batches: Sequence[dict[str, Tensor]], what: str) -> NonFiniteError:
    """Write the step's micro-batches into `failed/` of the run directory; return the error to raise."""
    step = job.state.step + 1
    path = job.directory.path / "failed" / f"step-{step}.pt"
    path.parent.mkdir(exist_ok=True)
    written = path.with_name(f"{path.name}.{distributed.rank()}")  # several ranks may write the same batch
    saved = [{name: value.cpu() for name, value in b.items() if isinstance(value, Tensor)} for b in batches]
    torch.save(saved, written)
    written.replace(path)
    return NonFiniteError(
        f"step {step}: {what} is not finite; no update was made",
        where=str(job.directory.path),
        allowed=f"the batch is in {path}; the last checkpoint is kept",
        hint="lower optim.lr, or look at the rows of this batch",
    )


@contextlib.contextmanager
def save_on_error(job: Job, note: Callable[[str], None]) -> Iterator[None]:
    """Save a checkpoint of the finished steps if the block fails in a step that has not changed the weights yet."""
    before = job.state.step
    with optim.count_updates(job.optimizer) as begun:
        try:
            yield
        except Exception as error:
            done = job.state.step
            if done and not job.saving:
                whole = begun() == done - before
                save_before_raising(error, done, job.directory, [job.loaded.model], job.save, whole=whole, note=note)
            raise


@distributed.propagate_failures()
def train(trainer: Any, job: Job, columns: Sequence[str], notes: Sequence[str], saver: Saver = save) -> dict[str, Any]:
    """Run a trainer (a RunLoop) from the newest complete checkpoint to the end, save the model, return the summary.

    saver: writes the model into a folder; its result is stored in the summary under `save`. Raises Interrupted after
    Ctrl-C, with a checkpoint saved, and NonFiniteError (see `training_step`).
    """
    directory, recipe = job.directory, job.recipe
    job.state = checkpoint.restore(directory.checkpoints, job.loaded, job.optimizer) or job.state
    checkpoints.check_steps_left(job.state.step, job.plan.steps)
    status.note_steps(directory, job.plan.steps)
    with (
        contextlib.closing(directory.metrics(resume_after=job.state.step)) as metrics,
        open_samples(job) as samples,
        GracefulStop() as stop,
        Progress(recipe.verb, job.plan.steps, columns, max_minutes=recipe.run.max_minutes) as progress,
        Watchdog(directory.logs, recipe.run.hang_minutes) as watchdog,
    ):
        if lost := lost_rows(metrics, job.state.rows.get("metrics"), but=job.state.step):
            progress.note(lost)
        last_metrics = job.state.last_metrics or {}
        if job.state.step and is_logged(job, last_metrics):
            metrics.fill(job.state.step, last_metrics)
        unsaved = checkpoints.no_checkpoint_note(recipe.run.save_every, job.plan.steps)
        begin = start_notes.start_notes(recipe, job.loaded.model, job.plan.steps)
        few = start_notes.few_rows_note(job.sampler.n_items, job.plan.size, "row", "batch.size", job.plan.rows)
        for note in (merged_note(job.loaded), *notes, *begin, few, unsaved):
            if note:
                progress.note(note)
        if job.state.step:
            progress.note(f"resumed after step {job.state.step}")
            changed = job.state.planned, job.plan.steps, last_metrics.get("lr")
            if note := optim.changed_lr_note(recipe.optim, job.state.step, *changed):
                progress.note(note)
        job.state.planned = job.plan.steps
        trainer.attach(metrics, samples, progress, stop, watchdog)
        if not job.is_finished:
            explained = explain_out_of_memory(recipe, job.loaded.model, job.longest, job.state, directory)
            with (
                explained,
                save_on_error(job, progress.note),
                compiled.compile_layers(job.loaded.model, recipe.model)(),
            ):
                if (values := trainer.evaluate_due()) and (job.state.step or metrics.last < 0):
                    metrics.write(job.state.step, values)
                peak_memory()  # resets the peak of loading and of earlier stages in this process
                trainer.train()
    if job.idle_error is not None:
        raise job.idle_error
    if not job.is_finished:
        message = f"stopped after step {job.state.step} of {job.plan.steps}"
        raise Interrupted(message, where=str(directory.path), number=job.stop_signal or 2)
    update_check.check_end(job.state)
    started = time.perf_counter()
    report = save_model(job.loaded, directory.final, saver)
    final_save = time.perf_counter() - started
    return {
        "steps": job.state.step,
        "train_seconds": job.state.seconds,
        "save_seconds": job.state.save_seconds + job.state.own_save + final_save,
        "loss_first": (job.state.first_metrics or {}).get("loss"),
        "loss_last": (job.state.last_metrics or {}).get("loss"),
        "num_tokens": job.state.tokens,
        "trainable_parameters": update_check.count_weights(job.loaded.model)[0],
        **update_check.summary(job.state),
        "ledger": _ledger(job.state, final_save),
        **(job.evaluation.summary(job.state) if job.evaluation else {}),
        "model": str(directory.final),
        "save": report,
    }


def _ledger(state: checkpoint.State, final_save: float) -> dict[str, dict[str, float]]:
    """Summarize tokens and seconds of a run on rows; a step without an update has trained on no tokens."""
    tokens = {"tokens/trained": state.trained, "tokens/context": state.seen - state.trained}
    saves = {"checkpoints": state.save_seconds + state.own_save, "final_save": final_save}
    return ledger.ledger(tokens, {"steps": state.seconds, "eval": state.eval_seconds, **saves})


@contextlib.contextmanager
def open_samples(job: Job) -> Iterator[SamplesLog]:
    """Open samples.jsonl of a run that evaluates; without evaluation, samples are discarded."""
    if job.evaluation is None:
        yield SamplesLog.without_file()
        return
    with contextlib.closing(job.directory.samples(resume_after=job.state.step)) as log:
        yield log


def rows_note(prepared: Prepared[Any], what: str) -> str:
    """Return one line on the rows trained on, and on dropped or truncated rows by cause."""
    causes = format_causes({**prepared.dropped, **prepared.cut, **prepared.noted})
    counts = f"{count_noun(len(prepared.items), what)}, {prepared.trained_ratio:.0%} of the tokens are trained on"
    return f"{counts}; {causes}" if causes else counts


def check_window(loaded: LoadedModel, uid: str, length: int) -> None:
    """Raise DataError if the longest row exceeds the model's context window."""
    if loaded.window is not None and length > loaded.window:
        raise DataError(
            f"{count_noun(length, 'token')}; the model's window is {loaded.window}",
            where=source_locations.describe_row(uid),
            hint=f"set data.max_length to {loaded.window} or less",
        )
