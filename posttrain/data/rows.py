"""From the recipe's `data` section to rows: read, renamed, brought to a known shape, given stable ids, mixed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain import source_locations
from posttrain.data import files, images, row_formats, sources
from posttrain.data.identity import row_uid
from posttrain.data.messages import kind
from posttrain.data.select import select_rows
from posttrain.errors import DataError, Problem, count_noun
from posttrain.recipe.sections import Data, Source

Row = dict[str, Any]

log = logging.getLogger(__name__)

# Keys of one source, which say nothing beside `mix`.
_SOURCE_KEYS = ("split", "config", "skip", "seed", "params", "columns", "weight")


def load_rows(section: Data, base_dir: Path) -> list[Row]:
    """Every row with a stable `uid` (a column of that name gives way to ours), one of messages | prompt (+ completion |
    answer | chosen/rejected) | text, and all its other columns. The order is the source's, or the mixture's; shuffling
    is the sampler's. Only rows that `data.select` keeps. Raises DataError.
    """
    rows = _all_rows(section, base_dir)
    if section.select is None:
        return rows
    plain = Data(source="", prompt_template=section.prompt_template)
    return select_rows(
        rows,
        section.select,
        base_dir,
        lambda bench: source_rows(Source.model_validate(bench.model_dump()), plain, base_dir),
    )


def _all_rows(section: Data, base_dir: Path) -> list[Row]:
    if section.mix is None:
        rows = source_rows(section, section, base_dir)
        if told := fewer_rows(section, len(rows)):
            log.warning("data.size: %s", told)
        return rows
    written = [k for k in _SOURCE_KEYS if k in section.model_fields_set]
    if written:
        raise DataError(f"data.{written[0]} belongs to one source: write it inside data.mix")
    parts = [source_rows(source, section, base_dir) for source in section.mix]
    for number, (source, part) in enumerate(zip(section.mix, parts, strict=True)):
        if told := fewer_rows(source, len(part)):
            log.warning("data.mix.%d.size: %s", number, told)
    names = [str(source.source) for source in section.mix]
    return mix(parts, [source.weight for source in section.mix], names, section.size)


def fewer_rows(source: Source, read: int) -> str:
    """What is told of a source of which `size` asks for more rows than were read; empty where there are enough."""
    if source.size is None or read >= source.size:
        return ""
    behind = f" behind the first {source.skip:,}" if source.skip else ""
    return f"asks for {source.size:,} rows; {source.source} has {read:,}{behind}, and all are used"


def source_rows(source: Source, section: Data, base_dir: Path) -> list[Row]:
    """The rows of one source, as `load_rows` gives them."""
    rows: list[Row] = []
    wrong: list[Problem] = []
    folder = sources.folder_of(source, base_dir)
    for position, (where, record) in enumerate(sources.records(source, base_dir), start=source.skip):
        try:
            renamed = _rename_columns(record, source.columns, where)
            renamed = images.collect(renamed, where, folder, section.image)
            row = row_formats.normalise(renamed, where, section.prompt_template, section.completion_template)
            row = images.place(row, where)
        except DataError as error:
            wrong += error.problems
            if not rows:  # the first row: all others will be the same
                raise _tell_renamed(error, record, source.columns) from None
            continue
        uid = row_uid(record, _stable_name(str(source.source)), position)
        source_locations.note(uid, where)
        rows.append({**row, "uid": uid})
    if wrong:
        raise files.first_of(wrong, "row")
    return rows


def _stable_name(source: str) -> str:
    """A file's name without its folder, so that ids survive a move of the project."""
    return source if source.startswith(("gym:", "task:")) else source.rpartition("/")[2]


def _rename_columns(record: Row, columns: dict[str, str], where: str) -> Row:
    """The record with columns under our names; `reward_model.ground_truth` is a key of the column `reward_model`."""
    for theirs in columns.values():
        turned = [ours for ours, column in columns.items() if column == theirs and ours in record]
        if turned and theirs not in record and "." not in theirs:
            error = row_formats.unknown_column(theirs, record, where)
            hint = f"the data has `{turned[0]}` already: remove this mapping"
            if theirs in row_formats.READ:
                hint = f"turn it round: `{theirs}: {turned[0]}`"
            raise DataError.of([replace(error.problems[0], hint=hint)])
    taken = {ours: _value_at(record, theirs, where) for ours, theirs in columns.items()}
    gone = set(columns.values())
    return {**{k: v for k, v in record.items() if k not in gone}, **taken}


def _tell_renamed(error: DataError, record: Row, columns: dict[str, str]) -> DataError:
    """The error of a row, with a hint where `columns` renamed what would have been read as it is."""
    lost = [(ours, theirs) for ours, theirs in columns.items() if theirs in row_formats.READ and theirs in record]
    if not lost or "no shape" not in error.problems[0].what:
        return error
    ours, theirs = lost[0]
    hint = f"data.columns renames `{theirs}`, which is read under that name, to `{ours}`: remove `{ours}: {theirs}`"
    return DataError.of([replace(error.problems[0], hint=hint)])


def _value_at(record: Row, path: str, where: str) -> Any:
    """The column of that name, or what keys and list places lead to from the column before the first dot."""
    if path in record:
        return record[path]
    name, *keys = path.split(".")
    if not keys or name not in record:
        raise row_formats.unknown_column(path, record, where)
    value, there = record[name], name
    for key in keys:
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            known = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"{there} is {kind(value)}"
            raise DataError(f"`{there}` has no key `{key}`", where=where, allowed=f"known: {known}")
        there = f"{there}.{key}"
    return value


def mix(parts: list[list[Row]], weights: list[float], names: list[str], size: int | None = None) -> list[Row]:
    """Rows of all parts, interleaved so that every beginning of the result has the weights' shares as nearly as can be.

    No row is repeated. Without `size` the mixture ends where the shares can no longer be kept; what is left is logged.
    With it, a part that has too few rows for its share is an error.
    """
    shares = [w / sum(weights) for w in weights]
    taken = [0] * len(parts)
    mixed: list[Row] = []
    while size is None or len(mixed) < size:
        # The part that is furthest behind its share; the first of equals.
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
