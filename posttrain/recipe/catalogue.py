"""Catalogue of every method by name: presets, components and shipped rewards, each with the recipe lines that select
it.

Does not import torch.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.path_resolution import known_files
from posttrain.recipe import keys, presets, references
from posttrain.recipe.foreign.words import read_table
from posttrain.recipe.functions import keyword_annotations
from posttrain.recipe.needs import CONFLICTS, INTERNAL, LACKS, SAMPLERS, given_by, givers_of
from posttrain.recipe.objective_checks import named_rewards
from posttrain.recipe.requirements import Scope
from posttrain.recipe.section import ComponentSection

Entry = dict[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef

_TABLE = read_table(Path(__file__).with_name("methods.yaml"))  # the file explains each table
KINDS: dict[str, tuple[str, str, str]] = {kind: tuple(row) for kind, row in _TABLE["kinds"].items()}
OTHER_NAMES: dict[str, str] = _TABLE["other_names"]
KEYS: dict[str, list[str]] = _TABLE["keys"]
FORMULAS: dict[str, list[str]] = _TABLE["formulas"]
SYMBOLS: list[dict[str, Any]] = _TABLE["symbols"]
# `A` is also the article: it is a symbol if it touches an operator, an index or a variable.
_ADVANTAGE = r"(?:[-|*(=] ?A\b|\bA(?= [-<>=*/|+^(]| logp\b| r\b|\||_|\)))"


def describe_unregistered(name: str) -> list[str]:
    """Return the lines that `posttrain methods show` prints for a method that is no registered component; [] if the
    name is unknown."""
    if name in KEYS:
        what, written = KEYS[name]
        return [f"{name}  ({what})", "", "in a recipe or on the command line:", f"  {written}"]
    if name in FORMULAS:
        what, function = FORMULAS[name]
        return [f"{name}  ({what})", "", f"a formula: posttrain.{function}; no recipe key reaches it"]
    return []


def list_entries() -> list[Entry]:
    """Return presets, components and rewards, in the order in which a training step uses them."""
    entries = [*map(_preset_entry, map(presets.preset, presets.names())), *_reward_entries()]
    entries += [_component_entry(kind, name, about) for kind, name, about in _iterate_components() if kind in KINDS]
    order = ["preset", *KINDS]
    return sorted(entries, key=lambda entry: order.index(entry["kind"]))


def _iterate_components() -> Iterator[tuple[str, str, Entry]]:
    """Yield (kind, name, description) of every registered component."""
    for kind, group in registry.load_index().items():
        yield from ((kind, name, about) for name, about in group.items())


def find_entries(name: str, among: list[Entry]) -> list[Entry]:
    """Return the entries of a name: `group`, `advantage/group`, a name from the literature, or a reward without its
    script."""
    wanted = OTHER_NAMES.get(name, name)
    entries = [entry for entry in among if wanted in (entry["name"], f"{entry['kind']}/{entry['name']}")]
    return entries or [entry for entry in among if entry["kind"] == "reward" and entry["name"].endswith(f".{name}")]


def _make_entry(kind: str, name: str, stage: str, file: str, doc: str, **known: Any) -> Entry:
    """Build an entry as the commands show it; unknown properties are empty. title: the first sentence of the
    docstring."""
    empty: Entry = {"paper": "", "symbols": {}, "needs": [], "conflicts": [], "unusable": "", "not_stated": ""}
    title = re.split(r"(?<=(?<!Dr)\.) ", " ".join(doc.partition("\n\n")[0].split()))[0]
    return {"kind": kind, "name": name, "stage": stage, "file": file, "title": title, "text": doc, **empty, **known}


def _preset_entry(preset: presets.Preset) -> Entry:
    """Describe a preset. needs: what its components need besides the policy's log-probs, which indicates its cost."""
    recipe: dict[str, Any] = {"stage": preset.stage, "algorithm": preset.name}
    needs = {need for kind, name in components_of_preset(preset) for need in registry.load_index()[kind][name]["needs"]}
    return _make_entry(
        *("preset", preset.name, preset.stage, f"posttrain/recipe/presets/{preset.name}.yaml", preset.purpose.strip()),
        title=preset.title,
        paper=preset.paper,
        choices=preset.choices,
        needs=sorted(needs & {*given_by("model"), "groups", "several_updates"}),
        not_stated=preset.not_stated.strip(),
        recipe=recipe | preset.example | ({"rewards": preset.rewards} if preset.rewards else {}),
    )


