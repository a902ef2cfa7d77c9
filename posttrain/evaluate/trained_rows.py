"""Which rows of an evaluation its model was trained on: those that ask what a row of a training asks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from posttrain.data import duplicates
from posttrain.data.rows import load_rows
from posttrain.errors import PosttrainError
from posttrain.models.lineage import RESOLVED, trace_lineage
from posttrain.path_resolution import ROW_FILES
from posttrain.recipe.sections import Data
from posttrain.run.atomic_io import read_json


def count_trained_rows(model: str, rows: Sequence[duplicates.Row], base_dir: Path) -> dict[str, Any]:
    """`{rows, of, runs}`: how many of the rows the runs that made the model were trained on; {} where none is known.

    model: as `model.path` has it. Rows are the same where their prompts have the same words, whatever their other
    columns and their files. Only trainings on files of rows are compared.
    """
    texts = [duplicates.question(row) for row in rows]
    seen: set[int] = set()
    runs: list[str] = []
    for run in trace_lineage(model, base_dir).runs:
        recipe = read_json(run / RESOLVED) or {}
        try:
            trained = Data.model_validate(recipe.get("data") or {})
            if not _reads_files(trained):
                continue
            asked = [duplicates.question(row) for row in load_rows(trained, base_dir)]
        except (PosttrainError, ValidationError, OSError):  # moved or changed since: nothing is known of it
            continue
        if found := {place for place, _ in duplicates.match_same_words(texts, asked) if texts[place].strip()}:
            seen |= found
            runs.append(str(run))
    return {"rows": len(seen), "of": len(rows), "runs": runs} if seen else {}


def _reads_files(data: Data) -> bool:
    """Whether all rows of a `data` section are read from files."""
    sources = [source.source for source in data.mix] if data.mix is not None else [data.source]
    return all(name and name.endswith(ROW_FILES) for name in sources)
