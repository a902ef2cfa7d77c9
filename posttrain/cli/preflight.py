"""Checks of everything that a recipe names, before a run directory is made and without torch.

Scripts of rewards, tools and environments are imported, in a process of their own (`imports.py`). Scripts of other
functions are parsed. Models, data, runs and
templates must exist. So a wrong name costs half a second, and its error has a line. A recipe with other mistakes is
checked too, so that all mistakes are told at once.

`recipe validate` may run on another machine than the recipe will, so there, missing models, data and runs are notes.
Scripts go with the recipe: a missing one is always an error.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.cli import imports
from posttrain.errors import DataError, PosttrainError, Problem, UserError
from posttrain.places import ROW_FILES, candidates, find, meant, split_function

if TYPE_CHECKING:
    from pydantic import BaseModel

    from posttrain.recipe.load import Loaded
    from posttrain.recipe.named import Part
    from posttrain.recipe.rollout_sections import Tool
    from posttrain.recipe.section import Names
    from posttrain.recipe.stages import Stage
    from posttrain.recipe.tree import Node, Path_
    from posttrain.verify.load import LoadedReward

    Model = TypeVar("Model", bound=BaseModel)

ACCEPTED = "accepted:"
Values = Mapping[str, Any]


def load(
    recipe: str, overrides: Sequence[str] = (), *, stage: str | None = None, without: Sequence[str] = ()
) -> Loaded:
    """Load a recipe and check what it names. Raises UserError with all mistakes of both kinds.

    without: kinds of names (`Names.kind`) that the command does not read, so that they need not exist.
    """
    return look(recipe, overrides, stage=stage, without=without)[0]


def look(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    stage: str | None = None,
    elsewhere: list[Problem] | None = None,
    without: Sequence[str] = (),
) -> tuple[Loaded, list[str]]:
    """`load`, which also returns the names of the rewards.

    elsewhere: a list that takes missing models, data and runs, which are mistakes otherwise, and hub ids that look like
    misspelt folders. without: as in `load`.
    """
    from posttrain.recipe import load as loading
    from posttrain.recipe.stages import STAGES

    try:
        loaded = loading.load(recipe, overrides, stage=stage)
    except loading.WrongRecipe as wrong:
        with imports.Importer(wrong.base_dir) as importer:
            found = _Look(wrong.base_dir, _marks_in(wrong.draft), importer, STAGES.get(stage or ""), without)
            found.at(_plain(wrong.draft))
        mistakes = [*wrong.problems, *found.told(elsewhere)]
        raise loading.RecipeError.of(sorted(mistakes, key=loading.in_order)) from None
    return loaded, check(loaded, elsewhere, without)


def check(loaded: Loaded, elsewhere: list[Problem] | None = None, without: Sequence[str] = ()) -> list[str]:
    """Check what a loaded recipe names, and return the names of its rewards. Raises UserError with all mistakes.

    elsewhere, without: as in `look`.
    """
    with imports.Importer(loaded.recipe.base_dir) as importer:
        found = _Look(loaded.recipe.base_dir, _marks_of(loaded), importer, type(loaded.recipe), without)
        found.at(loaded.resolved)
    if not found.problems:
        _check_turns(loaded, found)
    if "data" not in without and not found.problems:
        _check_first_rows(loaded, found)
    if told := found.told(elsewhere):
        raise UserError.of(told)
    return list(dict.fromkeys(reward.name for rewards in found.rewards.values() for reward in rewards))


@dataclass
class _Look:
    """The checks, and what they found.

    mark: gives the line of a path in the recipe. importer: imports scripts in another process. verb: the schema, for a
    recipe that does not say its `stage`. absent:
    models, data and runs that are not on this machine. doubts: hub ids that resemble a folder on this machine. rewards:
    by the path of their stage. tools: (path of their list, name) -> path.
    """

    base_dir: Path
    mark: Callable[[Path_], str]
    importer: imports.Importer
    verb: type[Stage] | None = None
    without: Sequence[str] = ()
    problems: list[Problem] = field(default_factory=list)
    absent: list[Problem] = field(default_factory=list)
    doubts: list[Problem] = field(default_factory=list)
    rewards: dict[Path_, list[LoadedReward]] = field(default_factory=dict)
    tools: dict[tuple[Path_, str], Path_] = field(default_factory=dict)

    def told(self, elsewhere: list[Problem] | None) -> list[Problem]:
        """The mistakes, by line. Absent things are mistakes too, unless `elsewhere` takes them."""
        if elsewhere is None:
            return _once([*self.problems, *self.absent])
        elsewhere += _once([*self.absent, *self.doubts])
        return _once(self.problems)

    def at(self, values: Values) -> None:
        """Check everything that a recipe's values name. The values need not fit the schema."""
        from posttrain.recipe import named

        for place, model, section in named.stages(values, self.verb):
            self.rewards[place] = []
            for part in named.parts(model, section, place):
                for path, names, name in named.names(part):
                    self._named(path, names, name, part)
                self._part(part, self.rewards[place])

    def collected(self, path: Path_, into: list[Problem] | None = None, about: str = "") -> _Collected:
        key = ".".join(map(str, path))
        return _Collected(self.mark(path), f"{key}: {about}", self.problems if into is None else into)

    def _part(self, part: Part, rewards: list[LoadedReward]) -> None:
        """Check what the `use` of a section names."""
        from posttrain.recipe.reward_sections import Reward
        from posttrain.recipe.rollout_sections import Environment, Tool
        from posttrain.recipe.section import ComponentSection

        use = (*part.path, "use")
        if issubclass(part.model, ComponentSection):
            self._component(part, part.model)
        elif part.model is Reward and (reward := as_far_as_right(Reward, part.values)):
            with self.collected(use):
                described = self.importer.reward(reward.model_dump())
                rewards.append(described.reward)
                for path, names, name in described.names:
                    self._named((*part.path, *path), names, name, part)
        elif part.model is Tool and (tool := as_far_as_right(Tool, part.values)):
            self._tool(part, tool)
        elif part.model is Environment and (environment := as_far_as_right(Environment, part.values)):
            with self.collected(use):
                self.importer.environment(environment.model_dump())

    def _component(self, part: Part, model: type[Any]) -> None:
        from posttrain.recipe.functions import strange_arguments, written

        use = part.values.get("use")
        if not isinstance(use, str) or not split_function(use):
            return  # registered ones are looked up by the schema
        function = None
        with self.collected((*part.path, "use")):
            function = written(use, self.base_dir, model.kinds[0].replace("_", " "), self.importer.function)
        given = [name for name in part.values if name not in model.model_fields]
        for name, error in strange_arguments(function, given).items() if function else ():
            with self.collected((*part.path, name)):
                raise error

    def _tool(self, part: Part, tool: Tool) -> None:
        """Check a tool, and that no other tool of its stage has its name."""
        from posttrain.tools.load import same_name

        path = (*part.path, "use" if tool.use else "command")
        with self.collected(path):
            name = self.importer.tool(tool.model_dump())
            before = self.tools.setdefault((part.path[:-1], name), path)
            if before != path:
                raise same_name(name)

    def _named(self, path: Path_, names: Names, name: str, part: Part, about: str = "") -> None:
        """Check that a model, data, a run or a file exists.

        A missing file is a mistake, since files go with the recipe; other things are `absent`. about: begins the error,
        where the recipe does not name the thing itself (the base of an adapter).
        """
        from posttrain.data.sources import refuse_script

        if names.kind in self.without:
            return
        if names.kind == "data" and name.endswith(".py"):
            with self.collected(path):
                refuse_script(name)
            return
        if name.startswith("gym:"):
            with self.collected(path):
                _find_task(name.removeprefix("gym:"), part.values.get("params"))
            return
        if names.kind == "data" and split_function(name) and not name.startswith(ACCEPTED):
            self._data_function(path, name, part)
            return
        places = candidates(name.removeprefix(ACCEPTED), self.base_dir)
        here = names.kind == "file" or any(map(_is_there, places))
        base = ""
        with self.collected(path, self.problems if here else self.absent, about):
            if names.kind == "model":
                base = _find_model(name, self.base_dir)
            elif names.kind == "data":
                _find_data(name, self.base_dir)
            else:
                _find_run(name, names, self.base_dir)
        if base:
            self._named(path, names, base, part, f"the base of the adapter {name}: ")
        elif (
            not here and names.kind in ("model", "data") and _may_be_of_the_hub(name) and (hint := meant(name, places))
        ):
            with self.collected(path, self.doubts):
                raise UserError(f"`{name}` is taken for a hub id: there is no such {names.what} here", hint=hint)

    def _data_function(self, path: Path_, use: str, part: Part) -> None:
        from posttrain.recipe.functions import strange_arguments, written

        function = None
        with self.collected(path):
            function = written(use, self.base_dir, "data function", self.importer.function, DataError)
        params = part.values.get("params")
        given = list(params) if isinstance(params, Mapping) else []
        for name, error in strange_arguments(function, given, of_data=True).items() if function else ():
            with self.collected((*part.path, "params", name)):
                raise error


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """The problems by line, each once: a stage of `rounds` is checked in every round, but was written once."""
    from posttrain.recipe.load import in_order

    once = {(problem.where, problem.what.partition(": ")[2]): problem for problem in reversed(problems)}
    return sorted(once.values(), key=in_order)


