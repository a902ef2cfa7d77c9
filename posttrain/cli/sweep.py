"""`posttrain merge R --sweep KEY=VALUES --eval E`: a merge and an evaluation per value, a table, the best recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.guard import RESUME, RUN, say
from posttrain.errors import Interrupted, UserError

if TYPE_CHECKING:
    import typer

    from posttrain.recipe.load import Loaded
    from posttrain.recipe.merge_sweep import Point
    from posttrain.run.directory import RunDirectory

BEST = "best.yaml"
LEVEL = 0.95  # confidence level of the table's intervals
CAVEAT = "the best point was chosen on the problems it was evaluated on: evaluate it on others before you report it"


def sweep(
    ctx: typer.Context,
    recipe: str,
    overrides: Sequence[str],
    asked: Sequence[str],
    evaluation: str,
    output: Path | None,
    *,
    resume: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Check everything, then merge and evaluate every point. Of the merged models only the best one is kept."""
    from posttrain.cli import packages, preflight
    from posttrain.cli.run_messages import print_notes, print_run_summary
    from posttrain.recipe.load import load
    from posttrain.recipe.merge_sweep import parse, points
    from posttrain.recipe.stages import MergeRecipe
    from posttrain.run.directory import RunDirectory

    axes = [parse(text) for text in asked]
    start = preflight.load(recipe, overrides, stage="merge")
    found = points(axes, start.require(MergeRecipe))
    merges = {point.name: load(recipe, [*overrides, *point.overrides], stage="merge") for point in found}
    measure = preflight.load(evaluation, ["model.path=tiny"], stage="eval")  # the recipe's own model is never read
    print_notes(start)
    print_notes(measure)
    if dry_run:
        for point in found:
            say(f"would merge and measure {point.name}: {' '.join(point.overrides)}")
        return
    packages.require(start)
    packages.require(measure)
    values = {
        **start.resolved,
        "sweep": {a.key: list(a.values) for a in axes},
        "evaluation": _comparable_values(measure),
    }
    wanted = output or (Path(start.recipe.run.output) if start.recipe.run.output else None)
    with RunDirectory.open(
        wanted, name=f"{start.name}-sweep", text=start.text, resolved=values, resume=resume
    ) as directory:
        typed = ["posttrain", "merge", recipe, *overrides, *(f"--sweep={text}" for text in asked)]
        ctx.meta[RUN] = directory
        ctx.meta[RESUME] = [*typed, "--eval", evaluation, "--output", str(directory.path), "--resume"]
        say(f"run directory: {directory.path}")
        from posttrain.report.live import keep_report

        with keep_report(directory):
            summary = run_points(found, merges, evaluation, directory)
        print_run_summary(summary, directory.path, as_json)
        if not _all_equal(summary["table"]):
            say(CAVEAT)


def _comparable_values(measure: Loaded) -> dict[str, Any]:
    """Return the evaluation's values without its model and output, which differ between points."""
    return {key: value for key, value in measure.resolved.items() if key not in ("model", "run")}


def run_points(
    points: Sequence[Point], merges: Mapping[str, Loaded], evaluation: str, directory: RunDirectory
) -> dict[str, Any]:
    """Merge and evaluate every point that has no result yet; keep the best model in `final`; write best.yaml and
    summary.json.
    """
    from posttrain.evaluate.table import closing_table, describe_findings
    from posttrain.recipe.merge_sweep import best
    from posttrain.run.atomic_io import write_json
    from posttrain.run.interrupt import GracefulStop

    accuracies: dict[str, float | None] = {}
    GracefulStop.take_ignored_signal()  # discard signals from before this sweep
    for number, point in enumerate(points, 1):
        if asked := GracefulStop.take_ignored_signal():
            raise Interrupted(f"stopped after point {number - 1} of {len(points)}", number=asked)
        say(f"point {number} of {len(points)}: {point.name}")
        accuracies[point.name] = measure_point(point.name, merges[point.name], evaluation, directory.path)
        _remove_other_weights(best(accuracies), accuracies, directory.path)
    chosen = best(accuracies)
    if chosen is None:
        raise UserError("no point could be measured", where=str(directory.path))
    rows = closing_table(
        {name: {"0": _point_folder(directory.path, name) / "eval"} for name in accuracies}, level=LEVEL
    )
    _move_to_final(_point_folder(directory.path, chosen) / "merge" / "final", directory.final)
    recipe = directory.path / BEST
    recipe.write_text(recipe_text(merges[chosen], chosen, accuracies[chosen]), encoding="utf-8")
    summary = {
        "model": str(directory.final),
        "best": chosen,
        "accuracy": accuracies[chosen],
        "recipe": str(recipe),
        "table": rows,
        "findings": [*describe_findings(rows), f"{_describe_choice(chosen, accuracies)}: {recipe}"],
        "caveat": CAVEAT,
    }
    write_json(directory.path / "summary.json", summary)
    return summary