@functools.cache
def _component_sections(preset: str) -> list[tuple[registry.Kind, Mapping[str, Any]]]:
    """Return (kind, keys) of every component section that a preset writes, one pair for each kind allowed in that
    place."""
    chosen = presets.preset(preset)
    parts = references.parts(keys.BY_NAME[chosen.stage], chosen.choices)
    return [
        (kind, part.values) for part in parts if issubclass(part.model, ComponentSection) for kind in part.model.kinds
    ]


def components_of_preset(preset: presets.Preset, *, idle: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of every component that a preset names, except a KL term whose coefficient stays 0; with
    `idle` only that term."""
    driven = "kl.coef" in preset.choices.get("controllers", {})
    for kind, section in _component_sections(preset.name):
        name, is_idle = section.get("use"), kind == "kl" and not driven and section.get("coef", 0) == 0
        if name in registry.load_index().get(kind, {}) and idle == is_idle:
            yield kind, str(name)


@functools.cache
def _presets_by_component(*, idle: bool = False) -> dict[tuple[str, str], list[str]]:
    """Return (kind, name) of each component -> the presets that choose it. idle: as in `components_of_preset`."""
    users: dict[tuple[str, str], list[str]] = {}
    for name in presets.names():
        for component in dict.fromkeys(components_of_preset(presets.preset(name), idle=idle)):
            users.setdefault(component, []).append(name)
    return users


def shared_symbols(kind: str, text: str, known: Mapping[str, Any]) -> dict[str, str]:
    """Return symbol -> meaning of the shared symbols that a method's text uses and does not define.

    known: the method's keys. Symbols within a meaning are explained too.
    """
    meanings = {name: what for group in SYMBOLS if kind in group["kinds"] for name, what in group["meaning"].items()}
    used: dict[str, str] = {}
    unread = [text]
    while unread:
        part = re.sub(r"`[^`]*`", "", unread.pop())
        for name, what in meanings.items():
            if name not in used and name not in known and uses_symbol(part, name) and not defines_symbol(text, name):
                used[name] = what
                unread.append(what)
    return {name: what for name, what in meanings.items() if name in used}


def uses_symbol(text: str, name: str) -> bool:
    """Return whether a text uses a name as a symbol of a formula."""
    return bool(re.search(_ADVANTAGE if name == "A" else rf"(?<![\w.'-]){re.escape(name)}(?![\w'])", text))


def defines_symbol(text: str, name: str) -> bool:
    """Return whether a text says what a symbol is: `r = ...`, `r: ...`, `r the ...`, `r and s = ...`, `h(n) = ...`."""
    name = rf"(?<![\w.]){re.escape(name)}"
    forms = (rf"{name}(_\w+)?(,? and \w+|, \w+)* ?[=:]", rf"{name}\([\w, ]*\) =", rf"{name}(_\w+)? (the|is|are)\b")
    return any(re.search(form, text) for form in forms)


def _describe_keys(arguments: Mapping[str, tuple[Any, ...]]) -> Entry:
    """Return key -> its type and default, from annotations and defaults; `...` marks a required key."""
    return {
        key: {"type": kind} | ({} if value is ... else {"default": value}) for key, (kind, value) in arguments.items()
    }


def _component_entry(kind: str, name: str, described: Entry) -> Entry:
    """Describe a registered component. conflicts: what a recipe may not combine with it, one sentence each. unusable:
    why no recipe can use it (a function for callers that build their own batches), or empty."""
    words = {"lam": "lambda"} if kind == "merge" else {}  # `lambda` is mergekit's name and a reserved word in Python
    known = _describe_keys({words.get(key, key): (*about, ...)[:2] for key, about in described["params"].items()})
    needs, conflicts = described["needs"], []
    for action in described.get("exclusive", []):
        rivals = [
            n
            for k, n, entry in _iterate_components()
            if action in entry.get("exclusive", []) and (k, n) != (kind, name)
        ]
        conflicts += [f"{', '.join(rivals)}: each would {action}"] if rivals else []
    givable = given_by().union(*SAMPLERS.values()) if kind not in registry.KINDS_WITHOUT_BATCH else needs
    lacks = sorted({LACKS.get(need, need) for need in needs if need not in givable})
    stages = {"pair_loss": "dpo", "merge": "merge", "token_weight": "sft"}
    return _make_entry(
        *(kind, name, "generate" if "world" in needs else stages.get(kind, "rl")),
        *(f"{described['module'].replace('.', '/')}.py", described["doc"]),
        paper=described["paper"],
        symbols=shared_symbols(kind, described["doc"], known),
        keys=known,
        needs=[need for need in needs if need not in INTERNAL],
        conflicts=[*conflicts, *(sentence for need, sentence in CONFLICTS.items() if need in needs)],
        unusable=f"stage rl has no {' and no '.join(lacks)}" if lacks else "",
        not_stated=described["note"],
        presets=_presets_by_component().get((kind, name), []),
        presets_with_coef_0=_presets_by_component(idle=True).get((kind, name), []),
        recipe=_example_recipe(kind, name, known, needs),
    )


def _example_recipe(kind: str, name: str, known: Entry, needs: list[str]) -> dict[str, Any]:
    """Return the shortest recipe lines that select a component and provide what it needs (methods.yaml)."""
    _, place, shape = KINDS[kind]
    required = [key for key, about in known.items() if "default" not in about]
    if kind == "merge":
        models = [{"model": f"path/of/{folder}"} for folder in ("one", "another")[: 1 if "one_model" in needs else 2]]
        base = {"base_model": "path/of/the/base"} if "base_model" in needs else {}
        parameters = {"parameters": dict.fromkeys(required, 1e-4)} if required else {}  # nearswap's t
        return {place: name, **base, "models": models, **parameters}
    if shape == "source":
        params = {"levels": [0, 1], **dict.fromkeys(required, "path/of/documents")}
        data = {"source": f"task:{name}", "size": 1000, "params": params}
        return {"data": data, **_TABLE["beside_task"].get(name, {})}
    facts = {"kind": kind, "name": name, "needs": {*needs}, "givers": givers_of(needs), "role": "role" in known}
    values = {key: about.get("default") for key, about in known.items()}
    values |= {key: _example_value(kind, name, key) for key in required}
    section = {"use": name, **_TABLE["example_arguments"].get(name, {"coef": 0.1} if kind == "kl" else {}), **values}
    if "world" in needs:
        tree = {"shape": section, "rewards": [{"use": "environment.score"}]}
        return {"environment": {"use": "my_game.py:Game"}, "tree": tree}
    long = {"max_new_tokens": 8192} if kind == "shape" and "shared_reward" in needs else {}
    inner = {"one": section, "inner": {**long, kind: section}, "list": [section], "named": {"kl.coef": section}}[shape]
    shaped: dict[str, Any] = {place: inner}
    for row in _TABLE["beside_component"]:
        if Scope.of(facts, shaped).holds(row["when"]):
            shaped = {**row.get("before", {}), **shaped, **row.get("behind", {})}
    advantage = shaped.get("advantage")
    readers = [(kind, section), *([("advantage", advantage)] if isinstance(advantage, dict) else [])]
    named = [reward for of, by in readers for reward in named_rewards([of], by["use"], by)]
    read = dict.fromkeys(reward.partition("/")[0] for _, reward, others in named if reward not in others)
    if read and "rewards" not in shaped:
        unnamed = [{"use": f"mine.py:{reward}", "weight": 0} for reward in read if reward != "accuracy"]
        shaped["rewards"] = [{"use": "math.accuracy"}, *unnamed]
    return shaped


_EXAMPLES: dict[str, Any] = {"float": 1.0, "bool": True, "str": "correct", "tuple": [1], "list": [1], "dict": {}}


def _example_value(kind: str, name: str, key: str) -> Any:
    """Return a value for a required key: the value of a preset that writes the key, or one of the key's type."""
    for of, section in (component for preset in presets.names() for component in _component_sections(preset)):
        if of == kind and section.get("use") == name and key in section:
            return section[key]
    annotation = registry.load_index()[kind][name]["params"][key][0]
    return next((value for word, value in _EXAMPLES.items() if annotation.startswith(word)), 1)


def _reward_entries() -> Iterator[Entry]:
    """Yield an entry for each shipped reward, `script.function`; the scripts are parsed, not run."""
    for script, path in sorted(known_files("rewards", [".py"]).items()):
        for function in _reward_functions(ast.parse(path.read_text(encoding="utf-8")).body):
            name, doc = f"{script}.{function.name}", ast.get_docstring(function) or ""
            yield _make_entry(
                *("reward", name, "rl", f"rewards/{path.name}", doc),
                keys=_describe_keys(keyword_annotations(function, ast.unparse)),
                recipe={"rewards": [{"use": name}]},
            )


def _reward_functions(body: list[ast.stmt]) -> list[Function]:
    """Return the functions that the script's EXAMPLES name, or else the first function that takes a completion."""
    public = [node for node in body if isinstance(node, Function) and not node.name.startswith("_")]
    takers = [node for node in public if node.args.args and node.args.args[0].arg in ("completion", "completions")]
    for node in body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "EXAMPLES"
            and isinstance(node.value, ast.Dict)
        ):
            names = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
            return [function for function in takers if function.name in names]
    return takers[:1]
