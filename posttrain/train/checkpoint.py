"""Checkpoints of an RL run: weights, optimizer state and counters, from which a run resumes exactly.

A checkpoint folder is also a model folder (an adapter folder under LoRA, with one folder per adapter if there are
several): `posttrain generate` loads it as it is. A checkpoint counts only once its manifest is sealed; older
checkpoints are removed only after that.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from posttrain import terminal
from posttrain.errors import PosttrainError, RunError
from posttrain.models import save_adapter, weight_names
from posttrain.models.host_memory import compact_state
from posttrain.models.load import LoadedModel
from posttrain.models.pretrained import suppress_progress_bars
from posttrain.models.save_adapter import adapter_folders, adapter_state, write_adapter
from posttrain.models.weight_names import save_under_published_names
from posttrain.run import checkpoints, ranks
from posttrain.run.atomic_io import explain_write_errors
from posttrain.run.fingerprint import NOTHING, Fact
from posttrain.train import distributed, divided_checkpoint, optim, rank_consistency, sharding
from posttrain.train.critic import load_head, save_head


@dataclass
class State:
    """Counters and small state of a run. Random numbers need no state: they are derived from (seed, purpose, step)."""

    step: int = 0  # finished steps
    position: int = 0  # prompts drawn from the endless stream
    tokens: int = 0  # prompt + completion tokens sampled
    updates: int = 0  # updates that changed weights: see `trained`
    idle: int = 0  # latest consecutive steps without an update
    idle_steps: int = 0  # all steps without an update
    trained: float = 0.0  # tokens that took part in an update
    seen: float = 0.0  # denominator of `trained`: sampled tokens in rl, all tokens of the rows elsewhere
    ledger: dict[str, float] = field(default_factory=dict)  # tokens/NAME and seconds/NAME over all steps: `run.ledger`
    seconds: float = 0.0  # spent in steps
    save_seconds: float = 0.0  # spent in saves after earlier steps
    longest_save: float = 0.0  # longest of these saves
    own_save: float = 0.0  # spent in the save after the newest step; still 0 in that step's checkpoint
    first_metrics: dict[str, Any] | None = None  # of step 1, for the closing summary
    last_metrics: dict[str, Any] | None = None  # of the newest step
    controllers: dict[str, Any] | None = None  # None: no controllers
    scaler: dict[str, Any] = field(default_factory=dict)  # loss scaler's state; empty unless matmuls are in float16
    memory: dict[str, Any] = field(default_factory=dict)  # state that components keep between steps, by component name
    sampler: dict[str, Any] | None = None  # prompt sampler's state after the newest step; None: before the first
    unfinished: list[dict[str, Any]] = field(default_factory=list)  # rollouts that continue in the next step: `windows`
    planned: int | None = None  # total steps of the run when it was last started
    rows: dict[str, int] = field(default_factory=dict)  # number of rows in each log before the newest save, by log name
    calls: list[Any] = field(default_factory=list)  # most recent reward calls: `verify.failures.Calls`
    evaluated: int = -1  # step after which the latest evaluation ran
    eval_seconds: float = 0.0  # spent in evaluations
    best: dict[str, Any] | None = None  # step, metric and value of the best evaluation
    since_best: int = 0  # evaluations since the best
    stopped_early: str = ""  # reason, if evaluations stopped the run early

    @property
    def seconds_towards_limit(self) -> float:
        """Seconds that count towards `run.max_minutes`: steps, evaluations and saves.

        Includes an estimate for the two final saves (checkpoint and final model): each as long as the longest save so
        far, 0 before the first save.
        """
        return self.seconds + self.eval_seconds + self.save_seconds + 2 * self.longest_save

    def out_of_time(self, minutes: float | None) -> bool:
        """Return whether the limit of `minutes` is used up; False without a limit.

        The answer after a step is the same as when resumed from that step's checkpoint.
        """
        return minutes is not None and self.seconds_towards_limit >= 60 * minutes

    def count_tokens(self, trained: float, seen: float, updates: int) -> None:
        """Count tokens passed through the loss in a step; they count as trained only if the step made an update."""
        self.trained += trained if updates else 0.0
        self.seen += seen

    def count_step(self, seconds: float, updates: int) -> None:
        """Count a finished step with `updates` optimizer updates; the save after the previous step is counted here."""
        self.step += 1
        self.updates += updates
        self.idle = 0 if updates else self.idle + 1
        self.idle_steps += not updates
        self.seconds += seconds
        self.save_seconds += self.own_save
        self.longest_save, self.own_save = max(self.longest_save, self.own_save), 0.0

    def count_save(self, seconds: float) -> dict[str, float]:
        """Record the duration of the save after the newest step; returns the metrics to add to that step."""
        self.own_save = seconds
        return {"time/save": seconds}


def save(
    root: Path,
    state: State,
    loaded: LoadedModel,
    optimizer: Optimizer,
    keep: int,
    critic: nn.Module | None = None,
    save_more: Callable[[Path], None] = lambda _: None,
    *,
    alone: bool = False,
    wait: bool = True,
) -> Path:
    """Write and seal `root/step-N`, then remove the oldest checkpoints until `keep` remain. Returns the folder.

    save_more: writes additional files into the folder, on rank 0.

    Rank 0 writes what is equal on all ranks, and the other ranks wait. In full training of a sharded model all ranks
    write (`divided_checkpoint`), with `wait=False` while the next step runs. alone: this is rank 0, and other ranks may
    be gone or busy; not possible for full training of a sharded model.
    """
    names = _parameter_names(optimizer, loaded.model, critic)
    moments = {**optimizer.state_dict(), "names": names}
    if loaded.is_sharded and not loaded.is_lora:
        scalars = divided_checkpoint.without_tensors(moments)
        write_more = partial(_write_all_but_weights, state, loaded, critic, scalars, save_more)
        parts = divided_checkpoint.moments_of(moments, names)
        return divided_checkpoint.save(root, state.step, loaded, parts, keep, write_more, wait=wait)
    moments["state"] = compact_state(moments["state"])
    exact = optim.state_dict_with_masters(optimizer, loaded.model)
    on_every_rank = loaded.is_lora and not save_adapter.is_resized(loaded)
    if alone and loaded.is_sharded and not on_every_rank:
        raise RunError("this process holds only a part of the model", where=str(root), hint=checkpoints.RESUME_HINT)
    written = loaded if on_every_rank else sharding.gather_model(loaded)
    write = partial(_save, root, state, written, exact, moments, keep, critic, save_more)
    with ranks.defer_shutdown():
        return write() if alone else distributed.run_on_rank0(write)


def _save(
    root: Path,
    state: State,
    loaded: LoadedModel,
    exact: dict[str, torch.Tensor] | None,
    moments: dict[str, Any],
    keep: int,
    critic: nn.Module | None,
    save_more: Callable[[Path], None],
) -> Path:
    """Write, seal and prune on one rank. exact: the float32 master weights, if the optimizer keeps any."""
    checkpoints.require_space(root, _checkpoint_bytes(loaded.model, critic, moments))
    with _as_run_error(root, state.step), checkpoints.save_checkpoint(root, state.step) as unsealed:
        if loaded.is_lora:
            for adapter, folder in adapter_folders(loaded, unsealed).items():
                write_adapter(loaded, folder, adapter)
        else:
            save_under_published_names(loaded.model).save_pretrained(unsealed, state_dict=exact)
        _write_all_but_weights(state, loaded, critic, moments, save_more, unsealed)
    checkpoints.prune(root, keep)
    return checkpoints.folder_for(root, state.step)


def _write_all_but_weights(
    state: State,
    loaded: LoadedModel,
    critic: nn.Module | None,
    moments: dict[str, Any],
    save_more: Callable[[Path], None],
    unsealed: Path,
) -> None:
    """Write tokenizer, critic head, optimizer state, `save_more` files and `state.json`."""
    with _as_run_error(unsealed.parent, state.step), explain_write_errors(unsealed):
        loaded.tokenizer.save_pretrained(unsealed)
        if critic is not None:
            save_head(critic, unsealed)
        torch.save(moments, unsealed / "optimizer.pt")
        save_more(unsealed)
        (unsealed / "state.json").write_text(json.dumps(asdict(state), indent=1))


@contextmanager
def _as_run_error(root: Path, step: int) -> Iterator[None]:
    """Convert any exception of the block to a RunError: a library's own error does not mention the checkpoint."""
    try:
        yield
    except PosttrainError:
        raise
    except Exception as cause:
        raise RunError(
            f"the checkpoint of step {step} could not be written: {cause}",
            where=str(root),
            hint=checkpoints.RESUME_HINT,
        ) from cause


