"""Checks of one stage that need its reward scripts to be described first. No torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import PosttrainError

if TYPE_CHECKING:
    from posttrain.recipe.tree import Path_
    from posttrain.verify.load import LoadedReward

Found = Iterator[tuple[str, str, str]]  # (key within the stage, problem, hint)
Values = Mapping[str, Any]


def find_problems(section: Values, rewards: Sequence[LoadedReward], base_dir: Path) -> Found:
    """Yield the problems of one stage. section: its resolved values; rewards: those of all its lists, in order."""
    if section.get("stage") == "rl":
        yield from _check_turns(section, rewards)
    yield from _check_correctness(section, rewards)
    yield from _check_window(section, base_dir)
    output = (section.get("run") or {}).get("output")
    if output and Path(output).exists() and not Path(output).is_dir():
        yield "run.output", f"{output} is a file, not a directory", "name another directory"


def _check_turns(section: Values, rewards: Sequence[LoadedReward]) -> Found:
    """Yield a problem if a component needs per-turn rewards and no reward returns them."""
    from posttrain import registry
    from posttrain.verify.completion_steps import problem

    names = [reward.name for reward in rewards if reward.per_turn]
    advantage = dict(section.get("advantage") or {})
    use = advantage.pop("use", "")
    needs = {*registry.load_index()["advantage"].get(use, {}).get("needs", ())}
    if any(
        "turn_ids" in registry.load_index()[kind].get(name, {}).get("needs", ())
        for kind, name in _chosen_components(section)
    ):
        needs.add("turn_ids")  # the component reads step boundaries but needs no per-step reward
    split, acts = section.get("scoring", {}).get("split"), bool(section.get("environment"))
    key, what, right = problem(names, use, advantage, needs, environment=acts, split=split)
    if what:
        yield key, what, right


def _chosen_components(section: Values) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of the components that may work per turn or step. A name may be a user's function."""
    for key, kinds in (
        ("loss", ("loss", "group_loss")),
        ("credit_assignment", ("credit_assignment",)),
        ("advantage_transforms", ("advantage_transform",)),
    ):
        value = section.get(key) or []
        for item in value if isinstance(value, list) else [value]:
            yield from ((kind, str(item.get("use"))) for kind in kinds)


def _check_correctness(section: Values, rewards: Sequence[LoadedReward]) -> Found:
    """Yield a problem for each list of rewards without a reward that decides whether an answer is correct."""
    from posttrain.recipe.reward_sections import Reward
    from posttrain.verify import correctness

    paths = list_reward_paths(section)
    for above, listed in itertools.groupby(zip(paths, rewards, strict=True), lambda item: item[0][:-1]):
        entries = list(listed)
        sections = [Reward.model_validate(_value_at(section, place)) for place, _ in entries]
        for key, what, right in correctness.problems(sections, [reward for _, reward in entries]):
            yield ".".join([*map(str, above), key]), what, right


def list_reward_paths(section: Values) -> list[Path_]:
    """Return the paths of all rewards of a stage, in the order of its schema."""
    holders: list[Path_] = [(), ("eval",), ("best_of",), ("search",), ("search", "evidence"), ("tree",)]
    lists: list[Path_] = [(*holder, "rewards") for holder in holders]
    return [(*path, number) for path in lists for number in range(len(_value_at(section, path) or ()))]


def _value_at(section: Values, path: Path_) -> Any:
    """Return the value at a path; None if a mapping on the way lacks the key."""
    value: Any = section
    for part in path:
        value = value[part] if isinstance(part, int) else (value or {}).get(part)
    return value


def _check_window(section: Values, base_dir: Path) -> Found:
    """Yield a problem if `max_new_tokens` leaves no room in the model's context window, where a local config gives its
    length.
    """
    key = "rollout" if "rollout" in section else "sampling"
    sampling = section.get(key) or {}
    new = sampling.get("max_new_tokens")
    if new is None or sampling.get("engine") == "stored":
        return
    window = read_window(str((section.get("model") or {}).get("path", "")), base_dir)
    if window is not None and new >= window:
        what = f"{new} new tokens leave no room for a prompt in the model's window of {window}"
        yield f"{key}.max_new_tokens", what, f"write less than {window}"


def read_window(path: str, base_dir: Path) -> int | None:
    """Return the number of positions of a local model; None if the config does not say or is not on this machine."""
    from posttrain.models import adapters
    from posttrain.models.model_paths import TINY_WINDOW, locate

    try:
        place = locate(path, base_dir)
        if place.kind == "adapter" and place.path is not None:
            place = locate(adapters.base_of(place.path), base_dir)
        if place.kind == "tiny":
            return TINY_WINDOW
        if place.kind != "directory" or place.path is None:
            return None
        config = json.loads((place.path / "config.json").read_text(encoding="utf-8"))
    except (PosttrainError, OSError, ValueError):
        return None  # reported when the model is checked
    text = config.get("text_config", config) if isinstance(config, dict) else None
    named = (text.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len")) if text else ()
    return next((count for count in named if isinstance(count, int) and count > 0), None)
