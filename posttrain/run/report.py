"""report.html: one page without external parts that shows what a run did, for a browser or a mail."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from posttrain.errors import counted
from posttrain.run import rounds
from posttrain.run.curves import Point, chart, number
from posttrain.run.directory import flatten
from posttrain.run.durable import read_json, write_text
from posttrain.run.metrics import read_metrics
from posttrain.run.progress import duration
from posttrain.run.samples import read_samples
from posttrain.run.table import headers, row_cells

# Shown first and in this order; every other curve is one click away.
MAIN = (
    *("reward", "correct", "signal/share", "completions/mean_length", "completions/clipped_ratio", "entropy", "kl"),
    *("loss", "accuracy", "token_accuracy", "rewards/accuracies", "rewards/margins", "grad_norm", "lr"),
)
TILES = (
    *("accuracy", "mean_tokens", "reward_first", "reward_last", "loss_first", "loss_last", "steps", "num_tokens"),
    "train_seconds",
)
SAMPLES = 4  # completions shown of the first and of the last step


def write_report(run_path: Path) -> Path:
    """Write `report.html` from what the run directory holds; return its path."""
    page = run_path / "report.html"
    write_text(page, render(run_path))
    return page


def render(run_path: Path) -> str:
    """The page as text. Whatever the run does not have is left out."""
    resolved = read_json(run_path / "resolved.json") or {}
    env = read_json(run_path / "env.json") or {}
    summary = read_json(run_path / "summary.json") or {}
    name = run_path.resolve().name
    sections = [
        _tiles(summary),
        _closing_table(summary),
        _canaries(summary),
        _findings(summary),
        _rounds(summary),
        _stages(run_path, summary),
        _stage_curves(run_path, summary),
        _curves(read_metrics(run_path)),
        _samples(read_samples(run_path)),
        _details("Summary", json.dumps(summary, indent=2, ensure_ascii=False)) if summary else "",
        _details("Recipe", _read(run_path / "recipe.yaml")),
        _details("Every value in force", "\n".join(f"{k}: {v}" for k, v in flatten(resolved).items())),
        _details("Environment", json.dumps({**env, "git": _commit(env)}, indent=2)),
    ]
    style = files("posttrain.run").joinpath("report.css").read_text(encoding="utf-8")
    title = f"{escape(resolved.get('stage', 'run'))} · {escape(name)}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = f"<header><h1>{title}</h1>{_origin(resolved, env, summary)}</header>{''.join(sections)}"
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{style}</style></head><body><main>{body}</main></body></html>"
    )


def _origin(resolved: Mapping[str, Any], env: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """One line: model, versions, where, and whether the run is finished."""
    model = resolved.get("model")
    packages = env.get("packages", {})
    parts = [
        f"model {model['path']}" if isinstance(model, Mapping) else "",
        f"algorithm {resolved['algorithm']}" if resolved.get("algorithm") else "",
        *(f"{name} {packages[name]}" for name in ("posttrain", "torch", "transformers", "vllm") if name in packages),
        ", ".join(env.get("gpus", [])) or f"{env.get('cpus', '?')} CPU cores",
        f"commit {_commit(env)}" if _commit(env) else "",
        "" if summary else "not finished",
    ]
    return f"<p class=origin>{' · '.join(escape(part) for part in parts if part)}</p>"


def _commit(env: Mapping[str, Any]) -> str:
    git = env.get("git") or {}
    return f"{git['commit'][:12]}{' with changes' if git.get('diff') else ''}" if git else ""


def _tiles(summary: Mapping[str, Any]) -> str:
    found = [(key, summary[key]) for key in TILES if isinstance(summary.get(key), (int, float))]
    cells = [
        f"<div><b>{duration(value) if key.endswith('seconds') else number(value)}</b>{escape(_words(key))}</div>"
        for key, value in found
    ]
    return f"<section class=tiles>{''.join(cells)}</section>" if cells else ""


def _words(key: str) -> str:
    return key.replace("_seconds", " time").replace("num_tokens", "tokens").replace("_", " ")


def _closing_table(summary: Mapping[str, Any]) -> str:
    rows: Sequence[Mapping[str, Any]] = summary.get("table") or []
    if not rows:
        return ""
    says = "".join(f"<li>{escape(sentence)}</li>" for sentence in summary.get("findings", []))
    return f"<section><h2>Comparison</h2>{_table(headers(rows), map(row_cells, rows))}<ul>{says}</ul></section>"


def _findings(summary: Mapping[str, Any]) -> str:
    """What a stage found: its sentences and its tables (`title`, `head`, `rows`), unless they are a comparison's."""
    shown = summary.get("tables") or []
    if not shown:
        return ""
    says = "".join(f"<li>{escape(sentence)}</li>" for sentence in summary.get("findings", []))
    tables = "".join(f"<h3>{escape(t['title'])}</h3>{_table(t['head'], t['rows'])}" for t in shown)
    return f"<section><h2>Findings</h2><ul>{says}</ul>{tables}</section>"


