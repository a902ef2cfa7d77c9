"""Asynchronous checkpoints of a sharded model in full training: every rank writes its shards, while the next step runs.

`divided/` is a torch.distributed.checkpoint (DCP) of weights and optimiser moments in float32, which any number of
ranks can load, each what its own shards need. Beside it stands the same model as a Hugging Face folder in half
precision, so that a checkpoint loads as any model does. `save` copies the tensors to the host; a thread then writes
them. The checkpoint counts once all ranks have written and rank 0 has sealed it; until then the one before is the
newest. The next save waits for the thread, and so does the end of the run.

Whatever can fail on one rank (a file, the host's memory) is caught, and all ranks agree that it went well before the
next collective, in which the others would wait for the rank that failed.

Tensors are named here and not by `get_state_dict`, which takes an optimiser over the model's own parameters only: those
of `MasterAdamW` are float32 copies, and a critic's belong to another module.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from posttrain.errors import RunError
from posttrain.models.load import LoadedModel
from posttrain.run import checkpoints, ranks
from posttrain.train import distributed, model_folder, optim, sharding
from posttrain.train.master_weights import MasterAdamW

FOLDER = "divided"
WEIGHTS, MOMENTS = "weights", "moments"  # what names of tensors begin with: weights/NAME, moments/KEY/NAME
_pending: Future[None] | None = None  # the save that goes on
_group: Any = None  # over which the thread of a save talks to those of other ranks


def is_divided(folder: Path) -> bool:
    """Whether ranks have written this checkpoint in parts."""
    return (folder / FOLDER).is_dir()


def save(
    root: Path,
    step: int,
    loaded: LoadedModel,
    moments: dict[str, Tensor],
    keep: int,
    write_rest: Callable[[Path], None],
    *,
    wait: bool,
) -> Path:
    """Copy weights and moments to the host, and begin to write `root/step-N`; all ranks call this. Returns the folder.

    moments: by name, see `moments_of`. write_rest: writes what else belongs into the folder, on rank 0. wait: until the
    checkpoint is sealed. Raises RunError, also where the save before this one has failed in its thread.
    """
    global _pending
    wait_for_save()
    with contextlib.ExitStack() as writing:
        writing.enter_context(ranks.defer_shutdown(every_rank=True))
        unsealed = distributed.run_on_rank0(_begin, root, step, loaded)
        share = model_folder.deal_out(loaded)
        distributed.run_on_rank0(_write_small, loaded, share.index, unsealed, write_rest)
        tensors = {f"{WEIGHTS}/{name}": tensor for name, tensor in sharding.distinct_state(loaded.model).items()}
        tensors = {name: sharding.in_one_piece(tensor) for name, tensor in {**tensors, **moments}.items()}
        parts = distributed.run_all_or_raise(_copy_to_host, tensors)
        _use_own_group()
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        _pending = thread.submit(_finish, writing.pop_all(), root, unsealed, share, parts, keep)
        thread.shutdown(wait=False)
    if wait:
        wait_for_save()
    return checkpoints.folder_for(root, step)


def wait_for_save() -> None:
    """Wait for the save whose thread still writes, if there is one. Raises its error, on all ranks."""
    global _pending
    if _pending is not None:
        done, _pending = _pending, None
        done.result()


def _use_own_group() -> None:
    """Have the thread talk over a group of its own, which the first save makes."""
    global _group
    if _group is None:
        _group = distributed.new_group()


def _begin(root: Path, step: int, loaded: LoadedModel) -> Path:
    weights = sum(p.numel() for p in loaded.model.parameters())
    checkpoints.require_space(root, weights * (3 * 4 + 2))  # float32 weights and two moments, and a folder's in half
    return checkpoints.begin(root, step)


def _write_small(
    loaded: LoadedModel, index: dict[str, Any], unsealed: Path, write_rest: Callable[[Path], None]
) -> None:
    model_folder.write_config(loaded, index, unsealed)
    write_rest(unsealed)


def _finish(
    writing: contextlib.ExitStack,
    root: Path,
    unsealed: Path,
    share: model_folder.Share,
    parts: dict[str, Tensor],
    keep: int,
) -> None:
    """In a thread: write, hash and seal.

    Each rank hashes the files that it has written, and rank 0 all others: another rank's listing of a folder on a
    network file system may be older than the files in it.
    """
    with writing, distributed.use_group(_group):
        written = distributed.capture(model_folder.write_files, share, unsealed)
        divided = distributed.capture(_write_parts, parts, unsealed)  # also where the other has failed
        distributed.value_or_raise(divided if written.error is None else replace(divided, error=written.error))
        own = {*share.files, *own_parts(unsealed, distributed.rank())}
        of_all = set[str]().union(*distributed.gather(own))
        hashed = distributed.capture(_hash, unsealed, own, of_all)
        files = {name: entry for found in distributed.gather_or_raise(hashed) for name, entry in found.items()}
        distributed.run_on_rank0(_complete, root, unsealed, files, keep)


def _hash(unsealed: Path, own: set[str], of_all: set[str]) -> checkpoints.Files:
    """own: names of files that this rank has written. of_all: those of all ranks; rank 0 takes what is not in it."""
    rest = checkpoints.list_files(unsealed) - of_all if distributed.is_main() else set[str]()
    return checkpoints.sync_and_hash(unsealed, own | rest)


def _copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of this rank's shards in the host's memory. `dcp.async_save` would begin to write with the ranks whose
    memory has sufficed, before it is known that one's has not."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    copied: Any = stager.stage(tensors)
    stager.close()
    return copied  # type: ignore[no-any-return]


def _write_parts(parts: dict[str, Tensor], unsealed: Path) -> None:
    """Write the shards of all ranks, a collective."""
    with _as_run_error("the checkpoint could not be written", unsealed, checkpoints.GO_ON):
        dcp.save(parts, checkpoint_id=unsealed / FOLDER, process_group=_group)


def own_parts(unsealed: Path, rank: int) -> set[str]:
    """Names of the files that DCP has written on this rank, which begin with its number. What it knows of the places of
    tensors tells no more: up to torch 2.12 other ranks than the first get none of it."""
    return {f"{FOLDER}/{file.name}" for file in (unsealed / FOLDER).glob(f"__{rank}_*")}


@contextlib.contextmanager
def _as_run_error(what: str, where: Path, hint: str = "") -> Iterator[None]:
    """DCP raises a BaseException with the errors of all ranks in it; here it becomes a RunError with the first."""
    try:
        yield
    except CheckpointException as error:
        first = next((found for found, _ in error.failures.values()), error)
        raise RunError(f"{what}: {first}", where=str(where), hint=hint) from error


def _complete(root: Path, unsealed: Path, files: checkpoints.Files, keep: int) -> None:
    checkpoints.complete(unsealed, files)
    checkpoints.prune(root, keep)


def moments_of(state: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """The tensors of an optimiser's `state_dict` as `save` names them. names: of its parameters, by group."""
    numbers = _numbers(state, names)
    return {
        f"{MOMENTS}/{key}/{name}": value
        for name, number in numbers.items()
        for key, value in state["state"].get(number, {}).items()
        if isinstance(value, Tensor)
    }


