"""Resolution of files named in a recipe: next to the recipe, in the working directory, and among shipped files."""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
import stat
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from posttrain.errors import UserError, count_noun, did_you_mean, nearest

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")  # suffixes that may follow a row file's suffix
TEXT_FILES = (".jsonl", ".json", ".csv")
# suffixes of row files that need no extra package
PLAIN_FILES = (*TEXT_FILES, *(f"{kind}{packed}" for kind in TEXT_FILES for packed in COMPRESSED))
PATHS = (".", "/", "~")  # first characters of a path
EARLIER = "stage:"  # beginning of what names an earlier stage of a pipeline, which makes the file or folder
ROW_FILES = (*PLAIN_FILES, ".parquet")  # suffixes of all row files
NAME_CHARS, PART_BYTES = 4096, 255  # maximum length of a path, and of a part between slashes
_PACKAGE = Path(__file__).resolve().parent


def shipped_folder(folder: str) -> Path:
    """Return the shipped `recipes`, `rewards` or `tools` folder: inside the wheel, or at the top of a checkout."""
    inside = _PACKAGE / "shipped" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def is_shipped(path: Path) -> bool:
    """Return whether a file is a shipped reward or tool."""
    return any(path.is_relative_to(shipped_folder(folder)) for folder in ("rewards", "tools"))


def candidate_paths(name: str, base_dir: Path | None) -> list[Path]:
    """Return the paths at which `name` is looked for, in order. `base_dir` is the folder of the recipe.

    Raises UserError for a text that cannot be a file name.
    """
    check_file_name(name)
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # no such user: `~` is a plain character
        path = path.expanduser()
    if path.is_absolute():
        return [path]
    places = [base_dir / path] if base_dir else []
    return [*places, Path.cwd() / path]


@dataclass(frozen=True)
class PathText:
    """Marks a text in an annotation as a path that need not exist: `Annotated[str, PathText(created=True)]`.

    created: the run creates it, next to the recipe. Otherwise a text without a file stays as it is, e.g. a hub id.
    words: values that are not paths.
    """

    created: bool = False
    words: tuple[str, ...] = ()

    def resolve(self, text: str, base_dir: Path | None) -> str:
        """Return the absolute path of the first candidate that exists, else of a path to create, else the text."""
        if text in self.words:
            return text
        places = candidate_paths(text, base_dir)
        found = next((path for path in places if path.exists()), places[0] if self.created else None)
        return text if found is None else str(found.absolute())


def find(name: str, base_dir: Path | None, what: str, error: type[UserError] = UserError) -> Path:
    """Return the first candidate path that exists. Raises `error` that lists all searched paths."""
    places = candidate_paths(name, base_dir)
    for place in places:
        if place.exists():
            check_not_special(place, what, error)
            return place.resolve()
    searched = ", ".join(str(p) for p in dict.fromkeys(places))
    hint = suggest_file(name, places) or list_similar_files(places)
    raise error(f"{what} not found: {name}", allowed=f"searched: {searched}", hint=hint)


def check_file_name(name: str) -> None:
    """Raise UserError for a text that no file system accepts as a name: too long, or with a NUL character."""
    if "\0" in name:
        raise UserError(f"{name[:60]!r} is not a file name: it contains a NUL character")
    if len(name) > NAME_CHARS or any(len(part.encode(errors="replace")) > PART_BYTES for part in name.split("/")):
        raise UserError(f"`{name[:60]}...` is not a file name: it has {count_noun(len(name), 'character')}")


