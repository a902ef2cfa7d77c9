"""Keys of another tool's file with their lines: from a YAML file, a shell script with a training command, or a TRL
script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.errors import RecipeError, did_you_mean
from posttrain.recipe import keys
from posttrain.recipe.foreign import python_script, shell, words
from posttrain.recipe.foreign.script_rewards import ScriptReward
from posttrain.recipe.foreign.words import Table
from posttrain.recipe.tree import Node
from posttrain.recipe.yaml import display_path, not_utf8_error, parse, parse_value, scalar

YAML = (".yaml", ".yml", ".json")
PYTHON = ".py"
_PROCESSES = re.compile(r"(?:--(?:num_processes|nproc_per_node|nproc-per-node|num_gpus)(?:=|\Z)|NPROC_PER_NODE=)(\d*)")


@dataclass(frozen=True)
class Given:
    """A key of the file with its value. line 0: not in the file, but a default of the tool."""

    key: str
    value: Any
    line: int


@dataclass
class Foreign:
    """The content of another tool's file.

    command: words of the command before its keys. gpus: number of processes that it starts, if known. nested: a YAML
    file as it is. unread: keys of a Python script with computed values, and why they are left out. functions: reward
    functions that the script defines. notes: where the keys come from.
    """

    path: Path
    table: Table
    given: dict[str, Given]
    command: tuple[str, ...] = ()
    gpus: int | None = None
    nested: Mapping[str, Any] = field(default_factory=dict)
    unread: Sequence[tuple[Given, str]] = ()
    functions: Mapping[str, ScriptReward] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def is_script(self) -> bool:
        """Whether the keys come from a command, where `${NAME}` is a variable."""
        return self.path.suffix not in (*YAML, PYTHON)


def read(path: Path, tool: str | None = None, stage: str | None = None) -> Foreign:
    """Read the keys of a file. tool: name of the table; None detects it from the keys or the command. stage: which
    training run of a Python script, if it has several.

    Raises RecipeError if the file cannot be read or its tool cannot be determined.
    """
    if path.suffix == PYTHON and tool not in (None, "trl"):
        hint = "give the YAML file or the command line that it is started with"
        raise RecipeError("only Python scripts of TRL can be imported", where=display_path(path), hint=hint)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as cause:
        raise not_utf8_error(cause, path) from None
    except OSError as cause:
        raise RecipeError(f"the file cannot be read: {cause.strerror}", where=display_path(path)) from None
    if path.suffix in YAML:
        return _yaml(path, text, tool)
    if path.suffix == PYTHON:
        return _python(path, text, stage)
    return _script(path, text, tool, stage)


def _python(path: Path, text: str, stage: str | None) -> Foreign:
    """Read the training run of a TRL script."""
    script = python_script.read_script(path, text, stage)
    return Foreign(
        path,
        words.table("trl"),
        {key: Given(key, value, line) for key, (value, line) in script.given.items()},
        (script.command,),
        unread=[(Given(unread.key, unread.text, unread.line), unread.why) for unread in script.unread],
        functions=script.functions,
        notes=script.notes,
    )


def _yaml(path: Path, text: str, tool: str | None) -> Foreign:
    tree = _tree(path, text)
    if tool is None:
        _refuse_own(tree, path)
    given = {setting.key: setting for setting in _flat(tree, "")}
    table = words.table(tool) if tool else _detect_table(path, given)
    return Foreign(path, table, given, nested=_plain(tree))


def _refuse_own(tree: Node, path: Path) -> None:
    """Raise RecipeError for a recipe of posttrain, recognized by its stage and keys."""
    stage_node = tree.mapping.get("stage")
    model = keys.BY_NAME.get(str(stage_node.value)) if stage_node else None
    if model is not None and tree.mapping.keys() <= keys.own_keys(model).keys():
        what = "it is a recipe of posttrain already"
        hint = f"posttrain {model.verb} {shlex.quote(str(path))}"
        raise RecipeError(what, where=display_path(path), hint=hint)


def _tree(path: Path, text: str) -> Node:
    """Return the mapping of a YAML file. Keys without a value, which are frequent in axolotl's files, become null."""
    document = parse(_escape_variables(text), display_path(path))
    broken = [
        problem
        for problem in document.problems
        if "has no value" not in problem.what and "environment" not in problem.what
    ]
    if broken:
        raise RecipeError.of(broken)
    return document.tree


def _escape_variables(text: str) -> str:
    """Escape `${NAME}`: variables are resolved when the recipe is read."""
    return text.replace("${", "$${")