def restore(
    root: Path,
    loaded: LoadedModel,
    optimizer: Optimizer,
    critic: nn.Module | None = None,
    load_more: Callable[[Path, State], None] = lambda *_: None,
) -> State | None:
    """Load the newest complete checkpoint under `root` in place and return its State; None if there is none.

    Every byte is first compared with the manifest, because weights damaged on disk would otherwise be trained on
    silently. A checkpoint that cannot be loaded is skipped for an older one, with a line on stderr. Raises RunError if
    none can be loaded; UserError, on all ranks, if some ranks find another newest checkpoint than rank 0.

    load_more: loads the additional files of the folder.
    """
    checkpoints.refuse_link(root)
    first_error: BaseException | None = None
    before: int | None = None
    failure = ""
    while (folder := _find_newest_intact(root, before)) is not None:
        found = distributed.capture(_load, folder, loaded, optimizer, critic, load_more)
        failure = next(filter(None, distributed.gather(found.message)), "")
        if not failure:
            distributed.run_on_rank0(checkpoints.set_aside, root, checkpoints.step_of(folder))
            return found.value
        if distributed.is_main():
            terminal.note(f"{folder} cannot be loaded and is not used: {failure}")
        first_error, before = first_error or found.error, checkpoints.step_of(folder)
    if before is not None:
        raise RunError(
            "no checkpoint can be loaded",
            where=str(root),
            allowed=f"the oldest: {failure}",
            hint=f"to start from the beginning, remove them: rm -r {shlex.quote(str(root))}",
        ) from first_error
    return None


