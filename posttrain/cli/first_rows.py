"""Checks of the first rows of local files, so that wrong column names are told before torch is loaded. No tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.places import PLAIN_FILES, candidates

if TYPE_CHECKING:
    from posttrain.recipe.sections import Data, Source
    from posttrain.recipe.tree import Path_
    from posttrain.verify.load import LoadedReward

ROWS = 20  # enough to know the columns
Check = Callable[[], None]


def checks(
    section: Mapping[str, Any], data: Data, base_dir: Path, rewards: Sequence[LoadedReward]
) -> Iterator[tuple[Path_, Check]]:
    """(key in the stage, check) for each local source and for the rewards' columns. A check raises what is wrong."""
    columns: set[str] = set()
    sources: list[tuple[Path_, Source]] = [(("data", "source"), data)]
    if data.mix is not None:
        sources = [(("data", "mix", number, "source"), source) for number, source in enumerate(data.mix)]
    for place, source in sources:
        if _is_local(source, base_dir):
            yield place, lambda source=source: columns.update(_read(section, source, data, base_dir))  # type: ignore[misc]
    if rewards and all(_is_local(source, base_dir) for _, source in sources):
        yield ("rewards", 0, "use"), lambda: _rewards(rewards, columns)


def _is_local(source: Source, base_dir: Path) -> bool:
    name = source.source or ""
    return name.endswith(PLAIN_FILES) and any(path.is_file() for path in candidates(name, base_dir))


def _read(section: Mapping[str, Any], source: Source, data: Data, base_dir: Path) -> set[str]:
    """The columns of the first rows. Raises DataError if the first row does not suit the stage."""
    from posttrain.data.rows import source_rows

    few = source.model_copy(update={"size": min(source.size or ROWS, ROWS)})
    rows = source_rows(few, data, base_dir)
    _first(section, rows[0], data)
    return {column for row in rows for column in row if column != "uid"}


def _first(section: Mapping[str, Any], row: Mapping[str, Any], data: Data) -> None:
    """Raises DataError if the row lacks what the stage reads."""
    from posttrain import registry
    from posttrain.data import labelled, render
    from posttrain.recipe.preference_sections import RewardObjective

    stage = section["stage"]
    if stage == "dpo" and "labels" in registry.index()["pair_loss"].get(section["loss"]["use"], {}).get("needs", ()):
        list(labelled.answers_of(row))
    elif stage == "dpo" or (stage == "reward_model" and RewardObjective.model_validate(section["objective"]).pairs):
        render.check_sides(row)
    elif stage in ("sft", "reward_model"):
        if row.get("messages") is None and row.get("prompt") is None:
            return  # plain text
        if data.chat:
            render.conversation(row, data)
        else:
            render.plain(row, "completion", data)
    elif data.chat:
        render.prompt_messages(row, data)
    else:
        render.plain(row, "prompt", data)


def _rewards(rewards: Sequence[LoadedReward], columns: set[str]) -> None:
    from posttrain.verify.load import check_columns

    if columns:  # else the data could not be read, which is told already
        check_columns(rewards, columns)