def _flat(node: Node, prefix: str) -> Iterable[Given]:
    for key, below in node.mapping.items():
        path = f"{prefix}{key}"
        if isinstance(below.value, dict) and below.value:
            yield from _flat(below, f"{path}.")
        else:
            yield Given(path, _value(below), _line(below))


def _value(node: Node) -> Any:
    if isinstance(node.value, list):
        return [_value(item) for item in node.value]
    if isinstance(node.value, dict):
        return {key: _value(below) for key, below in node.value.items()}
    return None if node.value == "" and not node.quoted else node.value


def _plain(node: Node) -> dict[str, Any]:
    return {key: _value(below) for key, below in node.mapping.items()}


def _line(node: Node) -> int:
    found = re.search(r":(\d+):\d+$", node.at_key.where)
    return int(found[1]) if found else 0


# `$(date)`, `$1`, `${1}`, `${NAME,,}`: known when the script runs
_COMPUTED = re.compile(r"\$\(|\$\{?\d|\$\{\w+[^\w}]")


def _script(path: Path, text: str, tool: str | None, stage: str | None) -> Foreign:
    """Read the training command of a shell script, and the YAML file or TRL script that it names."""
    names = [tool] if tool else list(words.TOOLS)
    tables = [words.table(name) for name in names]
    best: tuple[float, Table, list[shell.Word]] | None = None
    marks = [mark for table in tables for mark in table.commands]
    for command in shell.commands(text):
        # Later words are values: `megatron sft --dataset swift/self-cognition` is no command of swift.
        first = next((n for n, word in enumerate(command) if any(_is_mark(mark, word.text) for mark in marks)), 0)
        started = command[: first + 1]
        if any(word.text == "install" for word in started):  # pip install trl
            continue
        for table in tables:
            hits = sum(any(_is_mark(mark, word.text) for word in started) for mark in table.commands)
            score = hits + len(command) / 1000
            if score >= 1 and (best is None or score > best[0] + 0.5):
                best = (score, table, command)
    if best is None and tool in (None, "trl") and (found := _command_of_python(path, text, stage)):
        return found
    if best is None:
        what = f"no command of {words.table(tool).tool}" if tool else "no training command that is known"
        allowed = f"known: {', '.join(words.table(name).tool for name in names)}"
        raise RecipeError(
            f"{what} in it", where=display_path(path), allowed=allowed, hint="" if tool else "name the tool: --from"
        )
    _, table, command = best
    return _command(path, table, command)


def _command_of_python(path: Path, text: str, stage: str | None) -> Foreign | None:
    """Read a command that starts a TRL script: its options over the values of that script. None for other commands."""
    for command in shell.commands(text):
        for number, word in enumerate(command):
            places = [
                folder / word.text for folder in (path.resolve().parent, Path.cwd()) if word.text.endswith(PYTHON)
            ]
            place = next((path for path in places if path.is_file()), None)
            script = place.read_text(encoding="utf-8", errors="replace") if place else ""
            if place is None or not re.search(r"^\s*(?:from|import) trl\b", script, re.MULTILINE):
                continue
            found = _python(place, script, stage)
            options = _command(path, found.table, command[number:])
            typed = options.given
            note = f"what the command does not say is from {place.name}: {', '.join(found.given.keys() - typed.keys())}"
            return replace(
                found,
                path=path,
                given={**found.given, **typed},
                gpus=_processes(command),
                unread=[*options.unread, *(unread for unread in found.unread if unread[0].key not in typed)],
                notes=[*found.notes, *([note] if found.given.keys() - typed.keys() else [])],
            )
    return None


def _is_mark(mark: str, word: str) -> bool:
    """Return whether a word of a command is `mark`: the word itself, or a path or module that contains it."""
    return (
        word == mark
        or (("/" in mark or "." in mark or "_" in mark) and mark in word)
        or bool(re.match(rf"{re.escape(mark)}[./]", word))
    )


def _command(path: Path, table: Table, command: Sequence[shell.Word]) -> Foreign:
    """Read the options of a training command, over the YAML files that it names."""
    first = next((i for i, word in enumerate(command) if any(_is_mark(mark, word.text) for mark in table.commands)), 0)
    gpus = _processes(command)
    given: dict[str, Given] = {}
    unread: list[tuple[Given, str]] = []
    before = [word.text for word in command[: first + 1]]
    arguments = list(command[first + 1 :])
    while arguments and not arguments[0].text.startswith("-") and "=" not in arguments[0].text:
        word = arguments.pop(0)
        before.append(word.text)
        if word.text.endswith(YAML):
            given |= _named_file(path, word)
    for option in _parse_options(arguments):
        if option.key == "config" and str(option.value).endswith(YAML):
            given |= _named_file(path, shell.Word(str(option.value), option.line))
        elif _COMPUTED.search(str(option.value)):
            unread.append((option, "the script computes it, or has it from its own command line"))
        elif option.key not in ("num_processes", "config_file"):
            given[option.key] = option
    return Foreign(path, table, given, tuple(before), gpus, unread=unread)


