"""Which rows of an evaluation its model was trained on: rows of the same file have the same ids there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from posttrain.data.rows import load_rows
from posttrain.errors import PosttrainError
from posttrain.path_resolution import PLAIN_FILES, candidates
from posttrain.recipe.sections import Data
from posttrain.run.atomic_io import read_json


def count_trained_rows(model: str, data: Data, uids: Collection[str], base_dir: Path) -> dict[str, Any]:
    """`{rows, of, runs}`: how many of the rows the runs that made the model were trained on; {} where none is known.

    model: as `model.path` has it. data: of the evaluation, whose rows have these `uids`. Only files of the same name
    are read, for an id is of a row's file, position and content.
    """
    names = _files(data)
    seen: set[str] = set()
    runs: list[str] = []
    for run, recipe in _trainings(model, base_dir):
        try:
            trained = Data.model_validate(recipe.get("data") or {})
            if not names & _files(trained):
                continue
            found = {row["uid"] for row in load_rows(trained, base_dir)} & set(uids)
        except (PosttrainError, ValidationError, OSError):  # moved or changed since: nothing is known of it
            continue
        if found:
            seen |= found
            runs.append(str(run))
    return {"rows": len(seen), "of": len(uids), "runs": runs} if seen else {}


def _trainings(model: str, base_dir: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """(run directory, its values) of the run that made a model, of the one that made its start model, and so on."""
    seen: set[Path] = set()
    while True:
        folder = next((path.resolve() for path in candidates(model, base_dir) if path.is_dir()), None)
        near = (folder, folder.parent, folder.parent.parent) if folder else ()
        run = next((path for path in near if (path / "resolved.json").is_file()), None)
        if run is None or run in seen:
            return
        seen.add(run)
        recipe = read_json(run / "resolved.json") or {}
        yield run, recipe
        model = str((recipe.get("model") or {}).get("path") or "")
        if not model:
            return


def _files(data: Data) -> set[str]:
    """The names, without folders, of the files of rows of a `data` section."""
    sources = [source.source for source in data.mix] if data.mix is not None else [data.source]
    return {name.rpartition("/")[2] for name in sources if name and name.endswith(PLAIN_FILES)}
