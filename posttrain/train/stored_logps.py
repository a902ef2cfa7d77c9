"""Log-probs of rows stored on disk: computed once, before the first step, and read again by a resumed run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.run.atomic_io import explain_write_errors, sync_file
from posttrain.train import distributed

ROWS = "rows"  # key of the fingerprint of the rows


def read_or_compute(
    path: Path, rows: Sequence[Any], compute: Callable[[], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """Return the log-probs stored for exactly these rows, or compute and store them. All ranks call this."""
    logps: Mapping[str, Tensor] | None = distributed.run_on_rank0(read, path, rows)
    if logps is None:
        logps = compute()
        distributed.run_on_rank0(write, path, rows, logps)
    return logps


def read(path: Path, rows: Sequence[Any]) -> dict[str, Tensor] | None:
    """Return the log-probs that `write` stored for exactly these rows; None if there are none.

    rows: token ids, in lists of any depth.
    """
    if not path.exists():
        return None
    stored = load_file(path)
    return stored if torch.equal(stored.pop(ROWS, torch.empty(0)), fingerprint(rows)) else None


def write(path: Path, rows: Sequence[Any], logps: Mapping[str, Tensor]) -> None:
    """Write the log-probs atomically: a killed process leaves no partial file under this name."""
    partial = path.with_suffix(".partial")
    with explain_write_errors(path):
        save_file({**{name: value.contiguous() for name, value in logps.items()}, ROWS: fingerprint(rows)}, partial)
        sync_file(partial)
        partial.replace(path)


def fingerprint(rows: Sequence[Any]) -> Tensor:
    """Return a hash of all token ids in order, [32] uint8."""
    return torch.tensor(list(hashlib.sha256(json.dumps(rows).encode()).digest()), dtype=torch.uint8)
