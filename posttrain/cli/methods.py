"""`posttrain methods`: presets and components, from their files and components.json; torch is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from posttrain.cli.show import print_json, yaml_value
from posttrain.cli.stage import Json
from posttrain.errors import UserError, nearest

app = typer.Typer(no_args_is_help=True)

# kind of component -> (what a reader calls it, where it stands in a recipe)
KINDS = {
    "loss": ("policy loss", "loss"),
    "kl": ("KL estimator", "kl"),
    "advantage": ("advantage", "advantage"),
    "keep": ("filter of groups", "keep"),
    "pair_loss": ("preference loss", "loss"),
    "merge": ("merge method", "merge_method"),
}


@app.command("list")
def list_methods(as_json: Json = False) -> None:
    """All methods: presets (`algorithm: NAME`), then the components that recipes combine."""
    entries = catalogue()
    if as_json:
        print_json([{key: entry[key] for key in ("kind", "name", "stage", "title", "paper")} for entry in entries])
        return
    for kind, about in [
        ("preset", "presets: `algorithm: NAME`"),
        *((k, f"{v[0]}: {_where(k)}") for k, v in KINDS.items()),
    ]:
        rows = [entry for entry in entries if entry["kind"] == kind]
        if not rows:
            continue
        typer.echo(f"{about}")
        width = max(len(entry["name"]) for entry in rows)
        for entry in rows:
            paper = f"  [{entry['paper']}]" if entry["paper"] else ""
            typer.echo(f"  {entry['name']:<{width}}  {entry['title']}{paper}")
        typer.echo()


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A name of `methods list`, or kind/name where several share one.")],
    as_json: Json = False,
) -> None:
    """What a method is: purpose or formula, paper, keys with defaults, what it needs, and the recipe lines to write."""
    entries = catalogue()
    found = [entry for entry in entries if name in (entry["name"], f"{entry['kind']}/{entry['name']}")]
    if not found:
        known = {entry["name"] for entry in entries}
        near = nearest(name, known)
        hint = f"did you mean `{near}`?" if near else "`posttrain methods list` shows them all"
        raise UserError(f"no method `{name}`", hint=hint)
    if as_json:
        print_json(found)
        return
    typer.echo("\n\n".join("\n".join(_page(entry)) for entry in found))


def catalogue() -> list[dict[str, Any]]:
    """Every preset and component as one kind of record, with the recipe lines that choose it."""
    from posttrain import registry
    from posttrain.recipe import presets

    entries = [_preset_entry(presets.preset(name)) for name in presets.names()]
    for kind in KINDS:
        for name, described in registry.index().get(kind, {}).items():
            entries.append(_component_entry(kind, name, described))
    return entries


def _preset_entry(preset: Any) -> dict[str, Any]:
    return {
        "kind": "preset",
        "name": preset.name,
        "stage": preset.stage,
        "title": preset.title,
        "paper": preset.paper,
        "text": preset.purpose.strip(),
        "choices": preset.choices,
        "not_stated": preset.not_stated.strip(),
        "recipe": f"stage: {preset.stage}\nalgorithm: {preset.name}",
    }


def _component_entry(kind: str, name: str, described: dict[str, Any]) -> dict[str, Any]:
    keys = {
        key: {"type": known[0], **({"default": known[1]} if len(known) > 1 else {})}
        for key, known in described["params"].items()
    }
    title, _, _ = described["doc"].partition("\n")
    return {
        "kind": kind,
        "name": name,
        "stage": {"pair_loss": "dpo", "merge": "merge"}.get(kind, "rl"),
        "title": title,
        "paper": described["paper"],
        "text": described["doc"],
        "keys": keys,
        "needs": described["needs"],
        "not_stated": described["note"],
        "recipe": _snippet(kind, name, keys),
    }


def _snippet(kind: str, name: str, keys: dict[str, Any]) -> str:
    if kind == "merge":
        return f"merge_method: {name}"
    lines = [f"{KINDS[kind][1]}:", f"  use: {name}"]
    lines += [f"  {key}: {yaml_value(known.get('default', '...'))}" for key, known in keys.items()]
    return "\n".join(lines)


def _where(kind: str) -> str:
    section = KINDS[kind][1]
    return f"`{section}: NAME`" if kind == "merge" else f"`{section}: {{use: NAME}}`"


def _page(entry: dict[str, Any]) -> Iterator[str]:
    what = "preset" if entry["kind"] == "preset" else KINDS[entry["kind"]][0]
    yield f"{entry['name']}  ({what}, stage {entry['stage']})"
    if entry["paper"]:
        yield f"paper: https://arxiv.org/abs/{entry['paper']}"
    yield ""
    yield from ([entry["title"], ""] if entry["kind"] == "preset" else [])
    yield entry["text"]
    if entry.get("needs"):
        yield f"\nneeds: {', '.join(entry['needs'])}"
    if entry["not_stated"]:
        yield f"\n{'not in the paper' if entry['kind'] == 'preset' else 'note'}: {entry['not_stated']}"
    if entry.get("keys"):
        yield "\nkeys:"
        width = max(map(len, entry["keys"]))
        for key, known in entry["keys"].items():
            default = f"default {yaml_value(known['default'])}" if "default" in known else "required"
            yield f"  {key:<{width}}  {known['type']}, {default}"
    if entry.get("choices"):
        yield "\nchooses (each may be overridden in the recipe):"
        for section, chosen in entry["choices"].items():
            yield f"  {section}: {{{', '.join(f'{k}: {yaml_value(v)}' for k, v in chosen.items())}}}"
    yield "\nin a recipe:"
    yield from (f"  {line}" for line in entry["recipe"].splitlines())
