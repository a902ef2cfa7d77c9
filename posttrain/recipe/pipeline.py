"""Stages of a pipeline: each is merged with the defaults and validated like a single recipe, with its source lines."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain import registry
from posttrain.errors import Problem, did_you_mean
from posttrain.path_resolution import split_function
from posttrain.recipe import keys, layers, requirements, rounds
from posttrain.recipe.rounds import MODEL_MAKERS, REFERENCE, Entry
from posttrain.recipe.stages import PipelineRecipe, Stage
from posttrain.recipe.tree import Node, follow, format_path, from_plain, plain
from posttrain.recipe.validate import check, merge_preset, resolve_values

MINUTES = ("run", "max_minutes")  # may be `stage:NAME`: as long as that stage trained
_NAME = re.compile(r"\w[\w.-]*$")


@dataclass(frozen=True)
class Resolved:
    """The validated stages of a pipeline.

    `tree`: the recipe with each entry merged over the defaults, and without `defaults`. `values`: the entries with all
    values filled in. `layers`: `tree` merged over the presets of the stages, to look up origins. `notes`: settings of
    the entries without effect, see requirements.py.
    """

    tree: Node
    values: list[dict[str, Any]]
    layers: Node
    notes: list[Problem] = field(default_factory=list)


def resolve(tree: Node, problems: list[Problem]) -> Resolved:
    """Merge and validate each entry of `stages`. Mistakes are added to `problems`."""
    node = tree.mapping.get("stages")
    defaults = tree.mapping.get("defaults") or Node({}, tree.origin)
    earlier: dict[str, str] = {}  # name -> stage
    resolved: list[tuple[Node, dict[str, Any], Node]] = []
    notes: list[Problem] = []
    for entry in _entries(node.value if node and isinstance(node.value, list) else [], earlier, problems):
        if entry.round == 1 or not problems:  # later rounds would repeat the same problems
            resolved.append(_resolve_entry(entry, defaults, earlier, problems, notes))
        else:
            earlier[str(entry.node.mapping["name"].value)] = ""
    _refuse_seed(defaults, "defaults.run", problems)
    _check_defaults(defaults, set(earlier.values()), problems)
    _check_table(tree.mapping.get("table"), earlier, problems)
    if node is None or not resolved:
        return Resolved(tree, [], tree)

    def with_stages(stages: list[Node]) -> Node:
        rest = {key: value for key, value in tree.mapping.items() if key != "defaults" or problems}
        listed = Node(stages, node.origin, node.key_origin)
        return Node({**rest, "stages": listed}, tree.origin, tree.key_origin)

    merged, values, layered = zip(*resolved, strict=True)
    notes = _drop_used_defaults(notes, defaults, layered)
    return Resolved(with_stages(list(merged)), [v for v in values if v], with_stages(list(layered)), notes)


def _entries(written: list[Node], earlier: dict[str, str], problems: list[Problem]) -> Iterator[Entry]:
    """Yield the entries of `stages`, with all rounds expanded and references to rounds replaced by the models they
    produce."""
    results: dict[str, str] = {}
    for position, node in enumerate(written):
        node = rounds.with_results(node, results)
        if not rounds.is_rounds(node):
            yield Entry(node, ("stages", position))
            continue
        known_count = len(problems)
        _check_references(Node({"start": node.mapping["start"]} if "start" in node.mapping else {}, node.origin),
                          f"stages.{position}", earlier, problems)  # fmt: skip
        expanded = rounds.expand(node, ("stages", position), problems)
        if len(problems) > known_count:  # the models are unknown, but later stages may name them
            earlier |= dict.fromkeys(rounds.model_names(node), "")
            continue
        results |= expanded.results
        yield from expanded.entries


def _resolve_entry(
    given: Entry, defaults: Node, earlier: dict[str, str], problems: list[Problem], notes: list[Problem]
) -> tuple[Node, dict[str, Any], Node]:
    """Return one stage: merged over the defaults; its resolved values, if valid; and merged over its preset as well."""
    entry, head = given.node, format_path(given.path)
    if not isinstance(entry.value, dict):
        return entry, {}, entry  # the schema reports that a mapping is required
    name = _check_name(entry, head, earlier, problems)
    model = _find_stage(entry, head, problems)
    if model is None:
        earlier[name] = ""
        return entry, {}, entry
    written = Node({k: v for k, v in entry.value.items() if k != "name"}, entry.origin, entry.key_origin)
    stage = model.model_fields["stage"].default
    full = layers.merge(for_stage(defaults, model), written, keys.components_of(stage))
    full = _add_anchors(full, merge_preset(full, model, []), given)
    layered = merge_preset(full, model, problems)
    recipe, found = check(_without_minutes(layered), model, given.path)
    _add_problems(found, head, defaults, problems)
    if recipe:
        notes += _rename_default_keys(requirements.notes(recipe, layered, given.path), head, defaults)
    _check_references(full, head, earlier, problems)
    _refuse_seed(entry, f"{head}.run", problems)
    if base := written.mapping.get("extends"):
        what = f"{head}.extends: a stage of a pipeline takes the pipeline's `defaults` alone"
        problems.append(Problem(base.at_key.mark, what, hint="write the values here, or under `defaults`"))
    earlier[name] = stage
    values = {"name": name, **resolve_values(recipe)} if recipe else {}
    if recipe and _without_minutes(full) is not full:
        values["run"]["max_minutes"] = follow(full, MINUTES)[0].value
    named = {"name": entry.value["name"]} if "name" in entry.value else {}
    return (
        Node({**named, **full.mapping}, entry.origin, entry.key_origin),
        values,
        Node({**named, **layered.mapping}, entry.origin, entry.key_origin),
    )


def _add_anchors(full: Node, layered: Node, given: Entry) -> Node:
    """Add the other policies that the loss reads to a dpo stage of a round, unless the stage sets them."""
    stage = layered.mapping.get("stage")
    if stage is None or stage.value != "dpo" or not (given.reference or given.history):
        return full
    loss = layers.expand_use(layered.mapping["loss"]).mapping if "loss" in layered.mapping else {}
    use = str(loss["use"].value) if "use" in loss else "dpo"
    known = registry.load_index()["pair_loss"].get(use, {}).get("needs", ())
    needs = {"ref_logp"} if split_function(use) is not None else set(known)
    if "reference_free" in loss and loss["reference_free"].value is True:
        needs.discard("ref_logp")
    anchors: dict[str, Any] = {}
    if given.reference and "ref_logp" in needs:
        anchors["reference"] = given.reference
    if given.history and "history" in needs:
        anchors["history"] = list(given.history)
    return layers.merge(from_plain({"anchors": anchors}, full.origin), full) if anchors else full


def _add_problems(found: list[Problem], head: str, defaults: Node, problems: list[Problem]) -> None:
    """Add the problems of an entry to `problems`; a problem inside `defaults` is added once, under the key as
    written."""
    known = {(problem.where, problem.what) for problem in problems}
    problems += [p for p in _rename_default_keys(found, head, defaults) if (p.where, p.what) not in known]


def _rename_default_keys(found: list[Problem], head: str, defaults: Node) -> list[Problem]:
    """Rename the keys of problems that lie in `defaults` to the keys as written."""
    shared = {*_locations(defaults)}

    def rename_key(problem: Problem) -> Problem:
        what = problem.what.replace(f"{head}.", "defaults.", 1)
        return dataclasses.replace(problem, what=what) if problem.where in shared else problem

    return [rename_key(problem) for problem in found]


def _drop_used_defaults(notes: list[Problem], defaults: Node, stages: Sequence[Node]) -> list[Problem]:
    """Drop the notes about defaults that have an effect in another stage."""
    shared = {*_locations(defaults)}
    taken = Counter(mark for stage in stages for mark in {*_locations(stage)} & shared)
    idle_in = Counter(note.where for note in notes)
    unused = {note: None for note in notes if note.where not in shared or idle_in[note.where] == taken[note.where]}
    return list(unused)


def _refuse_seed(above: Node, head: str, problems: list[Problem]) -> None:
    node, depth = follow(above, ("run", "seed"))
    if depth == 2:
        problems.append(Problem(node.at_key.mark, f"{head}.seed: set by the pipeline's `seeds`", hint="remove it"))


def for_stage(defaults: Node, model: type[Stage]) -> Node:
    """Return the part of a pipeline's defaults that a stage takes: its sections, without the keys that it does not
    use."""
    taken: dict[str, Node] = {}
    for key, section in defaults.mapping.items():
        if key not in model.model_fields or _is_other_section(key, section, model):
            continue
        unused = {path.partition(".")[2] for path in model.unused if path.startswith(f"{key}.")}
        if isinstance(section.value, dict):
            kept = {k: v for k, v in section.value.items() if k not in unused}
            section = Node(kept, section.origin, section.key_origin)
        taken[key] = section
    return Node(taken, defaults.origin)


def _is_other_section(key: str, section: Node, model: type[Stage]) -> bool:
    """Return whether a section of the defaults belongs to other stages that have a different section of the same name.

    `eval` holds the metrics of the stage eval, but the evaluation during training in a stage that trains.
    """
    written = section.mapping.keys()
    sections = {name: keys.section_at(stage, [key]) for name, stage in keys.BY_NAME.items()}
    known = {name: keys.own_keys(section).keys() for name, section in sections.items() if section is not None}
    own_section = keys.section_at(model, [key])
    if own_section is None or written & keys.own_keys(own_section).keys():
        return False
    return any(written and written <= names for names in known.values())


def _check_name(entry: Node, head: str, earlier: dict[str, str], problems: list[Problem]) -> str:
    """Return the name of a stage; a missing, invalid or repeated name is a problem."""
    node = entry.mapping.get("name")
    if node is None:
        problems.append(Problem(entry.origin.mark, f"{head}.name: is missing", "later stages refer to the stage by it"))
        return head
    name = str(node.value)
    if not isinstance(node.value, str) or not _NAME.match(name):
        allowed = "letters, digits, `-`, `_` and `.` (it becomes a directory)"
        problems.append(Problem(node.origin.mark, f"{head}.name: `{name}` cannot be a stage's name", allowed))
    elif name in earlier:
        problems.append(Problem(node.origin.mark, f"{head}.name: `{name}` is already the name of an earlier stage"))
    return name


def _find_stage(entry: Node, head: str, problems: list[Problem]) -> type[Stage] | None:
    """Return the recipe class of a stage, or None with a problem."""
    known = {name: model for name, model in keys.BY_NAME.items() if model is not PipelineRecipe}
    node = entry.mapping.get("stage")
    allowed = f"allowed: {', '.join(known)}"
    if node is None:
        problems.append(Problem(entry.origin.mark, f"{head}.stage: is missing", allowed))
        return None
    if node.value not in known:
        hint = did_you_mean(str(node.value), known)
        problems.append(Problem(node.origin.mark, f"{head}.stage: unknown stage `{node.value}`", allowed, hint))
        return None
    return known[str(node.value)]


def references(values: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str, str]]:
    """Yield (path, NAME, FILE) of every value `stage:NAME` or `stage:NAME/FILE`."""
    if isinstance(values, str) and (found := REFERENCE.match(values)):
        yield path, found[1], found[2] or ""
    inside = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in inside:
        yield from references(value, (*path, key))


def _check_references(full: Node, head: str, earlier: dict[str, str], problems: list[Problem]) -> None:
    """Check that every `stage:NAME` refers to an earlier stage that produces a model (or the named file)."""
    values = plain(full)
    for path, name, file in references(values):
        scores = "rewards" in path or values.get("stage") == "reward_model"  # these may name a reward model
        makers = (*MODEL_MAKERS, "reward_model") if scores else MODEL_MAKERS
        usable = [other for other, stage in earlier.items() if file or stage in makers]
        if name in usable or earlier.get(name) == "":
            continue
        if name in earlier:
            why = f"stage `{name}` ({earlier[name]}) does not produce a model"
        else:
            why = f"there is no stage `{name}` before this one"
        what = f"{head}.{format_path(path)}: {why}"
        allowed = f"earlier stages{'' if file else ' with a model'}: {', '.join(usable) or 'none'}"
        hint = did_you_mean(name, usable, "stage:{}")
        problems.append(Problem(follow(full, path)[0].origin.mark, what, allowed, hint))


def _without_minutes(full: Node) -> Node:
    """Replace `run.max_minutes: stage:NAME`, which will become that stage's training time, by a number."""
    node, depth = follow(full, MINUTES)
    if depth < 2 or not isinstance(node.value, str) or not REFERENCE.match(node.value):
        return full
    number = Node({"max_minutes": Node(1.0, node.origin, node.key_origin)}, node.origin)
    run = layers.merge(full.mapping["run"], number)
    return Node({**full.mapping, "run": run}, full.origin, full.key_origin)


