"""`posttrain recipe import FILE`: converts a config file of another tool to a recipe, with origins and the keys left
out.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli.guard import say
from posttrain.cli.show import commented_lines, print_json
from posttrain.cli.stage import Json
from posttrain.errors import Problem, UserError, count_noun, problem_as_dict

if TYPE_CHECKING:
    from posttrain.recipe.foreign.draft import Draft

SHOWN_CHARS = 60  # shown characters of a value that is left out


def import_recipe(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A YAML file, a shell script with the training command, or a Python script using TRL."
        ),
    ],
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TOOL",
            help="Tool that the file is for: trl, open-r1, axolotl, llamafactory, ms-swift, megatron-swift, openrlhf, "
            "verl, torchtune or mergekit (default: recognised by its keys).",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Recipe file to write (default: stdout).")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage", metavar="STAGE", help="Stage of the recipe (sft, dpo, rl, ...) if FILE does not say it."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="Number of GPUs that FILE's batch sizes assume (default: 1)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a config of TRL, open-r1, axolotl, LLaMA-Factory, ms-swift, OpenRLHF, verl, torchtune or mergekit.

    A Python script using TRL is parsed, not run: only literal values are converted; its reward functions are written to
    a file beside the recipe.

    Each value has its original key as a comment. Keys without a counterpart are listed with the reason, at the end of
    the recipe and on stderr. Then the recipe is validated like any other.
    """
    from posttrain.recipe import keys
    from posttrain.recipe.foreign import source
    from posttrain.recipe.foreign.convert import convert
    from posttrain.recipe.load import locate_file

    if stage is not None and stage.replace("-", "_") not in keys.BY_NAME:
        raise UserError(f"--stage: no stage `{stage}`", allowed=f"stages: {', '.join(keys.BY_NAME)}")
    if output is not None and output.exists():
        raise UserError(f"{output} exists and is not overwritten", hint="give another --output")
    if output is not None and not output.parent.is_dir():
        hint = f"mkdir -p {shlex.quote(str(output.parent))}"
        raise UserError(f"there is no directory {output.parent}", hint=hint)
    base_dir = (output.parent if output else Path.cwd()).resolve()
    wanted = stage.replace("-", "_") if stage else None
    foreign = source.read(locate_file(file), source.parse_tool_name(tool) if tool else None, wanted)
    rewards = output.with_name(f"{output.stem}_rewards.py") if output else None
    draft = convert(foreign, stage=wanted, gpus=gpus, base_dir=base_dir, rewards_file=rewards.name if rewards else None)
    text = to_yaml(draft)
    if rewards and draft.carried:
        write_script(draft, rewards)
    problems, notes = check_recipe(text, base_dir, str(output or "the imported recipe"))
    if output is not None:
        output.write_text(text, encoding="utf-8")
    if as_json:
        print_json(outcome_as_data(draft, problems, notes))
    elif output is None:
        terminal.say(text.rstrip("\n"))
    _print_outcome(draft, problems, notes, output, as_json=as_json)
    if problems:
        raise typer.Exit(UserError.exit_code)


def write_script(draft: Draft, path: Path) -> None:
    """Write the reward functions that the file defines. Raises UserError if the target file exists."""
    from posttrain.recipe.foreign.script_rewards import write_rewards

    if path.exists():
        raise UserError(f"{path} exists and is not overwritten", hint="give another --output")
    rewards = [draft.foreign.functions[name] for name in draft.carried]
    path.write_text(write_rewards(rewards), encoding="utf-8")
    say(f"{path}: {', '.join(draft.carried)}, as in {rewards[0].script}")


def to_yaml(draft: Draft) -> str:
    """Return the recipe as YAML: the source file, values with their original keys, and what was left out and why."""
    name, tool = draft.foreign.path.name, draft.foreign.table.tool
    lines = [f"# {name} of {tool}, by `posttrain recipe import`. The comment after a value is its original key."]
    lines += [*(f"# {note}" for note in draft.notes), *commented_lines(draft.plain(), draft.origins())]
    if draft.left:
        lines += ["", f"# Left out of {name}:"]
        lines += [
            f"# line {setting.line}: {setting.key}: {_shorten(setting.key, setting.value)}   {setting.why}"
            for setting in draft.left
        ]
    text = "\n".join(lines) + "\n"
    if draft.foreign.is_script:  # a variable that the script does not set is an environment variable in the recipe, too
        text = text.replace("$${", "${")
    return text


def check_recipe(text: str, base_dir: Path, name: str) -> tuple[list[Problem], list[Problem]]:
    """Return (errors, notes) of a recipe as if it were saved in `base_dir`. Missing models, data and packages are
    notes.
    """
    from posttrain.cli import packages, preflight
    from posttrain.recipe.load import load_text

    notes: list[Problem] = []
    try:
        loaded = load_text(text, name, base_dir)
        preflight.check(loaded, notes)
    except UserError as error:
        return list(error.problems), notes
    return [], [*loaded.notes, *notes, *packages.find_missing_packages(loaded)]


def outcome_as_data(draft: Draft, problems: Sequence[Problem], notes: Sequence[Problem]) -> dict[str, Any]:
    """Return what `--json` prints."""
    from dataclasses import asdict

    from posttrain.redact import is_secret

    return {
        "tool": draft.foreign.table.tool,
        "stage": draft.stage,
        "recipe": draft.plain(),
        "origins": {key: origin for key, origin in draft.origins().items() if origin},
        "left_out": [
            {**asdict(setting), "value": "***" if is_secret(setting.key) else setting.value} for setting in draft.left
        ],
        "differs": draft.notes,
        "valid": not problems,
        "problems": [problem_as_dict(problem) for problem in problems],
        "notes": [problem_as_dict(note) for note in notes],
    }


def _print_outcome(
    draft: Draft, problems: Sequence[Problem], notes: Sequence[Problem], output: Path | None, *, as_json: bool
) -> None:
    """Print notes, left-out keys and errors of an imported recipe on stderr."""
    for note in draft.notes:
        say(f"note: {note}")
    if draft.left:
        listed = output is not None or as_json  # otherwise the recipe on stdout lists them
        where = "" if listed else ", listed at the end of the recipe"
        say(f"left out of {draft.foreign.path.name}: {count_noun(len(draft.left), 'key')}{where}")
        for setting in draft.left if listed else ():
            say(f"  line {setting.line}: {setting.key}: {_shorten(setting.key, setting.value)}   {setting.why}")
    for problem in notes:
        say(f"note: {problem}")
    where = str(output) if output else "the recipe"
    if problems:
        for problem in problems:
            terminal.note_escaped(str(problem))
        say(f"{where} is not valid yet: {count_noun(len(problems), 'error')}")
    else:
        say(f"{where}: valid (stage {draft.stage}, from {draft.foreign.table.tool})")


def _shorten(key: str, value: Any) -> str:
    """Return a value that is left out in at most SHOWN_CHARS characters; keys and tokens as `***`."""
    from posttrain.redact import is_secret

    text = "***" if is_secret(key) else " ".join(str(value).split())
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
