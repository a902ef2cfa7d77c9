"""Unchanged records from files, directories, the hub, reasoning-gym and functions."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain import hub
from posttrain.data import accepted, gym
from posttrain.errors import DataError, MissingExtra, Problem, counted, did_you_mean
from posttrain.places import ROW_FILES, candidates, meant, split_function
from posttrain.recipe.sections import Source
from posttrain.recipe.yaml import shown
from posttrain.registry import load_function

BROKEN = 5  # the most broken lines that one error names
Record = tuple[str, dict[str, Any]]  # (where it came from, for errors; the record)


def records(section: Source, base_dir: Path) -> list[Record]:
    """The records of a source after `skip`, at most `size`. Raises DataError for anything that cannot be read."""
    name = section.source
    assert name is not None, "a source without a name is refused by the recipe"
    stop = None if section.size is None else section.skip + section.size
    refuse_script(name)
    if name.startswith("gym:"):
        found = _made(name, gym.rows(name[4:], _needed(section), section.seed, section.params))
    elif name.startswith("accepted:"):
        found = _made(name, accepted.rows(name[9:], base_dir, section.params))
    elif split_function(name) is not None:
        found = _made(name, _call(section, name, base_dir))
    else:
        _refuse_params(section)
        found = _stored(section, name, base_dir, stop)
    found = found[section.skip : stop]
    if not found:
        why = f" after the first {section.skip}, which are skipped" if section.skip else ""
        raise DataError(f"{name} has no rows{why}")
    return found


def refuse_script(name: str) -> None:
    """Raises DataError for `file.py`, which names no function."""
    if name.endswith(".py"):
        raise DataError(f"data `{name}` names no function", hint=f"write {name}:FUNCTION")


def _needed(section: Source) -> int:
    if section.size is None:
        raise DataError(f"{section.source} is made on the spot: give `size`, the number of rows")
    return section.skip + section.size


def _made(name: str, rows: list[dict[str, Any]]) -> list[Record]:
    return [(f"{name} row {i}", row) for i, row in enumerate(rows)]


def _refuse_params(section: Source) -> None:
    if section.params:
        raise DataError(f"{section.source} takes no `params`; only gym:, accepted: and file.py:function do")


def _call(section: Source, name: str, base_dir: Path) -> list[dict[str, Any]]:
    """Rows of `file.py:function`, called with size, seed and the recipe's params.

    If the recipe names no size and the function's `size` has a default, the function returns all its rows.
    """
    function = load_function(name, base_dir, what="data function", error=DataError)
    own = inspect.signature(function).parameters.get("size")
    all_of_it = section.size is None and own is not None and own.default is not own.empty
    size = {} if all_of_it else {"size": _needed(section)}
    arguments = {**size, "seed": section.seed, **section.params}
    problem = _misfit(function, arguments)
    if problem:
        raise DataError(
            f"{name}{inspect.signature(function)} {problem}", hint="it is called with size, seed and `params`"
        )
    rows = list(function(**arguments))
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"a row must be a dict, not {type(row).__name__}: {row!r:.80}", where=f"{name} row {i}")
        refuse_halves(row, f"{name} row {i}")
    if len(rows) < section.skip + (section.size or 0):
        raise DataError(f"{name} was asked for {counted(arguments['size'], 'row')} and returned {len(rows)}")
    return rows


def _misfit(function: Any, arguments: dict[str, Any]) -> str:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as cause:
        return f"does not fit: {cause}"
    return ""


def _stored(section: Source, name: str, base_dir: Path, stop: int | None) -> list[Record]:
    path = next((p.resolve() for p in candidates(name, base_dir) if p.exists()), None)
    if path is not None and path.is_dir():
        return _directory(path, section.split, stop)
    if path is not None:
        return _file(path, stop)
    searched = ", ".join(str(p) for p in dict.fromkeys(candidates(name, base_dir)))
    if hub.only_a_path(name, ROW_FILES):
        hint = meant(name, candidates(name, base_dir))
        raise DataError(f"data not found: {name}", allowed=f"searched: {searched}", hint=hint)
    return _from_hub(section, name, searched, stop)


def _file(path: Path, stop: int | None) -> list[Record]:
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    if path.suffix not in readers:
        raise DataError(f"{path}: files ending in `{path.suffix}` are not read", allowed=f"known: {', '.join(readers)}")
    found = []
    try:
        for record in readers[path.suffix](path):
            found.append(record)
            if len(found) == stop:
                break
    except UnicodeDecodeError as cause:
        raise DataError(f"not UTF-8: {cause}", where=shown(path)) from cause
    return found


def _jsonl(path: Path) -> Iterator[Record]:
    """Rows of a file with one object a line. Raises DataError with the first BROKEN broken lines."""
    name = shown(path)
    with path.open(encoding="utf-8-sig") as lines:
        numbered = ((f"{name}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())
        for where, line in numbered:
            try:
                record = where, _line(line, where)
            except DataError as error:
                raise _with_others(error, numbered) from error.__cause__
            yield record


def _line(line: str, where: str) -> dict[str, Any]:
    return _object(_parse(line.rstrip(), where, first_line=1), where)


def _with_others(error: DataError, rest: Iterator[tuple[str, str]]) -> DataError:
    """The error together with those of the remaining lines."""
    problems = list(error.problems)
    for where, line in rest:
        try:
            _line(line, where)
        except DataError as another:
            problems += another.problems
    return first_of(problems, "line")


def first_of(problems: Sequence[Problem], what: str) -> DataError:
    """The error that names the first problems, one a line or a row, and counts the others."""
    more = [Problem("", f"and {counted(len(problems) - BROKEN, what)} more")] if len(problems) > BROKEN else []
    return DataError.of([*problems[:BROKEN], *more])


def _json(path: Path) -> Iterator[Record]:
    name = shown(path)
    value = _parse(path.read_text(encoding="utf-8"), name)
    if isinstance(value, dict):
        lists = [k for k, v in value.items() if isinstance(v, list)]
        if len(lists) != 1:
            raise DataError("a .json file must be a list of objects, or an object with one such list", where=name)
        value = value[lists[0]]
    if not isinstance(value, list):
        raise DataError(f"a .json file must be a list of objects, not {type(value).__name__}", where=name)
    for i, row in enumerate(value):
        yield f"{name} row {i}", _object(row, f"{name} row {i}")


def _parse(text: str, where: str, first_line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as cause:
        place = f"{where}:{cause.colno}" if first_line else f"{where}:{cause.lineno}:{cause.colno}"
        raise DataError(f"broken JSON: {cause.msg}", where=place) from cause


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"a row must be a JSON object, not {type(value).__name__}: {value!r:.60}", where=where)
    refuse_halves(value, where)
    return value


def refuse_halves(row: dict[str, Any], where: str) -> None:
    """Raises DataError for a text with a lone surrogate: half a character, which no tokenizer and no file accepts."""
    for column, value in row.items():
        if any(not _is_whole(text) for text in texts(value)):
            raise DataError(
                f"`{column}` has half a character in it (a lone surrogate)",
                where=where,
                hint='where it is a text: text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")',
            )


def texts(value: Any) -> Iterator[str]:
    """All texts in a value of a row, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*texts(key), *texts(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner)


