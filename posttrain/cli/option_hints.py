"""Errors for options and commands that do not exist, with what to write instead. Recipe keys are overrides, not
options.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from posttrain.errors import UserError, did_you_mean, nearest

SWITCHES = ("--resume", "--dry-run", "--debug", "--json", "--help")


_WRONG = re.compile(r"Invalid value for '([^']+)': (?:Value error, )?(.+?)\.?$", re.DOTALL)
_NUMBERS = (  # typer's message for a wrong number -> ours
    (r"Input should be a valid integer.*", "must be a whole number"),
    (r"Input should be a valid number.*", "must be a number"),
    (r"Input should be a finite number.*", "must be a finite number"),
    (r"Input should be greater than or equal to (\S+)", r"must be at least \1"),
    (r"Input should be less than or equal to (\S+)", r"must be at most \1"),
)


def wrong_value(message: str) -> UserError | None:
    """Return the error for a value that an option does not accept, from typer's message; None for any other message."""
    if not (found := _WRONG.match(message)):
        return None
    option, why = found[1].split(" / ")[0], found[2]
    if choice := re.fullmatch(r"'(.*)' is not one of (.+)", why):
        from posttrain.recipe.foreign.words import translate_value

        words = re.findall(r"'([^']+)'", choice[2])
        meant = translate_value("model.dtype", choice[1]) if "float16" in words else None
        hint = f"did you mean `{meant}`?" if meant in words else did_you_mean(choice[1], words)
        return UserError(f"{option}: `{choice[1]}` is not a value of this option", allowed=", ".join(words), hint=hint)
    plain = next((re.sub(theirs, ours, why) for theirs, ours in _NUMBERS if re.fullmatch(theirs, why)), "")
    return UserError(f"{option}: {plain}") if plain else None


@functools.cache
def _read_word_table(part: str) -> dict[str, str]:
    """Return one part of the command-line table: words of other tools' command lines -> posttrain's words."""
    from posttrain.recipe.foreign.words import TABLES, read_table

    found = read_table(TABLES / "command_line.yaml")[part]
    return {theirs: ours for ours, words in found.items() for theirs in words}


def no_such_option(option: str, words: Sequence[str], command: str, options: Sequence[str]) -> UserError:
    """Return the error for an unknown option. words: the words after `posttrain COMMAND`; options: the command's
    options.
    """
    place = next((i for i, word in enumerate(words) if word.partition("=")[0] == option), None)
    value, after = "", list(words)
    if place is not None:
        _, equals, value = words[place].partition("=")
        following = words[place + 1] if place + 1 < len(words) else ""
        value = value if equals or following.startswith("-") else following
        after = [*words[:place], *words[place + 1 + (not equals and bool(value)) :]]
    return UserError(
        f"{option}: `posttrain {command}` has no such option", hint=_suggest(option, value, after, command, options)
    )


def _suggest(option: str, value: str, others: Sequence[str], command: str, options: Sequence[str]) -> str:
    """Return what to write instead of an unknown option. others: the command's other words."""
    name = option.lstrip("-")
    plain = name.replace("-", "_").lower()
    ours = next(
        (option for option in options if option.lstrip("-").replace("-", "_") == plain),
        _read_word_table("options").get(plain),
    )
    if ours in options:
        return f"write {ours}" if ours in SWITCHES else f"write {ours} {value or 'VALUE'}"
    by_name = {option.lstrip("-").replace("-", "_"): option for option in options if option.startswith("--")}
    if "." not in name and len(plain) > 2 and (near := nearest(plain, by_name, alike=0.75)):
        return f"did you mean {by_name[near]}?"
    if _read_word_table("none").get(plain) == "KEY=VALUE" and "=" in value:
        return f"write {value}, without {option}"
    if _read_word_table("none").get(plain) == "RECIPE":
        return f"the recipe comes first: posttrain {command} {value or 'RECIPE'}"
    if name.endswith((".yaml", ".yml")):
        return f"the recipe comes first, without --: posttrain {command} {name}"
    if plain in ("m", "multirun", "sweep"):
        return "this command makes one run; for several: `posttrain sweep RECIPE KEY=A,B run.seed=0,1`"
    from posttrain.recipe.override_aliases import suggest_override

    form = suggest_override(name, value or "VALUE", _guess_stages(command, others)) if len(name) > 1 else ""
    if form.startswith("write ") and "`" in form:
        return f"{form}; values are written KEY=VALUE, without --"
    if form:
        return f"{form}, without --" if form.startswith("write ") else form
    listed = ", ".join(option for option in options if option.startswith("--") or f"-{option}" not in options)
    return f"recipe keys are written KEY=VALUE, without --; options: {listed}"


def no_such_command(name: str, commands: Sequence[str], group: str = "") -> UserError:
    """Return the error for an unknown command, or for an unknown subcommand of `group`. commands: those that exist."""
    if group:
        near = nearest(name, commands)
        hint = f"did you mean `posttrain {group} {near}`?" if near else ""
        return UserError(
            f"`posttrain {group}` has no command `{name}`", allowed=f"it has: {', '.join(commands)}", hint=hint
        )
    verbs, instead = _read_word_table("commands"), _read_word_table("instead")
    near = name if name in verbs or name in instead else nearest(name, [*commands, *verbs, *instead], alike=0.7)
    hint = instead.get(near or "") or (f"did you mean `posttrain {near}`?" if near else "")
    if near in verbs and near not in commands:
        hint = f"write posttrain {verbs[near]}"
    return UserError(f"no command `{name}`", allowed=f"there are: {', '.join(commands)}", hint=hint)


def _guess_stages(command: str, words: Sequence[str]) -> list[type]:
    """Return the stage that the command or the recipe among the words is for; otherwise all stages, rl first."""
    from posttrain.path_resolution import known_files
    from posttrain.recipe.keys import BY_NAME

    if (stage := command.replace("-", "_")) in BY_NAME:
        return [BY_NAME[stage]]
    for word in words:
        path = Path(word) if Path(word).is_file() else known_files("recipes", [".yaml"]).get(word)
        text = path.read_text(encoding="utf-8", errors="replace") if path and path.suffix in (".yaml", ".yml") else ""
        if (found_stage := re.search(r"^stage:\s*(\w+)", text, re.MULTILINE)) and found_stage[1] in BY_NAME:
            return [BY_NAME[found_stage[1]]]
    return [BY_NAME["rl"], *(model for name, model in BY_NAME.items() if name != "rl")]
