"""What an RL run needs to go on as if it had never stopped: weights, optimiser, and a few counters.

A checkpoint folder is also a model folder (or an adapter folder under LoRA, with a folder each for several adapters):
`posttrain generate` loads it as it is.
It counts only when its manifest is sealed; older ones go only after that.
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
from posttrain.models.host_memory import copy_from_pieces
from posttrain.models.load import LoadedModel
from posttrain.models.pretrained import quiet
from posttrain.models.save_adapter import adapter_folders, adapter_state, write_adapter
from posttrain.models.weight_names import save_under_published_names
from posttrain.run import checkpoints, ranks
from posttrain.run.atomic_io import explain_write_errors
from posttrain.run.fingerprint import NOTHING, Fact
from posttrain.train import distributed, divided_checkpoint, optim, rank_consistency, sharding
from posttrain.train.critic import load_head, save_head


@dataclass
class State:
    """Counters of a run. Random numbers need no state: they are derived from (seed, purpose, step)."""

    step: int = 0  # finished steps
    position: int = 0  # prompts drawn from the endless stream
    tokens: int = 0  # prompt + completion tokens sampled
    updates: int = 0  # that have changed weights: see `trained`
    idle: int = 0  # newest steps in a row without one
    idle_steps: int = 0  # all steps without one
    trained: float = 0.0  # tokens that had a part in an update
    seen: float = 0.0  # of so many: sampled ones in rl, all of the rows elsewhere
    ledger: dict[str, float] = field(default_factory=dict)  # tokens/NAME and seconds/NAME over all steps: `run.ledger`
    seconds: float = 0.0  # spent in steps
    save_seconds: float = 0.0  # spent in saves after earlier steps
    longest_save: float = 0.0  # of these
    own_save: float = 0.0  # spent in the save after the newest step; in its checkpoint still 0
    first_metrics: dict[str, Any] | None = None  # of step 1, for the closing summary
    last_metrics: dict[str, Any] | None = None  # of the newest step
    controllers: dict[str, Any] | None = None  # state of each controller in the newest step; None: there was none
    scaler: dict[str, Any] = field(default_factory=dict)  # of the loss; empty but for float16 products
    memory: dict[str, Any] = field(default_factory=dict)  # what components remember, by their name
    sampler: dict[str, Any] | None = None  # what the prompt sampler knows after the newest step; None: before the first
    unfinished: list[dict[str, Any]] = field(default_factory=list)  # rollouts that go on in the next step: `windows`
    planned: int | None = None  # steps of the whole run, when it was last started
    rows: dict[str, int] = field(default_factory=dict)  # that logs had before the newest save, by the log's name
    calls: list[Any] = field(default_factory=list)  # the newest calls of the rewards: `verify.failures.Calls`
    evaluated: int = -1  # the step after which the newest evaluation was made
    eval_seconds: float = 0.0  # spent in evaluations
    best: dict[str, Any] | None = None  # step, metric and value of the best evaluation
    since_best: int = 0  # evaluations since then
    stopped_early: str = ""  # why no step follows, where evaluations have stopped the run

    @property
    def spent(self) -> float:
        """Seconds that count towards `run.max_minutes`: steps, evaluations, saves, and what the two saves at the end,
        of a checkpoint and of the final model, will take: each as long as the longest so far, 0 before the first."""
        return self.seconds + self.eval_seconds + self.save_seconds + 2 * self.longest_save

    def out_of_time(self, minutes: float | None) -> bool:
        """Whether a limit of so many minutes, if there is one, is used up. What it says after a step it says of that
        step's checkpoint too."""
        return minutes is not None and self.spent >= 60 * minutes

    def count_tokens(self, trained: float, seen: float, updates: int) -> None:
        """A step has passed `trained` of the `seen` tokens through the loss; they count if it made an update."""
        self.trained += trained if updates else 0.0
        self.seen += seen

    def count_step(self, seconds: float, updates: int) -> None:
        """A step is done, with so many updates; the save after the one before counts from here on."""
        self.step += 1
        self.updates += updates
        self.idle = 0 if updates else self.idle + 1
        self.idle_steps += not updates
        self.seconds += seconds
        self.save_seconds += self.own_save
        self.longest_save, self.own_save = max(self.longest_save, self.own_save), 0.0

    def count_save(self, seconds: float) -> dict[str, float]:
        """The newest step is saved; returns what that adds to its metrics."""
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
    """Write and seal `root/step-N`, then remove older checkpoints down to `keep`. Returns the folder.

    save_more: writes what else belongs into the folder, on rank 0.

    Rank 0 writes: what is saved is the same on all ranks, and the others wait. In full training of a divided model all
    write (`divided_checkpoint`), with `wait: false` while the next step runs.
    alone: this is rank 0, and the others may be gone or elsewhere; not for full training of a divided model.
    """
    names = _names(optimizer, loaded.model, critic)
    moments = {**optimizer.state_dict(), "names": names}
    if loaded.is_sharded and not loaded.is_lora:
        rest = partial(_write_rest, state, loaded, critic, divided_checkpoint.without_tensors(moments), save_more)
        parts = divided_checkpoint.moments_of(moments, names)
        return divided_checkpoint.save(root, state.step, loaded, parts, keep, rest, wait=wait)
    moments["state"] = copy_from_pieces(moments["state"])
    exact = optim.masters(optimizer, loaded.model)
    on_every_rank = loaded.is_lora and not save_adapter.is_resized(loaded)
    if alone and loaded.is_sharded and not on_every_rank:
        raise RunError("one process has parts of the model only", where=str(root), hint=checkpoints.GO_ON)
    written = loaded if on_every_rank else sharding.whole(loaded)
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
    """exact: the float32 weights, where they are the optimiser's."""
    checkpoints.require_space(root, _bytes(loaded.model, critic, moments))
    with _as_run_error(root, state.step), checkpoints.save_checkpoint(root, state.step) as unsealed:
        if loaded.is_lora:
            for adapter, folder in adapter_folders(loaded, unsealed).items():
                write_adapter(loaded, folder, adapter)
        else:
            save_under_published_names(loaded.model).save_pretrained(unsealed, state_dict=exact)
        _write_rest(state, loaded, critic, moments, save_more, unsealed)
    checkpoints.prune(root, keep)
    return checkpoints.folder_for(root, state.step)


