"""Lineage of a model: the run that saved it, and the runs of the models that each run started from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.path_resolution import candidate_paths
from posttrain.run.atomic_io import read_json

RESOLVED = "resolved.json"  # the file that marks a run directory


@dataclass(frozen=True)
class Lineage:
    """runs: run directories in order, each after the runs of its start models. roots: start models, as recipes name
    them, that no known run saved.
    """

    runs: Sequence[Path]
    roots: Sequence[str]


def trace_lineage(model: str, base_dir: Path | None = None) -> Lineage:
    """Return the runs that produced a model, following all inputs of merges.

    model: a value of `model.path`. base_dir: directory in which relative names are looked up before the working
    directory.
    """
    runs: dict[Path, None] = {}
    roots: dict[str, None] = {}
    visited: set[Path] = set()

    def visit(name: str) -> None:
        run = find_run_of_model(name, base_dir)
        if run is None:
            roots[name] = None
        elif run not in visited:
            visited.add(run)
            for start in start_models(read_json(run / RESOLVED) or {}):
                visit(start)
            runs[run] = None

    visit(model)
    return Lineage(list(runs), list(roots))


def find_run_of_model(model: str, base_dir: Path | None = None) -> Path | None:
    """Return the run directory that holds a model (its `final/`, a checkpoint or the directory itself); None if there
    is none.
    """
    folder = next((path.resolve() for path in candidate_paths(model, base_dir) if path.is_dir()), None)
    near = (folder, folder.parent, folder.parent.parent) if folder else ()
    return next((path for path in near if (path / RESOLVED).is_file()), None)


def start_models(recipe: Mapping[str, Any]) -> list[str]:
    """Return the models that a run with these values starts from: the trained model, or the base and all inputs of a
    merge.
    """
    slices = recipe.get("slices") or ()
    named = [
        (recipe.get("model") or {}).get("path"),
        recipe.get("base_model"),
        *(source.get("base_model") for source in slices),
        *(source.get("model") for source in merge_inputs(recipe)),
    ]
    return list(dict.fromkeys(str(name) for name in named if name))


def merge_inputs(recipe: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of a merge that name an input: `models` and those of `slices`; [] for other stages."""
    return [
        *(recipe.get("models") or ()),
        *(source for part in recipe.get("slices") or () for source in part["sources"]),
    ]
