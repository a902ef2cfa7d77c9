"""Asynchronous checkpoints of a sharded model in full training: every rank writes its shards while the next step runs.

`divided/` is a torch.distributed.checkpoint (DCP) of weights and optimizer moments in float32. Any number of ranks can
load it; each reads what its own shards need. Next to it is the same model as a Hugging Face folder in half precision,
so that a checkpoint loads like any model. `save` copies the tensors to host memory; a thread then writes them. The
checkpoint counts once all ranks have written and rank 0 has sealed it; until then the previous checkpoint is the
newest. The next save and the end of the run wait for the thread.

Every operation that can fail on one rank alone (a file, host memory) is captured, and all ranks agree on its success
before the next collective; otherwise the other ranks would wait in that collective for the failed rank.

Tensor names are built here rather than by `get_state_dict`, which accepts only an optimizer over the model's own
parameters: parameters of `MasterAdamW` are float32 copies, and a critic's parameters belong to another module.
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
from posttrain.train.optimizers import MasterAdamW

FOLDER = "divided"
WEIGHTS, MOMENTS = "weights", "moments"  # prefixes of tensor names: weights/NAME, moments/KEY/NAME
_pending: Future[None] | None = None  # the save in progress
_group: Any = None  # process group of the saving threads of all ranks


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
    """Copy weights and moments to host memory and start writing `root/step-N`. Returns the folder. All ranks call this.

    moments: tensors by name, see `moments_of`. write_rest: writes the other files of the folder, on rank 0. wait:
    return only when the checkpoint is sealed. Raises RunError, also if the previous save failed in its thread.
    """
    global _group, _pending
    wait_for_save()
    with contextlib.ExitStack() as writing:
        writing.enter_context(ranks.defer_shutdown(every_rank=True))
        unsealed = distributed.run_on_rank0(_begin, root, step, loaded)
        share = model_folder.assign_weights(loaded)
        distributed.run_on_rank0(model_folder.write_config, loaded, share.index, unsealed)
        distributed.run_on_rank0(write_rest, unsealed)
        tensors = {f"{WEIGHTS}/{name}": tensor for name, tensor in sharding.distinct_state(loaded.model).items()}
        tensors = {name: sharding.contiguous_shard(tensor) for name, tensor in {**tensors, **moments}.items()}
        parts = distributed.run_all_or_raise(_copy_to_host, tensors)
        if _group is None:
            _group = distributed.new_group()
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        _pending = thread.submit(_finish, writing.pop_all(), root, unsealed, share, parts, keep)
        thread.shutdown(wait=False)
    if wait:
        wait_for_save()
    return checkpoints.folder_for(root, step)


def wait_for_save() -> None:
    """Wait for the save in progress, if any. Raises its error, on all ranks."""
    global _pending
    if _pending is not None:
        done, _pending = _pending, None
        done.result()


def _begin(root: Path, step: int, loaded: LoadedModel) -> Path:
    weights = sum(p.numel() for p in loaded.model.parameters())
    checkpoints.require_space(
        root, weights * (3 * 4 + 2)
    )  # float32 weights and two moments, plus the folder in half precision
    return checkpoints.begin(root, step)


def _finish(
    writing: contextlib.ExitStack,
    root: Path,
    unsealed: Path,
    share: model_folder.Share,
    parts: dict[str, Tensor],
    keep: int,
) -> None:
    """Write, hash and seal the checkpoint (runs in a thread).

    Each rank hashes the files it has written, and rank 0 all remaining files: on a network file system, a rank's
    directory listing can be older than the files of another rank.
    """
    with writing, distributed.use_group(_group):
        written = distributed.capture(model_folder.write_files, share, unsealed)
        divided = distributed.capture(_write_parts, parts, unsealed)  # a collective: needed even after a failure
        distributed.value_or_raise(divided if written.error is None else replace(divided, error=written.error))
        mine = {*share.files, *list_shards(unsealed, distributed.rank())}
        of_all_ranks = set[str]().union(*distributed.gather(mine))
        hashed = distributed.capture(_hash, unsealed, mine, of_all_ranks)
        files = {name: entry for hashes in distributed.gather_or_raise(hashed) for name, entry in hashes.items()}
        distributed.run_on_rank0(_complete, root, unsealed, files, keep)


def _hash(unsealed: Path, mine: set[str], of_all_ranks: set[str]) -> checkpoints.Files:
    """Sync and hash this rank's files, and on rank 0 also files that no rank has declared.

    mine: names of files written by this rank. of_all_ranks: names of files written by any rank.
    """
    others = checkpoints.list_files(unsealed) - of_all_ranks if distributed.is_main() else set[str]()
    return checkpoints.sync_and_hash(unsealed, mine | others)


def _copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy this rank's shards to host memory.

    `dcp.async_save` is not used: ranks that have enough memory would begin to write before knowing that another rank
    has not.
    """
    stager = DefaultStager(StagingOptions(False, False, False, False))
    copied: Any = stager.stage(tensors)
    stager.close()
    return copied  # type: ignore[no-any-return]


def _write_parts(parts: dict[str, Tensor], unsealed: Path) -> None:
    """Write the shards of all ranks (a collective)."""
    with _as_run_error("the checkpoint could not be written", unsealed, checkpoints.RESUME_HINT):
        dcp.save(parts, checkpoint_id=unsealed / FOLDER, process_group=_group)