def _check_defaults(defaults: Node, stages: set[str], problems: list[Problem]) -> None:
    """Check that each section of `defaults` is taken by at least one stage."""
    taken = {key for stage in stages if stage for key in keys.BY_NAME[stage].model_fields} - {"stage", "extends"}
    if "" in stages:
        return  # a stage of unknown type might take the key
    for key, node in defaults.mapping.items():
        if key not in taken:
            what = f"defaults.{key}: no stage of this pipeline takes it"
            hint = did_you_mean(key, taken)
            problems.append(Problem(node.at_key.mark, what, f"they take: {', '.join(sorted(taken))}", hint))


def _check_table(table: Node | None, stages: dict[str, str], problems: list[Problem]) -> None:
    evaluations = [name for name, stage in stages.items() if stage == "eval"]
    for position, node in enumerate(table.value if table and isinstance(table.value, list) else []):
        if node.value not in evaluations and stages.get(str(node.value)) != "":
            what = f"table.{position}: `{node.value}` is not an eval stage of this pipeline"
            problems.append(Problem(node.origin.mark, what, f"eval stages: {', '.join(evaluations) or 'none'}"))


def _locations(node: Node) -> Iterator[str]:
    yield node.origin.mark
    yield node.at_key.mark
    children = node.value if isinstance(node.value, list) else list(node.mapping.values())
    for below in children:
        yield from _locations(below)