def _all_equal(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all points have the same accuracy, so that none was chosen for it."""
    return len({row["pooled"]["mean"] for row in rows}) == 1


def _describe_choice(chosen: str, accuracies: Mapping[str, float | None]) -> str:
    """Return which point is the best, or that all points are equal."""
    values = [value for value in accuracies.values() if value is not None]
    if len(values) > 1 and min(values) == max(values):
        return f"all points have the accuracy {values[0]:.3f}, so none is the best; the first is kept, {chosen}"
    return f"the best is {chosen} ({accuracies[chosen]:.3f})"


def measure_point(name: str, merge: Loaded, evaluation: str, path: Path) -> float | None:
    """Return the accuracy of one point; merge and evaluate it unless an earlier attempt did."""
    from posttrain.pipeline import run_in_folder
    from posttrain.recipe.load import load
    from posttrain.run.atomic_io import read_json

    folder = _point_folder(path, name)
    done = read_json(folder / "eval" / "summary.json")
    if done is None:
        model = folder / "merge" / "final"
        if read_json(folder / "merge" / "summary.json") is None or not model.is_dir():
            run_in_folder(folder / "merge", merge, f"merge {name}")
        measure = load(evaluation, [f"model.path={model.resolve()}"], stage="eval")
        done = run_in_folder(folder / "eval", measure, f"eval {name}")
    accuracy = done.get("accuracy")
    return None if accuracy is None else float(accuracy)


def _point_folder(path: Path, name: str) -> Path:
    return path / "points" / name


def _remove_other_weights(chosen: str | None, names: Mapping[str, Any], path: Path) -> None:
    """Remove the weights of all points except the best so far; their evaluations and merge reports stay."""
    for name in names:
        if name != chosen:
            for file in (_point_folder(path, name) / "merge" / "final").glob("*.safetensors"):
                file.unlink()


def _move_to_final(model: Path, final: Path) -> None:
    """Move the best model to `final`; print a note if its weights were removed by an earlier attempt."""
    from posttrain.run.atomic_io import put_in_place

    if any(model.glob("*.safetensors")):
        put_in_place(model, final)
    elif not final.is_dir():
        say(f"the weights of the best point were removed: recreate them with `posttrain merge {BEST}`")


_NO_MODELS = ("base", "union")  # values of a tokenizer source that are not models


def recipe_text(merge: Loaded, name: str, accuracy: float | None) -> str:
    """Return the recipe of a point as a file that works in any directory: local models are named by absolute paths."""
    from posttrain.cli.show import yaml_lines
    from posttrain.models.model_paths import locate
    from posttrain.recipe.merge_sweep import slim

    def absolute_path(model: str) -> str:
        place = locate(model, merge.recipe.base_dir)
        return str(place.path) if place.path is not None else model

    def named_in_full(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: named_in_full(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [named_in_full(inner) for inner in value]
        names = key in ("model", "base_model") or (key in ("source", "tokenizer_source") and value not in _NO_MODELS)
        return absolute_path(value.removeprefix("model:")) if names and isinstance(value, str) else value

    values = named_in_full(slim(merge.resolved))
    head = f"# The best point of a sweep over {merge.path.name}: {name}, accuracy {accuracy:.4f} on its problems.\n"
    return head + "\n".join(yaml_lines(values)) + "\n"
