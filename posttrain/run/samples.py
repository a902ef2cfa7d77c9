"""samples.jsonl: some completions of a step as people want to read them, with every reward component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.run.jsonl import StepLog, read_rows


class SamplesLog(StepLog):
    """Completions of a run: records with `prompt`, `completion`, `reward`, `components` and what a stage adds."""

    def write(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append some records of one step."""
        self.append({"step": step, **record} for record in records)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The records of a samples.jsonl, or of the one in a run directory; a torn last line is left out."""
    return read_rows(path / "samples.jsonl" if path.is_dir() else path)
