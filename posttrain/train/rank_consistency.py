"""Consistency checks between ranks: what each rank prepares or loads independently must be the same on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from posttrain.errors import DataError, UserError, count_noun
from posttrain.run.fingerprint import Fact, differences
from posttrain.train import distributed

MAX_LISTED = 8  # differences that an error lists
SAMPLES_PER_TENSOR = 1024  # evenly spaced elements of a tensor that are compared


def check(
    found: Mapping[str, Fact],
    *,
    did: str = "was started with other things",
    hint: str = "start all with the same recipe, files and versions",
    error: type[UserError] = UserError,
) -> None:
    """Raise `error` on all ranks if the facts of any rank differ from rank 0's.

    The error names the first such rank and the differing facts. did: how the message describes what that rank did.
    """
    first, *others = distributed.gather(dict(found))
    for rank, theirs in enumerate(others, 1):
        if differ := differences(first, theirs):
            lines = [f"{key}: {a.shown} on rank 0, {b.shown} on rank {rank}" for key, (a, b) in differ.items()]
            more = [f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
            raise error(f"rank {rank} {did} than rank 0", allowed="\n  ".join([*lines[:MAX_LISTED], *more]), hint=hint)


def check_rows(uids: Sequence[str]) -> None:
    """Raise DataError if ranks have prepared different rows. uids: of this rank's rows, in order."""
    check(
        {"data": Fact.of("\n".join(uids).encode(), count_noun(len(uids), "row"))},
        did="has read other data",
        hint="the files may differ between machines or have changed meanwhile, or a function samples rows at random",
        error=DataError,
    )


def check_weights(model: nn.Module, *, trained: bool) -> None:
    """Raise UserError if ranks have loaded different weights; compares a sample of each tensor.

    trained: also compare the trained weights, else only the frozen ones.
    """
    if distributed.world() == 1:
        return
    parts = [
        f"{name} {tuple(weight.shape)}".encode() + _sample(weight)
        for name, weight in model.named_parameters()
        if trained or not weight.requires_grad
    ]
    check(
        {"weights": Fact.of(b"".join(parts))},
        did="has loaded other weights",
        hint="see that model.path has the same files everywhere; a hub id keeps to one state with model.revision",
    )


def check_files(files: Mapping[str, tuple[Path, str]]) -> None:
    """Raise UserError if ranks see different weight files, by size and by the tensor names in them.

    Used when every rank reads its own shards from the files.
    """
    sizes = {path.name: path.stat().st_size for path, _ in files.values()}
    listing = repr((sorted(sizes.items()), sorted((name, path.name, stored) for name, (path, stored) in files.items())))
    check(
        {"weights": Fact.of(listing.encode())},
        did="finds other files of weights",
        hint="see that model.path has the same files everywhere",
    )


def _sample(weight: nn.Parameter) -> bytes:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLES_PER_TENSOR)].contiguous().view(torch.uint8).cpu().numpy().tobytes()
