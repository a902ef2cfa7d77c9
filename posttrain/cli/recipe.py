"""`posttrain recipe`: list, show, validate, keys, copy, import, schema. None of these loads torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain import terminal
from posttrain.cli.guard import say
from posttrain.cli.help import App
from posttrain.cli.importing import import_recipe
from posttrain.cli.run_messages import print_notes
from posttrain.cli.show import print_json, print_recipe
from posttrain.cli.stage import Json, Overrides, Recipe
from posttrain.errors import Problem, UserError, did_you_mean, problem_as_dict

if TYPE_CHECKING:
    from posttrain.recipe.keys import Key
    from posttrain.recipe.tree import Node

app = App()
app.command("import")(import_recipe)
MODELINE = "# yaml-language-server: $schema="


@app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """List the shipped recipes."""
    from posttrain.path_resolution import known_files, shipped_folder

    root = shipped_folder("recipes")
    recipes = []
    for path in sorted(set(known_files("recipes", [".yaml"]).values())):
        text = path.read_text(encoding="utf-8")
        stage = re.search(r"^stage:\s*(\w+)", text, re.MULTILINE)
        name = path.relative_to(root).with_suffix("").as_posix()
        recipes.append({"name": name, "stage": stage[1] if stage else "", "about": headline(text), "path": str(path)})
    if as_json:
        print_json(recipes)
        return
    wide = {key: max((len(item[key]) for item in recipes), default=0) for key in ("name", "stage")}
    for item in recipes:
        terminal.say(f"{item['name']:<{wide['name']}}  {item['stage']:<{wide['stage']}}  {item['about']}")


def headline(text: str) -> str:
    """Return the first comment line of a recipe."""
    for line in text.splitlines():
        if line.startswith("#") and not line.startswith(MODELINE):
            return line.lstrip("# ").strip()
        if line and not line.startswith("#"):
            break
    return ""


@app.command()
def show(recipe: Recipe, overrides: Overrides = None, as_json: Json = False) -> None:
    """Show every value of a resolved recipe and its origin: default, preset, file:line, or command line."""
    from posttrain.recipe.load import load

    print_recipe(load(recipe, overrides or []), as_json)


@app.command()
def validate(recipe: Recipe, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a recipe: keys, types, values that must fit together, and the existence of everything it names.

    Settings without effect, such as vLLM's with another engine, are printed as notes.

    Models, data and runs that are not on this machine are printed as notes too, because the recipe may run elsewhere;
    scripts and functions must exist. The commands that run a recipe (`posttrain rl`, ...) refuse what is missing.
    """
    from posttrain.cli import preflight

    notes: list[Problem] = []
    try:
        loaded, rewards = preflight.load_with_rewards(recipe, overrides or [], notes=notes)
    except UserError as error:
        if not as_json:
            _print_absence_notes(notes)
            raise
        print_json({"valid": False, "problems": _to_data(error.problems), "notes": _to_data(notes)})
        raise typer.Exit(error.exit_code) from None
    if as_json:
        stage, path = loaded.resolved["stage"], str(loaded.path)
        all_notes = _to_data([*loaded.notes, *notes])
        print_json({"valid": True, "stage": stage, "path": path, "rewards": rewards, "notes": all_notes})
        return
    print_notes(loaded)
    _print_absence_notes(notes)
    reward_names = f"; rewards: {', '.join(rewards)}" if rewards else ""
    terminal.say(f"{loaded.path}: valid (stage {loaded.resolved['stage']}{reward_names})")


def _to_data(problems: Sequence[Problem]) -> list[dict[str, str | int | None]]:
    return [problem_as_dict(problem) for problem in problems]


def _print_absence_notes(notes: Sequence[Problem]) -> None:
    """Print notes on things that are not on this machine."""
    for note in notes:
        say(f"note: {note}")
    if notes:
        say("(notes are not errors: things missing on this machine may exist where the recipe will run)\n")


