"""Merging of the layers of a recipe: preset <- extended recipes <- the file <- command line. Later layers win.

Mappings are merged key by key; lists and scalars are replaced as a whole. If a later layer names another component in
`use`, the arguments of the former component are dropped; so is a key if a later layer writes an alternative to it
(`run.steps` for `run.epochs`).
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain import registry
from posttrain.errors import Problem, RecipeError, did_you_mean
from posttrain.path_resolution import check_not_special, known_files, split_function
from posttrain.recipe import keys, override_aliases
from posttrain.recipe.section import ComponentSection
from posttrain.recipe.tree import Node, Origin, child, follow, format_path
from posttrain.recipe.yaml import Document, display_path, parse_value, read
from posttrain.renamed_keys import current_key

Components = dict[str, type[ComponentSection]]

# Section -> alternative keys, of which a recipe writes one. "": the stage itself.
ALTERNATIVES = {
    "": ("tools", "environment"),
    "data": ("source", "mix"),
    "run": ("steps", "epochs"),
    "server": ("urls", "devices"),
    "tools": ("use", "command"),  # each entry of the list
}


def rename_old_keys(node: Node, notes: list[Problem], above: str = "") -> Node:
    """Rename the keys of older versions in a recipe, a stage of a pipeline, or `defaults`, and add a note for each to
    `notes`.

    An old key next to its new name is kept, so that it is refused as unknown.
    """
    entries: dict[str, Node] = {}
    for key, below in node.mapping.items():
        name = current_key(key)
        if key == "stages" and isinstance(below.value, list):
            stages = [rename_old_keys(stage, notes, f"stages.{n}.") for n, stage in enumerate(below.value)]
            below = Node(stages, below.origin, below.key_origin)
        elif key in ("defaults", "controllers"):
            below = rename_old_keys(below, notes, f"{key}.")
        if name != key and name not in node.mapping:
            notes.append(Problem(below.at_key.mark, f"{above}{key}: was renamed to `{name}`", hint=f"write `{name}`"))
        else:
            name = key
        entries[name] = below
    return replace(node, value=entries) if isinstance(node.value, dict) else node


def merge(lower: Node, upper: Node, components: Components | None = None, section: str = "") -> Node:
    """Merge `upper` over `lower`. `components`: keys that hold component sections; `section`: the key of both nodes."""
    if not isinstance(lower.value, dict) or not isinstance(upper.value, dict):
        return upper
    entries = _drop_alternatives(lower.value, upper.value, ALTERNATIVES.get(section, ()))
    for key, above in upper.value.items():
        below = entries.get(key)
        component = (components or {}).get(key)
        if component is not None:
            above = expand_use(above)
            below = _drop_former_params(expand_use(below), above, component) if below else None
        of_each = dict.fromkeys(above.mapping, component) if component and key == "controllers" else None
        cleared = key in _USER_NAMED and above.value == {}
        entries[key] = merge(below, above, of_each, section=key) if below and not cleared else above
    if upper.origin.kind == "command line":  # an override of one key keeps the section's origin
        return Node(entries, lower.origin, lower.key_origin)
    return Node(entries, upper.origin, upper.key_origin or lower.key_origin)


_USER_NAMED = ("columns", "params")  # user-chosen keys: `data.columns={}` clears the mapping, `{a: b}` adds an entry


def _drop_alternatives(lower: dict[str, Node], upper: dict[str, Node], rivals: Sequence[str]) -> dict[str, Node]:
    """Return `lower` without a key whose alternative `upper` writes. Two alternatives on one command line both stay and
    are reported later."""

    def is_set(entries: dict[str, Node], key: str) -> bool:
        return key in entries and entries[key].value not in (None, [])

    written = [key for key in rivals if is_set(upper, key)]
    if len(written) != 1:
        return dict(lower)
    typed = upper[written[0]].origin.kind == "command line"
    return {
        key: node
        for key, node in lower.items()
        if key not in rivals or key in written or (typed and node.origin.kind == "command line")
    }


def expand_use(node: Node) -> Node:
    """Expand `keep: dynamic_sampling` into `keep: {use: dynamic_sampling}`; in a list, each entry."""
    if isinstance(node.value, list):
        return Node([expand_use(entry) for entry in node.value], node.origin, node.key_origin)
    if not isinstance(node.value, str):
        return node
    return Node({"use": Node(node.value, node.origin, node.key_origin)}, node.origin, node.key_origin)


def _drop_former_params(lower: Node, upper: Node, section: type[ComponentSection]) -> Node:
    """Return `lower` without component arguments if `upper` names another component."""

    def use(node: Node) -> object:
        named = node.mapping.get("use")
        return named.value if named else None

    if use(upper) is None or use(upper) == (use(lower) or section.default_use()):
        return lower
    declared = {key: below for key, below in lower.mapping.items() if key in section.model_fields}
    return Node(declared, lower.origin, lower.key_origin)


def read_chain(path: Path) -> Document:
    """Read a recipe file merged over the recipes that it extends. Raises RecipeError for a missing file, broken YAML or
    a cycle."""
    document = read_renamed(path)
    chain, seen = [document], [path]
    current = path
    while (base := chain[-1].tree.mapping.get("extends")) is not None:
        current = _find_base_recipe(base, current)
        if current in seen:
            names = " extends ".join(p.name for p in [*seen[seen.index(current) :], current])
            raise RecipeError(f"extends: a cycle: {names}", where=base.origin.mark)
        seen.append(current)
        extended = read_renamed(current)
        _resolve_paths(extended.tree, current.parent, path.parent)
        chain.append(extended)
    tree = chain[-1].tree
    for upper in reversed(chain[:-1]):
        tree = merge(tree, upper.tree, keys.components_in(upper.tree) or keys.components_in(tree))
    if len(chain) > 1 and "extends" not in document.tree.mapping:
        tree.mapping.pop("extends", None)
    problems = [problem for document in chain for problem in document.problems]
    notes = [note for document in chain for note in document.notes]
    return Document(document.text, tree, problems, set().union(*(document.bad for document in chain)), notes)


def read_renamed(path: Path) -> Document:
    """Read a recipe file, renaming keys of older versions and adding a note for each."""
    document = read(path)
    return replace(document, tree=rename_old_keys(document.tree, document.notes))


def _resolve_paths(node: Node, folder: Path, base_dir: Path) -> None:
    """Make absolute the paths of files next to an extended recipe, so that a recipe in another folder finds them.

    base_dir: folder of the recipe that is loaded; a file there takes precedence, as for every name.
    """
    if isinstance(node.value, dict | list):
        for below in node.value.values() if isinstance(node.value, dict) else node.value:
            _resolve_paths(below, folder, base_dir)
    elif isinstance(node.value, str) and 0 < len(node.value) <= PATH_CHARS and "\n" not in node.value:
        split = split_function(node.value)
        named = split[0] if split else node.value
        if not Path(named).is_absolute() and not (base_dir / named).exists() and (folder / named).is_file():
            node.value = f"{(folder / named).resolve()}{node.value.removeprefix(named)}"


PATH_CHARS = 200  # maximum length of a value that is tested as a path


def _find_base_recipe(base: Node, here: Path) -> Path:
    """Return the path of an extended recipe: a file relative to the recipe, or a shipped recipe. Raises RecipeError."""
    name = base.value
    if not isinstance(name, str):
        raise RecipeError("extends: must be the path or the name of a recipe", where=base.origin.mark)
    beside = (here.parent / name).expanduser()
    if beside.is_file():
        return beside.resolve()
    if beside.exists():
        check_not_special(beside, "extends", RecipeError)
    shipped = known_files("recipes", [".yaml"])
    if name in shipped:
        return shipped[name].resolve()
    raise RecipeError(
        f"extends: no recipe `{name}`",
        where=base.origin.mark,
        allowed=f"searched: {display_path(beside)}, and the shipped recipes (`posttrain recipe list`)",
        hint=did_you_mean(name, shipped),
    )


def apply_override(tree: Node, text: str) -> Node:
    """Return the tree with one `key.path=value` of the command line applied. Raises RecipeError if it does not fit the
    tree."""
    path, equals, value = text.partition("=")
    origin = Origin("command line", text)
    parts = current_key(path.strip()).split(".")
    if not equals or not all(parts):
        raise RecipeError(f"`{text}`: an override is written key.path=value", where=origin.mark)
    if parts == ["extends"]:
        raise RecipeError(
            "extends: can only be set in the recipe file",
            where=origin.mark,
            hint=f"write `extends: {value}` into the file, or copy that recipe",
        )
    parts = _join_controller_key(tree, parts, value)
    if value == "":
        raise RecipeError(f"{path}: no value after `=`", where=origin.mark, hint=_empty_value_hint(tree, parts, path))
    try:
        parsed = _parse_typed(tree, parts, value, origin)
    except RecipeError as error:
        if "${" in value or not ("{" in value or ": " in value) or any(p.hint for p in error.problems):
            raise
        quoted = f"{path}='{json.dumps(value, ensure_ascii=False)}'"
        hint = f"a text is quoted for YAML, too: {quoted}"
        raise RecipeError.of([replace(problem, hint=hint) for problem in error.problems]) from None
    return set_value(tree, parts, parsed)


def _join_controller_key(tree: Node, parts: list[str], value: str) -> list[str]:
    """Return the parts of an override with the name of a controller, a dotted key, as one part.

    `controllers.kl.coef.use=safe` sets `use` of `kl.coef`, and `controllers.kl.coef=safe` is the whole entry.
    """
    at = parts.index("controllers") if "controllers" in parts else len(parts)
    above, name, last = parts[: at + 1], parts[at + 1 : -1], parts[-1]
    if not name:
        return parts
    node, depth = follow(tree, above)
    given = node.mapping if depth == len(above) else {}
    known = registry.load_index()["controller"]
    argument = last == "use" or ".".join(name) in given or any(last in entry["params"] for entry in known.values())
    whole = last != "use" and (value in known or value.startswith("{") or split_function(value) is not None)
    return [*above, ".".join(name), last] if argument and not whole else [*above, ".".join([*name, last])]


def _empty_value_hint(tree: Node, parts: Sequence[str], path: str) -> str:
    """Return what to write instead of an override without a value: the forms of "nothing" that its key accepts."""
    stage = tree.mapping.get("stage")
    model = keys.BY_NAME.get(str(stage.value)) if stage else None
    section = keys.section_at(model, [int(p) if p.isdigit() else p for p in parts[:-1]]) if model else None
    field = keys.own_keys(section).get(parts[-1]) if section else None
    if section and parts[-1] == "use" and issubclass(section, ComponentSection):
        return f"name a component: `posttrain methods list --kind {section.kinds[0]}`"
    kinds = {str, type(None)} if field is None else {field.annotation, *typing.get_args(field.annotation)}
    forms = [f"{path}=null for none"] if type(None) in kinds else []
    forms += [f"{path}='\"\"' for empty text"] if str in kinds else []
    return f"write {', '.join(forms)}" if forms else "give a value, or leave this override out"


def _parse_typed(tree: Node, parts: Sequence[str], value: str, origin: Origin) -> Node:
    """Parse a value of the command line. If the key takes text only, a value that YAML reads as a section or a list, or
    cannot read, is taken literally: `data.prompt_template=Q: {prompt}`. Raises RecipeError if it is not YAML."""
    as_typed = value[0] not in "\"'" and "${" not in value and _takes_only_text(tree, parts)
    try:
        parsed = parse_value(value, origin)
    except RecipeError:
        if as_typed:
            return Node(value, origin, quoted=True)
        raise
    return Node(value, origin, quoted=True) if as_typed and isinstance(parsed.value, dict | list) else parsed


def _takes_only_text(tree: Node, parts: Sequence[str]) -> bool:
    """Return whether the schema allows only text at an override's key; inside a pipeline, the schema of the named
    entry."""
    path = list(parts)
    if path[0] == "stages" and len(path) > 2 and (entry := child(tree, "stages")) and isinstance(entry.value, list):
        if (number := _find_entry(entry.value, path[1])) is None:
            return False
        tree, path = entry.value[number], path[2:]
    stage = tree.mapping.get("stage")
    model = keys.BY_NAME.get(str(stage.value)) if stage else None
    return model is not None and keys.takes_only_text(model, [int(p) if p.isdigit() else p for p in path])


def set_value(tree: Node, parts: Sequence[str], value: Node) -> Node:
    """Return the tree with another value at `parts`. Raises RecipeError if the path does not exist."""
    return merge(tree, _nest_value(tree, parts, value, ()), keys.components_in(tree))


def _nest_value(node: Node | None, parts: Sequence[str], value: Node, above: tuple[str | int, ...]) -> Node:
    """Return a layer that holds only `value`, at `parts` below `node`. Creates missing sections; list entries must
    exist."""
    if not parts:
        return value
    if node is not None and isinstance(node.value, list):
        position = _entry_index(node, parts[0], value.origin, above)
        entry = expand_use(node.value[position]) if len(parts) > 1 else node.value[position]
        layer = _nest_value(entry, parts[1:], value, (*above, position))
        section = "" if above[-1] == "stages" else str(above[-1])
        merged = merge(entry, layer, keys.components_in(entry), section)
        entries = [*node.value[:position], merged, *node.value[position + 1 :]]
        return Node(entries, node.origin, node.key_origin)
    if node is not None and node.value is not None and not isinstance(node.value, dict):
        what = f"{format_path([*above, *parts])}: `{format_path(above)}` is a single value and has no keys"
        raise RecipeError(what, where=value.origin.mark)
    below = child(node, parts[0]) if node else None
    if below and node and parts[0] in keys.components_in(node):
        below = expand_use(below)
    return Node({parts[0]: _nest_value(below, parts[1:], value, (*above, parts[0]))}, value.origin, value.origin)


def _entry_names(entries: Sequence[Node]) -> list[str]:
    """Return the `name` of each list entry; "" for an entry without one."""
    return [str(entry.mapping["name"].value) if "name" in entry.mapping else "" for entry in entries]


def _find_entry(entries: Sequence[Node], part: str) -> int | None:
    """Return the index of the list entry that `part` denotes (an index, or the `name` of an entry), or None."""
    names = _entry_names(entries)
    if part in names:
        return names.index(part)
    return int(part) if part.isdigit() and int(part) < len(entries) else None


def _entry_index(node: Node, part: str, origin: Origin, above: tuple[str | int, ...]) -> int:
    """Return the index of the list entry that `part` denotes. Raises RecipeError if there is none."""
    assert isinstance(node.value, list)
    if (found := _find_entry(node.value, part)) is not None:
        return found
    given = list(filter(None, _entry_names(node.value)))
    last = len(node.value) - 1
    entries = f"entries: 0 to {last}" if last >= 0 else "it is an empty list"
    allowed = entries + (f", or by name: {', '.join(given)}" if given else "")
    hint = did_you_mean(part, given) or _suggest_entry(node.value, part, origin.where, format_path(above))
    raise RecipeError(f"{format_path(above)} has no entry `{part}`", where=origin.mark, allowed=allowed, hint=hint)


def _suggest_entry(entries: Sequence[Node], part: str, typed: str, key: str) -> str:
    """Return a hint with the override for the right entry: the only one, or the one that uses `part`."""
    suffix = typed.removeprefix(f"{key}.{part}")
    used = [str(one.value) for entry in entries if (one := expand_use(entry).mapping.get("use"))]
    using = [number for number, use in enumerate(used) if part in re.split(r"[.:]", use)]
    if len(using) == 1 and suffix.startswith("."):
        return f"write {key}.{using[0]}{suffix}"
    return f"write {key}.0.{part}{suffix}" if len(entries) == 1 and not part.isdigit() else ""


def apply(tree: Node, overrides: Sequence[str], problems: list[Problem]) -> Node:
    """Apply all overrides in order; overrides that cannot be applied are added to `problems`."""
    for text, form in override_aliases.correct_overrides(overrides):
        if form:
            what = f"`{text}`: {override_aliases.OVERRIDE_FORM}"
            if text.endswith((".yaml", ".yml")):
                what = f"`{text}`: this is a second recipe"
            problems.append(Problem("command line", what, hint="" if form == override_aliases.OVERRIDE_FORM else form))
            continue
        try:
            tree = apply_override(tree, text)
        except RecipeError as error:
            problems.extend(error.problems)
    return tree
