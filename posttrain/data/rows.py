"""Loading of a recipe's `data` section: rows are read, renamed, normalized, given stable ids, and mixed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain import source_locations
from posttrain.data import files, images, row_formats, sources
from posttrain.data.messages import describe_value
from posttrain.data.select import select_rows
from posttrain.errors import DataError, Problem, count_noun
from posttrain.recipe.sections import Data, Source

Row = dict[str, Any]

log = logging.getLogger(__name__)

# Keys of a single source, which have no effect beside `mix`.
_SOURCE_KEYS = ("split", "config", "skip", "seed", "params", "columns", "weight")


def load_rows(section: Data, base_dir: Path, *, trained: bool = False) -> list[Row]:
    """Return all rows with a stable `uid`.

    Each has one of messages | prompt (+ completion | answer | chosen/rejected) | text. All other columns are kept; a
    column named `uid` is replaced. The order is the source's, or the mixture's; shuffling is left to the sampler. Only
    rows selected by `data.select` are returned. trained: their messages are trained on (`parse_messages`). Raises
    DataError.
    """
    rows = _read_all_rows(section, base_dir, trained)
    if section.select is None:
        return rows
    plain = Data(source="", prompt_template=section.prompt_template)
    return select_rows(
        rows,
        section.select,
        base_dir,
        lambda bench: source_rows(Source.model_validate(bench.model_dump()), plain, base_dir),
    )


def _read_all_rows(section: Data, base_dir: Path, trained: bool) -> list[Row]:
    """Return the rows of the source or mixture before `data.select`, and log sources with fewer rows than `size`."""
    if section.mix is None:
        rows = source_rows(section, section, base_dir, trained=trained)
        if warning := shortage_warning(section, len(rows)):
            log.warning("data.size: %s", warning)
        return rows
    written = [k for k in _SOURCE_KEYS if k in section.model_fields_set]
    if written:
        raise DataError(f"data.{written[0]} belongs to one source: write it inside data.mix")
    parts = [source_rows(source, section, base_dir, trained=trained) for source in section.mix]
    for number, (source, part) in enumerate(zip(section.mix, parts, strict=True)):
        if warning := shortage_warning(source, len(part)):
            log.warning("data.mix.%d.size: %s", number, warning)
    names = [str(source.source) for source in section.mix]
    return mix(parts, [source.weight for source in section.mix], names, section.size)


def shortage_warning(source: Source, read: int) -> str:
    """Return a warning if the source has fewer rows than `size`; an empty string otherwise."""
    if source.size is None or read >= source.size:
        return ""
    skipped = f" after the first {source.skip:,}" if source.skip else ""
    return f"asks for {source.size:,} rows; {source.source} has {read:,}{skipped}, and all are used"


def source_rows(source: Source, section: Data, base_dir: Path, *, trained: bool = False) -> list[Row]:
    """Return the rows of one source in the form that `load_rows` returns."""
    rows: list[Row] = []
    wrong: list[Problem] = []
    folder = sources.folder_of(source, base_dir)
    for position, (where, record) in enumerate(sources.read_records(source, base_dir), start=source.skip):
        try:
            renamed = _rename_columns(record, source.columns, where)
            renamed = images.collect_images(renamed, where, folder, section.image)
            row = row_formats.normalize_row(
                renamed, where, section.prompt_template, section.completion_template, trained=trained
            )
            row = images.insert_placeholders(row, where)
        except DataError as error:
            wrong += error.problems
            if not rows:  # the first row fails: the others probably fail alike
                raise _add_rename_hint(error, record, source.columns) from None
            continue
        name = str(source.source)
        if not name.startswith(("gym:", "task:")):  # a file without its folder: ids survive a move of the project
            name = name.rpartition("/")[2]
        uid = row_uid(record, name, position)
        source_locations.record_location(uid, where)
        rows.append({**row, "uid": uid})
    if wrong:
        raise files.summarize_problems(wrong, "row")
    return rows


def _rename_columns(record: Row, columns: dict[str, str], where: str) -> Row:
    """Return the record with columns under our names; `reward_model.ground_truth` addresses a nested key."""
    for theirs in columns.values():
        swapped = [ours for ours, column in columns.items() if column == theirs and ours in record]
        if swapped and theirs not in record and "." not in theirs:
            error = row_formats.unknown_column_error(theirs, record, where)
            hint = f"the data has `{swapped[0]}` already: remove this mapping"
            if theirs in row_formats.KNOWN_COLUMNS:
                hint = f"turn it round: `{theirs}: {swapped[0]}`"
            raise DataError.of([replace(error.problems[0], hint=hint)])
    renamed = {ours: _value_at(record, theirs, where) for ours, theirs in columns.items()}
    removed = set(columns.values())
    return {**{k: v for k, v in record.items() if k not in removed}, **renamed}


def _add_rename_hint(error: DataError, record: Row, columns: dict[str, str]) -> DataError:
    """Return the error of a row, with a hint if `columns` renamed a column that is read under its original name."""
    lost = [
        (ours, theirs) for ours, theirs in columns.items() if theirs in row_formats.KNOWN_COLUMNS and theirs in record
    ]
    if not lost or "no shape" not in error.problems[0].what:
        return error
    ours, theirs = lost[0]
    hint = f"data.columns renames `{theirs}`, which is read under that name, to `{ours}`: remove `{ours}: {theirs}`"
    return DataError.of([replace(error.problems[0], hint=hint)])


def _value_at(record: Row, path: str, where: str) -> Any:
    """Return the column of that name, or the value at a dotted path of column, keys and list indices."""
    if path in record:
        return record[path]
    name, *keys = path.split(".")
    if not keys or name not in record:
        raise row_formats.unknown_column_error(path, record, where)
    value, at = record[name], name
    for key in keys:
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            known = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"{at} is {describe_value(value)}"
            raise DataError(f"`{at}` has no key `{key}`", where=where, allowed=f"known: {known}")
        at = f"{at}.{key}"
    return value


def mix(parts: list[list[Row]], weights: list[float], names: list[str], size: int | None = None) -> list[Row]:
    """Interleave the parts so that every prefix of the result matches the weights as closely as possible.

    No row is repeated. Without `size` the mixture ends as soon as the shares can no longer be met, and unused rows are
    logged. With `size`, raises DataError if a part has too few rows for its share.
    """
    shares = [w / sum(weights) for w in weights]
    taken = [0] * len(parts)
    mixed: list[Row] = []
    while size is None or len(mixed) < size:
        # The part that is furthest below its share; ties go to the first.
        due = max(range(len(parts)), key=lambda i: (shares[i] * (len(mixed) + 1) - taken[i], -i))
        if taken[due] == len(parts[due]):
            if size is not None:
                has = count_noun(len(parts[due]), "row")
                raise DataError(
                    f"data.mix: {names[due]} has {has}, not its share {shares[due]:.3g} of {size}",
                    hint="lower its weight or data.size",
                )
            break
        mixed.append(parts[due][taken[due]])
        taken[due] += 1
    for name, part, count in zip(names, parts, taken, strict=True):
        if count < len(part) and size is None:
            log.warning("data.mix: %d of %s of %s used, to keep the weights", count, count_noun(len(part), "row"), name)
    return mixed


def row_uid(row: dict[str, Any], source: str, position: int) -> str:
    """Return 16 hex digits hashed from a row's content, its source's name and its position in the source."""
    text = json.dumps([source, position, row], sort_keys=True, ensure_ascii=True, default=_as_text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_text(value: Any) -> str:
    """Return a text for a value without a JSON form: a hash of the pixels for a Pillow image, else str()."""
    return hashlib.sha256(value.tobytes()).hexdigest() if hasattr(value, "getbbox") else str(value)


def format_causes(causes: Mapping[str, Sequence[str]]) -> str:
    """Format causes with counts and rows: `empty completion: 2 (rows 3, 12); empty prompt: 1 (row 7)`."""
    return "; ".join(
        f"{cause}: {len(uids)} ({source_locations.describe_rows(uids)})" for cause, uids in causes.items() if uids
    )
