"""Every method by name: presets, components, shipped rewards, each with the recipe lines that choose it. No torch."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain import registry
from posttrain.path_resolution import known_files
from posttrain.recipe import presets
from posttrain.recipe.argument_checks import named_rewards
from posttrain.recipe.foreign.words import read_table
from posttrain.recipe.needs import CONFLICTS, INTERNAL, LACKS, MAKERS, SAMPLERS, given_by, givers_of
from posttrain.recipe.requirements import Scope

Entry = dict[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef

_TABLE = read_table(Path(__file__).with_name("methods.yaml"))  # explains each
KINDS: dict[str, tuple[str, str, str]] = {kind: tuple(row) for kind, row in _TABLE["kinds"].items()}
OTHER_NAMES: dict[str, str] = _TABLE["other_names"]
KEYS: dict[str, list[str]] = _TABLE["keys"]
FORMULAS: dict[str, list[str]] = _TABLE["formulas"]


def describe_unregistered(name: str) -> list[str]:
    """What `posttrain methods show` says of a method that nothing registered is named after, [] if it is none."""
    if name in KEYS:
        what, written = KEYS[name]
        return [f"{name}  ({what})", "", "in a recipe or on the command line:", f"  {written}"]
    if name in FORMULAS:
        what, function = FORMULAS[name]
        return [f"{name}  ({what})", "", f"a formula: posttrain.{function}; no recipe key reaches it"]
    return []


def entries() -> list[Entry]:
    """Presets, then components and rewards in the order of a step."""
    found = [_preset(presets.preset(name)) for name in presets.names()]
    found += _rewards()
    for kind in KINDS:
        found += [_component(kind, name, entry) for name, entry in registry.index().get(kind, {}).items()]
    order = ["preset", *KINDS]
    return sorted(found, key=lambda entry: order.index(entry["kind"]))


def find_entries(name: str, among: list[Entry]) -> list[Entry]:
    """The entries of a name: `group`, `advantage/group`, a name of the literature, or a reward's without its script."""
    wanted = OTHER_NAMES.get(name, name)
    found = [entry for entry in among if wanted in (entry["name"], f"{entry['kind']}/{entry['name']}")]
    return found or [entry for entry in among if entry["kind"] == "reward" and entry["name"].endswith(f".{name}")]


def _entry(kind: str, name: str, stage: str, file: str, doc: str, **known: Any) -> Entry:
    """What the commands show of a method; what is not known of it is empty."""
    empty: Entry = {"paper": "", "needs": [], "conflicts": [], "unusable": "", "not_stated": ""}
    named: Entry = {"kind": kind, "name": name, "stage": stage, "file": file, "title": _title(doc), "text": doc}
    return {**named, **empty, **known}


def _preset(preset: presets.Preset) -> Entry:
    recipe: dict[str, Any] = {"stage": preset.stage, "algorithm": preset.name}
    return _entry(
        *("preset", preset.name, preset.stage, f"posttrain/recipe/presets/{preset.name}.yaml", preset.purpose.strip()),
        title=preset.title,
        paper=preset.paper,
        choices=preset.choices,
        needs=_needs_of(preset),
        not_stated=preset.not_stated.strip(),
        recipe=recipe | preset.example | ({"rewards": preset.rewards} if preset.rewards else {}),
    )


def _needs_of(preset: presets.Preset) -> list[str]:
    """What the components of a preset need besides the policy's log-probs, which shows its cost."""
    needs = {need for kind, name in components_of_preset(preset) for need in registry.index()[kind][name]["needs"]}
    return sorted(needs & {*given_by("model"), "groups", "several_updates"})


def components_of_preset(preset: presets.Preset) -> Iterator[tuple[str, str]]:
    """(kind, name) of every component that a preset names, without a KL term whose coefficient stays 0."""
    for key, section in preset.choices.items():
        kinds = [kind for kind, (_, place, _) in KINDS.items() if place == key]
        items: list[Any] = section if isinstance(section, list) else [section]
        if key == "controllers" and isinstance(section, dict):
            items = list(section.values())
        if key == "rollout" and isinstance(section, dict):
            items = [section.get("shape"), section.get("workflow")]
        for item in items:
            use = item.get("use") if isinstance(item, dict) else item
            for kind in kinds:
                idle = (
                    kind == "kl" and item.get("coef", 0) == 0 and "kl.coef" not in preset.choices.get("controllers", {})
                )
                if use in registry.index().get(kind, {}) and not idle:
                    yield kind, use