@app.command()
def keys(
    name: Annotated[
        str,
        typer.Argument(
            metavar="STAGE[.SECTION]",
            help="A stage (sft, rl, merge, ...), a stage with a section or key (rl.rollout), or a section (rollout).",
        ),
    ],
    as_json: Json = False,
) -> None:
    """List every key of a stage or of one section, one per line: key, type, default, meaning. Made for `grep`.

    N stands for a position in a list (rewards.0.weight=2 on the command line), NAME for a name that you choose. The
    parameters of a loss or another method are listed by `posttrain methods show NAME`.
    """
    listed = _find_keys(name)
    if as_json:
        print_json([key._asdict() for key in listed])
        return
    wide = [min(max(len(text) for text in column), 40) for column in zip(*listed, strict=True)]
    for key in listed:
        terminal.say(
            "  ".join(f"{text:<{width}}" for text, width in zip(key[:3], wide, strict=False)) + f"  {key.about}"
        )


def _find_keys(name: str) -> list[Key]:
    """Return the keys of `STAGE`, `STAGE.SECTION` or `SECTION`; a section alone is that of the first stage with it, and
    a note names the other stages. Raises UserError if there is none."""
    from posttrain.recipe.keys import BY_NAME, list_keys, plain_path

    def below(stage: str, section: str) -> list[Key]:
        every = list_keys(BY_NAME[stage])
        return [key for key in every if f"{plain_path(key.key)}.".startswith(f"{section}." if section else "")]

    stage, _, section = name.replace("-", "_").partition(".")
    if stage in BY_NAME:
        if found := below(stage, section):
            return found
        sections = dict.fromkeys(key.key.partition(".")[0] for key in below(stage, ""))
        hint = did_you_mean(section, sections, f"{stage}.{{}}")
        raise UserError(f"stage {stage} has no key `{section}`", allowed=f"it has: {', '.join(sections)}", hint=hint)
    by_stage = {one: keys for one in BY_NAME if (keys := below(one, name))}
    if not by_stage:
        sections = dict.fromkeys(key.key.partition(".")[0] for one in BY_NAME for key in below(one, ""))
        raise UserError(
            f"no stage and no section `{name}`",
            allowed=f"stages: {', '.join(BY_NAME)}; STAGE.SECTION or a section alone is allowed too",
            hint=did_you_mean(name, [*BY_NAME, *sections]),
        )
    first, *others = by_stage
    also = f"; also in {', '.join(others)}: posttrain recipe keys {others[0]}.{name}" if others else ""
    say(f"`{name}` in stage {first}{also}")
    return by_stage[first]


@app.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a shipped recipe, or a recipe file.")],
    to: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="File to write (default: NAME.yaml in this directory).")
    ] = None,
) -> None:
    """Copy a shipped recipe to a file that you can edit."""
    from posttrain.path_resolution import shipped_folder
    from posttrain.recipe.load import locate
    from posttrain.recipe.yaml import read

    source = locate(name)
    tree = read(source).tree
    target = to or Path(source.name)
    if target.is_dir():
        target = target / source.name
    if target.exists():
        raise UserError(f"{target} exists and is not overwritten", hint="give another FILE")
    if not target.parent.is_dir():
        hint = f"mkdir -p {shlex.quote(str(target.parent))}"
        raise UserError(f"there is no directory {target.parent}", hint=hint)
    schema = shipped_folder("recipes") / "schema.json"
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and lines[0].startswith(MODELINE):
        lines[0] = f"{MODELINE}{schema}\n"
    text = "".join(lines)
    for relative, absolute in _find_relative_files(tree, source.parent).items():
        written = rf"(?<![\w./-]){re.escape(relative)}(?![\w./-])"
        text = re.sub(written, str(absolute).replace("\\", r"\\"), text)
        say(f"{relative} is not copied; the copy names it by its full path, {absolute}")
    target.write_text(text, encoding="utf-8")
    say(f"copied {source} to {target}")


def _find_relative_files(tree: Node, folder: Path) -> dict[str, Path]:
    """Return the files that a recipe names relative to its own directory: name as written -> absolute path."""
    from posttrain.path_resolution import split_function
    from posttrain.recipe.tree import leaves, plain

    files: dict[str, Path] = {}
    for _, value in leaves(plain(tree)):
        for text in value if isinstance(value, list) else [value]:
            named = (split_function(text) or (text,))[0] if isinstance(text, str) and text else ""
            if named and not Path(named).is_absolute() and (folder / named).is_file():
                files[named] = (folder / named).resolve()
    return files


@app.command()
def schema() -> None:
    """Print the JSON Schema of all recipes, for editors."""
    from posttrain.recipe.schema import build

    print_json(build())
