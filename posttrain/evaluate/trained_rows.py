"""Count of evaluation rows whose question is also in the training data of the model."""

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
    """Return `{rows, of, runs}`: how many of the rows are in the training data of the model's runs; {} if none is.

    model: as `model.path` has it. Rows are the same if their prompts have the same words, whatever their other columns
    and files. Only trainings on files of rows are compared.
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
            questions = [duplicates.question(row) for row in load_rows(trained, base_dir)]
        except (PosttrainError, ValidationError, OSError):  # the training data was moved or changed since
            continue
        if found := {index for index, _ in duplicates.match_same_words(texts, questions) if texts[index].strip()}:
            seen |= found
            runs.append(str(run))
    return {"rows": len(seen), "of": len(rows), "runs": runs} if seen else {}


def _reads_files(data: Data) -> bool:
    """Return whether all rows of a `data` section are read from files."""
    sources = [source.source for source in data.mix] if data.mix is not None else [data.source]
    return all(name and name.endswith(ROW_FILES) for name in sources)