@functools.cache
def _users() -> dict[tuple[str, str], list[str]]:
    """(kind, name) of a component -> the presets that choose it."""
    users: dict[tuple[str, str], list[str]] = {}
    for name in presets.names():
        for component in dict.fromkeys(components_of_preset(presets.preset(name))):
            users.setdefault(component, []).append(name)
    return users


def _component(kind: str, name: str, described: Entry) -> Entry:
    names = {"lam": "lambda"} if kind == "merge" else {}  # mergekit's word, which Python keeps for itself
    keys = {
        names.get(key, key): {"type": known[0], **({"default": known[1]} if len(known) > 1 else {})}
        for key, known in described["params"].items()
    }
    stages = {"pair_loss": "dpo", "merge": "merge", "token_weight": "sft"}
    return _entry(
        *(kind, name, "generate" if "world" in described["needs"] else stages.get(kind, "rl")),
        *(f"{described['module'].replace('.', '/')}.py", described["doc"]),
        paper=described["paper"],
        keys=keys,
        needs=[need for need in described["needs"] if need not in INTERNAL],
        conflicts=list(_conflicts(kind, name, described)),
        unusable="" if kind in registry.OWN_WORDS else _unusable(described["needs"]),
        not_stated=described["note"],
        presets=_users().get((kind, name), []),
        recipe=_recipe(kind, name, keys, described["needs"]),
    )


def _title(doc: str) -> str:
    """The first sentence of a docstring, on one line."""
    first = " ".join(doc.partition("\n\n")[0].split())
    return re.split(r"(?<=(?<!Dr)\.) ", first)[0]


def _conflicts(kind: str, name: str, described: Entry) -> Iterator[str]:
    """What a recipe may not combine it with, one sentence each."""
    for deed in described.get("exclusive", []):
        others = [
            n
            for k, group in registry.index().items()
            for n, entry in group.items()
            if deed in entry.get("exclusive", []) and (k, n) != (kind, name)
        ]
        if others:
            yield f"{', '.join(others)}: each would {deed}"
    for need, sentence in CONFLICTS.items():
        if need in described["needs"]:
            yield sentence


def _unusable(needs: list[str]) -> str:
    """Why no recipe can use it, "" if one can. Such functions are for callers with batches of their own."""
    known = given_by().union(*SAMPLERS.values())
    missing = {LACKS.get(need, need) for need in needs if need not in known}
    return f"stage rl has no {' and no '.join(sorted(missing))}" if missing else ""


def _recipe(kind: str, name: str, keys: Entry, needs: list[str]) -> dict[str, Any]:
    """The shortest recipe lines that choose a component and give it what it needs."""
    _, place, shape = KINDS[kind]
    if kind == "merge":
        return {place: name, **_inputs_of_merge(keys, needs)}
    if shape == "source":
        required = {key: _PATHS[name] for key, known in keys.items() if "default" not in known}
        params = {"levels": [0, 1], **required}
        data = {"source": f"task:{name}", "size": 1000, "params": params}
        return {"data": data, **_TABLE["beside_task"].get(name, {})}
    if shape == "name":
        return {place: name}
    section: dict[str, Any] = {"use": name, **(_KL.get(name, {"coef": 0.1}) if kind == "kl" else {})}
    section |= {key: known.get("default", _example(kind, name, key, known["type"])) for key, known in keys.items()}
    if "behavior_logp" in needs:
        section["behavior_model"] = "tiny"  # whichever model wrote the data
    if "world" in needs:
        tree = {"shape": section, "rewards": [{"use": "environment.score"}]}
        return {"environment": {"use": "my_game.py:Game"}, "tree": tree}
    inner = {"one": section, "inner": {kind: section}, "list": [section], "named": {"kl.coef": section}}[shape]
    facts = {"kind": kind, "name": name, "needs": {*needs}, "givers": givers_of(needs), "role": "role" in keys}
    shaped: dict[str, Any] = {place: inner}
    for row in _TABLE["beside_component"]:
        if Scope((((), facts), ((), shaped))).holds(row["when"]):
            shaped = {**row.get("before", {}), **shaped, **row.get("behind", {})}
    for need in needs:
        if need in MAKERS:
            made_by = MAKERS[need][0]
            found = registry.index()["advantage"][made_by]["params"]
            required = {k: _example("advantage", made_by, k, v[0]) for k, v in found.items() if len(v) == 1}
            apart = {"separate": True} if need == "channels" and kind == "regulariser" else {}  # no other loss has it
            shaped = {"advantage": {"use": made_by, **required, **apart}, **shaped}
    read = dict.fromkeys([*_read_by(kind, section), *_read_by("advantage", shaped.get("advantage"))])
    if read and "rewards" not in shaped:
        mine = [{"use": f"mine.py:{one}", "weight": 0} for one in read if one != "accuracy"]
        shaped["rewards"] = [{"use": "math.accuracy"}, *mine]
    return shaped


