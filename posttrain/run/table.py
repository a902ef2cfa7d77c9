"""The closing tables of a pipeline as text: a row a model, accuracy with its interval per seed and over all seeds; and
a row a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from posttrain import terminal
from posttrain.run import rounds


def trained_rows_note(summary: Mapping[str, Any]) -> str:
    """That an evaluation (its summary) measured on rows of the model's own training; "" where it did not."""
    found = summary.get("trained_on")
    if not found:
        return ""
    return f"measured on rows it was trained on: {found['rows']} of {found['of']} ({', '.join(found['runs'])})"


def headers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Column names; the seeds are those of the first row."""
    seeds = [f"seed {seed}" for seed in rows[0]["seeds"]]
    against = next((row["difference"]["to"] for row in rows if row.get("difference")), None)
    stage = ["eval stage"] if _names_stages(rows) else []
    return ["model", *stage, *seeds, "all seeds", "tokens", *([f"against {against}"] if against else [])]


def _names_stages(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some row is called by a model whose evaluation has another name."""
    return any(row.get("stage", row["model"]) != row["model"] for row in rows)


def row_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows as text, each in the order of `headers`."""
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
    """`0.886 [0.866, 0.906]`; the mean alone where all values are equal, `-` where nothing was measured."""
    if value.get("mean") is None:
        return "-"
    form = "+.3f" if sign else ".3f"
    if value["low"] == value["high"]:
        return f"{value['mean']:{form}}"
    return f"{value['mean']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"


def half_width(value: Mapping[str, Any]) -> str:
    """`0.886 ±.020`, half of the interval's width; the mean alone where all values are equal, `-` where nothing was
    measured."""
    if value.get("mean") is None:
        return "-"
    if value["low"] == value["high"]:
        return f"{value['mean']:.3f}"
    return f"{value['mean']:.3f} ±{(value['high'] - value['low']) / 2:.3f}".replace("±0.", "±.")


def print_rounds(name: str, rows: Sequence[Mapping[str, float]]) -> None:
    """What each round of a pipeline came to, on stdout."""
    heads, cells = rounds.table(rows)
    _print(f"{name} by round", heads, cells)


def print_table(rows: Sequence[Mapping[str, Any]], findings: Sequence[str]) -> None:
    """The table and a sentence a comparison on stdout; wide enough where stdout is a file or a pipe."""
    console = _print("", headers(rows), row_cells(rows))
    for sentence in findings:
        console.print(sentence, soft_wrap=True)


def settings_table(
    rows: Sequence[Mapping[str, Any]], criterion: str, names: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """(head, cells) of a sweep's settings in their order: rank, setting, runs, the criterion and other numbers."""
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
    """The table of a sweep and what it says on stdout."""
    console = _print("", ranking["head"], ranking["rows"])
    for sentence in ranking["says"]:
        console.print(sentence, soft_wrap=True)


def ranking_as_markdown(ranking: Mapping[str, Any]) -> str:
    """The table of a sweep and what it says as Markdown."""
    return _markdown(ranking["head"], ranking["rows"], ranking["says"])


def comparison_as_markdown(rows: Sequence[Mapping[str, Any]], findings: Sequence[str]) -> str:
    """The table of evaluations and a sentence a comparison as Markdown."""
    return _markdown(headers(rows), row_cells(rows), findings)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], says: Sequence[str]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |" for cells in lines)
    return "\n\n".join([table, *says]) + "\n"


def _number(value: Mapping[str, Any]) -> str:
    """`0.886 [0.866, 0.906]` with four digits; the number alone where there is no interval, or one without width."""
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