def _is_there(path: Path) -> bool:
    """Whether a path exists. True as well if we may not look: reading it will raise the right error."""
    try:
        return path.exists()
    except OSError:
        return True


def _find_model(name: str, base_dir: Path) -> str:
    """The base that an adapter names, "" for other models. Raises ModelError if there is no such model."""
    from posttrain.models import adapters
    from posttrain.models.places import locate

    place = locate(name, base_dir)
    return adapters.base_of(place.path) if place.kind == "adapter" and place.path is not None else ""


def _may_be_of_the_hub(name: str) -> bool:
    from posttrain import hub

    return name != "tiny" and not hub.only_a_path(name, (".gguf", *ROW_FILES))


def _find_data(name: str, base_dir: Path) -> None:
    from posttrain import hub
    from posttrain.recipe.section import EVALUATION

    if name.startswith(ACCEPTED):
        _find_run(name.removeprefix(ACCEPTED), EVALUATION, base_dir)
    elif hub.only_a_path(name, ROW_FILES):
        find(name, base_dir, "data", DataError)


def _find_task(name: str, params: Any) -> None:
    from posttrain.data import gym

    if importlib.util.find_spec("reasoning_gym"):  # a package that is missing is told by cli/packages.py
        gym.check(name, params if isinstance(params, Mapping) else {})