def _find_newest_intact(root: Path, before: int | None) -> Path | None:
    """Return the newest complete, undamaged checkpoint of a step before `before`, the same on all ranks.

    The ranks divide its files among them to compare every byte with the manifest.
    """
    folder = _find_newest_complete(root, before)
    mine = (distributed.rank(), distributed.world())
    while folder is not None and distributed.any_rank(not checkpoints.verify(folder, share=mine)):
        if distributed.is_main():
            terminal.note(f"{folder} is damaged and is not used")
        folder = _find_newest_complete(root, checkpoints.step_of(folder))
    return folder


def _find_newest_complete(root: Path, before: int | None) -> Path | None:
    """Return the newest checkpoint before step `before` with files of the right sizes; the same on all ranks."""
    folder = checkpoints.latest(root, before=before)
    mine = NOTHING if folder is None else Fact.of((folder / checkpoints.MANIFEST).read_bytes(), folder.name)
    rank_consistency.check(
        {"checkpoint": mine},
        did="finds another newest checkpoint",
        hint=f"all ranks must see the same {root.parent}: set --output to a disk shared by all machines",
    )
    return folder


def _load(
    folder: Path,
    loaded: LoadedModel,
    optimizer: Optimizer,
    critic: nn.Module | None,
    load_more: Callable[[Path, State], None],
) -> State:
    """Load one checkpoint in place and return its State."""
    names = _parameter_names(optimizer, loaded.model, critic)
    state, moments = distributed.run_all_or_raise(_load_state, folder, names, critic)
    if (folder / divided_checkpoint.FOLDER).is_dir():
        moments = divided_checkpoint.load(folder, loaded, optimizer, moments, names)
    else:
        optim.load_masters(optimizer, loaded.model, load_weights(loaded, folder))
        moments = sharding.shard_optimizer_state(optimizer, moments)
    optimizer.load_state_dict(moments)
    load_more(folder, state)
    return state


def _load_state(folder: Path, names: list[list[str]], critic: nn.Module | None) -> tuple[State, dict[str, Any]]:
    """Load the State and the optimizer's state; fill a critic's head.

    Moments stay on the host: each optimizer moves them to its device. `state.json` is read first, so that an invalid
    file changes nothing.
    """
    state = State(**json.loads((folder / "state.json").read_text()))
    if critic is not None:
        load_head(critic, folder)
    moments = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    return state, _match_by_name(moments, names, folder)