def _write_rest(
    state: State,
    loaded: LoadedModel,
    critic: nn.Module | None,
    moments: dict[str, Any],
    save_more: Callable[[Path], None],
    unsealed: Path,
) -> None:
    """Write all but the weights."""
    with _as_run_error(unsealed.parent, state.step), explain_write_errors(unsealed):
        loaded.tokenizer.save_pretrained(unsealed)
        if critic is not None:
            save_head(critic, unsealed)
        torch.save(moments, unsealed / "optimizer.pt")
        save_more(unsealed)
        (unsealed / "state.json").write_text(json.dumps(asdict(state), indent=1))


@contextmanager
def _as_run_error(root: Path, step: int) -> Iterator[None]:
    """Whatever goes wrong inside is a RunError: a library's own error says nothing of checkpoints."""
    try:
        yield
    except PosttrainError:
        raise
    except Exception as cause:
        raise RunError(
            f"the checkpoint of step {step} could not be written: {cause}",
            where=str(root),
            hint=checkpoints.GO_ON,
        ) from cause


def restore(
    root: Path,
    loaded: LoadedModel,
    optimizer: Optimizer,
    critic: nn.Module | None = None,
    load_more: Callable[[Path, State], None] = lambda *_: None,
) -> State | None:
    """Load the newest complete checkpoint under `root` in place and return its State; None if there is none.

    Every byte of it is compared with the manifest first: weights that a disk has damaged would train on. One that
    cannot be loaded is skipped for an older one, with a line on stderr. Raises RunError if none of them can be loaded;
    UserError, on all ranks, if some find another one than rank 0.

    load_more: loads what else the folder holds.
    """
    checkpoints.refuse_link(root)
    first: BaseException | None = None
    before: int | None = None
    said = ""
    while (folder := _newest(root, before)) is not None:
        found = distributed.capture(_load, folder, loaded, optimizer, critic, load_more)
        said = next(filter(None, distributed.gather(found.message)), "")
        if not said:
            distributed.run_on_rank0(checkpoints.set_aside, root, checkpoints.step_of(folder))
            return found.value
        if distributed.is_main():
            terminal.note(f"{folder} cannot be loaded and is not used: {said}")
        first, before = first or found.error, checkpoints.step_of(folder)
    if before is not None:
        raise RunError(
            "no checkpoint can be loaded",
            where=str(root),
            allowed=f"the oldest: {said}",
            hint=f"to start from the beginning, remove them: rm -r {shlex.quote(str(root))}",
        ) from first
    return None


def _newest(root: Path, before: int | None) -> Path | None:
    """The newest complete checkpoint of a step before `before`, which must be the same on all ranks. They divide its
    files among them to compare every byte with the manifest."""
    folder = _newest_named(root, before)
    mine = (distributed.rank(), distributed.world())
    while folder is not None and distributed.any_rank(not checkpoints.verify(folder, share=mine)):
        if distributed.is_main():
            terminal.note(f"{folder} is damaged and is not used")
        folder = _newest_named(root, checkpoints.step_of(folder))
    return folder


def _newest_named(root: Path, before: int | None) -> Path | None:
    """The same, with files of the right size."""
    folder = checkpoints.latest(root, before=before)
    mine = NOTHING if folder is None else Fact.of((folder / checkpoints.MANIFEST).read_bytes(), folder.name)
    rank_consistency.check(
        {"checkpoint": mine},
        did="finds another newest checkpoint",
        hint=f"all ranks must see the same {root.parent}: let --output be on a disk that the machines share",
    )
    return folder


