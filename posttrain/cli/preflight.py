"""Checks of everything that a recipe names, before a run directory is made and without torch.

Scripts of rewards, tools and environments are imported in a separate process (`imports.py`). Scripts of other functions
are parsed. Models, data, runs and templates must exist. A wrong name is thus checker in half a second, with its line. A
recipe with other errors is checked too, so that all errors are reported together.

`recipe validate` may run on another machine than the recipe will, so missing models, data and runs are notes there.
Scripts go with the recipe: a missing script is always an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.cli import component_checks, existence, imports
from posttrain.errors import DataError, PosttrainError, Problem, UserError
from posttrain.path_resolution import candidate_paths, split_function, suggest_file

if TYPE_CHECKING:
    from pydantic import BaseModel

    from posttrain.recipe.load import Loaded
    from posttrain.recipe.references import SectionRef
    from posttrain.recipe.section import Names
    from posttrain.recipe.stages import Stage
    from posttrain.recipe.tool_sections import Tool
    from posttrain.recipe.tree import Node, Path_
    from posttrain.verify.load import LoadedReward

    Model = TypeVar("Model", bound=BaseModel)

Values = Mapping[str, Any]


def load(
    recipe: str, overrides: Sequence[str] = (), *, stage: str | None = None, without: Sequence[str] = ()
) -> Loaded:
    """Load a recipe and check what it names. Raises UserError with all errors of both kinds.

    without: what the command does not use, so that it need not exist: kinds of names (`Names.kind`), or `gpu`.
    """
    return load_with_rewards(recipe, overrides, stage=stage, without=without)[0]


def load_with_rewards(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    stage: str | None = None,
    notes: list[Problem] | None = None,
    without: Sequence[str] = (),
) -> tuple[Loaded, list[str]]:
    """Load a recipe and check what it names, as `load` does; return (recipe, names of its rewards).

    notes: a list to which missing models, data and runs are added as notes instead of errors, and hub ids that look
    like misspelled directories. without: as in `load`.
    """
    from posttrain.recipe import load as loading
    from posttrain.recipe.stages import STAGES

    try:
        loaded = loading.load(recipe, overrides, stage=stage)
    except loading.WrongRecipe as wrong:
        with imports.Importer(wrong.base_dir, in_pipeline="stages" in wrong.draft.mapping) as importer:
            checker = _RecipeChecker(
                wrong.base_dir, _draft_marks(wrong.draft), importer, STAGES.get(stage or ""), without
            )
            checker.check_values(_to_plain(wrong.draft))
            _check_first_rows(_list_checkable_stages(_to_plain(wrong.draft), checker.schema), checker)
        mistakes = [*wrong.problems, *checker.list_problems(notes)]
        raise loading.RecipeError.of(sorted(mistakes, key=loading.sort_key)) from None
    return loaded, check(loaded, notes, without)


def check(loaded: Loaded, notes: list[Problem] | None = None, without: Sequence[str] = ()) -> list[str]:
    """Check what a loaded recipe names; return the names of its rewards. Raises UserError with all errors.

    notes, without: as in `load_with_rewards`.
    """
    from posttrain.recipe import references

    with imports.Importer(loaded.recipe.base_dir, in_pipeline="stages" in loaded.resolved) as importer:
        checker = _RecipeChecker(loaded.recipe.base_dir, _recipe_marks(loaded), importer, type(loaded.recipe), without)
        checker.check_values(loaded.resolved)
    if not checker.problems:
        _check_combinations(loaded, checker)
    stages = references.stages(loaded.resolved, checker.schema)
    _check_first_rows(((place, section) for place, _, section in stages), checker)
    if problems := checker.list_problems(notes):
        raise UserError.of(problems)
    return list(dict.fromkeys(reward.name for rewards in checker.rewards.values() for reward in rewards if reward))


@dataclass
class _RecipeChecker:
    """Checks of one recipe, and their findings.

    mark: maps a path in the recipe to its line. importer: imports scripts in another process. schema: for a recipe
    without `stage`. absent: models, data and runs that are not on this machine. doubts: hub ids that resemble a local
    directory. rewards: by the path of their stage, None for a reward that could not be loaded. tools: (path of
    their list, name) -> path.
    """

    base_dir: Path
    mark: Callable[[Path_], str]
    importer: imports.Importer
    schema: type[Stage] | None = None
    without: Sequence[str] = ()
    problems: list[Problem] = field(default_factory=list)
    absent: list[Problem] = field(default_factory=list)
    doubts: list[Problem] = field(default_factory=list)
    rewards: dict[Path_, list[LoadedReward | None]] = field(default_factory=dict)
    tools: dict[tuple[Path_, str], Path_] = field(default_factory=dict)

    def list_problems(self, notes: list[Problem] | None) -> list[Problem]:
        """Return the errors in line order. Missing things are errors, or added to `notes` if that is given."""
        if notes is None:
            return _remove_duplicates([*self.problems, *self.absent])
        notes += _remove_duplicates([*self.absent, *self.doubts])
        return _remove_duplicates(self.problems)

    def check_values(self, values: Values) -> None:
        """Check everything that a recipe's values name. The values need not fit the schema."""
        from posttrain.recipe import references

        for place, model, section in references.stages(values, self.schema):
            self.rewards[place] = []
            for part in references.parts(model, section, place):
                for path, names, name in references.names(part):
                    self._check_exists(path, names, name, part)
                self._check_gpu(part)
                self._check_trained_model(part)
                self._check_use(part, self.rewards[place])

    def collect_errors(self, path: Path_, into: list[Problem] | None = None, about: str = "") -> _ErrorCollector:
        """Return a context manager that collects errors at a path of the recipe. into: the list for them; about:
        message prefix.
        """
        key = ".".join(map(str, path))
        return _ErrorCollector(self.mark(path), f"{key}: {about}", self.problems if into is None else into)

    def _check_use(self, part: SectionRef, rewards: list[LoadedReward | None]) -> None:
        """Check what the `use` of a section names."""
        from posttrain.recipe.reward_sections import Reward
        from posttrain.recipe.section import ComponentSection
        from posttrain.recipe.tool_sections import Environment, Tool

        use = (*part.path, "use")
        if issubclass(part.model, ComponentSection):
            self._check_component(part, part.model)
        elif part.model is Reward:
            rewards.append(None)
            if reward := validate_leniently(Reward, part.values):
                with self.collect_errors(use):
                    described = self.importer.reward(reward.model_dump())
                    rewards[-1] = described.reward
                    for path, names, name in described.names:
                        self._check_exists((*part.path, *path), names, name, part)
        elif part.model is Tool and (tool := validate_leniently(Tool, part.values)):
            self._check_tool(part, tool)
        elif part.model is Environment and (environment := validate_leniently(Environment, part.values)):
            with self.collect_errors(use):
                self.importer.environment(environment.model_dump())

    def _check_component(self, part: SectionRef, model: type[Any]) -> None:
        """Check that a user's function exists and takes the given parameters."""
        from posttrain.recipe.functions import find_argument_errors, find_definition

        use = part.values.get("use")
        if not isinstance(use, str) or not split_function(use):
            return  # the schema checks registered names
        function = None
        with self.collect_errors((*part.path, "use")):
            function = find_definition(use, self.base_dir, model.kinds[0].replace("_", " "), self.importer.function)
        given = {name: value for name, value in part.values.items() if name not in model.model_fields}
        for name, error in find_argument_errors(function, given).items() if function else ():
            with self.collect_errors((*part.path, name)):
                raise error

    def _check_tool(self, part: SectionRef, tool: Tool) -> None:
        """Check a tool, and that no other tool of its stage has the same name."""
        from posttrain.tools.load import duplicate_name_error

        path = (*part.path, "use" if tool.use else "command")
        with self.collect_errors(path):
            name = self.importer.tool(tool.model_dump())
            before = self.tools.setdefault((part.path[:-1], name), path)
            if before != path:
                raise duplicate_name_error(name)

    def _check_exists(self, path: Path_, names: Names, name: str, part: SectionRef, about: str = "") -> None:
        """Check that a model, data, a run or a file exists.

        A missing file is an error, since files go with the recipe; other missing things are added to `absent`. about:
        message prefix for a thing that the recipe does not name itself (the base of an adapter).
        """
        from posttrain.recipe.data_sections import Source, source_form

        if names.kind in self.without:
            return
        source = validate_leniently(Source, part.values) if names.kind == "data" else None
        if names.kind == "data" and source_form(name) == "function":
            self._check_data_function(path, name, part)
            return
        with self.collect_errors(path):
            tried = candidate_paths(name.removeprefix(existence.ACCEPTED_PREFIX), self.base_dir)
            here = names.kind == "file" or name.startswith(("gym:", "task:")) or any(map(existence.path_exists, tried))
            base = ""
            with self.collect_errors(path, self.problems if here else self.absent, about):
                if names.kind == "model":
                    base = existence.check_model(name, self.base_dir)
                    if not about:
                        existence.check_adapter(name, self._non_default_values(part, "lora"), self.base_dir)
                elif names.kind == "data":
                    existence.check_data(name, self.base_dir, source)
                else:
                    existence.check_run(name, names, self.base_dir)
            self._check_base(path, names, name, part, base, tried, here)

    def _check_gpu(self, part: SectionRef) -> None:
        """Check that there is a GPU for what needs one."""
        from posttrain.recipe.sections import Model
        from posttrain.recipe.training_sections import Optim

        section = next(
            (name for name, kind in (("model", Model), ("optim", Optim)) if issubclass(part.model, kind)), ""
        )
        if section and not {"model", "gpu"} & {*self.without}:
            for key, error in existence.check_gpu_needs(section, part.values):
                with self.collect_errors((*part.path, key), self.absent):
                    raise error

    def _check_trained_model(self, part: SectionRef) -> None:
        """Check the modules of a model that get an adapter."""
        from posttrain.recipe.sections import Model

        if part.model is not Model or "model" in self.without:
            return
        lora, name = part.values.get("lora"), part.values.get("path")
        if isinstance(lora, Mapping) and isinstance(name, str) and not name.startswith("stage:"):
            with contextlib.suppress(PosttrainError, OSError):  # a missing model is reported by _check_exists
                existence.check_model(name, self.base_dir)
                with self.collect_errors((*part.path, "lora", "targets")):
                    existence.check_targets(name, lora.get("targets"), self.base_dir)

    def _non_default_values(self, part: SectionRef, key: str) -> dict[str, Any]:
        """Return the values of a subsection that are not defaults; empty if there is no such subsection."""
        from posttrain.recipe.tree import DEFAULT

        section, default = part.values.get(key), str(DEFAULT)
        items = section.items() if isinstance(section, Mapping) else ()
        return {name: value for name, value in items if self.mark((*part.path, key, name)) != default}

    def _check_base(
        self, path: Path_, names: Names, name: str, part: SectionRef, base: str, tried: list[Path], here: bool
    ) -> None:
        """Check the base of an adapter; note a hub id that resembles a local directory."""
        if base:
            self._check_exists(path, names, base, part, f"the base of the adapter {name}: ")
        elif (
            not here
            and names.kind in ("model", "data")
            and existence.could_be_hub_id(name)
            and (hint := suggest_file(name, tried))
        ):
            with self.collect_errors(path, self.doubts):
                raise UserError(f"`{name}` is read as a hub id: there is no such {names.what} here", hint=hint)

    def _check_data_function(self, path: Path_, use: str, part: SectionRef) -> None:
        """Check that a function that makes data exists and takes the given parameters."""
        from posttrain.recipe.functions import find_data_argument_errors, find_definition

        function = None
        with self.collect_errors(path):
            function = find_definition(use, self.base_dir, "data function", self.importer.function, DataError)
        params, size = part.values.get("params"), part.values.get("size")
        given = params if isinstance(params, Mapping) else {}
        if function and [argument.arg for argument in function.args.args[:2]] == ["level", "draw"]:
            from posttrain.data.tasks.make import check_levels

            with self.collect_errors((*part.path, "params")):
                check_levels(use, given)
        for name, error in find_data_argument_errors(function, given, size).items() if function else ():
            with self.collect_errors(path if name == "source" else (*part.path, "params", name)):
                raise error


