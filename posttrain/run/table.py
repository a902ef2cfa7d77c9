"""Closing tables of a pipeline as text: one row per model, with accuracy and its interval per seed and over all seeds;
one row per round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from posttrain import terminal
from posttrain.run import rounds


def trained_rows_note(summary: Mapping[str, Any]) -> str:
    """Return a note if an evaluation (its summary) used rows of the model's own training; "" otherwise."""
    found = summary.get("trained_on")
    if not found:
        return ""
    return f"measured on rows it was trained on: {found['rows']} of {found['of']} ({', '.join(found['runs'])})"


def headers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the column names; the seeds are those of the first row."""
    seeds = [f"seed {seed}" for seed in rows[0]["seeds"]]
    against = next((row["difference"]["to"] for row in rows if row.get("difference")), None)
    stage = ["eval stage"] if _names_stages(rows) else []
    return ["model", *stage, *seeds, "all seeds", "tokens", *([f"against {against}"] if against else [])]


def _names_stages(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether some row has a model name that differs from the name of its evaluation."""
    return any(row.get("stage", row["model"]) != row["model"] for row in rows)


def row_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows as text, in the order of `headers`."""
    return [
        [
            str(row["model"]),
            *([str(row.get("stage", ""))] if _names_stages(rows) else []),
            *(half_width(value) for value in row["seeds"].values()),
            interval(row["pooled"]),
            "-" if row.get("mean_tokens") is None else f"{row['mean_tokens']:.1f}",
            "" if row.get("difference") is None else interval(row["difference"], sign=True),
        ]
        for row in rows
    ]


def interval(value: Mapping[str, Any], *, sign: bool = False) -> str:
    """Return `0.886 [0.866, 0.906]`; only the mean if all values are equal, `-` without measurements."""
    if value.get("mean") is None:
        return "-"
    form = "+.3f" if sign else ".3f"
    if value["low"] == value["high"]:
        return f"{value['mean']:{form}}"
    return f"{value['mean']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"


def half_width(value: Mapping[str, Any]) -> str:
    """Return `0.886 ±.020`, with half the interval's width; only the mean if all values are equal, `-` without
    measurements."""
    if value.get("mean") is None:
        return "-"
    if value["low"] == value["high"]:
        return f"{value['mean']:.3f}"
    return f"{value['mean']:.3f} ±{(value['high'] - value['low']) / 2:.3f}".replace("±0.", "±.")


def print_rounds(name: str, rows: Sequence[Mapping[str, float]]) -> None:
    """Print the results of each round of a pipeline on stdout."""
    heads, cells = rounds.table(rows)
    _print(f"{name} by round", heads, cells)


def print_table(rows: Sequence[Mapping[str, Any]], findings: Sequence[str]) -> None:
    """Print the table and one sentence per comparison on stdout; wide enough if stdout is a file or a pipe."""
    console = _print("", headers(rows), row_cells(rows))
    for sentence in findings:
        console.print(sentence, soft_wrap=True)


def settings_table(
    rows: Sequence[Mapping[str, Any]], criterion: str, names: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return (head, cells) of a sweep's settings in their order: rank, setting, runs, the criterion and other
    numbers."""
    head = ["rank", "setting", "runs", *(name.replace("_", " ") for name in (criterion, *names))]
    cells = [
        [
            "-" if row["rank"] is None else str(row["rank"]),
            str(row["setting"]),
            f"{row['runs']} of {row['of']}",
            _number(row["ranked"]),
            *(_number(row[name]) for name in names),
        ]
        for row in rows
    ]
    return head, cells


def print_ranking(ranking: Mapping[str, Any]) -> None:
    """Print the table of a sweep and its sentences on stdout."""
    console = _print("", ranking["head"], ranking["rows"])
    for sentence in ranking["says"]:
        console.print(sentence, soft_wrap=True)


def ranking_as_markdown(ranking: Mapping[str, Any]) -> str:
    """Return the table of a sweep and its sentences as Markdown."""
    return _markdown(ranking["head"], ranking["rows"], ranking["says"])


def comparison_as_markdown(rows: Sequence[Mapping[str, Any]], findings: Sequence[str]) -> str:
    """Return the table of evaluations and one sentence per comparison as Markdown."""
    return _markdown(headers(rows), row_cells(rows), findings)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], says: Sequence[str]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |" for cells in lines)
    return "\n\n".join([table, *says]) + "\n"


def _number(value: Mapping[str, Any]) -> str:
    """Return `0.886 [0.866, 0.906]` with four digits; only the number if there is no interval, or one of zero width."""
    if value["mean"] is None:
        return "-"
    if value["low"] is None or value["low"] == value["high"]:
        return f"{value['mean']:.4g}"
    return f"{value['mean']:.4g} [{value['low']:.4g}, {value['high']:.4g}]"


def _print(title: str, heads: Sequence[str], cells: Sequence[Sequence[str]]) -> Console:
    console = terminal.console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    if title:
        console.print(title)
    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    for name in heads:
        table.add_column(name, justify="left" if name in ("model", "setting", "eval stage") else "right")
    for row in cells:
        table.add_row(*row)
    console.print(table)
    return console
