"""Readers of row files: JSON lines (plain or compressed), JSON, CSV and parquet, as streams with size limits."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from posttrain.errors import DataError, Problem, count_noun
from posttrain.path_resolution import COMPRESSED, TEXT_FILES, check_not_special
from posttrain.recipe.yaml import display_path

Record = tuple[str, dict[str, Any]]  # (source location for errors, record)
PARQUET = ".parquet"
MAX_REPORTED = 5  # broken lines named by one error
MAX_SCANNED_LINES = 10_000  # lines parsed after the first broken one, to count further broken ones
MAX_LINE_BYTES = 32 << 20  # of one row
MAX_JSON_BYTES = 512 << 20  # of a .json file, which is read as a whole
_MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def check(path: Path) -> None:
    """Raise DataError for a file that cannot hold rows: unknown type, empty, or content that contradicts its extension.

    Reads only the first bytes, and the last ones of a parquet file.
    """
    check_not_special(path, "data", DataError)
    name = display_path(path)
    kind = _kind(path)
    if kind is None:
        raise DataError(
            f"{path}: files ending in `{path.suffix or path.name}` are not read",
            allowed=f"known: {', '.join(TEXT_FILES)}, each optionally with {', '.join(_OPENERS)}; {PARQUET}",
        )
    with path.open("rb") as stream:
        head = stream.read(8)
        tail = stream.read()[-8:] if kind == PARQUET and stream.seek(max(8, path.stat().st_size - 8)) else b""
    if not head:
        raise DataError("the file is empty", where=name)
    if _detect_compression(head) == ".zst":
        raise DataError("zstd is not read", where=name, hint=f"unpack it: zstd -d {path.name}")
    if kind == PARQUET and head[:4] != b"PAR1":
        raise DataError("not a parquet file: it does not begin with PAR1", where=name)
    if kind == PARQUET and (tail[4:] != b"PAR1" or int.from_bytes(tail[:4], "little") + 12 > path.stat().st_size):
        what = "the parquet file is incomplete or damaged: it does not end with a footer and PAR1"
        raise DataError(what, where=name, hint="download or write it again")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError("not UTF-8: it begins like UTF-16", where=name, hint=f"iconv -f UTF-16 -t UTF-8 {path.name}")
    if kind == ".json" and path.stat().st_size > MAX_JSON_BYTES:
        raise DataError(
            f"a .json file is read as a whole, and this one has more than {MAX_JSON_BYTES >> 20} MB",
            where=name,
            hint=f"convert it to JSON lines: jq -c '.[]' {path.name} > {path.stem}.jsonl",
        )


def read(path: Path, stop: int | None) -> list[Record]:
    """Return the first `stop` records of a file, or all. Raises DataError that names the lines that cannot be read."""
    check(path)
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, PARQUET: _parquet}
    try:
        records = list(itertools.islice(readers[_kind(path) or ""](path), stop))
    except UnicodeDecodeError as cause:
        raise not_utf8_error(path) from cause
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, OSError) as cause:
        if isinstance(cause, OSError) and cause.errno is not None:
            raise
        raise DataError(f"cannot be decompressed: {cause}", where=display_path(path)) from cause
    if not records:
        raise DataError("the file has no rows", where=display_path(path))
    return records


def not_utf8_error(path: Path) -> DataError:
    """Return the error that names the first line of a text file that is not UTF-8 and its first invalid byte."""
    with _open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as cause:
                what = f"not UTF-8: byte 0x{line[cause.start]:02x} at place {cause.start + 1} of the line"
                hint = f"if it is Latin-1: iconv -f LATIN1 -t UTF-8 {path.name} > utf8-{path.name}"
                return DataError(what, where=f"{display_path(path)}:{number}", hint=hint)
    return DataError("not UTF-8", where=display_path(path))


def _kind(path: Path) -> str | None:
    """Return `.jsonl`, `.json`, `.csv` or `.parquet`; None for unsupported files."""
    if path.suffix == PARQUET:
        return PARQUET
    name = path.stem if path.suffix in COMPRESSED else path.name
    return next((kind for kind in TEXT_FILES if name.endswith(kind)), None)


def _detect_compression(head: bytes) -> str:
    """Return the extension of the compression format that starts with these bytes, or ""."""
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")


def _open(path: Path, newline: str | None = None) -> IO[str]:
    """Open a file as text, decompressed according to its first bytes."""
    return io.TextIOWrapper(_open_bytes(path), encoding="utf-8-sig", newline=newline)


def _open_bytes(path: Path) -> Any:
    """Open a file as bytes, decompressed according to its first bytes."""
    with path.open("rb") as stream:
        compression = _detect_compression(stream.read(8))
    return _OPENERS[compression](path) if compression else path.open("rb")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (FILE:LINE, line) for every line that is not blank. Raises DataError for a line over MAX_LINE_BYTES."""
    name = display_path(path)
    with _open(path) as stream:
        for number, line in enumerate(_read_bounded_lines(stream, name), start=1):
            if line.strip():
                yield f"{name}:{number}", line


