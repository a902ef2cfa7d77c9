"""`posttrain report`, `runs`, `diff` and `track`: monitor a run, list runs, compare two, send metrics to trackers."""

from __future__ import annotations

import importlib.util
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli.guard import say
from posttrain.errors import MissingExtra, UserError, count_noun, did_you_mean

if TYPE_CHECKING:
    from posttrain.report.runs import RunRow

SHOWN_CHARS = 600  # characters of a completion shown by `posttrain diff`
STATES = ("running", "finished", "stopped", "failed", "killed")
Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="Run directory; the curves of several runs share their plots.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("report")(report)
    app.command("runs")(runs)
    app.command("diff")(diff)
    app.command("track")(track)


def report(
    run: Runs,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the report at a local address; it updates while the runs continue.")
    ] = False,
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port for --serve; 0 selects a free port.")] = 8008,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Report to write (default: report.html in the run, or compare.html in the last of several runs).",
        ),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            "--fit", metavar="METRIC", help="Fit a sigmoid to this metric over steps and print where it saturates."
        ),
    ] = None,
) -> None:
    """Write the HTML report of a run, or of several runs in shared plots. --serve serves a report that updates; --fit
    prints a scaling fit of a metric instead.
    """
    if fit is not None:
        _fit(run, fit)
        return
    if serve:
        if output is not None:
            raise UserError("--output and --serve exclude each other", hint="leave out one of them")
        _serve(run, port)
        return
    from posttrain.report.page import PAGE, write_report
    from posttrain.report.run_view import open_runs

    page = output or (run[0] / PAGE if len(run) == 1 else run[-1] / "compare.html")
    if page.is_dir():
        raise UserError(f"{page} is a directory", hint="--output names the page's file")
    views = open_runs(run)
    for view in views:
        say(f"{view.path}: {view.status.state}{f' ({view.status.message})' if view.status.message else ''}")
    write_report(views, page)
    terminal.say(str(page))


def _fit(run: Sequence[Path], metric: str) -> None:
    """Print the scaling fit of a metric of each run: y = start + (top - start) / (1 + (midpoint / step)^slope)."""
    from posttrain.run.metrics import read_metrics
    from posttrain.run.scaling import fit_scaling

    for path in run:
        rows = read_metrics(path)
        points = [(row["step"], row[metric]) for row in rows if isinstance(row.get(metric), int | float)]
        if not points:
            known = sorted({key for row in rows for key in row})
            raise UserError(f"{path} has no metric `{metric}`", hint=did_you_mean(metric, known))
        start = points[0][1]
        steps, values = zip(*[(step, value) for step, value in points if step > 0], strict=True)
        found = fit_scaling(steps, values, start, top=max(1.0, *values))
        low, high = found.interval
        terminal.say(
            f"{path}: {metric} goes from {start:.3f} to {found.asymptote:.3f} [{low:.3f}, {high:.3f}], midpoint at "
            f"step {found.midpoint:.0f}, slope {found.slope:.2f}; root mean square error {found.rmse:.3f}"
        )


def _serve(run: Sequence[Path], port: int) -> None:
    """Serve the report until Ctrl-C."""
    from posttrain.report.serve import HOST, make_server

    with make_server(run, port) as server:
        terminal.say(f"http://{HOST}:{server.server_address[1]}/")
        say("only this machine can open the page (from elsewhere: ssh -L); Ctrl-C stops the server")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped")