def check_not_special(path: Path, what: str, error: type[UserError] = UserError) -> None:
    """Raise `error` for a pipe, socket or device, which might never end when read. path: exists."""
    mode = path.stat().st_mode
    kinds = {"pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK, "device": stat.S_ISCHR, "block device": stat.S_ISBLK}
    for kind, is_it in kinds.items():
        if is_it(mode):
            raise error(f"{what}: {path} is a {kind}, not a file", hint="write its content to a file")


def suggest_file(name: str, places: Sequence[Path]) -> str:
    """Return a hint with the file next to the searched paths that was most likely meant; "" if there is none.

    Suffixes are not compared: `eval.yaml` is not similar to `linear.yaml`. Files with the same suffix are preferred.
    """
    if name.startswith("hub:"):
        return f"write `{name.removeprefix('hub:')}`: an id of the hub has no prefix"
    for place in places:
        if place.parent.is_dir():
            beside = [Path(path.name) for path in itertools.islice(place.parent.iterdir(), 10_000)]
            same = [path for path in beside if path.suffix == place.suffix]
            others = [path for path in beside if path.suffix != place.suffix]
            for files, alike in ((same, 0.6), (others, 0.8)):
                if near := nearest(place.stem, (path.stem for path in files), alike):
                    endings = [path.suffix for path in files if path.stem == near]
                    ending = nearest(place.suffix, endings, alike=0.0) or endings[0]
                    return f"did you mean `{name.removesuffix(place.name)}{near}{ending}`?"
    return ""


MAX_NAMES = 6  # files listed in a hint


def list_similar_files(places: Sequence[Path]) -> str:
    """Return a hint with the files next to the searched paths with the same suffix (folders for a name without one)."""
    for place in places:
        if place.parent.is_dir():
            beside = [path for path in itertools.islice(place.parent.iterdir(), 10_000) if path.name[0] != "."]
            alike = sorted(p.name for p in beside if (p.suffix == place.suffix if place.suffix else p.is_dir()))
            if alike:
                more = ", ..." if len(alike) > MAX_NAMES else ""
                return f"{place.parent} has {', '.join(alike[:MAX_NAMES])}{more}"
    return ""


def split_function(use: str) -> tuple[str, str] | None:
    """Split `path/file.py:name` or `package.module:name` into (left, name); None for a plain registered name."""
    left, colon, name = use.rpartition(":")
    return (left, name) if colon and left and name.isidentifier() else None


def locate_function(
    use: str, base_dir: Path | None, what: str, error: type[UserError] = UserError
) -> tuple[Path | str, str]:
    """Return (script path or module name, function name) of `use`.

    Raises `error` if the script does not exist or `use` has another form.
    """
    split = split_function(use)
    if split is None:
        raise error(f"{what} `{use}` is not of the form path/file.py:function or package.module:function")
    left, name = split
    if "/" in left and not left.endswith(".py"):
        raise error(f"{what} `{use}`: {left} is not a module", hint=f"a script ends in .py: {left}.py:{name}")
    return find(left, base_dir, f"{what} script", error) if left.endswith(".py") else left, name


def missing_function_error(left: str, name: str, known: Iterable[str], error: type[UserError] = UserError) -> UserError:
    """Return the error for a file or module (`left`) without the requested function. known: names it defines."""
    public = sorted(n for n in known if not n.startswith("_"))
    return error(
        f"{left} has no function {name}",
        allowed=f"it has: {', '.join(public) or 'none'}",
        hint=did_you_mean(name, public),
    )


def missing_module_error(
    use: str, base_dir: Path | None, what: str, why: str, error: type[UserError] = UserError
) -> UserError:
    """Return the error for a module that cannot be imported; suggests an existing file of that name."""
    left, _, name = use.rpartition(":")
    file = f"{left.replace('.', '/')}.py"
    if any(place.is_file() for place in candidate_paths(file, base_dir)):
        hint = f"did you mean `{file}:{name}`? a file is named by its path"
    else:
        hint = _suggest_module(left, name)
    return error(f"{what} `{use}`: cannot import {left}: {why}", hint=hint)


def _suggest_module(module: str, name: str) -> str:
    """Return a hint with the most similar installed module, compared at the first part that does not exist."""
    parts = module.split(".")
    path: Sequence[str] | None = None
    for depth, part in enumerate(parts):
        beside = {module.name for module in pkgutil.iter_modules(path)} | (
            set() if path else set(sys.stdlib_module_names)
        )
        if part not in beside:
            near = nearest(part, (n for n in beside if not n.startswith("_")))
            whole = ".".join([*parts[:depth], near or "", *parts[depth + 1 :]])
            return f"did you mean `{whole}:{name}`?" if near and find_module(whole) else ""
        spec = find_module(".".join(parts[: depth + 1]))
        path = spec.submodule_search_locations if spec else None
        if path is None:
            return ""
    return ""


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module without importing it or its parent packages; None if it cannot be found."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        whole = ".".join(parts[:depth])
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        spec = next((found for find_it in finders if find_it and (found := find_it(whole, path, None))), None)
        path = spec.submodule_search_locations if spec else None
        if spec is None or (path is None and depth < len(parts)):
            return None
    return spec


def known_files(folder: str, suffixes: Sequence[str]) -> dict[str, Path]:
    """Return name -> path of the shipped files with these suffixes.

    `rl/a.yaml` is available as `rl/a`, and as `a` if that is unique.
    """
    root = shipped_folder(folder)
    names: dict[str, Path] = {}
    stems: dict[str, list[Path]] = {}
    for path in sorted(p for s in suffixes for p in root.rglob(f"*{s}")):
        names[path.relative_to(root).with_suffix("").as_posix()] = path
        stems.setdefault(path.stem, []).append(path)
    return {**{stem: paths[0] for stem, paths in stems.items() if len(paths) == 1}, **names}
