"""report.html: one self-contained page about a run, for a browser or an e-mail.

Model output is inserted through escaping templates; a content security policy forbids scripts other than the page's and
connections other than to its origin.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from posttrain.report import sections
from posttrain.report.compare import compare_runs
from posttrain.report.curves import curves_to_draw, split_by_priority
from posttrain.report.run_view import RunView
from posttrain.run.atomic_io import write_text
from posttrain.terminal import escape_control_characters

PAGE = "report.html"


def write_report(views: Sequence[RunView], page: Path) -> None:
    """Write the page of one run, or of several runs with overlaid curves."""
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, render(views))


def render(views: Sequence[RunView], *, live: bool = False) -> str:
    """Return the page as text. Parts without data are omitted. live: the page polls its server for updates."""
    return render_page(
        "report.html.j2",
        ("uplot.min.js", "report.js"),
        ("uplot.min.css", "report.css"),
        {**page_values(views), "live": live, "written": time.time()},
        connects=live,
    )


def page_values(views: Sequence[RunView]) -> dict[str, Any]:
    """Return the values of the page's template, and `data`, which its script draws."""
    alone = views[0] if len(views) == 1 else None
    title = f"{views[0].stage} · {views[0].name}" if alone else " · ".join(view.name for view in views)
    return {
        "title": title,
        "views": views,
        "origins": [sections.build_origin(view) for view in views],
        "tiles": sections.build_tiles(alone) if alone else [],
        "blocks": sections.build_blocks(alone) if alone else compare_runs(views),
        "links": sections.build_stage_links(alone) or sections.build_run_links(alone) if alone else None,
        "samples": [(view.name, sections.build_sample_cards(view)) for view in views],
        "details": sections.build_details(alone) if alone else [],
        "data": {"groups": chart_groups(views), "states": [view.status.state for view in views]},
    }


def chart_groups(views: Sequence[RunView]) -> list[dict[str, Any]]:
    """Group the runs whose curves are overlaid in one chart, with a title for each group.

    For pipelines, a group is the same stage of all seeds; for sweeps, all runs.
    """
    groups: dict[str, list[tuple[str, RunView]]] = {}
    for view in views:
        if view.curves.points:
            groups.setdefault("Curves", []).append((view.name, view))
        for key, run in view.runs.items():
            if run.curves.points:
                groups.setdefault("Curves", []).append((key if len(views) == 1 else f"{view.name} {key}", run))
        for key, stage in view.stages.items():
            seed, _, name = key.partition("/")
            whose = seed.replace("-", " ") if len(views) == 1 else f"{view.name} {seed.replace('-', ' ')}"
            if stage.curves.points:
                groups.setdefault(f"Curves of {name}", []).append((whose, stage))
    charts = []
    for title, runs in groups.items():
        first, rest = split_by_priority(list(dict.fromkeys(name for _, view in runs for name in view.curves.points)))
        charts.append(
            {
                "title": title,
                "first": first,
                "rest": rest,
                "runs": [{"name": name, "curves": curves_to_draw(view.curves, view.group_size)} for name, view in runs],
            }
        )
    return charts


def render_page(
    template: str, scripts: Sequence[str], styles: Sequence[str], values: Mapping[str, Any], *, connects: bool = False
) -> str:
    """Render a template of this package with scripts and styles inlined. values: `data` becomes a JSON island."""
    code = [read_asset(name) for name in scripts]
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in code)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    policy += "; img-src data:"
    policy += "; connect-src 'self'" if connects else ""
    return (
        template_environment()
        .get_template(template)
        .render(
            {**values, "data": json_island(values["data"]), "policy": policy},
            scripts=[Markup(text) for text in code],  # files of this package
            styles=[Markup(read_asset(name)) for name in styles],
        )
    )


def render_fragment(template: str, values: Mapping[str, Any]) -> str:
    """Render a part of a page."""
    return template_environment().get_template(template).render(values)


@cache
def template_environment() -> jinja2.Environment:
    """Return the template environment, which escapes markup and control characters."""

    def visible(value: Any) -> Any:
        if isinstance(value, str) and not isinstance(value, Markup):
            return escape_control_characters(value)
        return value

    return jinja2.Environment(
        loader=jinja2.PackageLoader("posttrain.report", "templates"),
        autoescape=True,
        finalize=visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def json_island(data: Any) -> Markup:
    """Return JSON that is safe in a <script> element: it cannot end the element or begin a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return Markup(re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text))


@cache
def read_asset(name: str) -> str:
    """Return the text of a file of this package."""
    return files("posttrain.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
