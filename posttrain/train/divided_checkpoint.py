"""Checkpoints of a model that is divided in full training: every rank writes its parts, while the next step runs.

`divided/` holds weights and the optimiser's moments as torch.distributed.checkpoint writes them, in float32; any number
of ranks reads it, each what its parts need. Beside it stand the same weights as a model folder in half precision, so
that a checkpoint loads as any model does. The tensors are copied to the host first; a thread then writes them. The
checkpoint counts once all ranks have written and rank 0 has sealed it: until then the former one is the newest. The
next save waits for it, and so does the end of the run.

Tensors are named here and not by `get_state_dict`: its optimiser must hold parameters of the model, and those of
`MasterAdamW`, of a critic and of one process that goes on are others.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
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
    checkpoint is sealed. Raises RunError, also for the save before this one, if it has failed behind its caller.
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
        parts = dcp.async_save(tensors, checkpoint_id=unsealed / FOLDER, process_group=_own_group())
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        _pending = thread.submit(_finish, writing.pop_all(), root, unsealed, share, parts, keep)
        thread.shutdown(wait=False)
    if wait:
        wait_for_save()
    return checkpoints.folder_for(root, step)


def wait_for_save() -> None:
    """Until the save that goes on, if there is one, is done. Raises its error, on all ranks."""
    global _pending
    if _pending is not None:
        done, _pending = _pending, None
        done.result()


def _own_group() -> Any:
    global _group
    if _group is None:
        _group = distributed.new_group()
    return _group


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
    writing: contextlib.ExitStack, root: Path, unsealed: Path, share: model_folder.Share, parts: Any, keep: int
) -> None:
    """In a thread: write, hash and seal."""
    mine = (distributed.rank(), distributed.world())
    with writing, distributed.over(_group):
        written = distributed.capture(model_folder.write_files, share, unsealed)
        divided = distributed.capture(_wait_for_parts, parts, unsealed)  # also where the other has failed
        distributed.value_or_raise(written if written.error else divided)
        hashed = distributed.capture(partial(checkpoints.sync_and_hash, share=mine), unsealed)
        files = {name: entry for found in distributed.gather_or_raise(hashed) for name, entry in found.items()}
        distributed.run_on_rank0(_complete, root, unsealed, files, keep)


def _wait_for_parts(parts: Any, unsealed: Path) -> None:
    try:
        parts.result()
    except CheckpointException as error:  # no Exception; it tells all ranks the failures of each
        first = next((found for found, _ in error.failures.values()), error)
        raise RunError(
            f"the checkpoint could not be written: {first}",
            where=str(unsealed),
            hint="older checkpoints are kept; mend that, then run the same command with --resume",
        ) from error


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
    them; returns it. Each rank reads what its parts need, and talks to others only of weights of which it has a part of
    each of several pieces (`tensor_split`). Raises RunError where the checkpoint is of another model."""
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
    wanted = {**weights, **places}
    read = {name: sharding.in_one_piece(tensor) for name, tensor in wanted.items()}
    with warnings.catch_warnings():  # that it is one process: each rank reads by itself
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(read, checkpoint_id=folder / FOLDER, no_dist=True)
    for name, tensor in wanted.items():
        if read[name] is not tensor:
            sharding.copy_pieces(tensor, read[name])
    if isinstance(optimizer, MasterAdamW):
        optimizer.round_weights()
    return state


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
