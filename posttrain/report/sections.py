"""Sections of a run's page as plain values: tiles, tables, sentences and samples."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import count_noun
from posttrain.report.curves import format_number, proportion_interval
from posttrain.report.run_view import RunView
from posttrain.run import ledger, rounds
from posttrain.run.progress import duration
from posttrain.run.resolved_recipe import flatten
from posttrain.run.table import headers, row_cells, trained_rows_note

TILES = (
    *("accuracy", "mean_tokens", "reward_first", "reward_last", "loss_first", "loss_last", "steps", "num_tokens"),
    "train_seconds",
)
NOW = (  # metrics shown as tiles for a run without a summary
    *("reward", "correct", "eval/accuracy", "eval/loss", "loss", "completions/clipped_ratio", "num_tokens"),
)
SHARES = ("correct", "eval/accuracy", "completions/clipped_ratio", "truncated")
MANY_CUT = 0.1  # share of truncated completions above which the tile is a warning


def build_origin(view: RunView) -> dict[str, Any]:
    """Return the state and one line with model, versions and hardware."""
    resolved, env = view.resolved, view.env
    model, packages = resolved.get("model"), env.get("packages", {})
    parts = [
        f"model {model['path']}" if isinstance(model, Mapping) else "",
        f"algorithm {resolved['algorithm']}" if resolved.get("algorithm") else "",
        *(f"{name} {packages[name]}" for name in ("posttrain", "torch", "transformers", "vllm") if name in packages),
        ", ".join(env.get("gpus", [])) or f"{env.get('cpus', '?')} CPU cores",
        f"commit {view.commit()}" if view.commit() else "",
    ]
    return {
        "name": view.name,
        "state": view.status.state,
        "message": view.status.message,
        "progress": format_progress(view),
        "finished": view.status.state == "finished",
        "line": " · ".join(part for part in parts if part),
        "path": str(view.path),
        "note": read_note(view.path),
    }


def read_note(run: Path) -> str:
    """Return the note written with `posttrain runs --note`; "" if there is none."""
    path = run / "note.txt"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def format_progress(view: RunView) -> str:
    """Return `step 40 of 200` and the age of that step for an unfinished run; "" for others."""
    if view.status.state == "finished" or not view.last_step:
        return ""
    of = f" of {view.steps}" if view.steps else ""
    age = time.time() - view.curves.path.stat().st_mtime
    ago = f", {duration(age)} ago" if age > 60 else ""
    return f"step {view.last_step}{of}{ago}"


def build_tiles(view: RunView) -> list[dict[str, Any]]:
    """Return the few numbers at the top: from the summary, or from the newest step if there is none."""
    summary, last = view.summary, view.curves.last
    if not summary:
        tiles = [(key, value) for key in NOW if (value := view.curves.recent(key, 1)) is not None]
        tiles = [("step", view.last_step), *tiles] if view.last_step else tiles
    else:
        tiles = [(key, summary[key]) for key in TILES if isinstance(summary.get(key), (int, float))]
        cut = summary.get("truncated", last.get("completions/clipped_ratio"))
        tiles += [("completions/clipped_ratio", cut)] if isinstance(cut, (int, float)) else []
    return [_build_tile(view, key, value) for key, value in tiles]


def _build_tile(view: RunView, key: str, value: float) -> dict[str, Any]:
    """Return the tile of one number, with its interval if known."""
    shown = duration(value) if key.endswith("seconds") else f"{value:.1%}" if key in SHARES else format_number(value)
    more = ""
    rows = view.curves.last.get("rollout/rows")
    if key == "correct" and rows and view.group_size:
        low, high = proportion_interval(value, rows / view.group_size)
        more = f"[{low:.2f}, {high:.2f}]"
    if key == "eval/accuracy":
        lower, upper = (view.curves.recent(f"{key}/{side}", 1) for side in ("low", "high"))
        more = "" if lower is None or upper is None else f"[{lower:.2f}, {upper:.2f}]"
    if key == "accuracy" and (found := (view.summary.get("intervals") or {}).get("accuracy")):
        more = f"[{found['low']:.3f}, {found['high']:.3f}]" if found.get("low") is not None else ""
    name = "cut completions" if key == "completions/clipped_ratio" else _readable_name(key)
    return {"value": shown, "name": name, "more": more, "warn": name == "cut completions" and value > MANY_CUT}


def _readable_name(key: str) -> str:
    """Return a metric name in words."""
    return (
        key.replace("eval/", "evaluation ")
        .replace("_seconds", " time")
        .replace("num_tokens", "tokens")
        .replace("_", " ")
    )


def build_blocks(view: RunView) -> list[dict[str, Any]]:
    """Return titled blocks of sentences, tables and intervals, in page order; empty blocks are omitted."""
    summary = view.summary
    blocks = [
        *_best_block(summary),
        *_intervals_block(summary),
        *_settings_block(summary),
        *_comparison_block(summary),
        *_canaries_block(summary),
        *_ledger_block(summary),
        *_findings_block(summary),
        *_rounds_block(summary),
    ]
    return [{"says": [], "tables": [], "bars": [], **block} for block in blocks]


def _best_block(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the block about the evaluation that selected the best weights."""
    best = summary.get("best_checkpoint")
    if not best:
        return []
    where = f": {best['model']}" if best["model"] else ", before the first step" if not best["step"] else ""
    sentences = [f"{best['metric']} {best['value']:.4g} after step {best['step']}{where}"]
    if stopped := summary.get("stopped_early"):
        sentences.append(str(stopped))
    return [{"title": "Best evaluation", "says": sentences}]


