"""Conversion of pydantic's errors to messages: where, what is wrong, what is allowed, and the nearest known name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from posttrain import registry
from posttrain.errors import Problem, count_noun, did_you_mean, nearest
from posttrain.recipe import keys, presets
from posttrain.recipe.foreign.words import common_names, replacement_hint, translate_value
from posttrain.recipe.override_aliases import suggest_override
from posttrain.recipe.rl_stage import TAGS
from posttrain.recipe.section import ComponentSection
from posttrain.recipe.stages import Stage
from posttrain.recipe.tree import Node, follow, format_path

MAX_SHOWN = 30  # problems shown per stage
Item = dict[str, Any]


def convert_errors(
    error: ValidationError, tree: Node, stage: type[Stage], prefix: Sequence[str | int] = ()
) -> list[Problem]:
    """Return every validation error as a Problem located at its key or value in `tree`. `prefix`: shown before the
    keys."""
    problems: list[Problem] = []
    choices: dict[tuple[str | int, ...], list[Item]] = {}  # one error for each type that was tried
    for details in error.errors(include_url=False):
        if len(problems) == MAX_SHOWN:
            more = error.error_count() - MAX_SHOWN
            return [*problems, Problem("", f"and {count_noun(more, 'mistake')} more of this kind in the recipe")]
        item: Item = {**details, "loc": tuple(part for part in details["loc"] if part not in TAGS)}
        node, depth = follow(tree, item["loc"])
        path = item["loc"][:depth]
        short = item["loc"][depth:] == ("use",) and isinstance(node.value, str)  # `NAME`, for `use: NAME`
        # What follows the existing path are the types that pydantic tried.
        if depth < len(item["loc"]) - (item["type"] == "missing") and not short:
            choices.setdefault(path, []).append(item)
        else:
            problems.append(_problem(item, node, path, stage, tree, format_path([*prefix, *path])))
    return problems + [_type_problem(path, items, stage, tree, prefix) for path, items in choices.items()]


def _type_problem(
    path: Sequence[str | int], items: list[Item], stage: type[Stage], tree: Node, prefix: Sequence[str | int]
) -> Problem:
    """Build the problem of a value that matches none of its allowed types: `must be text or a list`.

    An error inside the list or section that was given is reported instead, because it is more specific.
    """
    node, _ = follow(tree, path)
    deepest = max(len(item["loc"]) for item in items)
    inner = [item for item in items if len(item["loc"]) == deepest] if deepest > len(path) + 1 else []
    if inner:
        node, depth = follow(node, inner[0]["loc"][len(path) + 1 :])
        path, items = (*path, *inner[0]["loc"][len(path) + 1 :][:depth]), inner
        if inner[0]["type"] not in _TYPES or inner[0]["type"] == "literal_error":  # an error inside it
            return _problem(inner[0], node, path, stage, tree, format_path([*prefix, *path]))
    if len(items) > 1 and any(item["type"] in _BOUNDS for item in items):  # right type, wrong value
        item = next(item for item in items if item["type"] in _BOUNDS)
        return Problem(node.origin.mark, f"{format_path([*prefix, *path])}: {_BOUNDS[item['type']](item)}")
    expected = " or ".join(dict.fromkeys(_describe_expected(item) for item in items))
    return Problem(
        node.origin.mark, f"{format_path([*prefix, *path])}: must be {expected}, not {format_value(items[0]['input'])}"
    )


def _problem(
    item: Item, node: Node, path: Sequence[str | int], stage: type[Stage], tree: Node, shown_path: str
) -> Problem:
    """Build the problem of a single error, by the type that pydantic reports."""
    kind = item["type"]
    if kind == "missing":
        return _missing_key_problem(item, node, path, stage, shown_path)
    if kind == "extra_forbidden":
        return _unknown_key(node, path, stage, tree, shown_path)
    if kind == "unknown_component":
        return _unknown_component(item, node, shown_path)
    place = node.at_key if kind in ("value_error", "too_short", "too_long") else node.origin
    head = f"{shown_path}: " if shown_path else ""
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", item["ctx"]["expected"]) or [item["ctx"]["expected"]]
        what = f"{head}{format_value(item['input'])} is not a value of this key"
        meant = translate_value(format_path(path), str(item["input"]))
        hint = f"did you mean `{meant}`?" if meant in words else did_you_mean(str(item["input"]), words)
        return Problem(place.mark, what, f"allowed: {', '.join(words)}", hint)
    if kind == "value_error":
        return Problem(place.mark, f"{head}{item['ctx']['error']}")
    if kind in _BOUNDS:
        hint = _addition(path) if kind == "too_short" and not item["input"] else ""
        return Problem(place.mark, f"{head}{_BOUNDS[kind](item)}", hint=hint)
    return Problem(
        place.mark,
        f"{head}must be {_describe_expected(item)}, not {format_value(item['input'])}",
        hint=_addition(path)
        if item["input"] is None
        else _type_hint(item, node) or _section_hint(item, node, path, stage),
    )


_BOUNDS: dict[str, Callable[[Item], str]] = {
    "greater_than": lambda i: f"must be greater than {_limit(i['ctx']['gt'])}, not {format_value(i['input'])}",
    "greater_than_equal": lambda i: f"must be at least {_limit(i['ctx']['ge'])}, not {format_value(i['input'])}",
    "steps_or_share": lambda i: f"must be a whole number of steps or a share below 1, not {format_value(i['input'])}",
    "less_than": lambda i: f"must be less than {_limit(i['ctx']['lt'])}, not {format_value(i['input'])}",
    "less_than_equal": lambda i: f"must be at most {_limit(i['ctx']['le'])}, not {format_value(i['input'])}",
    "string_too_short": lambda _: "must not be empty",
    "too_short": lambda i: (
        f"needs {count_noun(i['ctx']['min_length'], 'entry', 'entries')} or more, has {i['ctx']['actual_length']}"
    ),
    "too_long": lambda i: (
        f"takes {count_noun(i['ctx']['max_length'], 'entry', 'entries')}, has {i['ctx']['actual_length']}"
    ),
}

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "dict_type": "a section (`key: value` lines)",
    "mapping_type": "a section (`key: value` lines)",
    "model_type": "a section (`key: value` lines)",
    "model_attributes_type": "a section (`key: value` lines)",
    "list_type": "a list",
    "tuple_type": "a list",
    "none_required": "null",
    "literal_error": "one of its values",
}


def _limit(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _describe_expected(item: Item) -> str:
    return _TYPES.get(item["type"]) or item["msg"][0].lower() + item["msg"][1:]


def format_value(value: Any) -> str:
    """Format a wrong value for an error message."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        short = value if len(value) <= 60 else f"{value[:57]}..."
        return f"`{short}` (text)"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value) if not isinstance(value, int) or abs(value) < 10**20 else f"{value:.3e}"


