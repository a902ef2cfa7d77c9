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
from posttrain.recipe.objective_checks import (
    FROM_COMPONENTS,
    FROM_HINTS,
    FROM_MODEL,
    FROM_OPPONENT,
    FROM_PARTS,
    FROM_ROLLOUTS,
    FROM_SHAPE,
    FROM_SOLUTIONS,
    FROM_TREE,
    FROM_TURNS,
    MARKS,
    WHY_NOT,
    maker,
)
from posttrain.recipe.sampler_checks import GIVES

Entry = dict[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef

# kind -> (what a reader calls it, its key in a recipe, how it stands there), in the order in which a step calls them
KINDS = {
    "prompt_variants": ("what is sampled from in place of the data's prompts", "prompt_variants", "one"),
    "sampler": ("which prompts a step draws, and how many rollouts each gets", "sampler", "one"),
    "shape": ("how a rollout goes on, and which rows it is", "rollout", "inner"),
    "replay": ("stored rollouts that a step trains on beside its fresh ones", "replay", "one"),
    "reward": ("reward of a row", "rewards", "list"),
    "group_reward": ("reward of a group", "group_rewards", "list"),
    "keep": ("filter of groups and rows", "keep", "one"),
    "advantage": ("advantage: the normaliser", "advantage", "one"),
    "factor": ("factor on advantages", "factors", "list"),
    "advantage_transform": ("change of advantages", "advantage_transforms", "list"),
    "credit_assignment": ("credit by turn or token", "credit_assignment", "one"),
    "select": ("selection of rows and tokens", "select", "list"),
    "loss": ("policy loss", "loss", "one"),
    "group_loss": ("policy loss over whole groups", "loss", "one"),
    "correction": ("correction for other samplers", "corrections", "list"),
    "kl": ("KL estimator", "kl", "one"),
    "regulariser": ("term added to the loss", "regularisers", "list"),
    "controller": ("what drives a number over the run", "controllers", "named"),
    "pair_loss": ("preference loss", "loss", "one"),
    "token_weight": ("weights of supervised tokens", "objective", "one"),
    "merge": ("merge method", "merge_method", "name"),
    "task": ("generator of problems", "data", "source"),
}

# Names of papers and of the field for what has a plainer name here.
OTHER_NAMES = {
    "action_aware_sft": "token_weight/action_aware",
    "asearcher_reward": "reward/qa.asearcher",
    "acre": "reward/reasoning.acre",
    "adhint_adv": "advantage/adhint",
    "apc": "reward/audits.persona",
    "batch_norm": "advantage/batch",
    "bleuberi_select": "reward/bleu.bleuberi",
    "cm2_checklist": "advantage/per_turn",
    "cm2_turn_score": "reward/audits.checklist",
    "cosine_length": "reward/length.cosine",
    "dare": "merge/dare_linear",
    "dart_step_entropy": "select/step_entropy",
    "decs_curriculum": "controller/redundancy",
    "direct_advantage_po": "loss/direct_advantage",
    "dler_merge": "merge/update_selective",
    "dr_grpo_adv": "advantage/group",
    "dr_mas": "advantage/agent",
    "duration_aware": "factor/duration",
    "duration_weights": "factor/duration",
    "egpo": "preset/online_ipo",
    "format_reward": "reward/format.structure",
    "four_habits": "reward/countdown.expression",
    "grpo_norm": "advantage/group",
    "hybrid_reward": "group_reward/hybrid",
    "kl_estimators": "kl/k3",
    "linear_merge": "merge/linear",
    "loss_aggregation": "loss/clip",
    "math_verify": "reward/math.accuracy",
    "mle_partial_credit": "reward/code.milestones",
    "ngram_repetition": "reward/length.ngram_repetition",
    "on_policy_distill": "kl/k1_straight_through",
    "otc_reward": "group_reward/optimal_tool_calls",
    "partial_credit": "reward/code.milestones",
    "passk_difficulty_classifier": "sampler/gdro",
    "proact_mc_critic": "advantage/mc_critic",
    "ram_merge": "merge/ram",
    "random_calculation": "reward/numeric.distance",
    "reinforce_pp_adv": "advantage/reinforce_pp",
    "repetition_penalty": "reward/length.ngram_repetition",
    "rloo_adv": "advantage/rloo",
    "rollout_gdro": "sampler/gdro",
    "rlvmr": "advantage/meta_reasoning",
    "scaling_inter": "controller/equal_stages",
    "scma": "reward/efficiency.segment_importance",
    "sft_completion_only": "token_weight/ce",
    "soft_overlong": "reward/length.soft_overlong",
    "spo_winrate": "reward/judge.win_rate",
    "thurstone_rank": "group_reward/thurstone",
    "toolrl_scale": "reward/tools.toolrl",
    "xrpo_allocation": "sampler/xrpo",
    "xrpo_allocator": "sampler/xrpo",
    "update_selective_merge": "merge/update_selective",
    "vl_dac": "advantage/step_gae",
}


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


def _preset(preset: presets.Preset) -> Entry:
    recipe: dict[str, Any] = {"stage": preset.stage, "algorithm": preset.name}
    return {
        "kind": "preset",
        "name": preset.name,
        "stage": preset.stage,
        "file": f"posttrain/recipe/presets/{preset.name}.yaml",
        "title": preset.title,
        "paper": preset.paper,
        "text": preset.purpose.strip(),
        "choices": preset.choices,
        "needs": _needs_of(preset),
        "conflicts": [],
        "unusable": "",
        "not_stated": preset.not_stated.strip(),
        "recipe": recipe | preset.example | ({"rewards": preset.rewards} if preset.rewards else {}),
    }


def _needs_of(preset: presets.Preset) -> list[str]:
    """What the components of a preset need besides the policy's log-probs, which shows its cost."""
    needs = {need for kind, name in components_of_preset(preset) for need in registry.index()[kind][name]["needs"]}
    return sorted(needs & (FROM_MODEL | {"groups", "several_updates"}))


def components_of_preset(preset: presets.Preset) -> Iterator[tuple[str, str]]:
    """(kind, name) of every component that a preset names, without a KL term whose coefficient stays 0."""
    for key, section in preset.choices.items():
        kinds = [kind for kind, (_, place, _) in KINDS.items() if place == key]
        items: list[Any] = section if isinstance(section, list) else [section]
        if key == "controllers" and isinstance(section, dict):
            items = list(section.values())
        if key == "rollout" and isinstance(section, dict):
            items = [section.get("shape")]
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


# Of `needs`: how a step or a merge treats a component, which is nothing that a recipe could have or lack.
_INTERNAL = (
    "rounds",
    "unequal",
    "fewer",
    "values",
    "row_loss",
    "group_kl",
    "every_row",
    "own_mean",
    "own_credit",
    "measured_kl",
    "base_optional",
    "by_entry",
    "draws",
)


def _component(kind: str, name: str, described: Entry) -> Entry:
    names = {"lam": "lambda"} if kind == "merge" else {}  # mergekit's word, which Python keeps for itself
    keys = {
        names.get(key, key): {"type": known[0], **({"default": known[1]} if len(known) > 1 else {})}
        for key, known in described["params"].items()
    }
    return {
        "kind": kind,
        "name": name,
        "stage": {"pair_loss": "dpo", "merge": "merge", "token_weight": "sft"}.get(kind, "rl"),
        "file": f"{described['module'].replace('.', '/')}.py",
        "title": _title(described["doc"]),
        "paper": described["paper"],
        "text": described["doc"],
        "keys": keys,
        "needs": [need for need in described["needs"] if need not in _INTERNAL],
        "conflicts": list(_conflicts(kind, name, described)),
        "unusable": "" if kind in registry.OWN_WORDS else _unusable(described["needs"]),
        "not_stated": described["note"],
        "presets": _users().get((kind, name), []),
        "recipe": _recipe(kind, name, keys, described["needs"]),
    }


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
    for need, sentence in _CONFLICTS.items():
        if need in described["needs"]:
            yield sentence


_CONFLICTS = {
    "groups": "rollout.group_size 1: it compares the completions of a prompt",
    "several_updates": "one update a step: it would do nothing",
    "rounds": "an `opponent`, which answers once a step",
    "unequal": "riskpo, `prompt_variants`, and `solutions` in groups",
    "adds_rows": "a critic, channels and `select`: stored rows bring their advantages alone",
    "replaces": "rollout.max_gen_batches above 1: groups that failed are gone before a stored row could join them",
    "values": "rollout.staleness and model.shard: it reads the policy's hidden states of prompts",
    "row_loss": "losses over groups",
    "equal_groups": "a `sampler` that divides rollouts unequally or leaves prompts out",
    "turn_ids": "rollouts of a single turn: it needs `tools` or an `environment`, or steps (`scoring.split`)",
    "edge_ids": "`scoring.split`: it needs real turns",
    "turn_states": "`scoring.split`: it needs real turns",
    "token_rewards": "only rewards that know no turns: it needs one marked @per_turn, or an `environment` that pays",
    "turn_scores": "only rewards that know no turns: it needs those that its keys name, marked @per_turn",
    "all_correct": "keep `mixed`, or `dynamic_sampling` by correctness: they drop the groups that it is about",
    "every_group": "keep without rollout.max_gen_batches above 1: it puts the step's groups together",
    "own_credit": "`factors`, `advantage_transforms`, `credit_assignment`, a KL in the reward: it reads no advantages",
    "multiplies": "a number of 0: it multiplies what the recipe has there",
    "measured_kl": "a `kl.coef` of 0 that stays 0: it follows the KL to the reference",
}


def _unusable(needs: list[str]) -> str:
    """Why no recipe can use it, "" if one can. Such functions are for callers with batches of their own."""
    known = FROM_ROLLOUTS | FROM_MODEL | FROM_COMPONENTS | FROM_TURNS | FROM_OPPONENT | FROM_HINTS | MARKS
    known = {*known, "mc_values", *FROM_SOLUTIONS, *FROM_SHAPE, *FROM_PARTS, *FROM_TREE}.union(*GIVES.values())
    missing = {WHY_NOT.get(need, need) for need in needs if need not in known}
    return f"stage rl has no {' and no '.join(sorted(missing))}" if missing else ""


def _recipe(kind: str, name: str, keys: Entry, needs: list[str]) -> dict[str, Any]:
    """The shortest recipe lines that choose a component and give it what it needs."""
    _, place, shape = KINDS[kind]
    if kind == "merge":
        return {place: name, **_inputs_of_merge(keys, needs)}
    if shape == "source":
        required = {key: _PATHS[name] for key, known in keys.items() if "default" not in known}
        params = {"levels": [0, 1], **required}
        return {"data": {"source": f"task:{name}", "size": 1000, "params": params}, **_BESIDE_TASK.get(name, {})}
    if shape == "name":
        return {place: name}
    section: dict[str, Any] = {"use": name, **(_KL.get(name, {"coef": 0.1}) if kind == "kl" else {})}
    section |= {key: known.get("default", _example(kind, name, key, known["type"])) for key, known in keys.items()}
    if "behavior_logp" in needs:
        section["behavior_model"] = "tiny"  # whichever model wrote the data
    shaped: dict[str, Any] = {
        place: {"one": section, "inner": {kind: section}, "list": [section], "named": {"kl.coef": section}}[shape]
    }
    if "mc_values" in needs:
        shaped = {"environment": {"use": "my_game.py:Game", "simulations": 1000}, **shaped}
    elif kind == "loss" and set(needs) & FROM_TURNS == {"turn_ids"}:
        shaped = {"scoring": {"split": "lines"}, **shaped}
    elif set(needs) & FROM_TURNS:
        shaped = {"tools": [{"use": "calculator"}], **shaped}
    if set(needs) & {"token_rewards", "turn_scores"}:
        shaped["rewards"] = [{"use": "math.accuracy"}, *_REWARDS_BY_TURN.get(name, [{"use": "turns.failed_calls"}])]
    if "bundle_size" in section:
        shaped["rollout"] = {"prompts_per_step": 6 * section["bundle_size"]}
    if "frozen_critic" in needs:
        shaped["critic"] = {"path": "runs/critic/final"}
    if set(needs) & FROM_HINTS:
        shaped = {"prompt_variants": {"use": "hint_on_failure"}, **shaped}
    if set(needs) & FROM_SHAPE:
        divided = "budgets" if "part_ids" in needs else "chunks"
        shaped = {"rollout": {"shape": {"use": divided if kind == "advantage" else "serial_exit"}}, **shaped}
    if set(needs) & FROM_TREE:
        shaped = {"rollout": {"group_size": 1, "shape": {"use": "mcts"}}, **shaped}
    if kind == "shape" and "shared_reward" in needs:
        shaped["advantage"] = "budget_relative" if "parts" in needs else "trajectory"
    if set(needs) & FROM_SOLUTIONS:
        shaped["solutions"] = {"column": "solution", **({"in_group": True} if "external" in needs else {})}
    if set(needs) & FROM_OPPONENT:
        shaped["opponent"] = {"ema": 0.01}
    if "bins" in needs:
        shaped = {"sampler": "gdro", **shaped}
    if "kl_threshold" in needs:
        shaped = {"sampler": "taco", "kl": {"coef": 0.01}, **shaped}
    if kind == "controller":
        shaped = {"kl": {"coef": 0.01}, **shaped}
    if "several_updates" in needs:
        shaped["batch"] = {"minibatches": 2}
    for need in needs:
        if need in FROM_COMPONENTS - {"advantages"} and (made_by := maker(need)):
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


_REWARDS_BY_TURN = {
    "meta_reasoning": [{"use": "turns.meta_tag", "weight": 0}, {"use": "turns.meta_reward", "weight": 0}],
}
_PATHS = {"asearcher": "path/of/documents"}
_BESIDE_TASK: dict[str, dict[str, Any]] = {  # the reward of a task's answers, and the tool that its world has
    "saturn": {"rewards": [{"use": "sat.assignment"}]},
    "ariadne": {"rewards": [{"use": "maze.path"}]},
    "countdown": {"rewards": [{"use": "countdown.expression"}]},
    "random_calculation": {"rewards": [{"use": "numeric.distance"}]},
    "searchgym": {"tools": [{"use": "search_world"}], "rewards": [{"use": "qa.search_r1"}]},
    "asearcher": {
        "tools": [{"use": "search", "params": {"folder": "path/of/documents"}}],
        "rewards": [{"use": "qa.asearcher"}],
    },
}
_KL = {"k1": {"coef": 0.1, "where": "reward"}}  # k1 has no useful gradient of its own


def _example(kind: str, name: str, key: str, annotation: str) -> Any:
    """A value for a required key: what a preset writes there, or one of its type."""
    for preset in map(presets.preset, presets.names()):
        sections: Any = preset.choices.get(KINDS[kind][1], {})
        if KINDS[kind][2] == "named" and isinstance(sections, dict):
            sections = list(sections.values())
        for section in sections if isinstance(sections, list) else [sections]:
            if isinstance(section, dict) and section.get("use") == name and key in section:
                return section[key]
    words: dict[str, Any] = {
        "int": 1,
        "float": 1.0,
        "bool": True,
        "str": "correct",
        "tuple": [1],
        "list": [1],
        "dict": {},
    }
    return next((value for word, value in words.items() if annotation.startswith(word)), 1)


def _rewards() -> list[Entry]:
    """The shipped rewards: `script.function`, read without being run."""
    found = []
    for script, path in sorted(known_files("rewards", [".py"]).items()):
        for function in _reward_functions(path):
            doc = ast.get_docstring(function) or ""
            found.append(
                {
                    "kind": "reward",
                    "name": f"{script}.{function.name}",
                    "stage": "rl",
                    "file": f"rewards/{path.name}",
                    "title": _title(doc),
                    "paper": "",
                    "text": doc,
                    "needs": [],
                    "conflicts": [],
                    "unusable": "",
                    "not_stated": "",
                    "keys": _keys(function),
                    "recipe": {"rewards": [{"use": f"{script}.{function.name}"}]},
                }
            )
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
