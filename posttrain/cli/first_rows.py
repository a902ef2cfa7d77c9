"""Checks of the first rows of local files, run before torch is loaded and without a tokenizer.

They find wrong columns, and texts that the chat template leaves out if the template can be read without the model.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.cli import component_checks
from posttrain.errors import DataError, Problem, UserError
from posttrain.path_resolution import PLAIN_FILES, candidate_paths

if TYPE_CHECKING:
    from posttrain.data.columns import RequiredColumn
    from posttrain.recipe.reward_sections import Reward
    from posttrain.recipe.sections import Data, Source
    from posttrain.recipe.stages import RlRecipe
    from posttrain.recipe.tree import Path_
    from posttrain.verify.load import LoadedReward

FIRST_ROWS = 20  # rows that determine the columns
CHECKED_ROWS = 2000  # rows of a source that must each have the columns that the stage reads
Check = Callable[[], list[str]]


@dataclass
class _SourceRows:
    """First rows of all sources of a stage.

    complete: the sources have no further rows. read_all: functions that read every row of a source.
    """

    rows: list[Mapping[str, Any]] = field(default_factory=list)
    complete: bool = True
    read_all: list[Callable[[], Sequence[Mapping[str, Any]]]] = field(default_factory=list)

    def all_rows(self) -> list[Mapping[str, Any]]:
        """Return every row of the sources, for checks that the first rows cannot decide."""
        return self.rows if self.complete else [row for read in self.read_all for row in read()]

    @property
    def columns(self) -> set[str]:
        return {column for row in self.rows for column in row if column != "uid"}


def list_checks(
    section: Mapping[str, Any], data: Data, base_dir: Path, rewards: Sequence[LoadedReward | None]
) -> Iterator[tuple[Path_, Check]]:
    """Yield (key in the stage, check) for each local source, for the columns that rewards read, and for the variables
    of the chat template.

    A check raises the error of a wrong row, and returns the notes that the run will print about the first rows.
    rewards: of all lists in order, None for those that could not be loaded.
    """
    from posttrain.recipe import reward_sections
    from posttrain.recipe.stages import RlRecipe
    from posttrain.verify import correctness

    seen = _SourceRows()
    model = section.get("model") or {}
    for name in (model.get("chat_template_kwargs") or {}) if data.chat else ():
        yield ("model", "chat_template_kwargs", name), lambda name=name: _check_template_variable(name, model, base_dir)  # type: ignore[misc]
    sources: list[tuple[Path_, Source]] = [(("data", "source"), data)]
    if data.mix is not None:
        sources = [(("data", "mix", number, "source"), source) for number, source in enumerate(data.mix)]
    for place, source in sources:
        if _is_local(source, base_dir):
            yield place, lambda source=source: _check_source(section, source, data, base_dir, seen)  # type: ignore[misc]
    if section["stage"] != "eval" and section.get("eval"):
        yield from _list_held_out_checks(section, data, base_dir, rewards)
    if all(_is_local(source, base_dir) for _, source in sources):
        for place, reward in zip(component_checks.list_reward_paths(section), rewards, strict=False):
            if reward is not None and place[0] != "eval":
                yield (*place, "use"), lambda reward=reward: _check_reward_columns(reward, seen)  # type: ignore[misc]
        if section["stage"] == "rl":
            recipe = RlRecipe.model_validate(section)
            for column in _named_columns(recipe, base_dir):
                place = tuple(int(part) if part.isdigit() else part for part in column.key.split("."))
                where = place[:-1] if place[0] == "solutions" else (*place[:-1], "use")
                yield where, lambda column=column, acts=recipe.acts: _check_column(column, seen, acts)  # type: ignore[misc]
            yield ("sampler", "use"), lambda: _check_sampler(recipe, seen)
        known = [reward for reward in rewards if reward is not None]
        if section["stage"] == "rl" and len(section["rewards"]) == len(rewards) == len(known):
            sections = [reward_sections.Reward.model_validate(reward) for reward in section["rewards"]]
            if list(correctness.problems(sections, known)):
                return  # reported by component_checks
            number = correctness.position(sections, known)
            yield (
                ("rewards", number, "use"),
                lambda: _check_golds(
                    sections[number], known, number, base_dir, seen, section["scoring"]["max_bad_gold"]
                ),
            )


def _list_held_out_checks(
    section: Mapping[str, Any], data: Data, base_dir: Path, rewards: Sequence[LoadedReward | None]
) -> Iterator[tuple[Path_, Check]]:
    """Yield the checks of the rows in `eval.data`, which the evaluation's rewards read: its own, or those of rl."""
    from posttrain.recipe.eval_sections import HeldOut, held_out_data

    held_out = held_out_data(data, HeldOut.model_validate(section["eval"]["data"]))
    if not _is_local(held_out, base_dir):
        return
    seen = _SourceRows()
    yield ("eval", "data", "source"), lambda: _check_source(section, held_out, held_out, base_dir, seen)
    pairs = list(zip(component_checks.list_reward_paths(section), rewards, strict=False))
    own = [(place, reward) for place, reward in pairs if place[0] == "eval"]
    for place, reward in own or [(place, reward) for place, reward in pairs if place[0] == "rewards"]:
        key: Path_ = (*place, "use") if own else ("eval", "data", "source")
        if reward is None:
            continue
        yield key, lambda reward=reward: _check_reward_columns(reward, seen, "eval.data")  # type: ignore[misc]


