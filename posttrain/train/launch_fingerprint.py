"""Launch fingerprint: hashes of posttrain, the recipe, and every file it names.

All ranks must have the same fingerprint: each prepares the data, loads the model and scores separately, and differences
would go unnoticed. Paths may differ between machines, contents may not. A resumed run must find what it started with.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from posttrain import path_resolution, registry, terminal
from posttrain.errors import RewardError, ToolError, UserError
from posttrain.models.lineage import RESOLVED
from posttrain.models.model_paths import locate
from posttrain.recipe import references
from posttrain.recipe.data_sections import Source, source_form
from posttrain.recipe.load import Loaded
from posttrain.recipe.reward_sections import Reward
from posttrain.recipe.section import Names
from posttrain.recipe.tool_sections import Environment, Tool
from posttrain.recipe.tree import Path_
from posttrain.run import ranks
from posttrain.run.environment import package_version
from posttrain.run.fingerprint import Fact
from posttrain.run.resolved_recipe import flatten
from posttrain.tools import load as tools
from posttrain.verify import load as rewards

LIBRARIES = ("torch", "transformers", "tokenizers")  # libraries that affect the results
MAY_DIFFER = ("run.output",)  # only rank 0 writes there
LONG = 60  # maximum number of characters shown of a value
LARGE, MANY = 4 << 20, 64  # file size in bytes, files per folder: above them only a part is hashed
LARGE_DATA = 4 << 30  # size in bytes up to which all data of a key, which may be edited in place, is hashed completely
BLOCKS, BLOCK = 256, 4096  # blocks hashed of a large file; one per file if there are many
MOST_FILES = 10_000  # files of a folder that are hashed, so that a start takes seconds
SOURCE = (".py", ".json", ".yaml")  # suffixes of posttrain's own files


def launch_facts(loaded: Loaded) -> dict[str, Fact]:
    """Return facts by name: posttrain and libraries; each recipe key, or the content of the file or folder it names."""
    facts = {"posttrain": own_source()}
    facts |= {name: Fact(version, version) for name in LIBRARIES if (version := package_version(name))}
    values = json.loads(json.dumps(loaded.resolved))
    facts |= {key: _text(value) for key, value in flatten(values).items() if key not in MAY_DIFFER}
    return facts | named_files(loaded)


@functools.cache
def own_source() -> Fact:
    """Return the version of posttrain with the hash of its files."""
    root = Path(path_resolution.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in SOURCE and path.is_file())
    return _content(files, str(package_version("posttrain")), whole=True)


def named_files(loaded: Loaded) -> dict[str, Fact]:
    """Return facts of each script, file and folder that the recipe names, by recipe key."""
    values = json.loads(json.dumps(loaded.resolved))
    facts: dict[str, Fact] = {}
    for stage, model, section in references.stages(values, type(loaded.recipe)):
        for part in references.parts(model, section, stage):
            facts |= {_key(path): fact for path, fact in _named_files(part, loaded.recipe.base_dir)}
    return facts


def _text(value: object) -> Fact:
    text = json.dumps(value)
    return Fact(text, text) if len(text) <= LONG else Fact.of(text.encode(), f"{text[:LONG]}...")


def _named_files(part: references.SectionRef, base_dir: Path) -> Iterator[tuple[Path_, Fact]]:
    """Yield (path in the recipe, fact) of each local file or folder that a section names."""
    use = part.values.get("use")
    if isinstance(use, str) and (script := _script(use, base_dir, reward=part.model is Reward)):
        with _explain_unreadable((*part.path, "use")):
            fact = _content([script], use)
        yield (*part.path, "use"), fact
    for path, mark, name in references.names(part):
        script = _script(name.removeprefix("task:"), base_dir) if mark.kind == "data" else None
        with _explain_unreadable(path):
            files = [script] if script else _files(mark, name, base_dir)
            fact = _content(files, name, data=mark.kind == "data")
        if files:
            yield path, fact
    given = part.values.get("params")
    if given and isinstance(given, Mapping) and (function := _function(part, base_dir)):
        what = str(use or part.values.get("source"))
        resolved = registry.resolve_paths(function, given, base_dir, what, UserError, in_pipeline=True)
        for name, value in resolved.items():
            paths = [path for path in _paths_in(value) if not registry.awaits_stage(path)]
            if not paths:
                continue
            with _explain_unreadable((*part.path, "params", name)):
                files = [file for path in paths for file in _files_below(path)]
                shown = given[name] if isinstance(given[name], str) else json.dumps(given[name])
                fact = _content(files, shown, data=True)
            yield (*part.path, "params", name), fact


@contextlib.contextmanager
def _explain_unreadable(path: Path_) -> Iterator[None]:
    """Turn an OSError into a UserError with the file and the key that names it, at this path in the recipe."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{_key(path)}: {error.filename or 'a file'} cannot be read: {error.strerror or error}",
            hint="all files in a named folder are hashed, to detect changes on resume: make it readable, or move it",
        ) from error