def _parameter_names(optimizer: Optimizer, model: nn.Module, critic: nn.Module | None) -> list[list[str]]:
    """Return the names of the optimizer's parameters, by group."""
    of_critic = (critic or nn.Module()).named_parameters()
    parameters = dict(model.named_parameters()) | {f"critic.{name}": p for name, p in of_critic}
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    return [[name_of[id(optim.weight_of(optimizer, p))] for p in group["params"]] for group in optimizer.param_groups]


def _match_by_name(moments: dict[str, Any], names: list[list[str]], folder: Path) -> dict[str, Any]:
    """Return the optimizer's state with parameters numbered in the order of `names`: torch matches them by number only.

    Raises RunError if the checkpoint has moments of other parameters. Old checkpoints without stored names are matched
    in their order.
    """
    stored = moments.pop("names", names)
    if [set(group) for group in stored] != [set(group) for group in names]:
        mismatched = sorted({n for group in stored for n in group} ^ {n for group in names for n in group})
        example = (mismatched or names)[0]
        raise RunError(f"checkpoint {folder} has the optimizer state of other weights, e.g. {example}")
    numbers = {name: n for group, saved in zip(stored, moments["param_groups"], strict=True)
               for name, n in zip(group, saved["params"], strict=True)}  # fmt: skip
    order = [numbers[name] for group in names for name in group]
    state = {index: moments["state"][n] for index, n in enumerate(order) if n in moments["state"]}
    indices = iter(range(len(order)))
    groups = [
        {**saved, "params": [next(indices) for _ in group]}
        for saved, group in zip(moments["param_groups"], names, strict=True)
    ]
    return {**moments, "state": state, "param_groups": groups}


def load_weights(loaded: LoadedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Copy the trained weights of a checkpoint folder into the model; return them as stored.

    Raises RunError if weights are missing or unexpected.
    """
    if loaded.is_lora:
        weights, missing, unexpected = dict[str, torch.Tensor](), list[str](), list[str]()
        for adapter, adapter_folder in adapter_folders(loaded, folder).items():
            stored = load_file(adapter_folder / "adapter_model.safetensors")
            lacking, unknown = _fill_adapter(loaded, stored, adapter)
            weights, missing, unexpected = weights | stored, missing + lacking, unexpected + unknown
    else:
        try:
            with suppress_progress_bars():
                weights = weight_names.read(loaded.model, folder)
        except Exception as cause:
            raise RunError(f"checkpoint {folder} cannot be loaded: {cause}") from cause
        missing, unexpected = _fill(loaded, weights)
    if missing or unexpected:
        raise RunError(f"checkpoint {folder} does not fit: missing {missing[:3]}, unexpected {unexpected[:3]}")
    return weights


def _fill_adapter(loaded: LoadedModel, weights: dict[str, torch.Tensor], adapter: str) -> tuple[list[str], list[str]]:
    """Copy an adapter into the model by the names under which PEFT saves it. Returns missing and unexpected names.

    PEFT's own loading renames keys that it takes for names of older checkpoints, sometimes to names that do not exist.
    """
    current = adapter_state(loaded, adapter)
    for name in current.keys() & weights.keys():
        sharding.copy_whole(current[name], weights[name])
    return sorted(current.keys() - weights.keys()), sorted(weights.keys() - current.keys())


def _fill(loaded: LoadedModel, weights: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Copy whole weights into the model. Returns missing and unexpected names."""
    if loaded.is_sharded:
        return sharding.copy_weights(loaded.model, weights), [n for n in weights if n not in loaded.model.state_dict()]
    result: Any = loaded.model.load_state_dict(weights, strict=False)
    return result.missing_keys, result.unexpected_keys


def _checkpoint_bytes(model: nn.Module, critic: nn.Module | None, moments: dict[str, Any]) -> int:
    """Return the size of a checkpoint in bytes: trained weights in float32, and the optimizer's state."""
    weights = [*model.parameters(), *(critic.parameters() if critic is not None else ())]
    state = (value for values in moments["state"].values() for value in values.values() if isinstance(value, Tensor))
    return sum(p.numel() * max(p.element_size(), 4) for p in weights if p.requires_grad) + sum(t.nbytes for t in state)