def _find_run(name: str, names: Names, base_dir: Path) -> None:
    place = find(name, base_dir, names.what, DataError)
    if names.holds and place.is_dir() and not any((place / file).is_file() for file in names.holds):
        files = sorted(path.name for path in place.iterdir())
        raise DataError(
            f"{place} holds no {names.what}: {names.holds[0]} is missing",
            allowed=f"it holds: {', '.join(files[:12]) or 'nothing'}",
        )


def as_far_as_right(model: type[Model], values: Any) -> Model | None:
    """The section without the keys that the schema refuses; None if it means nothing without them."""
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
    """Components that read rewards by turn need a reward that gives them."""
    from posttrain import registry
    from posttrain.recipe import named
    from posttrain.recipe.tree import dotted
    from posttrain.verify.parts import problem

    for place, _, section in named.stages(loaded.resolved, found.verb):
        if section.get("stage") != "rl":
            continue
        names = [reward.name for reward in found.rewards[place] if reward.per_turn]
        advantage = dict(section.get("advantage") or {})
        use = advantage.pop("use", "")
        needs = {*registry.index()["advantage"].get(use, {}).get("needs", ())}
        if any("turn_ids" in registry.index()[kind].get(name, {}).get("needs", ()) for kind, name in _chosen(section)):
            needs.add("turn_ids")  # steps are read without a reward of them
        split, acts = section.get("scoring", {}).get("split"), bool(section.get("environment"))
        key, what, right = problem(names, use, advantage, needs, environment=acts, split=split)
        if what:
            path = (*place, *(int(part) if part.isdigit() else part for part in key.split(".")))
            mark = found.mark(path) or str(loaded.path)
            found.problems.append(Problem(mark, f"{dotted(path)}: {what}", hint=right))


def _check_first_rows(loaded: Loaded, found: _Look) -> None:
    """The first rows of local files must have the columns that their stage reads."""
    from posttrain.cli import first_rows
    from posttrain.recipe import named
    from posttrain.recipe.sections import Data

    for place, model, section in named.stages(loaded.resolved, found.verb):
        if "data" not in model.model_fields or not (data := as_far_as_right(Data, section.get("data"))):
            continue
        for key, look in first_rows.checks(section, data, found.base_dir, found.rewards[place]):
            path = (*place, *key)
            try:
                for note in look():
                    found.doubts.append(Problem(found.mark(path), f"{'.'.join(map(str, path))}: {note}"))
            except PosttrainError as error:
                for told in error.problems:
                    where, what = found.mark(path), f"{'.'.join(map(str, path))}: {told.where}: {told.what}"
                    found.problems.append(dataclasses.replace(told, where=where, what=what))


def _chosen(section: Values) -> Iterator[tuple[str, str]]:
    """(kind, name) of the components that may work by turn or step. Names may be functions of the user's."""
    for key, kinds in (("loss", ("loss", "group_loss")), ("spread", ("spread",)), ("bonuses", ("bonus",))):
        value = section.get(key) or []
        for item in value if isinstance(value, list) else [value]:
            yield from ((kind, str(item.get("use"))) for kind in kinds)


def _plain(draft: Node) -> dict[str, Any]:
    from posttrain.recipe.tree import plain

    values: dict[str, Any] = plain(draft)
    return values


def _marks_in(draft: Node) -> Callable[[Path_], str]:
    """path -> its line, in a recipe that was read but is not valid."""
    from posttrain.recipe.tree import follow

    return lambda path: follow(draft, path)[0].origin.mark


def _marks_of(loaded: Loaded) -> Callable[[Path_], str]:
    """path -> its line in a valid recipe, or that of the section around it."""
    from posttrain.recipe.tree import dotted

    def mark(path: Path_) -> str:
        above = (dotted(path[:depth]) for depth in range(len(path), 0, -1))
        return next((loaded.origins[key].mark for key in above if key in loaded.origins), "")

    return mark


class _Collected:
    """A context manager that turns errors into problems at the line `where`; `head` begins their messages."""

    def __init__(self, where: str, head: str, problems: list[Problem]) -> None:
        self.where, self.head, self.problems = where, head, problems

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, PosttrainError):
            for problem in error.problems:
                told = dataclasses.replace(problem, where=self.where, what=f"{self.head}{problem.what}")
                self.problems.append(told)
        elif isinstance(error, OSError):
            self.problems.append(Problem(self.where, f"{self.head}{error.strerror or error}: {error.filename}"))
        return isinstance(error, PosttrainError | OSError)
