"""Loading of a recipe from a file and a command line: every value with its origin, all mistakes reported together.

Later wins: defaults <- preset (`algorithm:`) <- extended recipes <- the file <- command line.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from posttrain.errors import Problem, RecipeError, did_you_mean
from posttrain.path_resolution import ROW_FILES, check_file_name, check_not_special, known_files, suggest_file
from posttrain.recipe import keys, layers, pipeline, presets, requirements
from posttrain.recipe.foreign.source import detect_tool
from posttrain.recipe.foreign.words import replacement_hint
from posttrain.recipe.stages import STAGES, PipelineRecipe, Stage
from posttrain.recipe.tree import Node, Origin, format_path, from_plain, leaves, plain
from posttrain.recipe.validate import check, merge_preset, origins, resolve_values
from posttrain.recipe.yaml import Document, display_path, parse

S = TypeVar("S", bound=Stage)


@dataclass(frozen=True)
class Loaded:
    """A validated recipe. `resolved` is JSON-able and holds every value; `origins` maps dotted keys to their origin.
    `notes`: settings without effect and renamed keys."""

    recipe: Stage
    origins: dict[str, Origin]
    path: Path
    name: str
    text: str
    resolved: dict[str, Any]
    notes: tuple[Problem, ...] = ()

    def require(self, kind: type[S]) -> S:
        """Return the recipe as an instance of its stage class, e.g. `RlRecipe`. Raises RecipeError if it is for another
        stage."""
        if not isinstance(self.recipe, kind):
            raise RecipeError(
                f"this is a recipe for `posttrain {self.recipe.verb}`, not for `posttrain {kind.verb}`",
                where=display_path(self.path),
            )
        return self.recipe


class WrongRecipe(RecipeError):
    """Error of a recipe that could be read but is invalid. `draft`: its unvalidated values, for further checks of what
    they name. `base_dir`: the folder of the recipe."""

    draft: Node
    base_dir: Path


def locate(path_or_name: str, verb: str | None = None) -> Path:
    """Return the file of a recipe: a path, or the name of a shipped recipe (`rl/grpo_x` or, if unique, `grpo_x`). verb:
    the command that asks, for messages."""
    check_file_name(path_or_name)
    path = Path(path_or_name).expanduser()
    if path.is_file():
        _refuse_other_files(path)
        return path.resolve()
    if path.exists():
        check_not_special(path, "recipe", RecipeError)
        kind = "model" if _holds_model(path) else "folder"
        raise RecipeError(
            f"{path_or_name} is a {kind}, not a recipe",
            hint=_hint_for_model(path_or_name, verb) or _suggest_recipe_in(path),
        )
    shipped = known_files("recipes", [".yaml"])
    if path_or_name in shipped:
        return shipped[path_or_name].resolve()
    if re.match(r"[A-Za-z_][\w.]*=", path_or_name):
        hint = f"the recipe comes first: posttrain {verb or 'VERB'} RECIPE {path_or_name}"
        raise RecipeError(f"`{path_or_name}` is a value, and no recipe is named", hint=hint)
    raise RecipeError(
        f"no recipe `{path_or_name}`: it is neither a file nor the name of a shipped recipe",
        allowed=f"looked for {Path.cwd() / path}; `posttrain recipe list` shows the shipped ones",
        hint=_hint_for_model(path_or_name, verb) or _suggest_recipe(path_or_name, shipped),
    )


def _suggest_recipe(name: str, shipped: Mapping[str, Path]) -> str:
    """Return a hint for a missing recipe: a shipped recipe of exactly that name, else the nearest file, else the
    nearest shipped recipe."""
    stem, path = name.removesuffix(".yaml"), Path(name).expanduser()
    if stem in shipped:
        return f"without an ending it is a shipped recipe: {stem}"
    return (path.suffix and suggest_file(name, [path.absolute()])) or did_you_mean(stem, shipped, alike=0.75)


def _refuse_other_files(path: Path) -> None:
    """Raise RecipeError for a file of rows or a script in place of a recipe."""
    if path.suffix != ".json" and path.name.endswith(ROW_FILES):
        hint = f"a recipe says what to do with it: data.source={shlex.quote(str(path))}"
        raise RecipeError(f"{path} is a file of rows, not a recipe", hint=hint)
    if path.suffix == ".py":
        hint = f"a script of TRL becomes one: posttrain recipe import {shlex.quote(str(path))}"
        raise RecipeError(f"{path} is a Python script, not a recipe", hint=hint)


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _hint_for_model(name: str, verb: str | None) -> str:
    """Return the command for a model given in place of a recipe; "" if `name` is no model. A training run counts as its
    model for commands that evaluate one."""
    model = Path(name).expanduser()
    run = verb in ("eval", "harness") and (model / "final").is_dir()
    if not (
        name in ("tiny", "tiny-vision") or run or _holds_model(model) or (model.suffix == ".gguf" and model.is_file())
    ):
        return ""
    named = shlex.quote(name)
    hint = f"a recipe says what to do with it: posttrain {verb or 'eval'} RECIPE model.path={named}"
    return f"{hint}; benchmarks need none: posttrain eval {named} --harness TASKS" if verb == "eval" else hint


def _suggest_recipe_in(folder: Path) -> str:
    """Return a hint that names a recipe inside a folder, such as the recipe of a run."""
    names = sorted(path.name for path in folder.glob("*.yaml"))
    return f"name the file: {shlex.quote(str(folder / names[0]))}" if names else ""


def read_stage(path_or_name: str, verb: str | None = None) -> str:
    """Return the `stage` of a recipe or of a recipe it extends, or the stage implied by its keys; "" if neither is
    known.

    Nothing else is checked. verb: as in `locate`.
    """
    tree = layers.read_chain(locate(path_or_name, verb)).tree.mapping
    written = str(tree["stage"].value) if "stage" in tree else ""
    return written or ("pipeline" if "stages" in tree else "merge" if "merge_method" in tree else "")


def load(path_or_name: str, overrides: Sequence[str] = (), *, stage: str | None = None) -> Loaded:
    """Read, merge and validate a recipe. `stage`: the command that asks for it (`sft`, `rl`, `run`, ...).

    Raises RecipeError with all problems; WrongRecipe if the recipe could be read. Paths in the recipe are looked up in
    the folder of the loaded file.
    """
    if whole := _join_split_path(path_or_name, overrides):
        what = f"no recipe `{path_or_name}`: the path has blanks, at which the shell splits it"
        raise RecipeError(what, hint=f"write it in quotes: {shlex.quote(whole)}")
    path = locate(path_or_name, stage)
    document = layers.read_chain(path)
    problems = document.problems
    tree = layers.apply(document.tree, overrides, problems)
    model = _stage_of(tree, stage, display_path(path), problems)
    return _finish(tree, model, document, problems, path)


def _join_split_path(first: str, others: Sequence[str]) -> str:
    """Return the path of an existing file that the shell has split at its blanks into `first` and the first of
    `others`; "" if there is none."""
    if os.path.exists(os.path.expanduser(first)):  # os.path: False, not an error, for a name of any length
        return ""
    wholes = (" ".join([first, *others[: n + 1]]) for n in range(len(others)))
    return next((whole for whole in wholes if os.path.isfile(os.path.expanduser(whole))), "")


def locate_file(path: Path) -> Path:
    """Return the path of another tool's file. Raises RecipeError if it does not exist."""
    check_file_name(str(path))
    if path.is_dir():
        raise RecipeError(f"{path} is a folder, not a file")
    if not path.exists():
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*")] if path.parent.is_dir() else [])
        raise RecipeError(f"file not found: {path}", hint=near)
    check_not_special(path, "file", RecipeError)
    return path