def _is_local(source: Source, base_dir: Path) -> bool:
    """Return whether the source is a JSONL, CSV or similar text file on this machine, compressed or not."""
    name = source.source or ""
    return name.endswith(PLAIN_FILES) and any(path.is_file() for path in candidate_paths(name, base_dir))


def _check_source(
    section: Mapping[str, Any], source: Source, data: Data, base_dir: Path, seen: _SourceRows
) -> list[str]:
    """Add the first rows of a source to `seen`; return notes about them.

    Raises DataError with the rows among the first 2,000 that do not suit the stage.
    """
    from posttrain.data.rows import shortage_warning, source_rows

    few = source.model_copy(update={"size": min(source.size or CHECKED_ROWS, CHECKED_ROWS)})
    checked = source_rows(few, data, base_dir, trained=_row_format(section) != "prompts")
    _check_rows(section, checked, data)
    _check_numbers(section, checked)
    rows = checked[:FIRST_ROWS]
    if any(row.get("images") for row in rows):
        _check_images(section, rows, data, base_dir)
    seen.rows += rows
    seen.read_all.append(lambda: source_rows(source, data, base_dir))
    seen.complete &= len(rows) < FIRST_ROWS or (source.size or FIRST_ROWS + 1) <= FIRST_ROWS
    if section["stage"] == "sft" and data.train_on != "all" and not any(map(_is_trained, rows)):
        _refuse_untrained(rows if seen.complete else source_rows(source, data, base_dir))
    fewer = shortage_warning(source, len(rows)) if len(rows) < FIRST_ROWS else ""
    return [*([f"`size` {fewer}"] if fewer else []), *_list_template_notes(section, rows, data, base_dir)]


def _check_images(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], data: Data, base_dir: Path) -> None:
    """Raise an error for images that cannot be opened, a model without vision, or a recipe that does not support
    images.
    """
    from posttrain import source_locations
    from posttrain.images import Image, open_image
    from posttrain.models.stored_names import reads_images
    from posttrain.recipe.checks import refuse_with_images
    from posttrain.recipe.stages import STAGES

    refuse_with_images(STAGES[section["stage"]].model_validate(section), rows)
    first = next(row for row in rows if row.get("images"))
    model = str((section.get("model") or {}).get("path"))
    if not reads_images(model, base_dir):
        raise DataError(
            f"the row has images, and {model} reads none",
            where=source_locations.describe_row(first["uid"]),
            hint="take a model that sees, or rename the column: `data.columns: {pictures: images}`",
        )
    wrong: list[Problem] = []
    for row in rows:
        for source in row.get("images") or ():
            try:
                open_image(Image(source, data.image.min_pixels, data.image.max_pixels))
            except DataError as error:
                wrong += error.at(source_locations.describe_row(row["uid"])).problems
    if wrong:
        raise DataError.of(wrong[:5])


