"""What ranks find by themselves, each on its machine, must be the same on all: they tell each other, and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from posttrain.errors import DataError, UserError, count_noun
from posttrain.run.fingerprint import Fact, differences
from posttrain.train import distributed

TOLD = 8  # differences that an error lists
SAMPLED = 1024  # numbers of a tensor that are compared


def check(
    found: Mapping[str, Fact],
    *,
    did: str = "was started with other things",
    hint: str = "start all with the same recipe, files and versions",
    error: type[UserError] = UserError,
) -> None:
    """Raises `error`, on all ranks, that names the first of them with something else than rank 0, and what that is.

    did: what this rank has done then.
    """
    first, *others = distributed.gather(dict(found))
    for rank, theirs in enumerate(others, 1):
        if differ := differences(first, theirs):
            told = [f"{key}: {a.shown} on rank 0, {b.shown} on rank {rank}" for key, (a, b) in differ.items()]
            more = [f"and {len(told) - TOLD} more"] if len(told) > TOLD else []
            raise error(f"rank {rank} {did} than rank 0", allowed="\n  ".join([*told[:TOLD], *more]), hint=hint)


def check_rows(uids: Sequence[str]) -> None:
    """Rows that every rank has prepared by itself. Raises DataError."""
    check(
        {"data": Fact.of("\n".join(uids).encode(), count_noun(len(uids), "row"))},
        did="has read other data",
        hint="files that change meanwhile or differ between machines do that, and functions that draw rows anew",
        error=DataError,
    )


def check_weights(model: nn.Module, *, trained: bool) -> None:
    """Weights that every rank has loaded by itself, by a part of each; those that are not trained, or all."""
    if distributed.world() == 1:
        return
    parts = [
        f"{name} {tuple(weight.shape)}".encode() + _part(weight)
        for name, weight in model.named_parameters()
        if trained or not weight.requires_grad
    ]
    check(
        {"weights": Fact.of(b"".join(parts))},
        did="has loaded other weights",
        hint="see that model.path has the same files everywhere; a hub id keeps to one state with model.revision",
    )


def check_files(files: Mapping[str, tuple[Path, str]]) -> None:
    """Files of weights, of which every rank reads its own parts, by size and by the names in them. Raises UserError."""
    sizes = {path.name: path.stat().st_size for path, _ in files.values()}
    told = repr((sorted(sizes.items()), sorted((name, path.name, stored) for name, (path, stored) in files.items())))
    check(
        {"weights": Fact.of(told.encode())},
        did="finds other files of weights",
        hint="see that model.path has the same files everywhere",
    )


def _part(weight: nn.Parameter) -> bytes:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].contiguous().view(torch.uint8).cpu().numpy().tobytes()
