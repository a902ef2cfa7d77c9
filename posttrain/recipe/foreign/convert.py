"""Conversion of another tool's keys to a recipe, by the tool's table of keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import RecipeError, nearest
from posttrain.recipe import keys, presets
from posttrain.recipe.foreign import objective_forms, transforms
from posttrain.recipe.foreign.draft import Draft, Leaf
from posttrain.recipe.foreign.source import Foreign, Given
from posttrain.recipe.foreign.words import Entry
from posttrain.recipe.yaml import display_path

# Transforms that run last: they need to know how the batch is divided, or come after the first reward.
LAST_TRANSFORMS = ("updates", "steps_of_rl", "eval_every", "entropy_bonus", "overlong_buffer", "openrlhf_overlong")
_DEFAULT = "the default is used here, write the value"
_NO_EVAL = "nothing is evaluated here, write `eval` with rows that are not trained on"
_FIRST = ("stage", "algorithm", "model", "data", "rollout", "rewards")


def convert(
    foreign: Foreign,
    *,
    stage: str | None = None,
    gpus: int | None = None,
    base_dir: Path | None = None,
    rewards_file: str | None = None,
) -> Draft:
    """Convert a file of another tool to a recipe, which is not validated.

    stage: used if the file does not determine it. gpus: number of processes that the batch sizes refer to (default: the
    file's, else 1). base_dir: folder of the recipe, to which file names are relative. rewards_file: name of the script
    that will be written there with the reward functions of `Draft.carried`, if that is allowed. Raises RecipeError if
    the stage is unknown.
    """
    found = stage or _stage_of(foreign)
    draft = Draft(foreign, found, gpus or foreign.gpus or 1, base_dir=base_dir or Path.cwd(), rewards_file=rewards_file)
    for computed, why in foreign.unread:
        draft.leave(computed, why)
        entry = foreign.table.entry(computed.key)
        known = entry is not None and entry[0] == foreign.table.older.get(computed.key, computed.key)
        if known and computed.key not in foreign.given:
            consequence = _NO_EVAL if computed.key == "eval_dataset" else _DEFAULT
            draft.note(f"{computed.key} of line {computed.line} is computed there: {consequence}")
    for note in foreign.notes:
        draft.note(note)
    draft.set_default("stage", found, "")
    if foreign.table.name == "mergekit":
        return _merge(draft)
    transforms.name_algorithm(draft)
    foreign.given = {foreign.table.older.get(key, key): setting for key, setting in foreign.given.items()}
    _add_defaults(draft)
    given = list(foreign.given.values())
    for late in (False, True):
        for setting in given:
            found_entry = foreign.table.entry(setting.key)
            if late == (found_entry is not None and found_entry[1].how in LAST_TRANSFORMS):
                _convert_key(draft, setting, found_entry)
    for path, value in _of_training(draft, foreign.table.constants).items():
        draft.set_default(path, value, f"fixed in {foreign.table.tool}")
    _finish(draft)
    return draft


def _stage_of(foreign: Foreign) -> str:
    """Return the stage that the file trains: from its command, from the value of a key, or from a key of a single
    stage."""
    rules = foreign.table.stages
    commanded = _stage_of_command(foreign)
    for key, setting in foreign.given.items():
        if setting.value not in (None, False):
            _refuse_unsupported(foreign, key, setting.value)
            _refuse_unsupported(foreign, key.partition(".")[0], setting.value)
    for key, by_value in rules.get("values", {}).items():
        value = foreign.given[key].value if key in foreign.given else None
        if value is not None and (named := by_value.get(_text(value))):
            return str(named)
        if value is not None and key in ("stage", "rlhf_type", "rl") and _text(value) != "false":
            where = f"{display_path(foreign.path)}:{foreign.given[key].line}"
            allowed = f"known: {', '.join(by_value)}"
            raise RecipeError(f"{key}: {value} is not trained here", where=where, allowed=allowed)
    if commanded:
        return commanded
    for key, named in rules.get("keys", {}).items():
        if key in foreign.given and foreign.given[key].value not in (None, False):
            return str(named)
    folders = [part.lower() for part in foreign.path.resolve().parts]
    for word, named in rules.get("commands", {}).items():
        if named and any(word in re.split(r"[^a-z0-9]+", part) for part in folders[-3:]):
            return str(named)
    if "otherwise" in rules:
        return str(rules["otherwise"])
    raise RecipeError(
        "the file does not say what it trains",
        where=display_path(foreign.path),
        allowed=f"--stage: {', '.join(dict.fromkeys(filter(None, rules.get('commands', {}).values())))}",
        hint="name it: --stage sft",
    )


def _stage_of_command(foreign: Foreign) -> str | None:
    """Return the stage that the command's words name, or None. Raises RecipeError if the command trains nothing."""
    commands = foreign.table.stages.get("commands", {})
    for word in reversed(foreign.command):
        for name in (word, word.rpartition(".")[2], Path(word).stem, *re.split(r"[._/]", Path(word).stem)):
            _refuse_unsupported(foreign, name)
            if name not in commands:
                continue
            if commands[name]:
                return str(commands[name])
            where, hint = display_path(foreign.path), "give the training command"
            raise RecipeError(f"`{name}` trains nothing", where=where, hint=hint)
    return None


def _refuse_unsupported(foreign: Foreign, name: str, value: Any = None) -> None:
    """Raise RecipeError for a command, a key or a key's value of a method that is not converted; its other keys would
    make it another method."""
    hint = foreign.table.stages.get("unsupported", {}).get(name)
    if isinstance(hint, Mapping):
        name, hint = f"{name}: {value}", hint.get(_text(value))
    if hint:
        what = f"`{name}` of {foreign.table.tool} is not converted"
        raise RecipeError(what, where=display_path(foreign.path), hint=hint)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _add_defaults(draft: Draft) -> None:
    """Add the tool's defaults where the file gives no value and posttrain's default differs. In TRL's dataclasses a
    null is a value: `max_length: null` means no limit; in verl's files, too."""
    foreign = draft.foreign
    nulls_count = foreign.table.name in ("trl", "open_r1", "verl")
    for key, value in _of_training(draft, foreign.table.defaults).items():
        given = foreign.given.get(key)
        if value is not None and (given is None or (given.value is None and not nulls_count)):
            foreign.given[key] = Given(key, value, 0)


def _of_training(draft: Draft, table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a table for the draft's stage, algorithm and command; the more special ones take effect."""
    commands = {word.rpartition(".")[2] for word in draft.foreign.command} - keys.BY_NAME.keys()  # --stage decides
    names = ("", draft.stage, str(draft.at("algorithm")), *sorted(commands))
    return {key: value for name in names for key, value in table.get(name, {}).items()}


def _convert_key(draft: Draft, given: Given, found: tuple[str, Entry] | None) -> None:
    """Write the counterpart of one key, or record why it is left out."""
    if given.value is None or given.value == "" or given.value == []:
        return
    if found is None:
        near = nearest(given.key, draft.foreign.table.keys, alike=0.85)
        draft.leave(given, f"no counterpart is known{f'; did you mean `{near}`?' if near else ''}")
        return
    _, entry = found
    if any(given.value == value and isinstance(given.value, bool) == isinstance(value, bool) for value in entry.noop):
        return
    if entry.needs_lora and not transforms.trains_adapter(draft.foreign):
        draft.leave(given, "no adapter is trained")
    elif entry.how:
        try:
            transforms.TRANSFORMS[entry.how](draft, given, entry.target(draft.stage))
        except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError):  # a value of an unexpected type
            draft.leave(given, "its value cannot be read here")
    elif entry.part_of:
        of = draft.foreign.given.get(entry.part_of)  # keys that the function reads are removed from the list at the end
        if of is None or of.value not in draft.foreign.table.keys[entry.part_of].noop:
            draft.leave(given, entry.replacement_hint(given.key, draft.stage) or f"it is read with {entry.part_of}")
    elif target := entry.target(draft.stage):
        _copy(draft, given, entry, target)
    else:
        why = (
            entry.left
            or entry.remove
            or entry.replacement_hint(given.key, draft.stage)
            or f"stage {draft.stage} has no such key"
        )
        draft.leave(given, why)


def _copy(draft: Draft, given: Given, entry: Entry, target: str) -> None:
    """Write a value unchanged or translated by the table's `values`; leave the key out if the stage or the value is not
    supported."""
    value = given.value
    if why := _reason_unavailable(draft.stage, target):
        draft.leave(given, why)
        return
    if entry.values is not None:
        if _text(value) not in entry.values:
            offered = ", ".join(dict.fromkeys(_text(option) for option in entry.values.values()))
            draft.leave(given, f"`{target}` is {offered}")
            if entry.ask:
                draft.set_default(target, _text(value), draft.origin(given.key))
            return
        value = entry.values[_text(value)]
    draft.set_default(target, value, draft.origin(given.key))


def _reason_unavailable(stage: str, target: str) -> str:
    """Return why a stage has no key of this name; "" if it has."""
    model = keys.BY_NAME[stage]
    head = target.partition(".")[0]
    if target in model.unused:
        return model.unused[target]
    if head in keys.components_of(stage) or target.startswith("data.columns.") or target in keys.all_paths(model):
        return ""
    return f"stage {stage} has no `{target}`"


def _finish(draft: Draft) -> None:
    """Complete the draft as a whole: adapter defaults, run length, arguments that the components take, notes, order of
    keys."""
    transforms.complete_adapter(draft)
    objective_forms.complete_loss(draft)
    # Otherwise the preset's value would apply.
    if draft.stage == "rl" and "minibatches" in _preset_choice(draft, "batch", {}):
        draft.set_default("batch.minibatches", 1, f"one update a pass in {draft.foreign.table.tool}")
    run = draft.values.get("run", {})
    if "steps" in run and "epochs" in run:
        for given in draft.keys_behind(run.pop("epochs")):
            draft.leave(given, "`run.steps` decides the length of the run")
    _prune(draft)
    older = draft.foreign.table.older
    draft.left = [setting for setting in draft.left if older.get(setting.key, setting.key) not in draft.read]
    _divide_columns(draft)
    if "rewards" in draft.values and not draft.values["rewards"]:
        del draft.values["rewards"]
    notes = draft.foreign.table.notes
    for key, note in notes.items():
        stage, _, unless = key.partition(" unless ")
        if stage in ("", draft.stage) and (not unless or draft.at(unless) is None):
            draft.note(note)
    order = [*_FIRST, *(key for key in keys.own_keys(keys.BY_NAME[draft.stage]) if key != "run"), "run"]
    draft.values = dict(sorted(draft.values.items(), key=lambda item: order.index(item[0])))


def _divide_columns(draft: Draft) -> None:
    """Move keys of a single source to each source of a mixture. Columns also apply to the evaluation data."""
    data = draft.values.get("data", {})
    held_out = draft.values.get("eval", {}).get("data")
    if held_out and "columns" in data:
        held_out["columns"] = data["columns"]
    for key in ("columns", "split", "config", "size") if "mix" in data else ():
        if key in data:
            shared = data.pop(key)
            data["mix"] = [{**source, key: source.get(key, shared)} for source in data["mix"]]


def _prune(draft: Draft) -> None:
    """Leave out sections that the stage does not have, and arguments that the component in use does not take: the other
    tool reads them for other stages and losses."""
    for key in draft.values.keys() - keys.own_keys(keys.BY_NAME[draft.stage]).keys():
        for leaf in _iterate_leaves(draft.values.pop(key)):
            for given in draft.keys_behind(leaf):
                draft.leave(given, f"stage {draft.stage} has no `{key}`")
    for key, section in keys.components_of(draft.stage).items():
        below = draft.values.get(key)
        if not isinstance(below, dict):
            continue
        use = draft.at(f"{key}.use") or _preset_use(draft, key) or section.default_use()
        # An unknown objective of the other tool, which the user must replace.
        if use not in section.registered_components():
            continue
        takes = {*section.model_fields, *section.registered_components().get(str(use), {}).get("params", {})}
        for name in [name for name in below if name not in takes]:
            leaf = below.pop(name)
            for given in draft.keys_behind(leaf):
                draft.leave(given, f"`{key}: {use}` has no `{name}`")
        if not below:
            del draft.values[key]


def _preset_use(draft: Draft, key: str) -> str | None:
    """Return the component that the recipe's preset chooses for a section."""
    chosen = _preset_choice(draft, key, None)
    return chosen.get("use") if isinstance(chosen, dict) else chosen


def _preset_choice(draft: Draft, key: str, otherwise: Any) -> Any:
    """Return what the recipe's preset chooses for a section, or `otherwise`."""
    name = draft.at("algorithm")
    return presets.preset(str(name)).choices.get(key, otherwise) if name in presets.names() else otherwise


def _iterate_leaves(value: Any) -> Iterator[Any]:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    yield from (leaf for item in items for leaf in _iterate_leaves(item)) if items else [value]


def _merge(draft: Draft) -> Draft:
    """Convert a mergekit file, whose keys are the same as ours."""
    for key, value in draft.foreign.nested.items():
        if value is None:
            continue
        line = next(
            (setting.line for setting in draft.foreign.given.values() if setting.key.partition(".")[0] == key), 0
        )
        draft.values[key] = _leaves(value, f"{key}, line {line}")
    return draft


def _leaves(value: Any, origin: str) -> Any:
    """Return a value of a mergekit file with its origin at each leaf."""
    if isinstance(value, Mapping) and value:
        return {key: _leaves(below, origin) for key, below in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and item for item in value):
        return [_leaves(item, origin) for item in value]
    return Leaf(value, origin)