def _remove_duplicates(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems in line order without duplicates: a stage of `rounds` is checked in every round but written
    once.
    """
    from posttrain.recipe.load import sort_key

    once: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        once.setdefault((problem.where, problem.what.partition(": ")[2]), problem)
    return sorted(once.values(), key=sort_key)


def validate_leniently(model: type[Model], values: Any) -> Model | None:
    """Validate a section without the keys that the schema rejects; return None if it is meaningless without them."""
    from pydantic import ValidationError

    if not isinstance(values, Mapping):
        return None
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        wrong = {str(problem["loc"][0]) if problem["loc"] else "" for problem in error.errors()}
    if wrong & {"", "use", "command", "params"}:
        return None
    try:
        return model.model_validate({key: value for key, value in values.items() if key not in wrong})
    except ValidationError:
        return None


def _check_combinations(loaded: Loaded, checker: _RecipeChecker) -> None:
    """Add the problems of each stage that can be checked only after its reward scripts are described."""
    from posttrain.recipe import references
    from posttrain.recipe.tree import format_path

    for place, _, section in references.stages(loaded.resolved, checker.schema):
        rewards = [reward for reward in checker.rewards[place] if reward]
        for key, what, right in component_checks.find_problems(section, rewards, checker.base_dir):
            path = (*place, *(int(part) if part.isdigit() else part for part in key.split(".")))
            mark = checker.mark(path) or str(loaded.path)
            checker.problems.append(Problem(mark, f"{format_path(path)}: {what}", hint=right))


_COLUMN_SECTIONS = ("data", "loss", "objective", "anchors", "eval")  # sections that decide which columns a stage reads


def _list_checkable_stages(draft: Values, verb: type[Stage] | None) -> Iterator[tuple[Path_, Values]]:
    """Yield (path, values) of the stages whose rows can be checked although other keys of the recipe are wrong."""
    from posttrain.recipe import references
    from posttrain.recipe.validate import resolve_valid_values

    for place, model, section in references.stages(draft, verb):
        if "data" in model.model_fields and (values := resolve_valid_values(section, model, _COLUMN_SECTIONS)):
            yield place, values


def _check_first_rows(stages: Iterable[tuple[Path_, Values]], checker: _RecipeChecker) -> None:
    """Check that the first rows of local files have the columns that their stage reads. stages: (path, resolved
    values).
    """
    from posttrain.cli import first_rows
    from posttrain.recipe.sections import Data

    for place, section in stages if "data" not in checker.without else ():
        if not (data := validate_leniently(Data, section.get("data"))):
            continue
        for key, check_rows in first_rows.list_checks(section, data, checker.base_dir, checker.rewards[place]):
            path = (*place, *key)
            try:
                for note in check_rows():
                    checker.doubts.append(Problem(checker.mark(path), f"{'.'.join(map(str, path))}: {note}"))
            except PosttrainError as error:
                for problem in error.problems:
                    row = f"{problem.where}: " if problem.where else ""
                    where, what = checker.mark(path), f"{'.'.join(map(str, path))}: {row}{problem.what}"
                    checker.problems.append(dataclasses.replace(problem, where=where, what=what))


def _to_plain(draft: Node) -> dict[str, Any]:
    from posttrain.recipe.tree import plain

    values: dict[str, Any] = plain(draft)
    return values


def _draft_marks(draft: Node) -> Callable[[Path_], str]:
    """Return a function from a path to its line, for a recipe that was read but is not valid."""
    from posttrain.recipe.tree import follow

    return lambda path: follow(draft, path)[0].origin.mark


def _recipe_marks(loaded: Loaded) -> Callable[[Path_], str]:
    """Return a function from a path to its line in a valid recipe, or to the line of the section around it."""
    from posttrain.recipe.tree import format_path

    def mark(path: Path_) -> str:
        above = (format_path(path[:depth]) for depth in range(len(path), 0, -1))
        return next((loaded.origins[key].mark for key in above if key in loaded.origins), "")

    return mark


class _ErrorCollector:
    """Context manager that turns errors into problems at the line `where`, with messages that begin with `head`."""

    def __init__(self, where: str, head: str, problems: list[Problem]) -> None:
        self.where, self.head, self.problems = where, head, problems

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, PosttrainError):
            for problem in error.problems:
                place = f"{problem.where}: " if problem.where else ""
                what = f"{self.head}{place}{problem.what}"
                self.problems.append(dataclasses.replace(problem, where=self.where, what=what))
        elif isinstance(error, OSError):
            self.problems.append(Problem(self.where, f"{self.head}{error.strerror or error}: {error.filename}"))
        return isinstance(error, PosttrainError | OSError)
