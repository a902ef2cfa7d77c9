"""`posttrain completion SHELL`: a script that completes commands, options, recipe names, keys, values and methods.

The script calls `posttrain __complete WORD...` for the candidates of the last word; torch is never loaded. If posttrain
has no candidate, the shell offers file names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain import terminal
from posttrain.errors import UserError, did_you_mean

BASH = r"""# posttrain: completion for bash. In ~/.bashrc: eval "$(posttrain completion bash)"
_posttrain() {
    local line="${COMP_LINE:0:COMP_POINT}" words cur
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    cur="${words[${#words[@]}-1]}"
    local IFS=$'\n'
    COMPREPLY=($(posttrain __complete -- "${words[@]:1}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
    local before="${cur%"${cur##*[=:]}"}"  # bash replaces only the text after these
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
}
complete -o default -F _posttrain posttrain
"""
ZSH = r"""#compdef posttrain
# posttrain: completion for zsh. In ~/.zshrc, after compinit: eval "$(posttrain completion zsh)"
_posttrain() {
    local -a found keys others
    found=("${(@f)$(posttrain __complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    keys=(${(M)found:#*=}) others=(${found:#*=})
    (( ${#keys} )) && compadd -S '' -- $keys
    (( ${#others} )) && compadd -- $others
    (( ${#keys} + ${#others} )) || _files
}
compdef _posttrain posttrain
"""
FISH = r"""# posttrain: completion for fish. In ~/.config/fish/config.fish: posttrain completion fish | source
function __posttrain_complete
    set -l words (commandline -opc) (commandline -ct)
    posttrain __complete -- $words[2..-1] 2>/dev/null
end
complete -c posttrain -a '(__posttrain_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
TAKE_RECIPE = ("plan", "preflight", "compare-methods", "sweep")  # commands other than stages that take a recipe
IMPORT_TOOLS = (
    "trl",
    "open-r1",
    "axolotl",
    "llamafactory",
    "ms-swift",
    "megatron-swift",
    "openrlhf",
    "verl",
    "torchtune",
    "mergekit",
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("completion")(completion)
    app.command("__complete", hidden=True, context_settings={"ignore_unknown_options": True})(complete)


TARGETS = {"export": ("merged", "gguf", "ollama", "hub:"), "track": ("wandb", "tensorboard", "trackio", "mlflow")}


def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="Shell to complete in: bash, zsh or fish.")],
) -> None:
    """Print a shell script that completes commands, options, recipe names, keys and methods.

    eval "$(posttrain completion bash)"      # in ~/.bashrc; likewise for zsh
    posttrain completion fish | source
    """
    if shell not in SCRIPTS:
        raise UserError(f"no completion for `{shell}`", allowed="bash, zsh, fish", hint=did_you_mean(shell, SCRIPTS))
    terminal.say(SCRIPTS[shell].rstrip("\n"))


def complete(ctx: typer.Context, words: Annotated[list[str] | None, typer.Argument(metavar="WORD")] = None) -> None:
    """Print the candidates for the last of the words after `posttrain`, one per line."""
    for candidate in find_candidates(words or [""], ctx.find_root().command):
        terminal.say(candidate)


def find_candidates(words: Sequence[str], root: Any) -> list[str]:
    """Return the completions of the last word, given the words before it. root: the top-level command."""
    before, last = list(words[:-1]), words[-1]
    command, used = _find_command(root, before)
    if last.startswith("-"):
        options = [option for param in command.params for option in param.opts if option.startswith("--")]
        return [candidate for candidate in options if candidate.startswith(last)]
    if hasattr(command, "commands"):
        names = [name for name, subcommand in command.commands.items() if not subcommand.hidden]
        return [name for name in names if name.startswith(last)]
    return [candidate for candidate in _complete_argument(before, used, last) if candidate.startswith(last)]


def _find_command(root: Any, words: Sequence[str]) -> tuple[Any, int]:
    """Return the command that the words name, and the number of words that name it."""
    command, used = root, 0
    for word in words:
        if not hasattr(command, "commands"):
            break
        if word.startswith("-"):
            used += 1
            continue
        below = (root.load_group(word) if command is root else None) or command.commands.get(word)
        if below is None:
            break
        command, used = below, used + 1
    return command, used


def _complete_argument(before: Sequence[str], used: int, last: str) -> Iterator[str]:
    """Yield candidates for the last word of a command's arguments. used: number of words that name the command."""
    from posttrain.recipe.keys import BY_NAME

    named, given = [word for word in before[:used] if not word.startswith("-")], list(before[used:])
    verb = named[0] if named else ""
    if given and given[-1] == "--from":
        yield from IMPORT_TOOLS
    elif given and given[-1] == "--to":
        yield from TARGETS.get(verb, ())
    elif named == ["methods", "show"]:
        yield from _list_method_names()
    elif named == ["recipe", "keys"]:
        yield from BY_NAME
    elif named == ["completion"]:
        yield from SCRIPTS
    elif verb.replace("-", "_") in BY_NAME or verb in (*TAKE_RECIPE, "run", "recipe", "data", "reward"):
        positional = [word for word in given if not word.startswith("-") and "=" not in word]
        if not positional:
            yield from _list_recipe_names(verb)
        yield from _complete_override(_find_stage(verb, positional), last)


def _list_method_names() -> Iterator[str]:
    from posttrain.recipe import catalogue

    yield from dict.fromkeys(entry["name"] for entry in catalogue.list_entries())


def _list_recipe_names(verb: str) -> Iterator[str]:
    """Yield names of shipped recipes; for a stage command only those of its stage."""
    from posttrain.path_resolution import known_files
    from posttrain.recipe.keys import BY_NAME

    wanted = verb.replace("-", "_")
    for name, path in known_files("recipes", [".yaml"]).items():
        if wanted not in BY_NAME or f"stage: {wanted}" in path.read_text(encoding="utf-8"):
            yield name


def _find_stage(verb: str, positional: Sequence[str]) -> str:
    """Return the stage whose keys to complete: that of the command, or the one that the recipe names."""
    import re

    from posttrain.path_resolution import known_files
    from posttrain.recipe.keys import BY_NAME

    if (stage := verb.replace("-", "_")) in BY_NAME:
        return stage
    for word in positional:
        path = Path(word) if Path(word).is_file() else known_files("recipes", [".yaml"]).get(word)
        text = path.read_text(encoding="utf-8", errors="replace") if path and path.suffix in (".yaml", ".yml") else ""
        if found := re.search(r"^stage:\s*(\w+)", text, re.MULTILINE):
            return found[1] if found[1] in BY_NAME else ""
    return ""


def _complete_override(stage: str, last: str) -> Iterator[str]:
    """Yield `optim.lr=` for a key, and after the `=` its possible values: literals, true and false, components,
    presets.
    """
    from posttrain.recipe.keys import BY_NAME, components_of, list_keys

    if not stage:
        return
    key, equals, _ = last.partition("=")
    listed = [
        key_info for key_info in list_keys(BY_NAME[stage]) if ".N." not in key_info.key and ".NAME." not in key_info.key
    ]
    if not equals:
        yield from (f"{key_info.key}=" for key_info in listed if key_info.type not in ("section", "section | null"))
        return
    section = components_of(stage).get(key.removesuffix(".use"))
    if section is not None:
        yield from (f"{key}={name}" for name in section.registered_components())
    elif key == "algorithm":
        from posttrain.recipe import presets

        yield from (f"algorithm={name}" for name in presets.names(stage))
    else:
        found = next((key_info for key_info in listed if key_info.key == key), None)
        words = found.type.split(" | ") if found else []
        yield from (f"{key}={word}" for word in words if word not in _TYPES and " " not in word)


_TYPES = ("text", "int", "float", "anything", "section")
