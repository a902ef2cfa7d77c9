"""Files of rows: JSON lines (plain or compressed), JSON, CSV and parquet, read as streams and with upper sizes."""

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
from posttrain.path_resolution import COMPRESSED, TEXT_FILES, refuse_special
from posttrain.recipe.yaml import display_path

Record = tuple[str, dict[str, Any]]  # (where it came from, for errors; the record)
PARQUET = ".parquet"
BROKEN = 5  # the most broken lines that one error names
SCANNED = 10_000  # lines behind a broken one that are looked at, to count the others
LINE_BYTES = 32 << 20  # of one row
WHOLE_BYTES = 512 << 20  # of a file that must be read as a whole
_MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def check(path: Path) -> None:
    """Raises DataError for a file that holds no rows: of another kind, empty, or not what its name says.

    Reads a few bytes.
    """
    refuse_special(path, "data", DataError)
    name = display_path(path)
    kind = _kind(path)
    if kind is None:
        raise DataError(
            f"{path}: files ending in `{path.suffix or path.name}` are not read",
            allowed=f"known: {', '.join(TEXT_FILES)}, also with {', '.join(_OPENERS)} behind; {PARQUET}",
        )
    with path.open("rb") as stream:
        head = stream.read(8)
    if not head:
        raise DataError("the file is empty", where=name)
    if _detect_compression(head) == ".zst":
        raise DataError("zstd is not read", where=name, hint=f"unpack it: zstd -d {path.name}")
    if kind == PARQUET and head[:4] != b"PAR1":
        raise DataError("not a parquet file: it does not begin with PAR1", where=name)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError("not UTF-8: it begins like UTF-16", where=name, hint=f"iconv -f UTF-16 -t UTF-8 {path.name}")
    if kind == ".json" and path.stat().st_size > WHOLE_BYTES:
        raise DataError(
            f"a .json file is read as a whole, and this one has more than {WHOLE_BYTES >> 20} MB",
            where=name,
            hint=f"make lines of it: jq -c '.[]' {path.name} > {path.stem}.jsonl",
        )


def read(path: Path, stop: int | None) -> list[Record]:
    """The first `stop` records of a file, or all. Raises DataError with the lines that cannot be read."""
    check(path)
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, PARQUET: _parquet}
    try:
        found = list(itertools.islice(readers[_kind(path) or ""](path), stop))
    except UnicodeDecodeError as cause:
        raise not_utf8_error(path) from cause
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, OSError) as cause:
        if isinstance(cause, OSError) and cause.errno is not None:
            raise
        raise DataError(f"cannot be unpacked: {cause}", where=display_path(path)) from cause
    if not found:
        raise DataError("the file has no rows", where=display_path(path))
    return found


def not_utf8_error(path: Path) -> DataError:
    """The error that names the first line of a text file that is not UTF-8, and its first byte that is not."""
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
    """`.jsonl`, `.json`, `.csv` or `.parquet`; None for what is not read."""
    if path.suffix == PARQUET:
        return PARQUET
    name = path.stem if path.suffix in COMPRESSED else path.name
    return next((kind for kind in TEXT_FILES if name.endswith(kind)), None)


def _detect_compression(head: bytes) -> str:
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")


def _open(path: Path, newline: str | None = None) -> IO[str]:
    """A file as text, unpacked if its first bytes say that it is packed."""
    return io.TextIOWrapper(_open_bytes(path), encoding="utf-8-sig", newline=newline)