def load_text(text: str, name: str, base_dir: Path) -> Loaded:
    """Validate a recipe given as text; `name` stands for its file in messages, `base_dir` is its folder."""
    document = parse(text, name)
    document.tree = layers.rename_old_keys(document.tree, document.notes)
    model = _stage_of(document.tree, None, name, document.problems)
    return _finish(document.tree, model, document, document.problems, base_dir / Path(name).name)


def load_dict(values: dict[str, Any], *, base_dir: Path, where: str, overrides: Sequence[str] = ()) -> Loaded:
    """Validate a recipe built in code; `where` stands for the file in messages. The stage is values["stage"].

    A pipeline's entry may contain `name`, which becomes the recipe's name.
    """
    given = {key: value for key, value in values.items() if key != "name"}
    problems: list[Problem] = []
    notes: list[Problem] = []
    written = layers.rename_old_keys(from_plain(given, Origin("file", where)), notes)
    tree = layers.apply(written, overrides, problems)
    model = _stage_of(tree, None, where, problems)
    document = Document("", tree, problems, set(), notes)
    return _finish(tree, model, document, problems, base_dir / str(values.get("name", where)))


def _stage_of(tree: Node, verb: str | None, where: str, problems: list[Problem]) -> type[Stage]:
    """Return the schema of a recipe. Raises immediately for an unknown, missing or different stage: nothing can be
    validated."""
    wanted = STAGES.get(verb) if verb else None
    node = tree.mapping.get("stage")
    if node is None:
        found = PipelineRecipe if "stages" in tree.mapping and verb in (None, "run") else wanted
        if found is None and "merge_method" in tree.mapping:
            found = STAGES["merge"]  # mergekit's files have no stage
        if found is None:
            raise RecipeError.of([_missing_stage_problem(tree, where), *_foreign_key_problems(tree), *problems])
        return found
    found = keys.BY_NAME.get(str(node.value))
    if found is None:
        allowed = f"allowed: {', '.join(keys.BY_NAME)}"
        what = f"stage: unknown stage `{node.value}`"
        problem = Problem(node.origin.mark, what, allowed, _suggest_stage(str(node.value)))
        raise RecipeError.of([problem, *problems])
    if wanted and found is not wanted:
        problem = Problem(
            node.origin.mark,
            f"stage: this is a recipe for `posttrain {found.verb}`, not for `posttrain {wanted.verb}`",
            hint=f"posttrain {found.verb} {shlex.quote(where)}",
        )
        raise RecipeError.of([problem, *problems])
    return found


