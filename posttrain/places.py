"""Where files that a recipe names are found: beside the recipe, in the working directory, among the shipped ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import UserError, nearest

_PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str) -> Path:
    """The shipped `recipes` or `rewards`: inside the wheel, or at the top of a source checkout."""
    inside = _PACKAGE / "shipped" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def is_shipped(path: Path) -> bool:
    """Whether a file is one of the shipped rewards or tools."""
    return any(path.is_relative_to(shipped(folder)) for folder in ("rewards", "tools"))


def candidates(name: str, base_dir: Path | None) -> list[Path]:
    """The places where `name` is looked for, in order. `base_dir` is the folder of the recipe."""
    path = Path(name).expanduser()
    if path.is_absolute():
        return [path]
    places = [base_dir / path] if base_dir else []
    return [*places, Path.cwd() / path]


def find(name: str, base_dir: Path | None, what: str, error: type[UserError] = UserError) -> Path:
    """The first place where `name` exists. Raises `error` naming every place that was searched."""
    places = candidates(name, base_dir)
    for place in places:
        if place.exists():
            return place.resolve()
    searched = ", ".join(str(p) for p in dict.fromkeys(places))
    raise error(f"{what} not found: {name}", allowed=f"searched: {searched}", hint=meant(name, places))


def meant(name: str, places: Sequence[Path]) -> str:
    """A hint with the file beside the places searched that was most likely meant; empty if there is none."""
    for place in places:
        if place.parent.is_dir():
            beside = [path.name for path in itertools.islice(place.parent.iterdir(), 1000)]
            if near := nearest(place.name, beside):
                return f"did you mean `{name.removesuffix(place.name)}{near}`?"
    return ""


def split_function(use: str) -> tuple[str, str] | None:
    """`path/file.py:name` or `package.module:name` -> (left, name); None if `use` is a plain registered name."""
    left, colon, name = use.rpartition(":")
    return (left, name) if colon and left and name.isidentifier() else None


def known_files(folder: str, suffixes: Sequence[str]) -> dict[str, Path]:
    """Name -> path of the shipped files with one of `suffixes`; `rl/a.yaml` answers to `rl/a` and to `a` if unique."""
    root = shipped(folder)
    names: dict[str, Path] = {}
    stems: dict[str, list[Path]] = {}
    for path in sorted(p for s in suffixes for p in root.rglob(f"*{s}")):
        names[path.relative_to(root).with_suffix("").as_posix()] = path
        stems.setdefault(path.stem, []).append(path)
    return {**{stem: paths[0] for stem, paths in stems.items() if len(paths) == 1}, **names}