def _type_hint(item: Item, node: Node) -> str:
    """Suggest a spelling for a value of the wrong type, such as a quoted number or `yes`."""
    value, expected = item["input"], _TYPES.get(item["type"], "")
    if expected == "a whole number" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, str) and "number" in expected and node.quoted and re.fullmatch(r"[-+0-9.eE]+", value):
        return f"write {value} without quotes"
    if isinstance(value, str) and expected == "true or false":
        return {"yes": "write true", "on": "write true", "no": "write false", "off": "write false"}.get(
            value.lower(), ""
        )
    if isinstance(value, str) and "number" in expected and (meant := _number_meant(value)):
        return f"write {meant}"
    if expected == "text" and isinstance(value, int | float):
        return f"put it in quotes to make it text: '{format_value(value)}'"
    if expected == "a list" and isinstance(value, str | int | float):
        return f"write [{value}] for a list{'' if isinstance(value, str) and ',' in value else ' of one'}"
    return ""


def _number_meant(text: str) -> str:
    """Return the number meant by a text with a decimal comma, or with k or m for thousands and millions; otherwise
    ""."""
    if re.fullmatch(r"[-+]?\d+,\d+(e[-+]?\d+)?", text):
        return text.replace(",", ".")
    if short := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text):
        return f"{float(short[1]) * {'k': 1e3, 'm': 1e6}[short[2].lower()]:.0f}"
    return ""


