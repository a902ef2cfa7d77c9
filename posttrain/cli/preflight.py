"""What a recipe names and can be looked at without torch: scripts of rewards, tools and environments are imported,
those of other functions are read, data files and local models must exist.

Looked at before a run directory is made, so that a wrong name costs half a second and is told with its line; and also
where the recipe has other mistakes, so that all of them are told at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.cli.scripts import has_function, strange_arguments
from posttrain.errors import DataError, PosttrainError, Problem, UserError
from posttrain.places import find, split_function

if TYPE_CHECKING:
    from pydantic import BaseModel

    from posttrain.recipe.load import Loaded
    from posttrain.recipe.tree import Node
    from posttrain.verify.load import LoadedReward

    Model = TypeVar("Model", bound=BaseModel)

FILES = (".jsonl", ".json", ".csv", ".parquet")
Values = Mapping[str, Any]


def load(recipe: str, overrides: Sequence[str] = (), *, stage: str | None = None) -> Loaded:
    """`recipe.load.load`, and what the recipe names looked at. Raises UserError with the mistakes of both kinds."""
    from posttrain.recipe import load as loading

    try:
        loaded = loading.load(recipe, overrides, stage=stage)
    except loading.WrongRecipe as wrong:
        found = _Look(wrong.base_dir, _marks_in(wrong.draft))
        found.at(_plain(wrong.draft))
        raise loading.RecipeError.of(sorted([*wrong.problems, *found.told], key=loading.in_order)) from None
    check(loaded)
    return loaded


def check(loaded: Loaded) -> list[str]:
    """The names of the rewards. Raises UserError with everything that is missing, each with its line."""
    from posttrain.recipe.load import in_order

    found = _Look(loaded.recipe.base_dir, lambda key: loaded.origins[key].mark if key in loaded.origins else "")
    found.at(loaded.resolved)
    if not found.problems:
        _check_turns(loaded, found)
    if found.problems:
        raise UserError.of(sorted(found.told, key=in_order))
    return list(dict.fromkeys(reward.name for rewards in found.rewards.values() for reward in rewards))


@dataclass
class _Look:
    """What was found in a recipe's values. mark: the place of a dotted key. rewards: by the stage's prefix."""

    base_dir: Path
    mark: Callable[[str], str]
    problems: list[Problem] = field(default_factory=list)
    rewards: dict[str, list[LoadedReward]] = field(default_factory=dict)

    @property
    def told(self) -> list[Problem]:
        """The problems; a stage of rounds stands in each of them, and what is wrong with it was written once."""
        once = {(problem.where, problem.what.partition(": ")[2]): problem for problem in reversed(self.problems)}
        return list(once.values())

    def at(self, values: Values) -> None:
        """Look at everything that a recipe's values name, right or not."""
        from posttrain.models.places import locate

        for prefix, section in _stages(values):
            for key, name in _models(section):
                with self.collected(f"{prefix}{key}"):
                    locate(name, self.base_dir)
            self._rewards(prefix, section)
            self._tools(prefix, section)
            for key, use, params in _functions(section):
                self._function(f"{prefix}{key}", use, params)
            for key, source in _sources(section.get("data")):
                with self.collected(f"{prefix}data.{key}"):
                    _find_source(source, self.base_dir)

    def _function(self, key: str, use: str, params: Sequence[str]) -> None:
        function = None
        with self.collected(key):
            function = has_function(use, self.base_dir)
        for name, error in strange_arguments(function, params).items() if function else ():
            with self.collected(f"{key.removesuffix('use')}{name}"):
                raise error

    def collected(self, key: str) -> _Collected:
        return _Collected(self.mark(key), key, self.problems)

    def _rewards(self, prefix: str, section: Values) -> None:
        from posttrain.recipe.sections import Reward
        from posttrain.verify.load import load_reward

        found = self.rewards.setdefault(prefix, [])
        for place in ("", "best_of.", "search."):
            holder = section.get(place.rstrip(".")) if place else section
            for number, values in _entries(holder, "rewards"):
                reward = as_far_as_right(Reward, values)
                if reward is not None:
                    with self.collected(f"{prefix}{place}rewards.{number}.use"):
                        found.append(load_reward(reward, self.base_dir))

    def _tools(self, prefix: str, section: Values) -> None:
        from posttrain.recipe.sections import Environment, Tool
        from posttrain.tools.load import environment_class, load_tool, load_tools

        before = len(self.problems)
        tools: dict[str, Tool] = {}
        for number, values in _entries(section, "tools"):
            tool = as_far_as_right(Tool, values)
            if tool is not None:
                key = f"{prefix}tools.{number}.{'use' if tool.use else 'command'}"
                tools[key] = tool
                with self.collected(key):
                    load_tool(tool, self.base_dir)
        if tools and len(self.problems) == before:
            with self.collected(next(iter(tools))):
                load_tools(list(tools.values()), self.base_dir)
        environment = as_far_as_right(Environment, section.get("environment"))
        if environment is not None:
            with self.collected(f"{prefix}environment.use"):
                environment_class(environment, self.base_dir)