def _suggest_stage(name: str) -> str:
    """Return a hint for an unknown stage: the stage of the preset of that name, else the nearest stage."""
    algorithm = name.lower().replace("-", "_")
    if algorithm in presets.names():
        stage = presets.preset(algorithm).stage
        return f"it is an algorithm: write `stage: {stage}` and `algorithm: {algorithm}`"
    return did_you_mean(name, keys.BY_NAME)


def _missing_stage_problem(tree: Node, where: str) -> Problem:
    """Return the problem of a recipe without a stage, with the stages that have all of its keys, if any."""
    allowed = f"allowed: {', '.join(keys.BY_NAME)}"
    if not tree.mapping:
        return Problem(where, "the recipe is empty: it has no key", allowed, "`posttrain recipe list` shows examples")
    able = set.intersection(*(set(_stages_with(key)) for key in tree.mapping))
    some = [name for name in keys.BY_NAME if name in able]
    hint = f"its keys are those of {' or '.join(some)}: write e.g. `stage: {some[0]}`" if some else ""
    if not some and (table := detect_tool([format_path(path) for path, _ in leaves(plain(tree))], Path(where))):
        hint = f"if it is a file of {table.tool}: posttrain recipe import {shlex.quote(where)}"
    return Problem(where, "stage: is missing", allowed, hint or "write what the recipe does, e.g. `stage: sft`")


def _stages_with(key: str) -> list[str]:
    """Return the stages that have `key` at their top level."""
    return [name for name, model in keys.BY_NAME.items() if key in keys.own_keys(model) and key not in model.unused]


def _foreign_key_problems(tree: Node) -> Iterator[Problem]:
    """Yield a problem for each top-level key of a recipe without a stage that no stage has, or that other tools also
    use."""
    if all(map(_stages_with, tree.mapping)):
        return
    known = {key for model in keys.BY_NAME.values() for key in keys.own_keys(model)}
    for key, node in tree.mapping.items():
        able, instead = _stages_with(key), replacement_hint(key, "")
        if instead or not able:
            what = f"only {' and '.join(able)} has this key" if able else "no stage has this key"
            yield Problem(node.at_key.mark, f"{key}: {what}", hint=instead or did_you_mean(key, known))


def _finish(tree: Node, model: type[Stage], document: Document, problems: list[Problem], path: Path) -> Loaded:
    """Merge the preset, resolve a pipeline's stages, validate, and build the result. Raises WrongRecipe with all
    problems."""
    tree = merge_preset(tree, model, problems)
    stages = pipeline.resolve(tree, problems) if model is PipelineRecipe else pipeline.Resolved(tree, [], tree)
    recipe, found = check(stages.tree, model)
    problems = [p for p in [*problems, *found] if p in document.problems or p.where not in document.bad]
    if problems:
        wrong = WrongRecipe.of(sorted(problems, key=sort_key))
        wrong.draft, wrong.base_dir = stages.tree, path.parent
        raise wrong
    assert recipe is not None
    recipe._base_dir = path.parent
    values = resolve_values(recipe) | ({"stages": stages.values} if stages.values else {})
    aside = tuple(sorted([*document.notes, *stages.notes, *requirements.notes(recipe, stages.layers)], key=sort_key))
    return Loaded(recipe, origins(values, stages.layers), path, path.stem, document.text, values, aside)


def sort_key(problem: Problem) -> tuple[str, int, int]:
    """Sort key: file, line, column; the command line last."""
    parts = problem.where.rsplit(":", 2)
    if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
        return parts[0], int(parts[1]), int(parts[2])
    return ("￿" if not problem.where or problem.where.startswith("command line") else problem.where), 0, 0