def _section_hint(item: Item, node: Node, path: Sequence[str | int], stage: type[Stage]) -> str:
    """Suggest the section that was meant where a text, a number or `true` was written in its place."""
    if _TYPES.get(item["type"]) != _TYPES["model_type"] or not path or not (model := keys.section_at(stage, path)):
        return ""
    if item["input"] is True:
        return f"write `{path[-1]}: {{}}` for a section with its defaults"
    number = isinstance(item["input"], int | float) and item["input"] is not False
    mains = ("coef", "size", "steps") if number else ("use", "path", "source", "model")
    main = next((key for key in mains if key in keys.own_keys(model)), None)
    if main and isinstance(path[-1], int) and isinstance(item["input"], str):
        return f"write {{{main}: {item['input']}}} for an entry"
    known = isinstance(path[-1], str) and (number or isinstance(item["input"], str)) and main
    if known and node.origin.kind == "command line":
        return f"write {format_path(path)}.{main}={item['input']}"
    return f"write `{path[-1]}: {{{main}: {item['input']}}}`" if known else ""


def _missing_key_problem(
    item: Item, node: Node, path: Sequence[str | int], stage: type[Stage], shown_path: str
) -> Problem:
    """Build the problem of a missing key, with its description and lines to add."""
    key = str(item["loc"][-1])
    model = keys.section_at(stage, path)
    field = keys.own_keys(model).get(key) if model else None
    about = keys.describe_key(field) if field else ""
    if key == "use" and model and issubclass(model, ComponentSection):
        about = f"known: {', '.join(sorted(model.registered_components()))}; or path/file.py:function"
    full = f"{shown_path}.{key}" if shown_path else key
    return Problem(node.at_key.mark, f"{full}: is missing", about, _addition((*path, key)))


# What to write if a section is missing or empty: the shortest valid lines.
ADDITIONS = {
    "model": ("model:", "  path: tiny  # or a directory, a hub id, a .gguf file"),
    "data": ("data:", "  source: rows.jsonl  # or a hub id, gym:TASK, task:NAME, file.py:function"),
    "rewards": ("rewards:", "  - use: math.accuracy  # a shipped one; your own: path/file.py:function"),
    "models": ("models:", "  - model: path/of/the/first", "  - model: path/of/the/second"),
    "merge_method": ("merge_method: linear  # others: `posttrain methods list`",),
    "stages": ("stages:", "  - {name: train, stage: sft, model: {path: tiny}, data: {source: rows.jsonl}}"),
    "completions": ("completions: runs/NAME/completions.jsonl",),
}


def _addition(path: Sequence[str | int]) -> str:
    """Return a hint with the lines to write at a path; empty if there is no short valid example."""
    key = str(path[-1]) if path else ""
    lines = ADDITIONS.get(key, ()) if len(path) == 1 or key == "rewards" else ()
    return "".join(["write", *(f"\n    {line}" for line in lines)]) if lines else ""


def _unknown_component(item: Item, node: Node, shown_path: str) -> Problem:
    """Build the problem of an unknown component, with the known names."""
    known = sorted(registry.load_index().get(item["ctx"]["kind"], {}))
    what = f"{shown_path}: unknown {item['ctx']['kind'].replace('_', ' ')} `{item['input']}`"
    or_function = "" if item["ctx"]["kind"] == "merge" else "; or path/file.py:function"
    allowed = f"known: {', '.join(known)}{or_function}"
    hint = did_you_mean(str(item["input"]), known)
    if str(item["input"]) in presets.names():
        hint = f"it is an algorithm: write `algorithm: {item['input']}`"
    elif meant := translate_value(shown_path, str(item["input"])):
        hint = f"did you mean `{meant}`?"
    hint = f"write {item['input']}:FUNCTION" if or_function and str(item["input"]).endswith(".py") else hint
    return Problem(node.origin.mark, what, allowed, hint)


