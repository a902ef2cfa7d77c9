"""metrics.jsonl: one object a step with flat keys `group/name`; what depends on the clock lives under `time/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.run.jsonl import StepLog, read_rows


class MetricsLog(StepLog):
    """The numbers of a run, a row a step."""

    def write(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Append one step's numbers. Steps of a run only grow; NaN and infinity are written as null."""
        self.append([{"step": step, **values}])

    def fill(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Write the row of `step` unless it is there: a run may have been killed between the save of a step, which
        holds its numbers, and its row."""
        if self.last < step:
            self.write(step, values)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, or of the one in a run directory; a torn last line is left out."""
    return read_rows(path / "metrics.jsonl" if path.is_dir() else path)