def _processes(command: Sequence[shell.Word]) -> int | None:
    for word, following in zip(command, [*command[1:], shell.Word("", 0)], strict=True):
        if found := _PROCESSES.match(word.text):
            number = found[1] or following.text
            return int(number) if number.isdigit() and int(number) > 0 else None
    return None


def _named_file(script: Path, word: shell.Word) -> dict[str, Given]:
    """Read the YAML file that a command names, from the working directory, the script's folder, or a folder above
    it."""
    places = [folder / word.text for folder in (Path.cwd(), *script.resolve().parents)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise RecipeError(
            f"the command names {word.text}, which does not exist",
            where=f"{display_path(script)}:{word.line}",
            hint="import that file itself",
        )
    tree = _tree(found, found.read_text(encoding="utf-8"))
    return {setting.key: setting for setting in _flat(tree, "")}


def _parse_options(arguments: Sequence[shell.Word]) -> Iterable[Given]:
    """Parse --key value ..., --key=value, --flag, --no_flag, and key=value, +key=value of hydra."""
    left = list(arguments)
    while left:
        word = left.pop(0)
        text = word.text
        if flag := re.match(r"--?([A-Za-z_][\w.-]*)(?:=(.*))?\Z", text, re.DOTALL):
            key, value = flag[1].replace("-", "_"), flag[2]
            values = [] if value is None else [value]
            while value is None and left and not re.match(r"--?[A-Za-z_]", left[0].text):
                values.append(left.pop(0).text)
            yield Given(key, _infer_types(values), word.line)
        elif override := re.match(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)\Z", text, re.DOTALL):
            yield Given(override[1], _parse_option_value(override[2]), word.line)


def _infer_types(values: Sequence[str]) -> Any:
    if not values:
        return True
    return _parse_option_value(values[0]) if len(values) == 1 else [_parse_option_value(value) for value in values]


def _parse_option_value(text: str) -> Any:
    """Parse a command-line value: a number, true or false, null, a list or a mapping in YAML, else text."""
    text = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text  # quotes for hydra
    if text[:1] in "[{" and text:
        from posttrain.recipe.tree import Origin, plain

        try:
            return plain(parse_value(text.replace("${", "$${"), Origin("command line", text)))
        except RecipeError:
            return text
    return {"None": None, "True": True, "False": False}.get(text, scalar(text))


def detect_tool(names: Collection[str], path: Path) -> Table | None:
    """Return the table with the most marks among the keys of a file, or None; the folders of the file decide ties."""
    folders = str(path.resolve()).lower()
    scores: dict[str, float] = {}
    for name in words.TOOLS:
        table = words.table(name)
        hits = sum(mark in names or any(key.startswith(f"{mark}.") for key in names) for mark in table.marks)
        known = sum(table.entry(key) is not None for key in names) / max(len(names), 1)
        scores[name] = hits + known + 0.5 * any(word in folders for word in (*table.files, name)) if hits else 0.0
    best = max(scores, key=lambda name: scores[name])
    return words.table(best) if scores[best] >= 1 else None


def _detect_table(path: Path, given: Mapping[str, Given]) -> Table:
    table = detect_tool(given.keys(), path)
    if table is None:
        raise RecipeError(
            "none of its keys shows which tool this file is for",
            where=display_path(path),
            allowed=f"--from: {', '.join(words.TOOLS).replace('_', '-')}",
            hint="name the tool: --from",
        )
    return table


def parse_tool_name(name: str) -> str:
    """Return the table name of a tool as typed after --from. Raises RecipeError for an unknown tool."""
    plain = name.lower().replace("-", "_")
    plain = {"llama_factory": "llamafactory", "swift": "ms_swift", "openr1": "open_r1"}.get(plain, plain)
    if plain not in words.TOOLS:
        shown_names = [tool.replace("_", "-") for tool in words.TOOLS]
        raise RecipeError(
            f"--from {name}: files of this tool are not read",
            allowed=f"known: {', '.join(shown_names)}",
            hint=did_you_mean(name, shown_names),
        )
    return plain
