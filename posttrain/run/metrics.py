"""metrics.jsonl: one object per step with flat keys `group/name`; values that depend on the clock are under `time/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.run.jsonl import StepLog, read_rows


class MetricsLog(StepLog):
    """Metrics of a run, one row per step."""

    def write(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Append the metrics of one step. Steps increase within a run; NaN and infinity are written as null."""
        self.append([{"step": step, **values}])

    def fill(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """Write the row of `step` unless it exists: a run may be killed between saving a step, which includes its
        metrics, and writing its row."""
        if self.last < step:
            self.write(step, values)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, or of the one in a run directory, without a torn last line."""
    return read_rows(path / "metrics.jsonl" if path.is_dir() else path)