def _inputs_of_merge(keys: Entry, needs: list[str]) -> dict[str, Any]:
    """What a merge method is given: a base, models, and the keys that have no default."""
    models = [{"model": f"path/of/{name}"} for name in ("one", "another")[: 1 if "one_model" in needs else 2]]
    base = {"base_model": "path/of/the/base"} if "base_model" in needs else {}
    required = {key: 1e-4 for key, known in keys.items() if "default" not in known}  # nearswap's t
    return {**base, "models": models, **({"parameters": required} if required else {})}


def _read_by(kind: str, section: Any) -> list[str]:
    """The rewards that a component's section names."""
    params = section if isinstance(section, dict) else {}
    found = named_rewards([kind], str(params.get("use")), params)
    return [name.partition("/")[0] for _, name, others in found if name not in others]


_PATHS = {"asearcher": "path/of/documents"}
_EXAMPLES: dict[str, Any] = {"float": 1.0, "bool": True, "str": "correct", "tuple": [1], "list": [1], "dict": {}}
# k1 has no useful gradient of its own; `full` needs a model of its own
_KL = {"k1": {"coef": 0.1, "where": "reward"}, "full": {"coef": 0.1, "reference": "tiny"}}


def _example(kind: str, name: str, key: str, annotation: str) -> Any:
    """A value for a required key: what a preset writes there, or one of its type."""
    for preset in map(presets.preset, presets.names()):
        sections: Any = preset.choices.get(KINDS[kind][1], {})
        if KINDS[kind][2] == "named" and isinstance(sections, dict):
            sections = list(sections.values())
        for section in sections if isinstance(sections, list) else [sections]:
            if isinstance(section, dict) and section.get("use") == name and key in section:
                return section[key]
    return next((value for word, value in _EXAMPLES.items() if annotation.startswith(word)), 1)


def _rewards() -> list[Entry]:
    """The shipped rewards: `script.function`, read without being run."""
    found = []
    for script, path in sorted(known_files("rewards", [".py"]).items()):
        for function in _reward_functions(path):
            name, doc = f"{script}.{function.name}", ast.get_docstring(function) or ""
            about = {"keys": _keys(function), "recipe": {"rewards": [{"use": name}]}}
            found.append(_entry("reward", name, "rl", f"rewards/{path.name}", doc, **about))
    return found


def _keys(function: Function) -> Entry:
    """Type and default of a function's keyword-only arguments. A default that is no literal stays source text."""
    keys: Entry = {}
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        keys[argument.arg] = {"type": ast.unparse(argument.annotation) if argument.annotation else ""}
        if default is not None:
            try:
                keys[argument.arg]["default"] = ast.literal_eval(default)
            except ValueError:
                keys[argument.arg]["default"] = ast.unparse(default)
    return keys


def _reward_functions(path: Path) -> list[Function]:
    """The functions that a script's EXAMPLES name, or the first function that takes a completion, or all of them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, Function) and not node.name.startswith("_")]
    takers = [f for f in functions if f.args.args and f.args.args[0].arg in ("completion", "completions")]
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "EXAMPLES"
            and isinstance(node.value, ast.Dict)
        ):
            names = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
            return [function for function in takers if function.name in names]
    return takers[:1]
