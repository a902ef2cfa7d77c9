"""What a recipe names and can be looked at without torch: scripts of rewards, tools and environments are imported, data
files must exist.

Called before a run directory is made, so that a wrong name costs half a second and is told with its line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from posttrain.errors import DataError, PosttrainError, Problem, UserError
from posttrain.places import find, split_function

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded
    from posttrain.verify.load import LoadedReward

FILES = (".jsonl", ".json", ".csv", ".parquet")


def check(loaded: Loaded) -> list[str]:
    """The names of the rewards. Raises UserError with everything that is missing, each with its line."""
    from posttrain.recipe.load import in_order
    from posttrain.recipe.sections import Environment, Reward, Tool
    from posttrain.tools.load import environment_class, load_tool, load_tools
    from posttrain.verify.load import load_reward

    base_dir = loaded.recipe.base_dir
    names: list[str] = []
    problems: list[Problem] = []
    for prefix, section in _stages(loaded.resolved):
        rewards: list[LoadedReward] = []
        for place in ("", "best_of.", "search."):
            holder = (section.get(place.rstrip(".")) or {}) if place else section
            for number, values in enumerate(holder.get("rewards", [])):
                with _Collected(loaded, f"{prefix}{place}rewards.{number}.use", problems):
                    rewards.append(load_reward(Reward(**values), base_dir))
                    names.append(rewards[-1].name)
        found = len(problems)
        for number, values in enumerate(tools := section.get("tools") or []):
            with _Collected(loaded, f"{prefix}tools.{number}.{'use' if values.get('use') else 'command'}", problems):
                load_tool(Tool(**values), base_dir)
        if tools and len(problems) == found:
            with _Collected(loaded, f"{prefix}tools.0.{'use' if tools[0].get('use') else 'command'}", problems):
                load_tools([Tool(**values) for values in tools], base_dir)
        if section.get("environment"):
            with _Collected(loaded, f"{prefix}environment.use", problems):
                environment_class(Environment(**section["environment"]), base_dir)
        if section.get("stage") == "rl" and not problems:
            _check_turns(loaded, prefix, section, [r.name for r in rewards if r.per_turn], problems)
        for key, source in _sources(section.get("data", {})):
            with _Collected(loaded, f"{prefix}data.{key}", problems):
                _find_source(source, loaded)
    if problems:
        # A stage of rounds stands in each of them; what is wrong with it was written once.
        once = {(problem.where, problem.what.partition(": ")[2]): problem for problem in reversed(problems)}
        raise UserError.of(sorted(once.values(), key=in_order))
    return list(dict.fromkeys(names))


def _check_turns(
    loaded: Loaded, prefix: str, section: dict[str, Any], names: list[str], problems: list[Problem]
) -> None:
    """Rewards by turn must be there for what reads them."""
    from posttrain import registry
    from posttrain.verify.parts import problem

    advantage = dict(section.get("advantage") or {})
    use = advantage.pop("use", "")
    needs = {*registry.index()["advantage"].get(use, {}).get("needs", ())}
    if any("turn_ids" in registry.index()[kind].get(name, {}).get("needs", ()) for kind, name in _chosen(section)):
        needs.add("turn_ids")  # steps are read without a reward of them
    split, acts = section.get("scoring", {}).get("split"), bool(section.get("environment"))
    key, what, right = problem(names, use, advantage, needs, environment=acts, split=split)
    if what:
        mark = loaded.origins[f"{prefix}{key}"].mark if f"{prefix}{key}" in loaded.origins else str(loaded.path)
        problems.append(Problem(mark, f"{prefix}{key}: {what}", hint=right))


def _chosen(section: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(kind, name) of what credits or trains by turn or step, shipped or not."""
    for key, kinds in (("loss", ("loss", "group_loss")), ("spread", ("spread",)), ("bonuses", ("bonus",))):
        value = section.get(key) or []
        for item in value if isinstance(value, list) else [value]:
            yield from ((kind, str(item.get("use"))) for kind in kinds)


def _stages(resolved: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", resolved
    for number, stage in enumerate(resolved.get("stages", [])):
        yield f"stages.{number}.", stage


def _sources(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, source in [("source", data), *((f"mix.{i}.source", one) for i, one in enumerate(data.get("mix") or []))]:
        if source.get("source"):
            yield key, source["source"]


def _find_source(source: str, loaded: Loaded) -> None:
    """A file or a function's script must exist; hub ids, gym tasks and a stage's files cannot be looked up here."""
    file = (split_function(source) or (source,))[0]
    is_file = file.endswith(".py") if file != source else file.endswith(FILES)
    if is_file and not source.startswith("stage:"):
        find(file, loaded.recipe.base_dir, "data", DataError)


class _Collected:
    """Errors inside `with` become problems that stand at the line of a key."""

    def __init__(self, loaded: Loaded, key: str, problems: list[Problem]) -> None:
        self.where, self.key, self.problems = loaded.origins[key].mark, key, problems

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, PosttrainError):
            return False
        for problem in error.problems:
            told = dataclasses.replace(problem, where=self.where, what=f"{self.key}: {problem.what}")
            self.problems.append(told)
        return True