def as_far_as_right(model: type[Model], values: Any) -> Model | None:
    """A section without the keys that the schema refuses; None where nothing can be said without them."""
    from pydantic import ValidationError

    if not isinstance(values, Mapping):
        return None
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        wrong = {str(found["loc"][0]) if found["loc"] else "" for found in error.errors()}
    if wrong & {"", "use", "command", "params"}:
        return None
    try:
        return model.model_validate({key: value for key, value in values.items() if key not in wrong})
    except ValidationError:
        return None


def _check_turns(loaded: Loaded, found: _Look) -> None:
    """Rewards by turn must be there for what reads them."""
    from posttrain import registry
    from posttrain.verify.parts import problem

    for prefix, section in _stages(loaded.resolved):
        if section.get("stage") != "rl":
            continue
        names = [reward.name for reward in found.rewards[prefix] if reward.per_turn]
        advantage = dict(section.get("advantage") or {})
        use = advantage.pop("use", "")
        needs = {*registry.index()["advantage"].get(use, {}).get("needs", ())}
        if any("turn_ids" in registry.index()[kind].get(name, {}).get("needs", ()) for kind, name in _chosen(section)):
            needs.add("turn_ids")  # steps are read without a reward of them
        split, acts = section.get("scoring", {}).get("split"), bool(section.get("environment"))
        key, what, right = problem(names, use, advantage, needs, environment=acts, split=split)
        if what:
            mark = found.mark(f"{prefix}{key}") or str(loaded.path)
            found.problems.append(Problem(mark, f"{prefix}{key}: {what}", hint=right))


def _chosen(section: Values) -> Iterator[tuple[str, str]]:
    """(kind, name) of what credits or trains by turn or step, shipped or not."""
    for key, kinds in (("loss", ("loss", "group_loss")), ("spread", ("spread",)), ("bonuses", ("bonus",))):
        value = section.get(key) or []
        for item in value if isinstance(value, list) else [value]:
            yield from ((kind, str(item.get("use"))) for kind in kinds)


def _functions(section: Values) -> Iterator[tuple[str, str, list[str]]]:
    """(key, `file.py:function`, its arguments) of every component that is the user's own."""
    from posttrain.recipe.keys import components_of

    for key, model in components_of(section.get("stage")).items():
        value = section.get(key)
        listed = isinstance(value, list)
        for number, one in enumerate(value if isinstance(value, list) else [value]):
            use = one.get("use") if isinstance(one, Mapping) else one
            if isinstance(use, str) and split_function(use):
                place = f"{key}.{number}" if listed else key
                params = [name for name in one if name not in model.model_fields] if isinstance(one, Mapping) else []
                yield f"{place}.use" if isinstance(one, Mapping) else place, use, params


def _stages(values: Values) -> Iterator[tuple[str, Values]]:
    yield "", values
    yield from ((f"stages.{number}.", stage) for number, stage in _entries(values, "stages"))


def _entries(holder: Any, key: str) -> Iterator[tuple[int, Values]]:
    """The sections of a list, with their places in it."""
    listed = holder.get(key) if isinstance(holder, Mapping) else None
    for number, value in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(value, Mapping):
            yield number, value


def _models(section: Values) -> Iterator[tuple[str, str]]:
    """(key, name) of the models that a stage reads, but for those that a stage makes. Hub ids are taken as they are."""
    holders = [("model.path", section.get("model"), "path"), ("kl.reference", section.get("kl"), "reference")]
    holders += [("base_model", section, "base_model")]
    holders += [(f"models.{number}.model", one, "model") for number, one in _entries(section, "models")]
    for key, holder, name in holders:
        value = holder.get(name) if isinstance(holder, Mapping) else None
        if isinstance(value, str) and value and not value.startswith("stage:"):
            yield key, value


def _sources(data: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(data, Mapping):
        return
    for key, holder in [("source", data), *((f"mix.{i}.source", one) for i, one in _entries(data, "mix"))]:
        if isinstance(source := holder.get("source"), str) and source:
            yield key, source


def _find_source(source: str, base_dir: Path) -> None:
    """A file or a function's script must exist; hub ids, gym tasks and a stage's files cannot be looked up here."""
    if split_function(source):
        has_function(source, base_dir)
    elif source.endswith(FILES) and not source.startswith(("stage:", "gym:", "accepted:")):
        find(source, base_dir, "data", DataError)


def _plain(draft: Node) -> dict[str, Any]:
    from posttrain.recipe.tree import plain

    values: dict[str, Any] = plain(draft)
    return values


def _marks_in(draft: Node) -> Callable[[str], str]:
    """The place of a dotted key in a recipe that was only read."""
    from posttrain.recipe.tree import follow

    def mark(key: str) -> str:
        return follow(draft, [int(part) if part.isdigit() else part for part in key.split(".")])[0].origin.mark

    return mark


class _Collected:
    """Errors inside `with` become problems that stand at the line of a key."""

    def __init__(self, where: str, key: str, problems: list[Problem]) -> None:
        self.where, self.key, self.problems = where, key, problems

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, PosttrainError):
            return False
        for problem in error.problems:
            told = dataclasses.replace(problem, where=self.where, what=f"{self.key}: {problem.what}")
            self.problems.append(told)
        return True
