"""Models built without their weights, whose parts are then read from files by each rank.

Parameters are zeros that occupy no memory until written. FSDP shards them and frees the rest, so a rank never holds
more than its parts, one layer and one slice of a file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from posttrain.models import adapters, load, pretrained
from posttrain.models.experts import compute_experts_in_half
from posttrain.models.load import LoadedModel, Origin
from posttrain.models.model_paths import locate
from posttrain.models.precision import HALF
from posttrain.recipe.sections import Model

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class EmptyModel:
    """A model whose weights are still zeros, and the file of each weight, by parameter name."""

    loaded: LoadedModel
    files: Mapping[str, tuple[Path, str]]  # parameter name -> (file, name in the file)
    dtype: torch.dtype  # type to which weights are rounded when read, as in a load of the whole model


def build_empty(section: Model, base_dir: Path, *, seed: int) -> EmptyModel | None:
    """Return what `models.load` gives for training, on the host, before weights are read; a fresh adapter is included.

    None if the weights are not safetensors of a directory under the module names: hub ids, `tiny`, adapters, GGUF,
    quantized checkpoints, and architectures whose checkpoints store weights in another form. Raises ModelError.
    """
    place = locate(section.path, base_dir)
    if place.kind != "directory" or place.path is None or section.quantize:
        return None
    bare = load.build_skeleton(section.model_copy(update={"lora": None}), base_dir, training=True, buffers=True)
    if bare is None or getattr(bare.model.config, "quantization_config", None) is not None:
        return None
    stored = find_stored_tensors(place.path)
    files = {
        name: stored[alias]
        for name, aliases in _list_parameter_names(bare.model).items()
        for alias in aliases
        if alias in stored
    }
    if len(files) < len(list(bare.model.parameters())):
        return None
    dtype = pretrained.dtype_of(section)
    _allocate_on_host(bare.model, dtype if section.lora else torch.float32)  # trained weights are float32
    model = adapters.add(bare.model, section.lora, seed=seed) if section.lora else bare.model
    half = load.set_mode(model, section, training=True)
    if half is None and dtype in HALF:
        half = dtype
        compute_experts_in_half()
    loaded = replace(bare, model=model, half=half, origin=Origin(section, base_dir, place))
    return EmptyModel(loaded, files, dtype)


def find_stored_tensors(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return the tensors of a model folder: name -> (file, name). Empty without safetensors."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: (folder / file, name) for name, file in index.items()}
    if not (folder / SINGLE).is_file():
        return {}
    with safe_open(folder / SINGLE, "pt") as file:
        return {name: (folder / SINGLE, name) for name in file.keys()}  # noqa: SIM118  no mapping


def _list_parameter_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of each parameter; a tied parameter has several."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in names_by_id.values()}


def _allocate_on_host(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace meta parameters by zeros on the host, in pages that the system allocates on first write."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(_zeros(parameter.shape, dtype), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]


def _zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return zeros from numpy, which gets zero pages from the system; torch would write them."""
    integers = {2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize]
    return torch.from_numpy(np.zeros(tuple(shape), integers)).view(dtype)


def read_local_weights(unfilled: EmptyModel) -> None:
    """Read this rank's part of each weight from the files, after the model is sharded."""
    base: Any = adapters.causal_of(unfilled.loaded.model)
    parameters = {adapters.strip_base_layer(name): parameter for name, parameter in base.named_parameters()}
    wanted: dict[Path, list[tuple[str, Tensor]]] = {}
    for name, (path, stored) in unfilled.files.items():
        wanted.setdefault(path, []).append((stored, parameters[name]))
    with torch.no_grad():
        for path, some in wanted.items():
            with safe_open(path, "pt") as file:
                for stored, parameter in some:
                    whole = file.get_slice(stored)
                    for part, of in list_local_slices(parameter):
                        part.copy_(whole[of].to(unfilled.dtype))


def list_local_slices(parameter: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Yield the slices of this rank's part of a parameter and their slices in the full tensor; nothing if it has no
    part.

    Parts follow `torch.chunk` along a dimension: first those of mesh dimensions whose ranks run the same tokens, where
    a rank may hold a part of each of several equal blocks, then those of FSDP.
    """
    if not isinstance(parameter, DTensor):
        yield parameter, (slice(None),) * parameter.ndim
        return
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
    owned = [torch.arange(size) for size in parameter.shape]
    placed = sorted(
        zip(names, parameter.placements, range(mesh.ndim), strict=True), key=lambda entry: entry[0].startswith("shard")
    )
    for name, placement, n in placed:
        dim = getattr(placement, "dim", None)
        if dim is not None:
            pieces = owned[dim].chunk(getattr(placement, "split_factor", 1) if name == "tensor" else 1)
            parts = [piece.chunk(mesh.size(n))[mesh.get_local_rank(n) :][:1] for piece in pieces]
            owned[dim] = torch.cat([p for part in parts for p in part] or [owned[dim][:0]])
    part = parameter.to_local()
    for runs in itertools.product(*map(_find_consecutive_runs, owned)):
        yield part[tuple(own for own, _ in runs)], tuple(of for _, of in runs)


def _find_consecutive_runs(numbers: Tensor) -> list[tuple[slice, slice]]:
    """Return increasing numbers as runs of consecutive ones: (their indices, the numbers) as slices."""
    if not len(numbers):
        return []
    starts = [0, *((numbers.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(numbers)]
    return [(slice(a, b), slice(int(numbers[a]), int(numbers[a]) + b - a)) for a, b in itertools.pairwise(starts)]