def _intervals_block(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the block with an evaluation's numbers and their intervals as bars."""
    bars = []
    for name, interval in (summary.get("intervals") or {}).items():
        if interval.get("mean") is None or interval.get("low") is None:
            continue
        top = 1.0 if interval["high"] <= 1 else interval["high"] * 1.1
        digits = 1 if name == "tokens" else 3
        ends = [100 * interval[key] / top for key in ("low", "mean", "high")]
        text = f"{interval['mean']:.{digits}f} [{interval['low']:.{digits}f}, {interval['high']:.{digits}f}]"
        bars.append({"name": name, "text": text, "low": ends[0], "mean": ends[1], "width": ends[2] - ends[0]})
    level = max((interval.get("level", 0.95) for interval in (summary.get("intervals") or {}).values()), default=0.95)
    title = f"Measured, with {100 * level:g}% intervals"
    note = trained_rows_note(summary)
    return [{"title": title, "says": [note] if note else [], "bars": bars}] if bars else []


def _settings_block(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the block with the ranked settings of a sweep."""
    found = summary.get("ranking")
    if not found:
        return []
    table = {"title": "", "head": found["head"], "rows": found["rows"]}
    return [{"title": "Settings", "says": found["says"], "tables": [table]}]


def _comparison_block(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = summary.get("table") or []
    if not rows:
        return []
    table = {"title": "", "head": headers(rows), "rows": row_cells(rows)}
    return [{"title": "Comparison", "says": summary.get("findings", []), "tables": [table]}]


def _findings_block(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the block with a stage's findings and tables (`title`, `head`, `rows`), except those of a comparison."""
    tables = summary.get("tables") or []
    return [{"title": "Findings", "says": summary.get("findings", []), "tables": tables}] if tables else []


def _rounds_block(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a table for each list of rounds, with one row per round."""
    found: Mapping[str, Any] = summary.get("rounds") or {}
    tables = {name: rounds.table(rows) for name, rows in found.items()}
    return [
        {"title": f"{name} by round", "tables": [{"title": "", "head": head, "rows": rows}]}
        for name, (head, rows) in tables.items()
    ]


def _canaries_block(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the block about canary rewards, which are never trained on."""
    says = []
    for name, canary in (summary.get("canaries") or {}).items():
        since = f"from step {canary['first_alarm']}, at {count_noun(canary['alarm_steps'], 'step')} in all"
        end = "and at the end" if canary["alarm_at_the_end"] else "not at the end"
        alarm = f"fell while the trained reward rose ({since}, {end})" if canary["alarm_steps"] else "no alarm"
        says.append(f"{name}: {alarm}")
    return [{"title": "Canaries", "says": says}] if says else []


def _ledger_block(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the block about the use of tokens and the time of each part of a step."""
    says = ledger.sentences(summary)
    return [{"title": "Where the tokens and seconds went", "says": says}] if says else []


def build_stage_links(view: RunView) -> dict[str, Any] | None:
    """Return links to the reports of a pipeline's stages, one row per stage and one column per seed, or None."""
    names = {key.partition("/")[0]: None for key in view.stages} | {
        f"seed-{seed}": None for seed in view.summary.get("seeds") or {}
    }
    stages = {key.partition("/")[2]: None for key in view.stages}
    for of_seed in (view.summary.get("seeds") or {}).values():
        stages |= dict.fromkeys(of_seed)
    rows = []
    for stage in stages:
        cells = []
        for seed in names:
            cells.append(_report_link(view, f"{seed}/{stage}", view.stages.get(f"{seed}/{stage}")))
        rows.append({"name": stage, "cells": cells})
    head = ["stage", *(seed.replace("-", " ") for seed in names)]
    return {"title": "Stages", "head": head, "rows": rows} if rows else None


def build_run_links(view: RunView) -> dict[str, Any] | None:
    """Return links to the reports of a sweep's runs, one per row; None for other runs."""
    rows = [{"name": name, "cells": [_report_link(view, name, run)]} for name, run in view.runs.items()]
    return {"title": "Runs", "head": ["run", "report"], "rows": rows} if rows else None


def _report_link(view: RunView, folder: str, run: RunView | None) -> dict[str, str]:
    """Return the cell that links to the report of an inner run: `report`, or the state of an unfinished run."""
    target = f"{folder}/report.html"
    text = "report" if run is None or run.status.state == "finished" else run.status.state
    return {"href": target, "text": text} if (view.path / target).exists() else {"href": "", "text": "-"}


def build_sample_cards(view: RunView) -> list[dict[str, Any]]:
    """Return samples as cards with correctness, truncation and scores."""
    cards = []
    for record in view.samples:
        scores = {"reward": record.get("reward"), **(record.get("scores") or record.get("components") or {})}
        judged = record.get("correct")
        cards.append(
            {
                "step": record["step"],
                "prompt": record["prompt"],
                "completion": record["completion"],
                "images": [url for url in record.get("images", ()) if str(url).startswith("data:image/")],
                "mark": "" if judged is None else "right" if judged else "wrong",
                "cut": record.get("finish") == "length",
                "evaluation": bool(record.get("eval")),
                "scores": [(n, format_number(float(v))) for n, v in scores.items() if isinstance(v, (int, float))],
                "tokens": count_noun(record["tokens"], "token") if isinstance(record.get("tokens"), int) else "",
            }
        )
    return cards


def build_details(view: RunView) -> list[tuple[str, str]]:
    """Return titles and texts of the collapsible sections."""
    recipe = view.path / "recipe.yaml"
    env = {**view.env, "git": view.commit()}
    details = [
        ("Summary", json.dumps(view.summary, indent=2, ensure_ascii=False) if view.summary else ""),
        ("Recipe", recipe.read_text(encoding="utf-8") if recipe.exists() else ""),
        ("Every value in force", "\n".join(f"{k}: {v}" for k, v in flatten(view.resolved).items())),
        ("Environment", json.dumps(env, indent=2, ensure_ascii=False)),
    ]
    return [(title, text) for title, text in details if text]