def runs(
    place: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER|RUN", help="Directories to search, or runs (default: runs).")
    ] = None,
    state: Annotated[
        str | None, typer.Option("--state", metavar="STATE", help=f"Only runs in this state: {', '.join(STATES)}.")
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="TEXT",
            help="Only runs with TEXT in path, stage, state, method or note, or with a recipe value KEY=VALUE "
            "(optim.lr=1e-5); repeatable.",
        ),
    ] = None,
    inner: Annotated[bool, typer.Option("--stages", help="Also list the stages of pipelines.")] = False,
    note: Annotated[str | None, typer.Option("--note", metavar="TEXT", help="Save a note on each RUN named.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete each RUN named, after a confirmation.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --delete: skip the confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """List runs with their state and latest metrics, newest last; save notes on runs; delete runs."""
    if state is not None and state not in STATES:
        hint = did_you_mean({"done": "finished", "crashed": "failed"}.get(state, state), STATES)
        raise UserError(f"--state: there is no `{state}`", allowed=f"one of {', '.join(STATES)}", hint=hint)
    if (note is not None or delete) and not place:
        raise UserError(
            f"{'--delete' if delete else '--note'} needs the run directories", hint="posttrain runs RUN ..."
        )
    if note is not None:
        from posttrain.report.runs import write_note

        for run in place or ():
            write_note(run, note)
    if delete:
        _delete(place or [], yes)
        return
    found = _list_runs(place or [Path("runs")], state, words or [], inner)
    if as_json:
        from posttrain.cli.show import print_json

        print_json([_to_dict(row) for row in found])
    elif found:
        _print_runs(found)
    else:
        say(f"no{' matching' if state or words else ''} run in {', '.join(map(str, place or [Path('runs')]))}")


def _list_runs(folders: Sequence[Path], state: str | None, words: Sequence[str], inner: bool) -> list[RunRow]:
    """Return the rows of all runs below the folders that match state and filters, oldest first."""
    from posttrain.report.runs import check_filters, describe, find_runs, is_sweep, matches

    for place in folders:
        if not place.is_dir() and place != Path("runs"):
            from posttrain.path_resolution import suggest_file

            raise UserError(f"there is no folder {place}", hint=suggest_file(str(place), [place]))
    found = (run for place in folders for run in find_runs(place, inner=inner or is_sweep(place)))
    rows = [describe(run) for run in found]
    if rows:
        check_filters(rows, words)
    rows = [row for row in rows if (state is None or row.state == state) and matches(row, words)]
    return sorted(rows, key=lambda row: row.when)


def _delete(run_folders: Sequence[Path], yes: bool) -> None:
    """Delete runs, after a confirmation unless `yes`."""
    from posttrain.report.runs import check_removable, remove, size_of

    for run in run_folders:
        check_removable(run)
        say(f"{run}  {size_of(run) / 1e6:.1f} MB")
    if not yes:
        if not _is_interactive():
            raise UserError(
                "nothing was removed: stdin is not a terminal, so the removal cannot be confirmed",
                hint="--yes removes without confirmation",
            )
        if not typer.confirm(f"permanently delete {count_noun(len(run_folders), 'run')}?", default=False, err=True):
            say("nothing was removed")
            return
    for run in run_folders:
        remove(run)
        say(f"removed {run}")


def _is_interactive() -> bool:
    import sys

    return sys.stdin.isatty()


def _to_dict(row: RunRow) -> dict[str, Any]:
    return {
        "path": str(row.path),
        "stage": row.stage,
        "state": row.state,
        "message": row.message,
        "step": row.step,
        "steps": row.steps,
        "headline": dict([row.headline]) if row.headline else {},
        "when": row.when,
        "note": row.note,
    }


def _print_runs(rows: Sequence[RunRow]) -> None:
    from posttrain.run.progress import duration

    cells = []
    for row in rows:
        done = "" if not row.step else f"{row.step}/{row.steps}" if row.steps else str(row.step)
        number = f"{row.headline[0]} {row.headline[1]:.3g}" if row.headline else ""
        cells.append([str(row.path), row.stage, row.state, done, number, duration(time.time() - row.when), row.note])
    _print_table(["run", "stage", "state", "step", "newest", "ago", "note"], cells)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table

    console = terminal.console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 240
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def diff(
    a: Annotated[Path, typer.Argument(metavar="RUN", help="First run directory.")],
    b: Annotated[Path, typer.Argument(metavar="OTHER", help="Run directory to compare with the first.")],
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=0, help="Number of prompts whose completions are shown.")
    ] = 3,
    every: Annotated[bool, typer.Option("--all", help="Compare all metrics, not only the main ones.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two runs: differing recipe values, metrics, and completions of the same prompts."""
    from posttrain.report.diff import diff as compare
    from posttrain.run.atomic_io import read_json
    from posttrain.run.table import trained_rows_note

    found = compare(a, b, samples, every=every or as_json)
    paired = _compare_problems(a, b)
    if as_json:
        from dataclasses import asdict

        from posttrain.cli.show import print_json

        print_json({**asdict(found), "paired": paired})
        return
    head = [str(a), str(b)]
    if found.values or found.files:
        rows = [[key, *cells] for key, cells in found.values.items()]
        _print_table(["recipe", *head], [*rows, *([f"{key} (file)", *cells] for key, cells in found.files.items())])
    else:
        terminal.say("the recipes and their files are the same\n")
    if found.metrics:
        means = "mean of the last steps (eval/: the last)" if any(found.spans) else "metric"
        _print_table([means, *head, "difference"], [_format_metric(n, row) for n, row in found.metrics.items()])
    if paired:
        terminal.say(_format_comparison(paired) + "\n")
        for run in (a, b):
            if note := trained_rows_note(read_json(run / "summary.json") or {}):
                terminal.say(f"{run}: {note}\n")
    elif any(found.spans):
        spans = "; ".join(f"{run}: {span}" for run, span in zip(head, found.spans, strict=True) if span)
        terminal.say(f"Means are over {spans}. With one run each, the differences have no confidence interval.")
        terminal.say(
            "To get one, evaluate both models on the same rows, or train several seeds: "
            "posttrain sweep R run.seed=0,1,2\n"
        )
    for prompt, first, second in found.samples:
        terminal.say(f"prompt: {prompt.strip()[-SHOWN_CHARS:]}")
        for path, record in zip(head, (first, second), strict=True):
            terminal.say(f"--- {path} ({_format_facts(record)})\n{str(record['completion'])[:SHOWN_CHARS]}")
        terminal.say()
    if any(found.spans):
        say(f"to plot both runs together: {shlex.join(['posttrain', 'report', *head])}")


def track(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="NAME",
            help="Tracker to send to: wandb, tensorboard, trackio or mlflow (default: the recipe's `track`); "
            "repeatable.",
        ),
    ] = None,
    attempt: Annotated[int, typer.Option("--attempt", hidden=True)] = 0,
    problems: Annotated[Path | None, typer.Option("--problems", hidden=True)] = None,
) -> None:
    """Send a run's metrics and samples to experiment trackers, while the run continues or afterwards."""
    from posttrain.report.run_view import open_runs
    from posttrain.track.backends import TRACKERS
    from posttrain.track.follow import follow

    (view,) = open_runs([run])
    if unknown := [name for name in to or () if name not in TRACKERS]:
        hint = did_you_mean(unknown[0], TRACKERS)
        raise UserError(f"there is no tracker `{unknown[0]}`", allowed=f"one of {', '.join(TRACKERS)}", hint=hint)
    trackers = [{"use": name} for name in to] if to else view.resolved.get("track") or []
    if not trackers:
        names = ", ".join(TRACKERS)
        raise UserError(f"the recipe of {run} has no `track`", allowed=f"trackers: {names}", hint="add --to NAME")

    def note(line: str) -> None:
        say(line)
        if problems is not None:
            with problems.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    if problems is None:  # the tracking process beside a run must outlive a failing tracker, so it skips this check
        for name in [str(tracker["use"]) for tracker in trackers]:
            if importlib.util.find_spec(name) is None:
                raise MissingExtra(name, "the tracker", "track")
    senders = follow(run, trackers, note, attempt=attempt)
    if problems is not None:
        return
    for sender in senders:
        if sender.works:
            say(sender.describe())
    if not all(sender.works for sender in senders):
        raise typer.Exit(1)