def _open_bytes(path: Path) -> Any:
    with path.open("rb") as stream:
        packed = _detect_compression(stream.read(8))
    return _OPENERS[packed](path) if packed else path.open("rb")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(FILE:LINE, line) of every line that is not blank. Raises DataError for one that is too long."""
    name = display_path(path)
    with _open(path) as stream:
        for number, line in enumerate(_read_bounded_lines(stream, name), start=1):
            if line.strip():
                yield f"{name}:{number}", line


def _read_bounded_lines(stream: IO[str], name: str) -> Iterator[str]:
    """The lines of a text. Raises DataError for one that is too long, before it is in memory."""
    for number in itertools.count(1):
        line = stream.readline(LINE_BYTES)
        if not line:
            return
        if len(line) == LINE_BYTES and not line.endswith("\n"):
            raise DataError(
                f"the line has more than {LINE_BYTES >> 20} MB",
                where=f"{name}:{number}",
                hint="a row is one line; is this a .json file, or another format?",
            )
        yield line


def _jsonl(path: Path) -> Iterator[Record]:
    """Rows of a file with one object a line. Raises DataError with the first BROKEN broken lines."""
    numbered = _lines(path)
    for where, line in numbered:
        try:
            record = where, _line(line, where)
        except DataError as error:
            raise _with_others(error, itertools.islice(numbered, SCANNED)) from error.__cause__
        yield record


def _line(line: str, where: str) -> dict[str, Any]:
    return _object(_parse(line.rstrip(), where, first_line=1), where)


def _with_others(error: DataError, rest: Iterator[tuple[str, str]]) -> DataError:
    """The error together with those of the lines behind it."""
    problems = list(error.problems)
    for where, line in rest:
        try:
            _line(line, where)
        except DataError as another:
            problems += another.problems
    return first_of(problems, "line")


def first_of(problems: Sequence[Problem], what: str) -> DataError:
    """The error that names the first problems, one a line or a row, and counts the others."""
    more = [Problem("", f"and {count_noun(len(problems) - BROKEN, what)} more")] if len(problems) > BROKEN else []
    return DataError.of([*problems[:BROKEN], *more])


def _json(path: Path) -> Iterator[Record]:
    name = display_path(path)
    with _open(path) as stream:
        text = stream.read(WHOLE_BYTES + 1)
    if len(text) > WHOLE_BYTES:
        raise DataError(f"unpacked it has more than {WHOLE_BYTES >> 20} MB", where=name, hint="make it a .jsonl file")
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
    try:
        return json.loads(text)
    except json.JSONDecodeError as cause:
        place = f"{where}:{cause.colno}" if first_line else f"{where}:{cause.lineno}:{cause.colno}"
        spread = first_line and text.strip() in ("{", "[")  # an object, or a list, over several lines
        hint = "a row is one line (`jq -c . FILE`); a file that is one list is a .json file" if spread else ""
        raise DataError(f"broken JSON: {cause.msg}", where=place, hint=hint) from cause
    except RecursionError:
        raise DataError("broken JSON: nested too deep", where=where) from None
    except ValueError as cause:  # Python refuses to read integers of more than 4300 digits
        raise DataError(f"broken JSON: {str(cause).partition(';')[0]}", where=where) from cause


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        what = f"a row must be a JSON object, not {type(value).__name__}: {value!r:.60}"
        several = isinstance(value, list) and all(isinstance(one, dict) for one in value)
        raise DataError(what, where=where, hint="a file that is one list of rows is a .json file" if several else "")
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
    """All texts in a value of a row, keys too, in no order. Without recursion: a value may be nested deeply."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value


def _is_whole(text: str) -> bool:
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _csv(path: Path) -> Iterator[Record]:
    name = display_path(path)
    with _open(path, newline="") as lines:
        csv.field_size_limit(LINE_BYTES)  # its own limit, 131,072 characters, is less than a long answer
        reader = csv.DictReader(_read_bounded_lines(lines, name), strict=True)
        try:
            _refuse_other_separator(reader.fieldnames or (), name)
            for row in reader:
                where = f"{name}:{reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"not {count_noun(len(reader.fieldnames or ()), 'cell')}, as the header has", where=where
                    )
                yield where, row
        except csv.Error as cause:
            raise DataError(f"broken CSV: {cause}", where=f"{name}:{reader.reader.line_num}") from cause


def _refuse_other_separator(columns: Sequence[str], name: str) -> None:
    """Raises DataError for a header that is one column to a reader of commas, and several to a reader of others."""
    found = next((one for one in (";", "\t", "|") if len(columns) == 1 and one in columns[0]), None)
    if found:
        what = f"the header has no comma; its columns seem to be separated by {found!r}: {columns[0]!r:.60}"
        raise DataError(what, where=f"{name}:1", hint="write the file with commas, or as .jsonl")


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    name = display_path(path)
    try:
        table = pyarrow.parquet.ParquetFile(path)
        rows = (row for batch in table.iter_batches(1024) for row in batch.to_pylist())
        for i, row in enumerate(rows):
            yield f"{name} row {i}", without_nulls(row)
    except pyarrow.ArrowException as cause:
        raise DataError(f"not a parquet file: {cause}", where=name) from cause


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row of an Arrow table without the null fields of its nested values, which the table format adds.

    In Arrow all structs of a column have the same fields: of two tools with different parameters, each gets the other's
    as nulls. Columns that are null themselves are kept.
    """
    return {k: _drop_nulls(v) for k, v in row.items()}


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _drop_nulls(v) for k, v in value.items() if v is not None}
    return [_drop_nulls(v) for v in value] if isinstance(value, list) else value