def without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """What of an optimiser's `state_dict` is no tensor."""
    kept = {
        number: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for number, values in state["state"].items()
    }
    return {**state, "state": kept}


def _numbers(state: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, int]:
    groups = zip(names, state["param_groups"], strict=True)
    return {name: number for own, group in groups for name, number in zip(own, group["params"], strict=True)}


@torch.no_grad()
def load(
    folder: Path, loaded: LoadedModel, optimizer: Optimizer, state: dict[str, Any], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Read a checkpoint's weights into the model, and its moments into `state`, an optimiser's `state_dict` without
    them; returns it. All ranks call this, and all raise if it fails on any.

    Each rank reads what its own shards need. Packed weights (gate and up projections in one, `tensor_split`) are read
    as contiguous shards and then redistributed, which is a collective. Raises RunError where the checkpoint is of
    another model or cannot be read.
    """
    wanted = distributed.run_all_or_raise(_plan, folder, loaded, optimizer, state, names)
    read = {name: sharding.in_one_piece(tensor) for name, tensor in wanted.items()}
    distributed.run_all_or_raise(_read, folder, read)
    for name, tensor in wanted.items():
        if read[name] is not tensor:
            sharding.copy_pieces(tensor, read[name])
    if isinstance(optimizer, MasterAdamW):
        optimizer.round_weights()
    return state


def _plan(
    folder: Path, loaded: LoadedModel, optimizer: Optimizer, state: dict[str, Any], names: Sequence[Sequence[str]]
) -> dict[str, Tensor]:
    """The tensors to load into, by the checkpoint's names; those of moments are new, and put into `state`."""
    stored = dcp.FileSystemReader(folder / FOLDER).read_metadata().state_dict_metadata
    weights = {f"{WEIGHTS}/{name}": tensor for name, tensor in _weights(loaded, optimizer).items()}
    _check_names(folder, weights, stored)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    like = dict(zip((name for own in names for name in own), parameters, strict=True))
    numbers = _numbers(state, names)
    places: dict[str, Tensor] = {}
    for key, entry in stored.items():
        kind, _, rest = key.partition("/")
        if kind == MOMENTS and isinstance(entry, TensorStorageMetadata):
            part, _, name = rest.partition("/")
            places[key] = _place(entry, like[name])
            state["state"].setdefault(numbers[name], {})[part] = places[key]
    return {**weights, **places}


def _read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's shards of the tensors."""
    with warnings.catch_warnings(), _as_run_error("the checkpoint cannot be read", folder):
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # each rank reads by itself
        dcp.load(tensors, checkpoint_id=folder / FOLDER, no_dist=True)


def _weights(loaded: LoadedModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """Where the weights of a checkpoint go: the model's, or the float32 ones of its optimiser."""
    exact = optim.masters(optimizer, loaded.model)
    distinct = sharding.distinct_state(loaded.model)
    return {name: tensor if exact is None else exact[name] for name, tensor in distinct.items()}


def _check_names(folder: Path, weights: dict[str, Tensor], stored: dict[str, Any]) -> None:
    there = {key: entry for key, entry in stored.items() if key.startswith(f"{WEIGHTS}/")}
    wrong: Iterable[str] = weights.keys() ^ there.keys()
    wrong = wrong or [key for key, tensor in weights.items() if tensor.shape != there[key].size]
    if wrong:
        first = min(wrong).removeprefix(f"{WEIGHTS}/")
        raise RunError(f"checkpoint {folder} does not fit: it holds other weights, e.g. {first}")


def _place(entry: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    """Where a moment is read to: divided as its parameter is, if it has its shape; of a whole parameter to the host,
    from where the optimiser brings it to where it keeps it."""
    if isinstance(parameter, DTensor) and entry.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)
