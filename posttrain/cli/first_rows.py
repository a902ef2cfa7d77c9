"""Checks of the first rows of local files, so that wrong columns are told before torch is loaded, and so are texts that
the chat template leaves out, where the template can be read without loading the model. No tokenizer."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.cli import together
from posttrain.places import PLAIN_FILES, candidates

if TYPE_CHECKING:
    from posttrain.recipe.sections import Data, Source
    from posttrain.recipe.tree import Path_
    from posttrain.verify.load import LoadedReward

ROWS = 20  # enough to know the columns
Check = Callable[[], list[str]]


def checks(
    section: Mapping[str, Any], data: Data, base_dir: Path, rewards: Sequence[LoadedReward]
) -> Iterator[tuple[Path_, Check]]:
    """(key in the stage, check) for each local source and for the rewards' columns. A check raises what is wrong, and
    returns what the run will note of the first rows."""
    columns: set[str] = set()
    sources: list[tuple[Path_, Source]] = [(("data", "source"), data)]
    if data.mix is not None:
        sources = [(("data", "mix", number, "source"), source) for number, source in enumerate(data.mix)]
    for place, source in sources:
        if _is_local(source, base_dir):
            yield place, lambda source=source: _read(section, source, data, base_dir, columns)  # type: ignore[misc]
    if all(_is_local(source, base_dir) for _, source in sources):
        for place, reward in zip(together.reward_places(section), rewards, strict=False):  # some may not be loaded
            yield (*place, "use"), lambda reward=reward: _reward(reward, columns)  # type: ignore[misc]


def _is_local(source: Source, base_dir: Path) -> bool:
    name = source.source or ""
    return name.endswith(PLAIN_FILES) and any(path.is_file() for path in candidates(name, base_dir))


def _read(section: Mapping[str, Any], source: Source, data: Data, base_dir: Path, columns: set[str]) -> list[str]:
    """Adds the columns of the first rows. Raises DataError if the first row does not suit the stage."""
    from posttrain.data.rows import source_rows

    few = source.model_copy(update={"size": min(source.size or ROWS, ROWS)})
    rows = source_rows(few, data, base_dir)
    _first(section, rows[0], data)
    _numbers(section, rows)
    columns.update(column for row in rows for column in row if column != "uid")
    return _unwritten(section, rows, data, base_dir)


def _unwritten(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], data: Data, base_dir: Path) -> list[str]:
    """What the chat template leaves out of the rows and adds to them. Raises DataError where a run would."""
    template = _template(section, base_dir) if data.chat else None
    if template is None or not template.chat_template:
        return []
    by_row = [{loss for text in _texts(section, row, template, data) for loss in text.losses} for row in rows]
    losses = [loss for found in by_row for loss in sorted(found)]
    return [f"{loss} (in {losses.count(loss)} of the first {len(rows)} rows)" for loss in dict.fromkeys(losses)]


def _template(section: Mapping[str, Any], base_dir: Path) -> Any:
    from posttrain.models.templates import read_template

    model = section.get("model") or {}
    try:
        return read_template(str(model.get("path")), model.get("chat_template"), base_dir)
    except (ValueError, OSError, struct.error):  # a model that is not here, or not whole: told where it is loaded
        return None


def _texts(section: Mapping[str, Any], row: Mapping[str, Any], template: Any, data: Data) -> list[Any]:
    """The row's texts as its stage renders them."""
    from posttrain.data import labelled, render

    reads = _reads(section)
    if reads == "answers":
        return render.example_texts(row, template, data)
    if reads == "prompts":
        return [render.prompt_text(row, template, data)]
    sides = [{**one, "rejected": one["chosen"]} for one in labelled.answers_of(row)] if reads == "labels" else [row]
    return [text for one in sides for text in render.pair_texts(one, template, data)[: 1 if reads == "labels" else 2]]


def _reads(section: Mapping[str, Any]) -> Literal["answers", "pairs", "labels", "prompts"]:
    """What the stage reads of its rows."""
    from posttrain import registry
    from posttrain.recipe.preference_sections import RewardObjective

    stage = section["stage"]
    if stage == "dpo":
        needs = registry.index()["pair_loss"].get(section["loss"]["use"], {}).get("needs", ())
        return "labels" if "labels" in needs else "pairs"
    if stage == "reward_model":
        return "pairs" if RewardObjective.model_validate(section["objective"]).pairs else "answers"
    return "answers" if stage == "sft" else "prompts"


def _first(section: Mapping[str, Any], row: Mapping[str, Any], data: Data) -> None:
    """Raises DataError if the row lacks what the stage reads."""
    from posttrain.data import labelled, render

    reads = _reads(section)
    if reads == "labels":
        list(labelled.answers_of(row))
    elif reads == "pairs":
        render.check_sides(row)
    elif reads == "prompts":
        render.prompt_messages(row, data) if data.chat else render.plain(row, "prompt", data)
    elif row.get("messages") is None and row.get("prompt") is None:
        return  # plain text
    elif data.chat:
        render.conversation(row, data)
    else:
        render.plain(row, "completion", data)


def _numbers(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises DataError where a row lacks a number that the stage learns from, RecipeError where two give it."""
    from posttrain import registry
    from posttrain.data import labelled
    from posttrain.recipe.preference_sections import Anchors
    from posttrain.train import pair_columns

    if section["stage"] == "reward_model":
        objective = section["objective"]
        for row in rows:
            for name in filter(None, [objective["margin"], *objective["labels"]]):
                labelled.number(row, name)
            if objective["user"] and row.get(objective["user"]) is None:
                raise labelled.missing(row, objective["user"])
    elif section["stage"] == "dpo":
        loss = section["loss"]
        declared = registry.index()["pair_loss"].get(loss["use"], {}).get("needs", ())
        pair_columns.refuse_missing(rows, pair_columns.read_by(set(declared) - {"labels"}, loss), loss["use"])
        anchors = Anchors.model_validate(section["anchors"])
        pair_columns.refuse_twice({column for row in rows for column in row}, anchors)


def _reward(reward: LoadedReward, columns: set[str]) -> list[str]:
    from posttrain.verify.load import check_columns

    if columns:  # else the data could not be read, which is told already
        check_columns([reward], columns)
    return []