def _rounds(summary: Mapping[str, Any]) -> str:
    """A table for each list of rounds, a row a round."""
    found: Mapping[str, Any] = summary.get("rounds") or {}
    tables = [f"<h2>{escape(name)} by round</h2>{_table(*rounds.table(rows))}" for name, rows in found.items()]
    return f"<section>{''.join(tables)}</section>" if tables else ""


def _canaries(summary: Mapping[str, Any]) -> str:
    """What the rewards say that were never trained on."""
    says = []
    for name, told in (summary.get("canaries") or {}).items():
        since = f"from step {told['first_alarm']}, at {counted(told['alarm_steps'], 'step')} in all"
        end = "and at the end" if told["alarm_at_the_end"] else "not at the end"
        alarm = f"fell while the trained reward rose ({since}, {end})" if told["alarm_steps"] else "no alarm"
        says.append(f"<li>{escape(name)}: {escape(alarm)}</li>")
    return f"<section><h2>Canaries</h2><ul>{''.join(says)}</ul></section>" if says else ""


def _stages(run_path: Path, summary: Mapping[str, Any]) -> str:
    """Links to the reports of a pipeline's stages, a row a stage and a column a seed."""
    seeds: Mapping[str, Mapping[str, Any]] = summary.get("seeds") or {}
    if not seeds:
        return ""
    rows = []
    for stage in next(iter(seeds.values())):
        links = []
        for seed in seeds:
            target = f"seed-{seed}/{stage}/report.html"
            there = (run_path / target).exists()
            links.append(f'<a href="{escape(target)}">report</a>' if there else "-")
        rows.append(f"<tr><td>{escape(stage)}</td>{''.join(f'<td>{link}</td>' for link in links)}</tr>")
    head = "".join(f"<th>{escape(text)}</th>" for text in ["stage", *(f"seed {seed}" for seed in seeds)])
    return f"<section><h2>Stages</h2><table><tr>{head}</tr>{''.join(rows)}</table></section>"


def _stage_curves(run_path: Path, summary: Mapping[str, Any]) -> str:
    """The reward of every RL stage of a pipeline, a chart a seed."""
    charts = []
    for seed, stages in (summary.get("seeds") or {}).items():
        for stage in stages:
            points = _points(read_metrics(run_path / f"seed-{seed}" / stage), "reward")
            if len(points) > 1:
                charts.append((stage, chart(f"{stage}, seed {seed}: reward", points)))
    shown = "".join(figure for _, figure in sorted(charts, key=lambda pair: pair[0]))
    return f"<section><h2>Rewards</h2><div class=charts>{shown}</div></section>" if charts else ""


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _curves(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(key for row in rows for key in row if key != "step"))
    curves = {name: points for name in names if len(points := _points(rows, name)) > 1}
    parts = [name for name in curves if name.startswith("rewards/") and name.endswith("/mean")]
    parts += [name for name in curves if name.startswith("canary/") and name.endswith("/alarm")]
    first = [name for name in (*MAIN, *parts) if name in curves]
    first = list(dict.fromkeys(first)) or list(curves)[:6]
    rest = [name for name in curves if name not in first]
    if not curves:
        return ""
    more = f"<summary>{counted(len(rest), 'more curve')}</summary><div class=charts>{_charts(curves, rest)}</div>"
    more = f"<details>{more}</details>" if rest else ""
    return f"<section><h2>Curves</h2><div class=charts>{_charts(curves, first)}</div>{more}</section>"


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    return [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), (int, float))]


def _charts(curves: Mapping[str, list[Point]], names: Iterable[str]) -> str:
    return "".join(chart(name, curves[name]) for name in names)


def _samples(records: Sequence[Mapping[str, Any]]) -> str:
    """Some completions of the first and of the last step, side by side."""
    if not records:
        return ""
    steps = sorted({record.get("step", 0) for record in records})
    columns = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        cards = [_card(record) for record in records if record.get("step", 0) == step][:SAMPLES]
        columns.append(f"<div><h3>Step {step}</h3>{''.join(cards)}</div>")
    return f"<section><h2>Completions</h2><div class=samples>{''.join(columns)}</div></section>"


def _card(record: Mapping[str, Any]) -> str:
    scores = {"reward": record.get("reward"), **(record.get("scores") or {})}
    shown = "".join(
        f"<span>{escape(name)} <b>{number(value)}</b></span>"
        for name, value in scores.items()
        if isinstance(value, (int, float))
    )
    mark = {True: "right", False: "wrong"}.get(bool(record["correct"])) if record.get("correct") is not None else ""
    length = f"<span>{counted(record['tokens'], 'token')}</span>" if "tokens" in record else ""
    cut = "<span>cut</span>" if record.get("finish") == "length" else ""
    prompt, completion = escape(str(record.get("prompt", ""))), escape(str(record.get("completion", "")))
    return (
        f'<article class="{mark}"><pre class=prompt>{prompt}</pre><pre>{completion}</pre>'
        f"<footer>{shown}{length}{cut}</footer></article>"
    )


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>" if text else ""


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