def _compare_problems(a: Path, b: Path) -> dict[str, Any] | None:
    """Return accuracy of b minus accuracy of a on the problems of both, with its interval, and under `metrics` the same
    for each pass@k and cons@k of both.

    None unless both runs are evaluations (a generate run has problems without an accuracy).
    """
    from posttrain.evaluate.compare import PROBLEMS, compare, list_sample_metrics, read_problem_values, read_problems

    if not all((run / PROBLEMS).is_file() for run in (a, b)):
        return None
    if not all("accuracy" in row for run in (a, b) for row in read_problems(run).values()):
        return None
    if not read_problem_values(a).keys() & read_problem_values(b).keys():
        return {"problems": 0}
    both = [name for name in list_sample_metrics(a) if name in list_sample_metrics(b)]
    return {**compare(a, b), "metrics": {name: compare(a, b, metric=name) for name in both}}


def _format_comparison(found: dict[str, Any]) -> str:
    """Return sentences on how the accuracies of two evaluations differ."""
    if not found["problems"]:
        return "The evaluations share no problem, so the difference of their accuracies has no interval."
    alone = found["only_in_a"] + found["only_in_b"]
    left = f" {count_noun(alone, 'problem')} that only one run has are left out." if alone else ""
    few = f" {found['note'].capitalize()}." if found["informative"] and found["note"] else ""
    how = " (paired bootstrap over problems; does not cover other training seeds)" if found["informative"] else ""
    lines = [
        f"accuracy on {count_noun(found['problems'], 'shared problem')}: {_format_difference(found)}{how}.{left}{few}"
    ]
    return "\n".join([*lines, *(f"{name}: {_format_difference(metric)}" for name, metric in found["metrics"].items())])


def _format_difference(found: dict[str, Any]) -> str:
    """Return a difference with its interval, and whether the interval excludes 0."""
    if not found["informative"]:
        return f"{found['diff']:+.4f}, without an interval ({found['note']})"
    side = "includes 0" if found["low"] <= 0 <= found["high"] else "excludes 0"
    side += ": no difference is shown" if found["diff"] and side == "includes 0" else ""
    return (
        f"{found['diff']:+.4f}, {100 * found['level']:g}% interval [{found['low']:+.4f}, {found['high']:+.4f}] {side}"
    )


def _format_metric(name: str, values: Sequence[float | None]) -> list[str]:
    first, second = values
    shown = ["-" if value is None else f"{value:.4g}" for value in values]
    return [name, *shown, "" if first is None or second is None else f"{second - first:+.4g}"]


def _format_facts(record: dict[str, Any]) -> str:
    facts = [f"step {record['step']}"] if record.get("step") else []  # step 0: an evaluation, or before training
    facts += [f"reward {record['reward']:.3g}"] if isinstance(record.get("reward"), (int, float)) else []
    facts += ["right" if record["correct"] else "wrong"] if record.get("correct") is not None else []
    return ", ".join([*facts, *(["cut"] if record.get("finish") == "length" else [])])