def _read_bounded_lines(stream: IO[str], name: str) -> Iterator[str]:
    """Yield the lines of a text. Raises DataError for a line over MAX_LINE_BYTES before it is read completely."""
    for number in itertools.count(1):
        line = stream.readline(MAX_LINE_BYTES)
        if not line:
            return
        if len(line) == MAX_LINE_BYTES and not line.endswith("\n"):
            raise DataError(
                f"the line has more than {MAX_LINE_BYTES >> 20} MB",
                where=f"{name}:{number}",
                hint="a row is one line; is this a .json file, or another format?",
            )
        yield line


def _jsonl(path: Path) -> Iterator[Record]:
    """Yield the rows of a JSON-lines file. Raises DataError with the first MAX_REPORTED broken lines."""
    numbered = _lines(path)
    for where, line in numbered:
        try:
            record = where, _line(line, where)
        except DataError as error:
            raise _add_later_errors(error, itertools.islice(numbered, MAX_SCANNED_LINES)) from error.__cause__
        yield record


def _line(line: str, where: str) -> dict[str, Any]:
    """Parse one line as a JSON object."""
    return _object(_parse(line.rstrip(), where, first_line=1), where)


def _add_later_errors(error: DataError, rest: Iterator[tuple[str, str]]) -> DataError:
    """Return the error together with the errors of the lines after it."""
    problems = list(error.problems)
    for where, line in rest:
        try:
            _line(line, where)
        except DataError as another:
            problems += another.problems
    return summarize_problems(problems, "line")


def summarize_problems(problems: Sequence[Problem], what: str) -> DataError:
    """Return an error that lists the first MAX_REPORTED problems and counts the others."""
    more = (
        [Problem("", f"and {count_noun(len(problems) - MAX_REPORTED, what)} more")]
        if len(problems) > MAX_REPORTED
        else []
    )
    return DataError.of([*problems[:MAX_REPORTED], *more])