def _is_trained(row: Mapping[str, Any]) -> bool:
    """Return whether any part of a row is trained on; not if its messages have no answer, or only answers marked as
    untrained.
    """
    messages = row.get("messages")
    if not isinstance(messages, list):
        return True
    return any(message.get("role") == "assistant" and message.get("train", True) for message in messages)


def _refuse_untrained(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError if no row has an answer that is trained on."""
    from posttrain import source_locations

    if any(map(_is_trained, rows)):
        return
    roles = list(dict.fromkeys(str(message.get("role")) for row in rows for message in row["messages"]))
    answers = "assistant" in roles
    others = f"no message has the role assistant, but {', '.join(roles)}" if roles else "`messages` is an empty list"
    what = "every answer has `train: false`" if answers else others
    raise DataError(
        f"no token is trained on: {what}",
        where=source_locations.describe_rows([str(row["uid"]) for row in rows]),
        hint="remove it from what the model is to learn" if answers else "an answer has the role `assistant`",
    )


def _list_template_notes(
    section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], data: Data, base_dir: Path
) -> list[str]:
    """Return what the chat template omits from the rows or adds to them. Raises DataError if the run would."""
    template = _read_chat_template(section, base_dir) if data.chat else None
    if template is None or not template.chat_template:
        return []
    by_row = [{note for text in _render_texts(section, row, template, data) for note in text.notes} for row in rows]
    notes = [note for row_notes in by_row for note in sorted(row_notes)]
    return [f"{note} (in {notes.count(note)} of the first {len(rows)} rows)" for note in dict.fromkeys(notes)]


def _read_chat_template(section: Mapping[str, Any], base_dir: Path) -> Any:
    """Return the model's chat template, or None if it cannot be read."""
    from posttrain.models.templates import read_template
    from posttrain.thoughts import declare_format

    model = section.get("model") or {}
    try:
        template = read_template(model, base_dir)
    except (ValueError, OSError, struct.error):  # a missing or incomplete model: reported where it is loaded
        return None
    if template is not None and model.get("thoughts"):
        declare_format(template, *model["thoughts"])
    return template


def _check_template_variable(name: str, model: Mapping[str, Any], base_dir: Path) -> list[str]:
    """Raise ModelError if the chat template does not read a variable of the recipe; return no notes."""
    from posttrain.models.templates import set_variables

    template = _read_chat_template({"model": {**model, "chat_template_kwargs": {}}}, base_dir)
    if template is not None:
        set_variables(template.chat_template, {name: model["chat_template_kwargs"][name]})
    return []


def _render_texts(section: Mapping[str, Any], row: Mapping[str, Any], template: Any, data: Data) -> list[Any]:
    """Return the row's texts as its stage renders them."""
    from posttrain.data import binary_labels, render

    row_format = _row_format(section)
    if row_format == "answers":
        return render.example_texts(row, template, data)
    if row_format == "prompts":
        return [render.prompt_text(row, template, data)]
    sides = (
        [{**answer_row, "rejected": answer_row["chosen"]} for answer_row in binary_labels.split_answers(row)]
        if row_format == "labels"
        else [row]
    )
    return [
        text for side in sides for text in render.pair_texts(side, template, data)[: 1 if row_format == "labels" else 2]
    ]


def _row_format(section: Mapping[str, Any]) -> Literal["answers", "pairs", "labels", "prompts"]:
    """Return what the stage reads from its rows."""
    from posttrain import registry
    from posttrain.recipe.preference_sections import RewardObjective

    stage = section["stage"]
    if stage == "dpo":
        needs = registry.load_index()["pair_loss"].get(section["loss"]["use"], {}).get("needs", ())
        return "labels" if "labels" in needs else "pairs"
    if stage == "reward_model":
        return "pairs" if RewardObjective.model_validate(section["objective"]).pairs else "answers"
    return "answers" if stage == "sft" else "prompts"


def _check_rows(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], data: Data) -> None:
    """Raise DataError with the rows that lack what the stage reads; with only the first row if that is one of them."""
    from posttrain.data.files import summarize_problems

    wrong: list[Problem] = []
    for number, row in enumerate(rows):
        try:
            _check_row(section, row, data)
        except DataError as error:
            if number == 0:  # all others will be the same
                raise
            wrong += error.problems
    if wrong:
        raise summarize_problems(wrong, "row")


