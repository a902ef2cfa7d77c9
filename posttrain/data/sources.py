"""Raw records from files, directories, the hub, reasoning-gym, task generators and functions."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain import hub
from posttrain.data import accepted, files, gym
from posttrain.data.files import Record, drop_nested_nulls, refuse_lone_surrogates
from posttrain.data.tasks import make
from posttrain.errors import DataError, MissingExtra, count_noun, did_you_mean
from posttrain.path_resolution import ROW_FILES, candidate_paths, split_function, suggest_file
from posttrain.recipe.sections import Source
from posttrain.registry import load_function, resolve_paths

_DATASETS_FILES = ("state.json", "dataset_dict.json")  # files that mark a directory saved by `datasets`


def read_records(section: Source, base_dir: Path) -> list[Record]:
    """Return the records of a source after `skip`, at most `size`. Raises DataError if there are none."""
    name = section.source
    assert name is not None, "a source without a name is refused by the recipe"
    stop = None if section.size is None else section.skip + section.size
    check(section, base_dir)
    if name.startswith("gym:"):
        found = _number_records(name, gym.rows(name[4:], _require_size(section), section.seed, section.params))
    elif name.startswith("task:"):
        found = _number_records(
            name, make.rows(name[5:], _require_size(section), section.seed, section.params, base_dir)
        )
    elif name.startswith("accepted:"):
        found = _number_records(name, accepted.rows(name[9:], base_dir, section.params))
    elif split_function(name) is not None:
        found = _number_records(name, _call_function(section, name, base_dir))
    else:
        found = _read_stored(section, name, base_dir, stop)
    found = found[section.skip : stop]
    if not found:
        why = f" after the first {section.skip}, which are skipped" if section.skip else ""
        raise DataError(f"{name} has no rows{why}")
    return found


def check(section: Source, base_dir: Path) -> None:
    """Raise DataError for errors of a source that show without reading its rows or running a function."""
    name = str(section.source)
    if name.endswith(".py"):
        raise DataError(f"data `{name}` names no function", hint=f"write {name}:FUNCTION")
    if name.startswith("gym:"):
        _require_size(section)
        if importlib.util.find_spec("reasoning_gym"):
            gym.check(name[4:], section.params)
    elif name.startswith("task:"):
        _require_size(section)
        make.check(name[5:], section.params, base_dir)
    elif name.startswith("accepted:"):
        accepted.check(section.params)
    elif split_function(name) is None:
        if section.params:
            raise DataError(f"{name} takes no `params`; only gym:, task:, accepted: and file.py:function do")
        path = next((p.resolve() for p in candidate_paths(name, base_dir) if p.exists()), None)
        if path is not None and path.is_dir():
            _check_directory(path, section.split)
        elif path is not None:
            files.check(path)


def folder_of(section: Source, base_dir: Path) -> Path:
    """Return the base folder of relative paths in the rows of a source: its file's folder, or the recipe's."""
    name = str(section.source)
    function = split_function(name)
    path = next((p.resolve() for p in candidate_paths(function[0] if function else name, base_dir) if p.exists()), None)
    return base_dir if path is None else path if path.is_dir() else path.parent


def _files_of_split(path: Path, split: str) -> list[Path]:
    """Return the row files of a split in a copy of a hub data set: `train.jsonl`, `data/train-00000-of-00002.parquet`.

    In the order of their names.
    """
    name = re.compile(rf"{re.escape(split)}[-_.]")
    inside = [file for folder in (path, path / "data") if folder.is_dir() for file in sorted(folder.iterdir())]
    return [file for file in inside if name.match(file.name) and file.name.endswith(ROW_FILES)]


def _check_directory(path: Path, split: str) -> None:
    """Raise DataError for a directory that `datasets` saved without the split, or another one without its files."""
    if not any((path / file).is_file() for file in _DATASETS_FILES):
        if parts := _files_of_split(path, split):
            for part in parts:
                files.check(part)
            return
        inside = sorted(found.name for found in path.iterdir() if found.name.endswith(ROW_FILES))
        held = ", ".join(sorted(found.name for found in path.iterdir())[:12])
        raise DataError(
            f"{path} is no directory that `datasets` saved (save_to_disk), and has no files of the split `{split}`",
            allowed=f"it holds: {held or 'nothing'}",
            hint=f"name {'the file' if len(inside) == 1 else 'one of its files'}: {', '.join(inside[:12])}"
            if inside
            else "name a file of rows",
        )
    if (path / _DATASETS_FILES[1]).is_file():
        saved: Any = None
        with contextlib.suppress(ValueError):  # `datasets` itself reports invalid JSON
            saved = json.loads((path / _DATASETS_FILES[1]).read_text(encoding="utf-8"))
        if isinstance(saved, Mapping) and isinstance(saved.get("splits"), list):
            _check_split(split, saved["splits"], str(path))


def _require_size(section: Source) -> int:
    """Return the number of rows to generate. Raises DataError for a generated source without `size`."""
    if section.size is None:
        raise DataError(f"{section.source} is made on the spot: give `size`, the number of rows")
    return section.skip + section.size


def _number_records(name: str, rows: list[dict[str, Any]]) -> list[Record]:
    """Return rows as records with their location."""
    return [(f"{name} row {i}", row) for i, row in enumerate(rows)]


def _call_function(section: Source, name: str, base_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of `file.py:function`, called with size, seed and the recipe's params.

    A function with the parameters `level` and `draw` is a generator of single problems (`tasks.make`). If the recipe
    has no size and the function's `size` has a default, the function returns all its rows.
    """
    function = load_function(name, base_dir, what="data function", error=DataError)
    if list(inspect.signature(function).parameters)[:2] == ["level", "draw"]:
        return make.rows(name, _require_size(section), section.seed, section.params, base_dir)
    own = inspect.signature(function).parameters.get("size")
    all_of_it = section.size is None and own is not None and own.default is not own.empty
    size = {} if all_of_it else {"size": _require_size(section)}
    params = resolve_paths(function, section.params, base_dir, name, DataError)
    arguments = {**size, "seed": section.seed, **params}
    problem = _explain_mismatch(function, arguments)
    if problem:
        raise DataError(
            f"{name}{inspect.signature(function)} {problem}", hint="it is called with size, seed and `params`"
        )
    rows = list(function(**arguments))
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"a row must be a dict, not {type(row).__name__}: {row!r:.80}", where=f"{name} row {i}")
        refuse_lone_surrogates(row, f"{name} row {i}")
    if len(rows) < section.skip + (section.size or 0):
        raise DataError(f"{name} was asked for {count_noun(arguments['size'], 'row')} and returned {len(rows)}")
    return rows


