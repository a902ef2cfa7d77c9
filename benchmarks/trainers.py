"""Shared code of `sft.py` and `dpo.py`: posttrain's stage and TRL's trainer, by settings and micro-batches."""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import folders
import sides
from clocks import metric_times, posttrain_steps

ROWS = 64  # an optimiser step
METRICS = {"loss": "loss", "grad_norm": "grad_norm"}  # name in the results -> name that both sides log it by

Worker = Callable[[dict[str, Any], dict[str, Any]], None]


def run(
    script: str,
    doc: str | None,
    made_rows: Callable[[int, bool], list[dict[str, str]]],
    workers: Mapping[str, Worker],
    *,
    steps: int,
    ways: Mapping[str, bool],
    micro: Sequence[int],
    enough: Callable[[list[dict[str, Any]]], bool],
) -> None:
    """Main function of the script; in a worker, runs one of `workers`.

    made_rows: builds the training rows, small ones for a smoke test. ways: TRL's settings to try, and whether each of
    their steps sees the same rows as posttrain's; each is tried with the micro-batches `micro` from the first on, until
    `enough` accepts the tries so far.
    """
    args = arguments(doc, steps, list(ways))
    remarks = functools.partial(loss_curves, ways=ways)
    if args.worker:
        spec = json.loads(Path(args.spec).read_text())
        with sides.reporting(spec) as result:
            workers[args.worker](spec, result)
        return
    if args.recompute:
        print(sides.table(json.loads(args.recompute.read_text()), remarks))
        return
    lib = None if args.smoke else sides.nvml()
    work = Path(script).stem
    with tempfile.TemporaryDirectory(prefix=f"{work}-") as scratch:
        folder = Path(scratch)
        spec = specification(args, folder, made_rows)
        setting = {key: spec[key] for key in ("steps", "rows_a_step")}
        record: dict[str, Any] = {"work": work, **sides.environment(lib), "setting": setting}
        ours = [
            sides.run_side(script, "posttrain", {**spec, "posttrain": settings}, folder, lib)
            for settings in posttrain_settings(args, largest=spec["rows_a_step"] // (2 if args.smoke else 1))
        ]
        record |= {"posttrain": sides.best_of(ours), "posttrain_tries": ours}
        sides.finish(record, args.out, remarks)  # kept if the other side is killed
        tries: list[dict[str, Any]] = []
        for way in args.ways:
            of_way: list[dict[str, Any]] = []
            for rows in args.trl_micro or ((4,) if args.smoke else micro):
                settings = {"trl": {"way": way, "micro": rows}}
                of_way.append(sides.run_side(script, "trl", {**spec, **settings}, folder, lib))
                tries.append(of_way[-1])
                record |= {"trl": sides.best_of(tries), "trl_tries": tries}
                sides.finish(record, args.out, remarks)
                if enough(of_way):
                    break


def specification(
    args: argparse.Namespace, folder: Path, made_rows: Callable[[int, bool], list[dict[str, str]]]
) -> dict[str, Any]:
    """Return what the workers of both sides read."""
    rows, steps = (8, 4) if args.smoke else (ROWS, args.steps)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made_rows(rows * steps, args.smoke)))
    return {
        "smoke": args.smoke,
        "model": str((folders.tiny if args.smoke else folders.smollm2)(folder / "model")),
        "rows": str(path),
        "rows_a_step": rows,
        "steps": steps,
        "max_length": 2048,
    }


def posttrain_settings(args: argparse.Namespace, largest: int) -> list[dict[str, Any]]:
    """Return posttrain's settings to try: each micro-batch, eager and compiled."""
    ways = {"off": (False,), "on": (True,), "both": (False, True)}[args.compile]
    sizes = dict.fromkeys(min(micro, largest) for micro in args.micro)
    return [{"micro": micro, "compile": compiled} for micro in sizes for compiled in ways]


def loss_curves(record: dict[str, Any], ways: Mapping[str, bool]) -> list[str]:
    """Return lines below the table: for each of TRL's tries, the difference of its losses from posttrain's."""
    ours = record["posttrain"]
    lines = []
    for one in record.get("trl_tries", []):
        if "loss" not in one or "loss" not in ours:
            continue
        pairs = list(zip(ours["loss"], one["loss"], strict=False))
        gap, means = max(abs(a - b) for a, b in pairs), [sides.mean([p[i] for p in pairs]) for i in (0, 1)]
        way, micro = one["settings"]["way"], one["settings"]["micro"]
        lines.append(
            f"trl {way} at {micro}: {1 / sides.seconds_a_token(one):.0f} tokens/s, peak {one['peak_gib']:.1f} GiB;"
            f" {f'largest gap of the loss {gap:.4f}, ' if ways[way] else ''}mean loss {means[0]:.4f} and {means[1]:.4f}"
        )
    if "reference_s" in ours and "reference_s" in record.get("trl", {}):
        lines.append(f"reference pass, once: {ours['reference_s']:.2f} s and {record['trl']['reference_s']:.2f} s")
    return lines


def arguments(doc: str | None, steps: int, ways: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--micro", type=int, nargs="*", default=[16], help="posttrain's batch.micro_size, to be tried")
    parser.add_argument("--compile", choices=["off", "on", "both"], default="off", help="posttrain's model.compile")
    parser.add_argument("--ways", nargs="*", choices=ways, default=ways, help="TRL's settings to try")
    parser.add_argument("--trl-micro", type=int, nargs="*", help="micro-batches to try, largest first")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="on a CPU with the tiny model: does the script run?")
    parser.add_argument("--recompute", type=Path, metavar="FILE", help="print the ratios of a committed JSON")
    parser.add_argument("--worker", choices=["posttrain", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    return parser.parse_args()


# In a worker


def recipe(stage: str, spec: dict[str, Any], lr: float) -> dict[str, Any]:
    """Return posttrain's recipe, except for the stage's own sections."""
    return {
        "stage": stage,
        "model": {"path": spec["model"], "compile": spec["posttrain"]["compile"]},
        "data": {"source": spec["rows"], "shuffle": False, "max_length": spec["max_length"]},
        "batch": {"size": spec["rows_a_step"], "micro_size": spec["posttrain"]["micro"]},
        "optim": {"lr": lr},
        "run": {"steps": spec["steps"]},
    }


def run_recipe(
    recipe: dict[str, Any], spec: dict[str, Any], result: dict[str, Any], metrics: Mapping[str, str]
) -> None:
    """Run posttrain's side: the stage of a recipe; a step lasts from one line of metrics to the next."""
    from posttrain.pipeline import run_stage
    from posttrain.recipe.load import load_dict
    from posttrain.run.directory import RunDirectory
    from posttrain.run.metrics import read_metrics

    loaded = load_dict(recipe, base_dir=Path(spec["rows"]).parent, where="benchmark")
    with (
        RunDirectory.open(Path(spec["run"]), name=loaded.name, text="", resolved=loaded.resolved) as directory,
        metric_times() as times,
    ):
        run_stage(loaded.recipe, directory)
        rows = read_metrics(directory.path)
    result |= posttrain_steps(rows, times) | {"phases": {"update": [row["time/step"] for row in rows]}}
    result |= curves(rows, metrics)


def curves(rows: Iterable[Mapping[str, Any]], metrics: Mapping[str, str]) -> dict[str, list[float]]:
    """Return the values of each metric by step, under its name in the results."""
    return {name: [row[key] for row in rows] for name, key in metrics.items()}
