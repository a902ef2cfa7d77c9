"""`posttrain methods`: lists and shows presets, components and shipped rewards, read from their files without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli.help import App
from posttrain.cli.show import flow_value, print_json, yaml_value
from posttrain.cli.stage import Json
from posttrain.errors import UserError, count_noun, nearest

app = App()
WIDTH = 100  # characters of a method's line


@app.command("list")
def list_methods(
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="List only this kind: preset, loss, group_reward, ...")
    ] = None,
    as_json: Json = False,
) -> None:
    """List all methods, one per line: presets (`algorithm: NAME`), then components in the order of a training step.
    --kind also lists their files.
    """
    from posttrain.recipe import catalogue

    entries = [entry for entry in catalogue.list_entries() if kind in (None, entry["kind"])]
    if not entries:
        raise UserError(f"no kind `{kind}`", allowed=f"kinds: preset, {', '.join(catalogue.KINDS)}")
    if as_json:
        print_json(
            [{key: entry[key] for key in ("kind", "name", "stage", "file", "title", "paper")} for entry in entries]
        )
        return
    for heading, rows in _group_by_kind(entries):
        terminal.say(heading)
        width = max(len(entry["name"]) for entry in rows)
        for entry in rows:
            paper = f"  [{entry['paper']}]" if entry["paper"] else ""
            file = f"  {entry['file']}" if kind else ""
            title = _shorten(entry["title"], WIDTH - width - len(paper))
            terminal.say(f"  {entry['name']:<{width}}  {title}{paper}{file}")
        terminal.say()


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name from `methods list`, or kind/name if several kinds share it.")
    ],
    as_json: Json = False,
) -> None:
    """Show a method: purpose or formula, paper, keys with defaults, requirements, conflicts, differences from the
    paper, and the recipe lines to write.
    """
    from posttrain.recipe import catalogue

    entries = catalogue.list_entries()
    found = catalogue.find_entries(name, entries)
    if not found and (text_lines := catalogue.describe_unregistered(name)):
        if as_json:
            print_json([{"name": name, "text": "\n".join(text_lines)}])
        else:
            terminal.say("\n".join(text_lines))
        return
    if not found:
        names = {entry["name"] for entry in entries} | set(catalogue.OTHER_NAMES) | set(catalogue.KEYS)
        near = nearest(name, names)
        hint = f"did you mean `{near}`?" if near else "`posttrain methods list` lists all methods"
        raise UserError(f"no method `{name}`", hint=hint)
    if as_json:
        print_json([{**entry, "recipe": "\n".join(recipe_lines(entry))} for entry in found])
        return
    terminal.say("\n\n".join("\n".join(_describe_entry(entry)) for entry in found))


def _group_by_kind(entries: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (heading, entries) of each kind, in the order of a training step."""
    from posttrain.recipe import catalogue

    yield from _select_kind(entries, "preset", "presets: `algorithm: NAME`")
    for kind, (about, _, _) in catalogue.KINDS.items():
        yield from _select_kind(entries, kind, f"{about} ({kind}): {_recipe_form(kind)}")


def _select_kind(entries: list[dict[str, Any]], kind: str, heading: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    rows = [entry for entry in entries if entry["kind"] == kind]
    if rows:
        yield heading, rows


def _recipe_form(kind: str) -> str:
    """Return how a recipe selects a method of this kind."""
    from posttrain.recipe import catalogue

    _, place, shape = catalogue.KINDS[kind]
    shapes = {
        "name": f"`{place}: NAME`",
        "source": f"`{place}: {{source: task:NAME, size: N, params: {{levels: [0, 1]}}}}`",
        "one": f"`{place}: {{use: NAME}}`",
        "inner": f"`{place}: {{{kind}: {{use: NAME}}}}`",
        "list": f"`{place}: [{{use: NAME}}]`",
        "named": f"`{place}: {{KEY.OF.A.NUMBER: {{use: NAME}}}}`",
    }
    return shapes[shape]


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."


def _describe_entry(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that `methods show` prints for a method."""
    from posttrain.recipe import catalogue

    is_preset = entry["kind"] == "preset"
    what = "preset" if is_preset else catalogue.KINDS[entry["kind"]][0]
    yield f"{entry['name']}  ({what}, stage {entry['stage']})"
    if entry["paper"]:
        yield f"paper: https://arxiv.org/abs/{entry['paper']}"
    yield f"file: {entry['file']}"
    yield ""
    yield from ([entry["title"], ""] if is_preset else [])
    yield entry["text"]
    if entry["symbols"]:
        yield "\nsymbols:"
        width = max(map(len, entry["symbols"]))
        yield from (f"  {symbol:<{width}}  {meaning}" for symbol, meaning in entry["symbols"].items())
    if entry["needs"]:
        yield f"\nneeds: {', '.join(entry['needs'])}"
    for conflict in entry["conflicts"]:
        yield f"cannot be combined with: {conflict}"
    if entry["unusable"]:
        yield f"for callers of the function only: {entry['unusable']}"
    if entry["not_stated"]:
        yield f"\n{'not in the paper' if is_preset else 'note'}: {entry['not_stated']}"
    if entry.get("keys"):
        yield "\nkeys:"
        width = max(map(len, entry["keys"]))
        for key, known in entry["keys"].items():
            default = f"default {yaml_value(known['default'])}" if "default" in known else "required"
            yield f"  {key:<{width}}  {known['type']}, {default}"
    if entry.get("choices"):
        yield "\nchooses (each may be overridden in the recipe):"
        yield from (f"  {line}" for line in _yaml(entry["choices"]))
    if entry.get("presets"):
        yield f"\nused by: {', '.join(entry['presets'])}"
    if idle := entry.get("presets_with_coef_0"):
        off = "with coefficient 0, off until a recipe sets kl.coef"
        yield f"also set, {off}, by {count_noun(len(idle), 'preset')}: see --json"
    yield "\nin a recipe:"
    yield from (f"  {line}" for line in recipe_lines(entry))


def recipe_lines(entry: dict[str, Any]) -> list[str]:
    """Return the YAML lines that select a method in a recipe."""
    return list(_yaml(entry["recipe"]))


def _yaml(values: dict[str, Any]) -> Iterator[str]:
    """Yield a mapping as YAML: a line per key, a line per entry of lists of sections."""
    for key, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{key}:"
            yield from (f"  - {_flow_yaml(item)}" for item in value)
        elif isinstance(value, dict) and value and all(isinstance(item, dict) for item in value.values()):
            yield f"{key}:"
            yield from (f"  {name}: {_flow_yaml(item)}" for name, item in value.items())
        else:
            yield f"{key}: {_flow_yaml(value) if isinstance(value, dict | list | tuple) else yaml_value(value)}"


def _flow_yaml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow_yaml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_flow_yaml(item) for item in value)}]"
    return flow_value(value)