def _is_whole(text: str) -> bool:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _csv(path: Path) -> Iterator[Record]:
    name = shown(path)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for row in reader:
                where = f"{name}:{reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"not {counted(len(reader.fieldnames or ()), 'cell')}, as the header has", where=where
                    )
                yield where, row
        except csv.Error as cause:
            raise DataError(f"broken CSV: {cause}", where=f"{name}:{reader.reader.line_num}") from cause


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    name = shown(path)
    try:
        table = pyarrow.parquet.ParquetFile(path)
        rows = (row for batch in table.iter_batches(1024) for row in batch.to_pylist())
        for i, row in enumerate(rows):
            yield f"{name} row {i}", without_nulls(row)
    except pyarrow.ArrowException as cause:
        raise DataError(f"not a parquet file: {cause}", where=name) from cause


def _directory(path: Path, split: str, stop: int | None) -> list[Record]:
    """A directory that `datasets` saved (save_to_disk)."""
    _need_datasets(f"data {path}")
    import datasets

    if not ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        raise DataError(f"{path} is no directory that `datasets` saved (save_to_disk)", hint="name a file in it")
    data = datasets.load_from_disk(str(path))
    if isinstance(data, datasets.DatasetDict):
        data = data[_known_split(split, list(data), str(path))]
    return _arrow(data, str(path), stop)


def _known_split(split: str, known: list[str], where: str) -> str:
    if split not in known:
        raise DataError(
            f"{where} has no split `{split}`",
            allowed=f"splits: {', '.join(known)}",
            hint=did_you_mean(split, known),
        )
    return split


def _arrow(data: Any, name: str, stop: int | None) -> list[Record]:
    count = len(data) if stop is None else min(stop, len(data))
    return [(f"{name} row {i}", without_nulls(row)) for i, row in enumerate(data.select(range(count)))]


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row of an Arrow table without the null fields of its nested values, which the table format adds.

    In Arrow all structs of a column have the same fields: of two tools with different parameters, each gets the other's
    as nulls. Columns that are null themselves are kept.
    """
    return {k: _pruned(v) for k, v in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _pruned(v) for k, v in value.items() if v is not None}
    return [_pruned(v) for v in value] if isinstance(value, list) else value


def _from_hub(section: Source, name: str, searched: str, stop: int | None) -> list[Record]:
    _need_datasets(f"data {name}")
    import datasets

    try:
        with _no_retries():
            data = datasets.load_dataset(name, section.config, split=section.split)
    except (OSError, ValueError) as cause:  # ConnectionError, DatasetNotFoundError, unknown split or configuration
        where = f"; {silent}" if (silent := hub.why_silent()) else ""
        raise DataError(
            f"data not found: {name}",
            allowed=f"no file or directory {searched}{where}; the hub library says: {str(cause).splitlines()[0]}",
            hint=hub.way_out(),
        ) from cause
    return _arrow(data, name, stop)


@contextlib.contextmanager
def _no_retries() -> Iterator[None]:
    """Without a hub, `datasets` looks only through its cache instead of retrying for half a minute."""
    import datasets
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    offline = before[0] or not hub.reachable()
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _need_datasets(why: str) -> None:
    if importlib.util.find_spec("datasets") is None:
        raise MissingExtra("datasets", why, "train")