def _load(
    folder: Path,
    loaded: LoadedModel,
    optimizer: Optimizer,
    critic: nn.Module | None,
    load_more: Callable[[Path, State], None],
) -> State:
    """A checkpoint, in place."""
    names = _names(optimizer, loaded.model, critic)
    state, moments = distributed.run_all_or_raise(_load_small, folder, names, critic)
    if divided_checkpoint.is_divided(folder):
        moments = divided_checkpoint.load(folder, loaded, optimizer, moments, names)
    else:
        optim.fill_masters(optimizer, loaded.model, load_weights(loaded, folder))
        moments = sharding.spread(optimizer, moments)
    optimizer.load_state_dict(moments)
    load_more(folder, state)
    return state


def _load_small(folder: Path, names: list[list[str]], critic: nn.Module | None) -> tuple[State, dict[str, Any]]:
    """The State and the optimiser's state, whose moments stay on the host: each optimiser brings them to where it keeps
    them; a critic's head is filled. `state.json` is read first, so that one which is no State changes nothing."""
    state = State(**json.loads((folder / "state.json").read_text()))
    if critic is not None:
        load_head(critic, folder)
    moments = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    return state, _by_name(moments, names, folder)


def _names(optimizer: Optimizer, model: nn.Module, critic: nn.Module | None) -> list[list[str]]:
    """What the optimiser's parameters are called, by group."""
    named = dict(model.named_parameters()) | {f"critic.{n}": p for n, p in (critic or nn.Module()).named_parameters()}
    of = {id(parameter): name for name, parameter in named.items()}
    return [[of[id(optim.weight_of(optimizer, p))] for p in group["params"]] for group in optimizer.param_groups]


def _by_name(moments: dict[str, Any], names: list[list[str]], folder: Path) -> dict[str, Any]:
    """The optimiser's state with its parameters numbered in the order of `names`: torch matches them by number alone.

    Raises RunError where the checkpoint has moments of other parameters. Those written before they had names are taken
    in the order in which they are.
    """
    stored = moments.pop("names", names)
    if [set(group) for group in stored] != [set(group) for group in names]:
        other = sorted({n for group in stored for n in group} ^ {n for group in names for n in group})
        raise RunError(f"checkpoint {folder} has the optimiser's state of other weights, e.g. {(other or names)[0]}")
    numbers = {name: n for group, kept in zip(stored, moments["param_groups"], strict=True)
               for name, n in zip(group, kept["params"], strict=True)}  # fmt: skip
    order = [numbers[name] for group in names for name in group]
    state = {place: moments["state"][n] for place, n in enumerate(order) if n in moments["state"]}
    places = iter(range(len(order)))
    groups = [
        {**kept, "params": [next(places) for _ in group]}
        for kept, group in zip(moments["param_groups"], names, strict=True)
    ]
    return {**moments, "state": state, "param_groups": groups}


def load_weights(loaded: LoadedModel, folder: Path) -> dict[str, torch.Tensor]:
    """Copy the trained weights of a checkpoint folder into the model; returns them as they are stored. Raises RunError
    if any is missing."""
    if loaded.is_lora:
        weights, missing, unexpected = dict[str, torch.Tensor](), list[str](), list[str]()
        for adapter, place in adapter_folders(loaded, folder).items():
            stored = load_file(place / "adapter_model.safetensors")
            lacking, unknown = _fill_adapter(loaded, stored, adapter)
            weights, missing, unexpected = weights | stored, missing + lacking, unexpected + unknown
    else:
        try:
            with quiet():
                weights = weight_names.read(loaded.model, folder)
        except Exception as cause:
            raise RunError(f"checkpoint {folder} cannot be loaded: {cause}") from cause
        missing, unexpected = _fill(loaded, weights)
    if missing or unexpected:
        raise RunError(f"checkpoint {folder} does not fit: missing {missing[:3]}, unexpected {unexpected[:3]}")
    return weights


def _fill_adapter(loaded: LoadedModel, weights: dict[str, torch.Tensor], adapter: str) -> tuple[list[str], list[str]]:
    """Copy an adapter into the model by the names that PEFT saves it under; returns as `_fill` does.

    PEFT's own loading renames what it takes for names of older checkpoints, here and there to names that do not exist.
    """
    own = adapter_state(loaded, adapter)
    for name in own.keys() & weights.keys():
        sharding.copy_whole(own[name], weights[name])
    return sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())


def _fill(loaded: LoadedModel, weights: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Copy whole weights into the model; returns names that it misses, and names that it does not know."""
    if loaded.is_sharded:
        return sharding.fill(loaded.model, weights), [n for n in weights if n not in loaded.model.state_dict()]
    result: Any = loaded.model.load_state_dict(weights, strict=False)
    return result.missing_keys, result.unexpected_keys


def _bytes(model: nn.Module, critic: nn.Module | None, moments: dict[str, Any]) -> int:
    """What a checkpoint takes: trained weights in float32, and the optimiser's state."""
    weights = [*model.parameters(), *(critic.parameters() if critic is not None else ())]
    state = (value for values in moments["state"].values() for value in values.values() if isinstance(value, Tensor))
    return sum(p.numel() * max(p.element_size(), 4) for p in weights if p.requires_grad) + sum(t.nbytes for t in state)
