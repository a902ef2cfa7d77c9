"""samples.jsonl: some completions of each step in readable form, with every reward component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.run.jsonl import StepLog, read_rows


class SamplesLog(StepLog):
    """Completions of a run: records with `prompt`, `completion`, `reward`, `components` and fields of the stage."""

    def write(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records of one step."""
        self.append({"step": step, **record} for record in records)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the records of a samples.jsonl, or of the one in a run directory, without a torn last line."""
    return read_rows(path / "samples.jsonl" if path.is_dir() else path)
