"""Generate the reference pages of the site from the schema, the commands, the registry and the packages."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import typer

import posttrain
import posttrain.api
from posttrain.cli.app import LAZY, PANELS, Root, app
from posttrain.cli.methods import recipe_lines
from posttrain.cli.show import yaml_value
from posttrain.recipe import catalogue
from posttrain.recipe.keys import REQUIRED, list_keys
from posttrain.recipe.stages import STAGES

PACKAGES = {  # page of the Python reference -> what it is about
    "loss": "Losses, KL estimators and their aggregation: pure functions of a batch.",
    "advantage": "From rewards to advantages: pure functions of a batch.",
    "merge": "Tensor rules of merging, and what reads and writes models for them.",
    "evaluate": "Estimators, intervals, and the stages that measure a model.",
    "verify": "From a completion to a reward: extraction, equality, rewards and their workers.",
}
MODULES = {  # modules of the page on the interface
    "posttrain.api.Run": "Runs",
    "posttrain.api.Rows": "Rows of runs",
    "posttrain.batch.rollouts": "Rollouts and batches: what advantages and losses read",
    "posttrain.batch.results": "What advantages and losses return",
    "posttrain.registry": "Registering components",
    "posttrain.options": "Types of arguments",
    "posttrain.errors": "Errors",
}


@functools.cache
def pages() -> dict[str, str]:
    """All generated pages: path below docs/ -> Markdown."""
    found = {"reference/cli.md": commands(), "reference/methods/index.md": presets()}
    found |= {f"reference/recipe/{verb.replace('-', '_')}.md": recipe_keys(verb) for verb in STAGES}
    found |= {f"reference/methods/{kind}.md": components(kind) for kind in catalogue.KINDS}
    found |= {"reference/python/index.md": interface()}
    return found | {f"reference/python/{name}.md": package(name, about) for name, about in PACKAGES.items()}


def recipe_keys(verb: str) -> str:
    """The keys that a stage takes, a table for each section."""
    about = f"Generated from the schema; `posttrain recipe keys {verb}` prints the same. `N` is a place in a list."
    lines = [f"# `{verb}`: keys of a recipe", "", about, ""]
    for section, keys in groupby(list_keys(STAGES[verb]), lambda key: key.key.partition(".")[0]):
        first, *inner = keys
        default = f", default {code(first.default)}" if first.default != REQUIRED else ", required"
        lines += [f"## `{section}`", "", f"{sentence(first.about)} *{escape(first.type)}*{default}", ""]
        if inner:
            rows = [(code(k.key), k.type, code(k.default) if k.default else "", escape(k.about)) for k in inner]
            lines += table(("key", "type", "default", "meaning"), rows)
    return "\n".join(lines)


def commands() -> str:
    """Every command with its arguments and options."""
    lines = ["# Commands", "", "Generated from the commands; `posttrain COMMAND --help` prints the same.", ""]
    group = typer.main.get_group(app)
    for panel, names in PANELS.items():
        lines += [f"## {panel}", ""]
        for name in names:
            command = Root.load_group(name) if name in LAZY else group.commands[name]
            for path, found in below(command, f"posttrain {name}"):
                lines += [f"### {path}", "", "```text", help_text(found, path), "```", ""]
    return "\n".join(lines)


def below(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A command, or those of a group, each with what to type."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, found in command.commands.items():
        if not found.hidden:
            yield from below(found, f"{path} {name}")


def help_text(command: Any, path: str) -> str:
    """What `--help` prints of a command."""
    context = command.make_context(path, [], resilient_parsing=True, terminal_width=84, max_content_width=84)
    with context:
        return str(command.get_help(context))


def presets() -> str:
    """The list of presets with their purpose, and a table of the pages of components."""
    entries = [entry for entry in catalogue.list_entries() if entry["kind"] == "preset"]
    lines = [
        "# Methods",
        "",
        "A method is a row of choices over pure functions. `algorithm: NAME` takes a preset, whose choices a recipe "
        "may override; each part can also be chosen by itself. Generated from the registry; "
        "`posttrain methods show NAME` prints the same.",
        "",
        "## Parts",
        "",
    ]
    kinds = [(f"[{about}]({kind}.md)", code(key)) for kind, (about, key, _) in catalogue.KINDS.items()]
    lines += [*table(("part", "key of the recipe"), kinds), "## Presets", ""]
    rows = [(f"[{e['name']}](#{e['name']})", e["stage"], escape(e["title"]), paper(e)) for e in entries]
    lines += table(("preset", "stage", "method", "paper"), rows)
    return "\n".join([*lines, *(line for entry in entries for line in method(entry))])


def components(kind: str) -> str:
    """All components of a kind."""
    about, key, _ = catalogue.KINDS[kind]
    lines = [f"# {about[0].upper()}{about[1:]}", "", f"Key of the recipe: `{key}`. Kind: `{kind}`.", ""]
    entries = [entry for entry in catalogue.list_entries() if entry["kind"] == kind]
    return "\n".join([*lines, *(line for entry in entries for line in method(entry))])


def method(entry: dict[str, Any]) -> Iterator[str]:
    """A preset or component: text, paper, keys, and its lines in a recipe."""
    yield from (f"### {entry['name']} {{#{entry['name']}}}", "")
    yield from ([f"{escape(entry['title'])}.", ""] if entry["kind"] == "preset" else [])
    yield from (as_markdown(entry["text"]), "")
    facts = [f"Paper: {paper(entry)}" if entry["paper"] else "", *(f"Not beside: {c}" for c in entry["conflicts"])]
    facts += [f"Symbol {code(symbol)}: {escape(meaning)}" for symbol, meaning in entry["symbols"].items()]
    facts += [f"Needs: {', '.join(map(code, entry['needs']))}" if entry["needs"] else ""]
    facts += [f"For callers of the function only: {entry['unusable']}" if entry["unusable"] else ""]
    facts += [f"Note: {escape(' '.join(entry['not_stated'].split()))}" if entry["not_stated"] else ""]
    yield from (f"- {fact}" for fact in facts if fact)
    yield ""
    if entry.get("keys"):
        known = entry["keys"].items()
        default = [code(yaml_value(k["default"])) if "default" in k else "(required)" for _, k in known]
        rows = [(code(key), k["type"], d) for (key, k), d in zip(known, default, strict=True)]
        yield from table(("key", "type", "default"), rows)
    yield from ("```yaml", *recipe_lines(entry), "```", "")


def package(name: str, about: str) -> str:
    """The public functions and classes of a package, module by module, from their docstrings."""
    found = pkgutil.iter_modules([f"{folder}/{name}" for folder in posttrain.__path__])
    modules = [f"posttrain.{name}.{module.name}" for module in found]
    lines = [f"# posttrain.{name}", "", about, ""]
    return "\n".join([*lines, *(line for module in modules for line in (f"::: {module}", ""))])


def interface() -> str:
    """The page on the public interface."""
    lines = ["# Python interface", "", "How it is used: [from Python](../../python_api.md). Packages of formulas:", ""]
    lines += [f"- [posttrain.{name}]({name}.md): {about}" for name, about in PACKAGES.items()]
    lines += ["", "## Functions", ""]
    for name in posttrain.__all__:
        function = getattr(posttrain.api, name, None)  # of stages: made by a function, their source has no signature
        if not inspect.isfunction(function):
            continue
        signature = str(inspect.signature(function)).replace("'", "")
        lines += [f"### pt.{name} {{#{name}}}", "", "```python", f"pt.{name}{signature}", "```", ""]
        lines += [as_markdown(inspect.getdoc(function) or ""), ""]
    for module, about in MODULES.items():
        lines += ["", f"## {about}", "", f"::: {module}"]
    return "\n".join([*lines, ""])


def as_markdown(text: str) -> str:
    """A docstring as Markdown: lines with columns become a code block, and no character is read as HTML."""
    blocks: list[str] = []
    for columns, lines in groupby(text.split("\n"), lambda line: bool(re.search(r"\S {2,}\S|^ {2,}\S", line))):
        body = "\n".join(lines)
        blocks.append(f"\n```text\n{body}\n```\n" if columns else escape(body))
    return "\n".join(blocks)


def escape(text: str) -> str:
    """Text in which `<`, `*` and `[` outside of code are themselves."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*\[])", r"\\\1", p).replace("<", "&lt;") for p in parts)


def sentence(text: str) -> str:
    return f"{escape(text[:1].upper() + text[1:])}." if text else ""


def code(text: str) -> str:
    """Text in backquotes, as many as it needs."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def paper(entry: dict[str, Any]) -> str:
    number = entry["paper"]
    return f"[arXiv {number}](https://arxiv.org/abs/{number})" if number else ""


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A table; bars inside cells are escaped."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    cells = [[re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row] for row in rows]
    return [*lines, *(f"| {' | '.join(row)} |" for row in cells), ""]
