"""Conversion of rewards of other tools: registered names, functions of modules, scripts with another signature."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.recipe.foreign.draft import Draft, Leaf
from posttrain.recipe.foreign.source import Given


def _rewards(draft: Draft, given: Given, _: str) -> None:
    """Convert named rewards by the tool's table; `module.function` is a user's function."""
    names = given.value if isinstance(given.value, list) else [given.value]
    weights = draft.get(given.key.replace("reward_funcs", "reward_weights"), default=[])
    weights = weights if isinstance(weights, list) else [weights]
    for number, name in enumerate(names):
        reward = _reward(draft, given, str(name))
        weight = float(weights[number]) if number < len(weights) else 1.0
        name_key = {"name": name} if _is_used(draft, reward["use"]) else {}  # distinguishes two rewards of one function
        weight_key = {"weight": weight} if weight != 1.0 else {}
        _add_reward(draft, {**reward, **name_key, **weight_key}, f"{given.key}: {name}")


def _reward(draft: Draft, given: Given, name: str) -> dict[str, Any]:
    """Return the entry of a named reward: a function of the script, a name in the tool's table, or `module.function`.
    In a table, `keys` are the tool's keys of the parameters, and `params` their defaults."""
    if name in draft.foreign.functions:
        return _own_function(draft, given, name)
    known = draft.foreign.table.rewards.get(name)
    if known is not None and "left" in known:
        return _require_function(draft, given, name, str(known["left"]))
    if known is not None:
        if known.get("gold"):
            draft.set_default("data.columns.answer", known["gold"], f"what {name} reads")
        given_params = {param: draft.get(*keys) for param, keys in known.get("keys", {}).items()}
        params = known.get("params", {}) | {param: value for param, value in given_params.items() if value is not None}
        return {"use": known["use"], **({"params": params} if params else {})}
    if draft.foreign.table.name == "trl" and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith(".py"):
        return {"use": "reward_model", "params": {"path": name}}  # a reward model on the hub
    module, dot, function = name.rpartition(".")
    if not dot or "/" in name:
        why = (
            "a name that a plugin registers: write `use: FILE.py:NAME`"
            if draft.get("external_plugins")
            else "no reward of this name is known: write `use: FILE.py:NAME`"
        )
        return _require_function(draft, given, name, why)
    file = draft.foreign.path.parent / (module.replace(".", "/") + ".py")
    if file.is_file():
        place = os.path.relpath(file, draft.base_dir)
        return {"use": f"{place if place.startswith('..') else './' + place}:{function}"}
    return {"use": f"{module}:{function}"}


def _require_function(draft: Draft, given: Given, name: str, why: str) -> dict[str, Any]:
    """Return the entry of a reward that the user must still write. It names a missing function, so the recipe is
    invalid until the function exists. Leaving it out would silently make the run a different experiment."""
    draft.leave(Given(f"{given.key}: {name}", name, given.line), why)
    return {"use": f"./{draft.rewards_file or f'{draft.foreign.path.stem}_rewards.py'}:{name}"}


def _own_function(draft: Draft, given: Given, name: str) -> dict[str, Any]:
    """Convert a function that the script defines: it is copied to a reward script if it does not depend on the rest."""
    why = draft.foreign.functions[name].why
    if not why and draft.rewards_file is None:
        why = "it is a function of the script: with --output it is written to a reward script beside the recipe"
    if why:
        return _require_function(draft, given, name, why)
    draft.carried.append(name)
    return {"use": f"./{draft.rewards_file}:{name}"}


def _is_used(draft: Draft, use: str) -> bool:
    return any(
        entry["use"].value.rpartition(".")[2] == use.rpartition(".")[2] for entry in draft.values.get("rewards", [])
    )


def _add_reward(draft: Draft, reward: Mapping[str, Any], origin: str) -> None:
    entries = draft.values.setdefault("rewards", [])
    entries.append({key: Leaf(value, origin if key == "use" else "") for key, value in reward.items()})


_SWITCHES = {  # verl's switch of the reward model, off by default
    "reward_model.model.path": "reward_model.enable",
    "reward.reward_model.model_path": "reward.reward_model.enable",
}