def _unknown_key(node: Node, path: Sequence[str | int], stage: type[Stage], tree: Node, shown_path: str) -> Problem:
    key, parent_path = str(path[-1]), path[:-1]
    parent, _ = follow(tree, parent_path)
    known = keys.known_at(stage, parent_path, parent)
    what = f"{shown_path}: unknown key"
    hint = _of_another_tool(node, path, stage) or _hint_for(key, parent_path, tree, known, stage)
    return Problem(node.at_key.mark, what, f"known here: {', '.join(known)}" if known else "", hint)


def _of_another_tool(node: Node, path: Sequence[str | int], stage: type[Stage]) -> str:
    """Suggest a key for an override whose first section is unknown, such as `trainer.total_epochs=2` of another
    tool."""
    typed, _, value = node.at_key.where.partition("=") if node.at_key.kind == "command line" else ("", "", "")
    return suggest_override(typed, value, [stage]) if len(path) == 1 and "." in typed else ""


def _hint_for(key: str, above: Sequence[str | int], tree: Node, known: list[str], stage: type[Stage]) -> str:
    """Suggest what to write for an unknown key: another tool's key, a typing error, a key of another section or
    stage."""
    name = stage.model_fields["stage"].default
    section = ".".join(str(part) for part in above if not isinstance(part, int))
    elsewhere = keys.keys_by_last_part(stage).get(key) if not section or key not in keys.GENERIC_KEYS else None
    elsewhere = elsewhere and keys.in_use(elsewhere, stage, tree)
    if hint := replacement_hint(key, name) or (section and replacement_hint(f"{section}_{key}", name)):
        return hint
    if near := nearest(key, known, alike=0.9):  # typing error, even if the key exists in another section
        return f"did you mean `{near}`?"
    if longer := [name for name in known if name.startswith(f"{key}_")][:2]:
        return f"did you mean {' or '.join(f'`{name}`' for name in longer)}?"
    if inner := keys.section_with(key, keys.section_at(stage, above)):
        return f"write `{inner}.{key}`"
    if elsewhere:
        above_it = [path.rpartition(".")[0] for path in elsewhere[:2]]
        return f"`{key}` belongs to {' or '.join(f'`{p}`' if p else 'the top level' for p in above_it)}"
    if hint := _other_component(key, keys.section_at(stage, above), follow(tree, above)[0]):
        return hint
    path = f"{section}.{key}".lstrip(".")
    users = [other for other, model in keys.BY_NAME.items() if other != name and path in keys.all_paths(model)]
    if users:
        return f"`{key}` is not used by stage {name}; it is a key of stage {', '.join(users)}"
    if near := nearest(key, known, alike=0.8):
        return f"did you mean `{near}`?"
    if near := nearest(key, common_names(), alike=0.8):  # typing error in a key of another tool
        return str(replacement_hint(near, name))
    if near := nearest(key, known):
        return f"did you mean `{near}`?"
    if (not section or key not in keys.GENERIC_KEYS) and (
        near := nearest(key, keys.keys_by_last_part(stage), alike=0.75)
    ):
        return f"did you mean `{keys.keys_by_last_part(stage)[near][0]}`?"
    return ""


def _other_component(key: str, model: type[BaseModel] | None, parent: Node) -> str | None:
    """Return a hint if another component of the same kind takes the key."""
    if model is None or not issubclass(model, ComponentSection):
        return None
    takers = [name for name, entry in model.registered_components().items() if key in entry["params"]]
    if not takers:
        return None
    named = parent.mapping.get("use")
    use = named.value if named else model.default_use()
    return f"`{key}` is a key of {', '.join(f'`{name}`' for name in takers)}; this section uses `{use}`"