def _explain_mismatch(function: Any, arguments: dict[str, Any]) -> str:
    """Return why the function cannot be called with these arguments, or ""."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as cause:
        return f"does not fit: {cause}"
    return ""


def _read_stored(section: Source, name: str, base_dir: Path, stop: int | None) -> list[Record]:
    """Return the records of a file, a directory or a data set on the hub."""
    path = next((p.resolve() for p in candidate_paths(name, base_dir) if p.exists()), None)
    if path is not None and path.is_dir():
        return _read_directory(path, section.split, stop)
    if path is not None:
        return files.read(path, stop)
    searched = ", ".join(str(p) for p in dict.fromkeys(candidate_paths(name, base_dir)))
    if hub.is_only_path(name, ROW_FILES):
        hint = suggest_file(name, candidate_paths(name, base_dir))
        raise DataError(f"data not found: {name}", allowed=f"searched: {searched}", hint=hint)
    return _read_hub(section, name, searched, stop)


def _read_directory(path: Path, split: str, stop: int | None) -> list[Record]:
    """Return the records of a directory that `datasets` saved (save_to_disk), or of the split's files in it."""
    if not any((path / file).is_file() for file in _DATASETS_FILES):
        records: list[Record] = []
        for part in _files_of_split(path, split):
            if stop is None or len(records) < stop:
                records += files.read(part, None if stop is None else stop - len(records))
        return records
    _require_datasets(f"data {path}")
    import datasets

    data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.DatasetDict):
        data = data[_check_split(split, list(data), str(path))]
    return _read_arrow(data, str(path), stop)


def _check_split(split: str, known: list[str], where: str) -> str:
    """Return the split. Raises DataError if it does not exist."""
    if split not in known:
        raise DataError(
            f"{where} has no split `{split}`",
            allowed=f"splits: {', '.join(known)}",
            hint=did_you_mean(split, known),
        )
    return split


def _read_arrow(data: Any, name: str, stop: int | None) -> list[Record]:
    """Return the records of a `datasets` data set."""
    import datasets

    for column, kind in data.features.items():  # undecoded: decoding errors then name a row, and EXIF data is kept
        if isinstance(kind, datasets.Image):
            data = data.cast_column(column, datasets.Image(decode=False))
    count = len(data) if stop is None else min(stop, len(data))
    return [(f"{name} row {i}", drop_nested_nulls(row)) for i, row in enumerate(data.select(range(count)))]


def _read_hub(section: Source, name: str, searched: str, stop: int | None) -> list[Record]:
    """Return the records of a data set on the hub."""
    _require_datasets(f"data {name}")
    import datasets

    try:
        with _no_retries():
            data = datasets.load_dataset(name, section.config, split=section.split)
    except (OSError, ValueError) as cause:  # ConnectionError, DatasetNotFoundError, unknown split or configuration
        where = f"; {silent}" if (silent := hub.explain_unavailable()) else ""
        raise DataError(
            f"data not found: {name}",
            allowed=f"no file or directory {searched}{where}; the hub library says: {str(cause).splitlines()[0]}",
            hint=hub.offline_hint(),
        ) from cause
    return _read_arrow(data, name, stop)


@contextlib.contextmanager
def _no_retries() -> Iterator[None]:
    """Make `datasets` use only its cache if the hub is unreachable, instead of retrying for half a minute."""
    import datasets
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    offline = before[0] or not hub.is_reachable()
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _require_datasets(why: str) -> None:
    """Raise MissingExtra if the library `datasets` is not installed."""
    if importlib.util.find_spec("datasets") is None:
        raise MissingExtra("datasets", why, "train")