def _check_row(section: Mapping[str, Any], row: Mapping[str, Any], data: Data) -> None:
    """Raise DataError if the row lacks what the stage reads."""
    from posttrain.data import binary_labels, render

    row_format = _row_format(section)
    if row_format == "labels":
        list(binary_labels.split_answers(row))
    elif row_format == "pairs":
        render.check_sides(row)
    elif row_format == "prompts":
        render.prompt_messages(row, data) if data.chat else render.plain_text(row, "prompt", data)
    elif row.get("messages") is None and row.get("prompt") is None:
        return  # plain text
    elif data.chat:
        render.conversation(row, data)
    else:
        for column in ("prompt", "completion"):
            render.plain_text(row, column, data)


def _check_numbers(section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError if a row lacks a number that the stage trains on, RecipeError if two keys give the same one."""
    from posttrain import registry
    from posttrain.data import binary_labels
    from posttrain.recipe.preference_sections import Anchors
    from posttrain.train import pair_columns

    if section["stage"] == "reward_model":
        objective = section["objective"]
        for row in rows:
            for name in filter(None, [objective["margin"], *objective["labels"]]):
                binary_labels.read_number(row, name)
            if objective["user"] and row.get(objective["user"]) is None:
                raise binary_labels.missing_column_error(row, objective["user"])
    elif section["stage"] == "dpo":
        loss = section["loss"]
        declared = registry.load_index()["pair_loss"].get(loss["use"], {}).get("needs", ())
        pair_columns.refuse_missing(rows, pair_columns.needs_with_params(set(declared) - {"labels"}, loss), loss["use"])
        anchors = Anchors.model_validate(section["anchors"])
        pair_columns.refuse_twice({column for row in rows for column in row}, anchors)


def _check_reward_columns(reward: LoadedReward, seen: _SourceRows, key: str = "data") -> list[str]:
    """Raise an error if the rows lack a column that the reward reads."""
    from posttrain.verify.load import check_columns

    if seen.rows:  # otherwise the data could not be read, which is already reported
        check_columns([reward], seen.columns, key)
    return []


def _named_columns(recipe: RlRecipe, base_dir: Path) -> Iterator[RequiredColumn]:
    """Yield the data columns that components read by name. A user's function is parsed, not imported."""
    from posttrain import registry
    from posttrain.data.columns import named_columns, solution_columns
    from posttrain.path_resolution import split_function
    from posttrain.recipe import functions

    yield from solution_columns(recipe.prompt_variants, recipe.solutions)
    for key, section in recipe.every_component():
        if split_function(section.use) is None:
            described = registry.load_index()[registry.find_kind(section.kinds, section.use)][section.use]["params"]
            takes = {name: (known[0], known[1] if len(known) > 1 else None) for name, known in described.items()}
        else:
            try:
                written = functions.find_definition(section.use, base_dir, section.kinds[0], lambda *_: None)
            except UserError:  # a missing function: reported by preflight
                continue
            takes = functions.keyword_annotations(written) if written else {}
        yield from named_columns(key, section.use, takes, section.params)


def _check_column(required: RequiredColumn, seen: _SourceRows, acts: bool) -> list[str]:
    """Raise DataError if the first rows show that a column is missing or is not numeric."""
    from posttrain.data.columns import find_problems

    if not seen.rows:
        return []
    rows = seen.rows
    if not required.every and not seen.complete and list(find_problems(rows, [required], acts=acts)):
        rows = seen.all_rows()  # later rows may have the column
    if problems := list(find_problems(rows, [required], acts=acts)):
        raise DataError.of([problem for _, problem in problems])
    return []


def _check_sampler(recipe: RlRecipe, seen: _SourceRows) -> list[str]:
    """Raise DataError if a shipped sampler refuses the rows; return its notes on them if all rows are read.

    All rows are read of a short file, or for a sampler that reads a column of difficulties.
    """
    from posttrain import registry
    from posttrain.curriculum.protocol import Pool
    from posttrain.path_resolution import split_function

    section = recipe.sampler
    if not seen.rows or split_function(section.use) is not None:
        return []
    try:
        made = registry.resolve(section.kinds, section.use, recipe.base_dir).function(**section.params)
    except (TypeError, UserError):  # wrong arguments: reported by the schema
        return []

    def pool(rows: Sequence[Mapping[str, Any]]) -> Pool:
        rollout = recipe.rollout
        uids = [str(row["uid"]) for row in rows]
        return Pool(uids, rows, rollout.prompts_per_step, rollout.group_size, recipe.run.seed, recipe.run.steps or 1)

    read_all = seen.complete or getattr(made, "column", None) is not None
    try:
        made.start(pool(seen.all_rows() if read_all else seen.rows))
    except DataError:
        if read_all:
            raise
        made.start(pool(seen.all_rows()))  # later rows may have what the sampler needs
    return list(made.notes(pool(seen.all_rows()))) if read_all and hasattr(made, "notes") else []


def _check_golds(
    section: Reward, rewards: Sequence[LoadedReward], number: int, base_dir: Path, seen: _SourceRows, allowed: float
) -> list[str]:
    """Return a note on rows without a usable gold answer. Raises RewardError if the run would: no row has one, or they
    are dicts.

    A shipped reward says which gold answers it accepts. A user's script is not imported here, and its GOLD may read the
    answer from elsewhere, so only the column `answer` is checked, and noted. allowed: the allowed share of bad golds.
    """
    from posttrain import source_locations
    from posttrain.errors import RewardError, count_noun
    from posttrain.path_resolution import split_function
    from posttrain.verify.audit import describe_unusable, row_uid, split_golds
    from posttrain.verify.golds import explain_unusable
    from posttrain.verify.load import load_reward

    reward = rewards[number]
    alone = not any(other.knows_gold for place, other in enumerate(rewards) if place != number)
    if not alone or not reward.knows_gold or not set(reward.columns) <= seen.columns:
        return []
    shipped = split_function(section.use) is None
    if shipped:
        unusable = split_golds(load_reward(section, base_dir), seen.rows).unusable
    else:
        reasons = {row_uid(row, place): explain_unusable(row.get("answer")) for place, row in enumerate(seen.rows)}
        unusable = {uid: why for uid, why in reasons.items() if why} if "answer" in reward.columns else {}
    if not unusable:
        return []
    rows = f"{'the' if seen.complete else 'the first'} {count_noun(len(seen.rows), 'row')}"
    what = f"of {rows}, {describe_unusable(unusable)}"
    if shipped and seen.complete and len(unusable) == len(seen.rows) and allowed < 1:
        column = "answer" if "answer" in reward.columns else next(iter(reward.columns), "answer")
        hint = f"say which column holds the answers: data.columns: {{{column}: COLUMN}}"
        raise RewardError(
            f"reward {reward.name}: {what}", where=source_locations.describe_rows(list(unusable)), hint=hint
        )
    return [f"{what}: the run counts them as bad golds"]
