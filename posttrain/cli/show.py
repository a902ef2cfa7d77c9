"""Output of commands: recipes with the origin of every value, summaries as small tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from posttrain import terminal

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded


def print_json(value: Any) -> None:
    """Print data for programs on stdout as JSON."""
    terminal.say(json.dumps(value, indent=2, ensure_ascii=False))


def print_recipe(loaded: Loaded, as_json: bool) -> None:
    """Print a resolved recipe as YAML that can be used again, with the origin of each value as a comment."""
    from posttrain.redact import without_secrets

    origins = {key: str(origin) for key, origin in loaded.origins.items()}
    shown = without_secrets(loaded.resolved)
    if as_json:
        print_json({"recipe": shown, "origins": origins, "path": str(loaded.path)})
        return
    for line in commented_lines(shown, origins):
        terminal.say(line)


def commented_lines(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Return values as YAML lines with the origin of each (by its dotted key) as a comment."""
    lines = list(_yaml_lines(values, origins, "", ""))
    width = min(max((len(text) for text, _ in lines), default=0), 60)
    return [f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines]


def yaml_lines(values: Mapping[str, Any]) -> list[str]:
    """Return values as YAML lines that parse to the same values."""
    return [text for text, _ in _yaml_lines(values, {}, "", "")]


def _yaml_lines(
    value: Mapping[str, Any], origins: Mapping[str, str], path: str, indent: str
) -> Iterator[tuple[str, str]]:
    """Yield (text, origin) of each line of a mapping."""
    for key, below in value.items():
        here = f"{path}.{key}" if path else key
        key = key if re.fullmatch(r"[A-Za-z_][\w.-]*", key) else json.dumps(key, ensure_ascii=False)
        if isinstance(below, dict) and below:
            yield f"{indent}{key}:", ""
            yield from _yaml_lines(below, origins, here, f"{indent}  ")
        elif isinstance(below, list) and below and all(isinstance(item, dict) and item for item in below):
            yield f"{indent}{key}:", ""
            for position, item in enumerate(below):
                for number, (text, origin) in enumerate(_yaml_lines(item, origins, f"{here}.{position}", "")):
                    yield f"{indent}{'  ' if number else '- '}{text}", origin
        else:
            yield f"{indent}{key}: {yaml_value(below)}", origins.get(here, "")


def yaml_value(value: Any) -> str:
    """Return a value as one line of YAML that parses to the same value."""
    if isinstance(value, str):
        from posttrain.recipe.yaml import scalar

        simple = value and value.isprintable() and value == value.strip() and isinstance(scalar(value), str)
        free = simple and value[0] not in "!&*-?|>@`\"'%#{}[],:=<" and not any(c in value for c in ("#", ": ", "${"))
        return value if free and not value.endswith(":") else json.dumps(value, ensure_ascii=False).replace("${", "$${")
    if isinstance(value, list):
        return f"[{', '.join(flow_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {flow_value(item)}' for key, item in value.items())}}}"
    return json.dumps(value)


def flow_value(value: Any) -> str:
    """Return a value for use inside brackets, where a text with a comma or bracket needs quotes."""
    text = yaml_value(value)
    free = not isinstance(value, str) or text.startswith('"') or not any(c in text for c in ",[]{}")
    return text if free else json.dumps(value, ensure_ascii=False)


def print_summary(summary: Mapping[str, Any], as_json: bool) -> None:
    """Print a run's summary: a line per number, or JSON."""
    if as_json:
        print_json(summary)
        return
    for name, by_round in summary.get("rounds", {}).items():
        from posttrain.run.table import print_rounds

        print_rounds(name, by_round)
    rows = summary.get("table")
    if isinstance(rows, list) and rows:
        from posttrain.run.table import print_table

        print_table(rows, summary.get("findings", []))
        return
    plain = {key: text for key, value in summary.items() if (text := _format_value(value)) is not None}
    if (best := summary.get("best_checkpoint")) and best["model"]:
        plain["best"] = f"{best['model']}  ({best['metric']} {best['value']:.4g} after step {best['step']})"
    width = max((len(key) for key in plain), default=0)
    for key, text in plain.items():
        terminal.say(f"{key:<{width}}  {text}")
    if summary.get("ledger"):
        from posttrain.run.ledger import sentences

        for line in sentences(summary):
            terminal.say(line)


def _format_value(value: Any) -> str | None:
    """Return a number, a text or a mean with its interval as text; None for values that do not fit into one cell."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, int | float):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    if isinstance(value, Mapping) and {"mean", "low", "high"} <= value.keys() and value["mean"] is not None:
        return f"{value['mean']:.4g} [{value['low']:.4g}, {value['high']:.4g}]"
    return None