def _json(path: Path) -> Iterator[Record]:
    """Yield the rows of a .json file: a list of objects, or an object with exactly one list."""
    name = display_path(path)
    with _open(path) as stream:
        text = stream.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        what = f"the decompressed file has more than {MAX_JSON_BYTES >> 20} MB"
        raise DataError(what, where=name, hint="make it a .jsonl file")
    value = _parse(text, name)
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
    """Parse JSON text. Raises DataError with the position of the first error.

    first_line: the text is one line of a file.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as cause:
        place = f"{where}:{cause.colno}" if first_line else f"{where}:{cause.lineno}:{cause.colno}"
        multiline = first_line and text.strip() in ("{", "[")  # an object or list over several lines
        hint = "a row is one line (`jq -c . FILE`); a file that is one list is a .json file" if multiline else ""
        raise DataError(f"broken JSON: {cause.msg}", where=place, hint=hint) from cause
    except RecursionError:
        raise DataError("broken JSON: nested too deep", where=where) from None
    except ValueError as cause:  # a repeated key; Python refuses to read integers of more than 4300 digits
        raise DataError(f"broken JSON: {str(cause).partition(';')[0]}", where=where) from cause


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError for a repeated key, of which `json` keeps the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key `{next(name for name in names if names.count(name) > 1)}` is given twice")
    return found


def _object(value: Any, where: str) -> dict[str, Any]:
    """Return the value if it is a dict of valid texts, else raise DataError."""
    if not isinstance(value, dict):
        what = f"a row must be a JSON object, not {type(value).__name__}: {value!r:.60}"
        several = isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
        raise DataError(what, where=where, hint="a file that is one list of rows is a .json file" if several else "")
    refuse_lone_surrogates(value, where)
    return value


def refuse_lone_surrogates(row: dict[str, Any], where: str) -> None:
    """Raise DataError for a text with a lone surrogate (half a character), which tokenizers and files reject."""
    for column, value in row.items():
        if any(not _is_encodable(text) for text in iterate_texts(value)):
            raise DataError(
                f"`{column}` has half a character in it (a lone surrogate)",
                where=where,
                hint='where it is a text: text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")',
            )


def iterate_texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value of a row, keys included, in no order. Iterative: a value may be nested deeply."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            stack += value


def _is_encodable(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _csv(path: Path) -> Iterator[Record]:
    """Yield the rows of a CSV file with a header. Raises DataError for a row with a different number of cells."""
    name = display_path(path)
    with _open(path, newline="") as lines:
        csv.field_size_limit(MAX_LINE_BYTES)  # the default, 131,072 characters, is too short for a long answer
        reader = csv.DictReader(_read_bounded_lines(lines, name), strict=True)
        try:
            _refuse_other_separator(reader.fieldnames or (), name)
            for row in reader:
                where = f"{name}:{reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"not {count_noun(len(reader.fieldnames or ()), 'cell')} like the header", where=where
                    )
                yield where, row
        except csv.Error as cause:
            raise DataError(f"broken CSV: {cause}", where=f"{name}:{reader.reader.line_num}") from cause


def _refuse_other_separator(columns: Sequence[str], name: str) -> None:
    """Raise DataError for a header without commas that another separator would split into several columns."""
    found = next((separator for separator in (";", "\t", "|") if len(columns) == 1 and separator in columns[0]), None)
    if found:
        what = f"the header has no comma; its columns seem to be separated by {found!r}: {columns[0]!r:.60}"
        raise DataError(what, where=f"{name}:1", hint="write the file with commas, or as .jsonl")


def _parquet(path: Path) -> Iterator[Record]:
    """Yield the rows of a parquet file."""
    import pyarrow
    import pyarrow.parquet

    name = display_path(path)
    try:
        table = pyarrow.parquet.ParquetFile(path)
        rows = (row for batch in table.iter_batches(1024) for row in batch.to_pylist())
        for i, row in enumerate(rows):
            yield f"{name} row {i}", drop_nested_nulls(row)
    except pyarrow.ArrowException as cause:
        raise DataError(f"not a parquet file: {cause}", where=name) from cause


def drop_nested_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table without the null fields of its nested values, which the table format adds.

    In Arrow, all structs of a column have the same fields: of two tools with different parameters, each gets the
    parameters of the other as nulls. Columns that are null themselves stay.
    """
    return {k: _drop_nulls(v) for k, v in row.items()}


def _drop_nulls(value: Any) -> Any:
    """Remove null fields from nested dicts."""
    if isinstance(value, dict):
        return {k: _drop_nulls(v) for k, v in value.items() if v is not None}
    return [_drop_nulls(v) for v in value] if isinstance(value, list) else value