def list_shards(unsealed: Path, rank: int) -> set[str]:
    """Return the names of the files that DCP wrote on this rank: they begin with its rank number.

    DCP's metadata cannot be used instead: up to torch 2.12 it reaches rank 0 only.
    """
    return {f"{FOLDER}/{file.name}" for file in (unsealed / FOLDER).glob(f"__{rank}_*")}


@contextlib.contextmanager
def _as_run_error(what: str, where: Path, hint: str = "") -> Iterator[None]:
    """Convert DCP's CheckpointException to a RunError with the first rank's error.

    CheckpointException is a BaseException with the errors of all ranks.
    """
    try:
        yield
    except CheckpointException as error:
        first = next((failure for failure, _ in error.failures.values()), error)
        raise RunError(f"{what}: {first}", where=str(where), hint=hint) from error


def _complete(root: Path, unsealed: Path, files: checkpoints.Files, keep: int) -> None:
    checkpoints.complete(unsealed, files)
    checkpoints.prune(root, keep)


def moments_of(state: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's `state_dict`, named as `save` expects. names: parameter names by group."""
    numbers = _parameter_numbers(state, names)
    return {
        f"{MOMENTS}/{key}/{name}": value
        for name, number in numbers.items()
        for key, value in state["state"].get(number, {}).items()
        if isinstance(value, Tensor)
    }


def without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an optimizer's `state_dict` without its tensors."""
    scalars = {
        number: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for number, values in state["state"].items()
    }
    return {**state, "state": scalars}


def _parameter_numbers(state: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the number under which the optimizer's `state_dict` keeps each named parameter."""
    groups = zip(names, state["param_groups"], strict=True)
    return {name: number for own, group in groups for name, number in zip(own, group["params"], strict=True)}


@torch.no_grad()
def load(
    folder: Path, loaded: LoadedModel, optimizer: Optimizer, state: dict[str, Any], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Read a checkpoint's weights into the model and its moments into `state`, and return `state`.

    state: an optimizer's `state_dict` without moments. All ranks call this, and all raise if the load fails on any.
    Each rank reads what its own shards need. Packed weights (gate and up projections in one tensor, `tensor_split`) are
    read as contiguous shards and then redistributed, which is a collective. Raises RunError if the checkpoint belongs
    to another model or cannot be read.
    """
    wanted = distributed.run_all_or_raise(_plan, folder, loaded, optimizer, state, names)
    read = {name: sharding.contiguous_shard(tensor) for name, tensor in wanted.items()}
    distributed.run_all_or_raise(_read, folder, read)
    for name, tensor in wanted.items():
        if read[name] is not tensor:
            sharding.copy_contiguous_shard(tensor, read[name])
    if isinstance(optimizer, MasterAdamW):
        optimizer.round_weights()
    return state


def _plan(
    folder: Path, loaded: LoadedModel, optimizer: Optimizer, state: dict[str, Any], names: Sequence[Sequence[str]]
) -> dict[str, Tensor]:
    """Return the tensors to load into, by the checkpoint's names.

    Tensors of moments are allocated here and put into `state`.
    """
    stored = dcp.FileSystemReader(folder / FOLDER).read_metadata().state_dict_metadata
    exact = optim.state_dict_with_masters(optimizer, loaded.model)  # weights are loaded into float32 masters, if any
    distinct = sharding.distinct_state(loaded.model).items()
    weights = {f"{WEIGHTS}/{name}": tensor if exact is None else exact[name] for name, tensor in distinct}
    _check_names(folder, weights, stored)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameter_of = dict(zip((name for own in names for name in own), parameters, strict=True))
    numbers = _parameter_numbers(state, names)
    moments: dict[str, Tensor] = {}
    for key, entry in stored.items():
        kind, _, path = key.partition("/")
        if kind == MOMENTS and isinstance(entry, TensorStorageMetadata):
            part, _, name = path.partition("/")
            moments[key] = _allocate_moment(entry, parameter_of[name])
            state["state"].setdefault(numbers[name], {})[part] = moments[key]
    return {**weights, **moments}


def _read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's shards of the tensors from the checkpoint."""
    with warnings.catch_warnings(), _as_run_error("the checkpoint cannot be read", folder):
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # each rank reads independently
        dcp.load(tensors, checkpoint_id=folder / FOLDER, no_dist=True)


def _check_names(folder: Path, weights: dict[str, Tensor], stored: dict[str, Any]) -> None:
    stored_weights = {key: entry for key, entry in stored.items() if key.startswith(f"{WEIGHTS}/")}
    wrong: Iterable[str] = weights.keys() ^ stored_weights.keys()
    wrong = wrong or [key for key, tensor in weights.items() if tensor.shape != stored_weights[key].size]
    if wrong:
        first = min(wrong).removeprefix(f"{WEIGHTS}/")
        raise RunError(f"checkpoint {folder} does not fit: it holds other weights, e.g. {first}")


def _allocate_moment(entry: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    """Allocate the tensor that a moment is read into.

    Sharded like its parameter if the shapes are equal; otherwise on the host, from where the optimizer moves it to its
    device.
    """
    if isinstance(parameter, DTensor) and entry.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)