def _reward_model(draft: Draft, given: Given, _: str) -> None:
    """Convert the path of a reward model, unless verl's switch disables it."""
    switch = _SWITCHES.get(given.key)
    if switch and draft.get(switch) is not True:
        draft.leave(given, f"{switch} is not true: verl does not ask it")
    elif draft.stage == "rl" and isinstance(given.value, str):
        _add_reward(draft, {"use": "reward_model", "params": {"path": given.value}}, draft.origin(given.key))
    elif draft.stage == "rl":
        draft.leave(
            given,
            "a reward model is a directory or a hub id: write `rewards: [{use: reward_model, params: {path: ...}}]`",
        )
    else:
        draft.leave(given, f"stage {draft.stage} has no rewards")


def _require_score(draft: Draft, given: Given, call: str) -> None:
    """Add a reward that the user must write, as a call of the tool's function: the recipe is invalid until then, even
    if it has a length penalty, too."""
    draft.leave(given, f"write `def score(completion, answer): return {call}` in the file of `rewards`")
    use = f"./{draft.rewards_file or f'{draft.foreign.path.stem}_rewards.py'}:score"
    _add_reward(draft, {"use": use}, draft.origin(given.key))


def _verl_reward(draft: Draft, given: Given, _: str) -> None:
    name = draft.get("custom_reward_function.name", "reward.custom_reward_function.name", default="compute_score")
    _require_score(draft, given, f'{name}("", completion, answer)')


def _verl_default_reward(draft: Draft, _given: Given, _: str) -> None:
    """Add verl's default reward. verl chooses the reward by the column data_source; for maths it compares the answer
    with a column. With a reward model or a user's function, verl uses nothing else."""
    others = ("custom_reward_function.path", "reward.custom_reward_function.path", *_SWITCHES.values())
    if draft.stage != "rl" or any(draft.foreign.given.get(key) and draft.foreign.given[key].value for key in others):
        return
    _add_reward(
        draft, {"use": "math.accuracy", "params": {"extract": ["boxed", "hash"]}}, "verl's reward of maths data"
    )
    draft.set_default("data.columns.answer", "reward_model.ground_truth", "what verl's rewards read")
    draft.note(
        "verl chooses a reward by the column data_source: math.accuracy is for maths answers, write another for others"
    )


def _overlong_buffer(draft: Draft, given: Given, _: str) -> None:
    """verl: convert the overlong penalty to `length.soft_overlong`."""
    section = given.key.removesuffix(".enable")
    above = section.rpartition(".")[0]
    buffer, factor = draft.get(f"{section}.len"), draft.get(f"{section}.penalty_factor", default=1.0)
    draft.get(f"{section}.log")
    longest = draft.get(f"{above}.max_resp_len", "data.max_response_length")
    if not buffer or not longest:
        draft.leave(given, "write `use: length.soft_overlong` with `params: {max_length: ..., buffer: ...}`")
        return
    params = {"max_length": int(longest), "buffer": int(buffer), "factor": float(factor)}
    _add_reward(draft, {"use": "length.soft_overlong", "params": params}, draft.origin(given.key))


def _openrlhf_reward(draft: Draft, given: Given, _: str) -> None:
    if str(given.value).endswith(".py"):
        _require_score(draft, given, 'reward_func([completion], [completion], [answer])["rewards"][0]')
    else:
        _require_score(draft, given, "...")


def _openrlhf_overlong(draft: Draft, given: Given, _: str) -> None:
    """OpenRLHF: convert the overlong penalty, which counts back from the longest completion."""
    params = {
        "max_length": int(draft.at("rollout.max_new_tokens")),
        "buffer": int(given.value),
        "factor": float(draft.get("reward.overlong_penalty_factor", default=1.0)),
    }
    _add_reward(draft, {"use": "length.soft_overlong", "params": params}, draft.origin(given.key))


TRANSFORMS: dict[str, Callable[[Draft, Given, str], None]] = {
    "openrlhf_overlong": _openrlhf_overlong,
    "openrlhf_reward": _openrlhf_reward,
    "overlong_buffer": _overlong_buffer,
    "reward_model": _reward_model,
    "rewards": _rewards,
    "verl_default_reward": _verl_default_reward,
    "verl_reward": _verl_reward,
}
