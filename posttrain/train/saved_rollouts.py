"""Rollouts of a step on disk, for `posttrain compare-methods`: other methods can be evaluated on them later.

One safetensors file per step, `rollouts/step-00000010.safetensors`, about 24 bytes a token: the batch before advantages
were assigned (rewards, components, correctness, lengths, masks), log-probs of the engine, of the policy at the start of
the step (`old_logp`), of the reference if there is one, and `logp`, the log-probs of each row when it was last trained
on. Text and hidden states are not stored. For rows without a signal no log-probs were computed: their old_logp is the
engine's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.run.atomic_io import explain_write_errors
from posttrain.train import distributed
from posttrain.train.collate import join_batches, join_rows
from posttrain.train.own_rows import OwnRows

FOLDER = "rollouts"
TOO_LARGE = ("hidden", "ref_hidden", "topk_logp", "topk_chosen")
BY_PASS = (
    *("old_logp", "ref_logp", "entropy", "values", "old_vocab_mean_logp", "prompt_logp", "prompt_mask"),
    *("masked_logp", "perturbed_logp"),
)
PLAIN = ("step", "total_steps", "memory", "sampler_state", "reward_weights")  # fields that are not tensors


@dataclass(frozen=True)
class SavedRollouts:
    """A step's rollouts before advantages were assigned, and the policy's log-probs [N,T] when last trained on."""

    batch: RolloutBatch
    logp: Tensor

    def join(self, more: SavedRollouts) -> SavedRollouts:
        """Return the rows of both."""
        return SavedRollouts(join_batches(self.batch, more.batch), join_rows(self.logp, more.logp))


def build_saved(scored: RolloutBatch, measured: RolloutBatch, logp: Tensor) -> SavedRollouts:
    """Return the stored form of a step: `scored` (before advantages) with the log-probs that were computed later.

    logp [N,T]: of each row when it was last trained on, 0 = not trained.
    """
    trained = logp.ne(0).any(-1, keepdim=True)
    engine = torch.zeros_like(logp) if scored.rollout_logp is None else scored.rollout_logp.nan_to_num(nan=0.0)
    old = measured.old_logp if measured.old_logp is not None else logp
    old = torch.where(trained, old.float(), scored.old_logp if scored.old_logp is not None else engine)
    later = {n: getattr(measured, n) for n in BY_PASS if getattr(measured, n) is not None}
    batch = scored.replace(**{**later, "old_logp": old}, **dict.fromkeys(TOO_LARGE))
    return SavedRollouts(batch.to("cpu"), torch.where(trained, logp, old).cpu())


def gather_saved(own: SavedRollouts, rows_of: OwnRows) -> SavedRollouts | None:
    """Collect the rollouts of all ranks in the order of the step: returned on rank 0, None on other ranks.

    own: those of this rank.
    """
    if rows_of.ranks.count == 1:
        return own
    count = len(rows_of.mine)
    own = SavedRollouts(own.batch.select(list(range(count))), own.logp[:count])
    numbers, found = list[int](), None
    for number, (rows, part) in enumerate(distributed.gather_one_by_one((rows_of.mine, own))):
        if number % rows_of.ranks.model_parallel_size == 0:
            numbers += rows
            found = part if found is None else found.join(part)
    if found is None:
        return None
    order = torch.tensor(numbers).argsort()
    return SavedRollouts(found.batch.select(order), found.logp[order])


def write(run: Path, step: int, saved: SavedRollouts, *, keep: int) -> None:
    """Write the rollouts of a step and remove all but the newest `keep` files (0: write nothing)."""
    if keep == 0 or not distributed.is_main():
        return
    folder = run / FOLDER
    tensors: dict[str, Tensor] = {"logp": saved.logp}
    plain: dict[str, Any] = {}
    for item in fields(saved.batch):
        value = getattr(saved.batch, item.name)
        if isinstance(value, Tensor):
            tensors[item.name] = value
        elif item.name in PLAIN:
            plain[item.name] = value
        elif isinstance(value, dict):
            tensors |= {f"{item.name}/{name}": column for name, column in value.items()}
    path = folder / f"step-{step:08d}.safetensors"
    partial = path.with_suffix(".partial")
    with explain_write_errors(partial):
        folder.mkdir(exist_ok=True)
        save_file({name: value.contiguous() for name, value in tensors.items()}, partial, {"plain": json.dumps(plain)})
        partial.replace(path)
    for old in steps(run)[:-keep]:
        old.unlink()


def remove_after(run: Path, after: int) -> None:
    """Remove the rollouts of steps after `after` when a run resumes, since it samples those steps again."""
    if distributed.is_main():
        for path in steps(run):
            if _step_of(path) > after:
                path.unlink()


def _step_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def steps(run: Path) -> list[Path]:
    """Return the files of a run's saved steps, oldest first."""
    return sorted((run / FOLDER).glob("step-*.safetensors"))


def read(run: Path, step: int | None = None) -> SavedRollouts:
    """Return the rollouts of a step, by default the newest. Raises UserError if the run has none."""
    files = {_step_of(path): path for path in steps(run)}
    if not files or (step is not None and step not in files):
        raise UserError(
            f"{run} has no rollouts of step {step}" if files else f"{run} has no saved rollouts",
            allowed=f"it has steps {', '.join(map(str, sorted(files)))}" if files else "",
            hint="" if files else "`rl` writes them while run.keep_rollouts is 1 or more",
        )
    path = files[max(files) if step is None else step]
    with safe_open(path, "pt") as file:
        plain = json.loads(file.metadata()["plain"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    logp = tensors.pop("logp")
    nested: dict[str, Any] = {}
    for name, value in tensors.items():
        place, _, key = name.partition("/")
        nested = {**nested, place: {**nested.get(place, {}), key: value} if key else value}
    return SavedRollouts(RolloutBatch(**nested, **plain), logp)