def _paths_in(value: Any) -> list[Path]:
    """Return the paths in an argument: itself, or those in its lists and mappings."""
    if isinstance(value, Mapping | list):
        inside = value.values() if isinstance(value, Mapping) else value
        return [path for item in inside for path in _paths_in(item)]
    return [value] if isinstance(value, Path) else []


def _function(part: references.SectionRef, base_dir: Path) -> Callable[..., Any] | None:
    """Return the function of a reward or tool, the class of an environment or the function that makes the rows, which
    may read files; None for other sections."""
    use, source = part.values.get("use"), str(part.values.get("source"))
    if part.model is Reward:
        return registry.load_function(rewards.locate(str(use), base_dir), base_dir, what="reward", error=RewardError)
    if part.model is Tool and use:
        return registry.load_function(tools.locate(str(use), base_dir), base_dir, what="tool", error=ToolError)
    if part.model is Environment:
        return tools.load_class(str(use), base_dir)
    if issubclass(part.model, Source) and source_form(source) in ("task", "function"):
        return registry.resolve("task", source.removeprefix("task:"), base_dir).function
    return None


def _script(use: str, base_dir: Path, *, reward: bool = False) -> Path | None:
    """Return the source file of a function; None for registered and compiled functions."""
    if reward:
        try:
            use = rewards.locate(use, base_dir)
        except RewardError:
            return None
    split = path_resolution.split_function(use)
    if split is None:
        return None
    if split[0].endswith(".py"):
        return next((path for path in path_resolution.candidate_paths(split[0], base_dir) if path.is_file()), None)
    spec = path_resolution.find_module(split[0])
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _files(mark: Names, name: str, base_dir: Path) -> list[Path]:
    """Return the files of a model, data set or run; empty if it is not on this machine."""
    if mark.kind == "model":
        try:
            found = locate(name, base_dir).path
        except UserError:
            return []
    else:
        found = next((path for path in path_resolution.candidate_paths(name, base_dir) if path.exists()), None)
    if found is None or found.is_file():
        return [found] if found else []
    if mark.holds:
        listed = [found / file for file in mark.holds if (found / file).is_file()]
    else:
        listed = _files_below(found) if mark.kind == "data" else sorted(filter(Path.is_file, found.iterdir()))
    return [path for path in listed if not path.name.startswith(".") and path.suffix != ".md"]


def _files_below(path: Path) -> list[Path]:
    """Return the files in a folder and its folders, sorted; a file alone as it is. Of a run directory only its rows:
    logs and reports change.

    Left out: run directories inside the folder (perhaps this run's), hidden files and folders, and `__pycache__`. Links
    to folders are followed, each folder once. Of more than MOST_FILES the first by name.
    """
    if path.is_file():
        return [path]
    if (path / RESOLVED).is_file():
        return sorted(path.glob("*.jsonl"))
    found: list[Path] = []
    seen: set[str] = set()
    for folder, folders, names in os.walk(path, onerror=_raise, followlinks=True):
        place, real = Path(folder), os.path.realpath(folder)
        if real in seen or (place != path and (place / RESOLVED).is_file()):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        files = (file for name in sorted(names) if not name.startswith(".") and (file := place / name).is_file())
        found += itertools.islice(files, MOST_FILES + 1 - len(found))
        if len(found) > MOST_FILES:
            _note_once(f"{path} has more than {MOST_FILES:,} files: changes are detected in the first of them only")
            return sorted(found[:MOST_FILES])
    return sorted(found)


def _raise(error: OSError) -> NoReturn:
    raise error


@functools.cache
def _note_once(text: str) -> None:
    if ranks.is_main():
        terminal.note(f"note: {text}")


def _content(files: Sequence[Path], shown: str, *, whole: bool = False, data: bool = False) -> Fact:
    """Hash the names, sizes and contents of files; of large files, and of many files, only some blocks.

    A name is relative to the innermost folder that has all the files, so that a moved folder has the same hash. data:
    files that may be edited in place; together they are large above LARGE_DATA.
    """
    many, digest = len(files) > MANY, hashlib.sha256()
    folder = os.path.commonpath([path.parent for path in files]) if files else ""
    sizes = [path.stat().st_size for path in files]
    large = LARGE_DATA if data and sum(sizes) <= LARGE_DATA else LARGE
    for path, size in zip(files, sizes, strict=True):
        digest.update(f"{path.relative_to(folder).as_posix()} {size}\n".encode())
        everything = whole or (not many and size <= large)
        try:
            for block in _blocks(path) if everything else _some_blocks(path, size, 1 if many else BLOCKS):
                digest.update(block)
        except OSError as error:
            error.filename = path
            raise
    return Fact.from_hash(digest.hexdigest(), shown)


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(LARGE):
            yield block


def _some_blocks(path: Path, size: int, blocks: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number in range(1, blocks + 1):
            file.seek(max(0, size - BLOCK) * number // blocks)
            yield file.read(BLOCK)


def _key(path: Path_) -> str:
    """Format a path as `flatten` does."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
