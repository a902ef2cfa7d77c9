"""The command that `sft.py` and `dpo.py` share: posttrain's stage against TRL's trainer, by ways and micro-batches."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sides

Specification = Callable[[argparse.Namespace, Path], dict[str, Any]]
Worker = Callable[[dict[str, Any], dict[str, Any]], None]


def run(
    script: str,
    *,
    doc: str | None,
    work: str,
    steps: int,
    ways: Sequence[str],
    micro: Sequence[int],
    enough: Callable[[list[dict[str, Any]]], bool],
    setting: Sequence[str],
    specification: Specification,
    workers: dict[str, Worker],
    remarks: Callable[[dict[str, Any]], list[str]],
) -> None:
    """What the script does when it is called; in a worker, one of `workers`.

    ways: TRL's settings to try, each with the micro-batches `micro` from the first on, until `enough` of the tries so
    far. setting: what of the specification is kept in the record; it also says posttrain's `largest_micro`, of which
    the command names the ones to try. remarks: lines below the table.
    """
    args = arguments(doc, steps, ways)
    if args.worker:
        spec = json.loads(Path(args.spec).read_text())
        with sides.reporting(spec) as result:
            workers[args.worker](spec, result)
        return
    if args.recompute:
        print(sides.table(json.loads(args.recompute.read_text()), remarks))
        return
    lib = None if args.smoke else sides.nvml()
    with tempfile.TemporaryDirectory(prefix=f"{work}-") as scratch:
        folder = Path(scratch)
        spec = specification(args, folder)
        record = {"work": work, **sides.environment(lib, args.gpu), "setting": {k: spec[k] for k in setting}}
        ours = [
            sides.run_side(script, "posttrain", {**spec, "posttrain": settings}, folder, lib, args.gpu)
            for settings in posttrain_settings(args, largest=spec["largest_micro"])
        ]
        record |= {"posttrain": sides.best_of(ours), "posttrain_tries": ours}
        sides.finish(record, args.out, remarks)  # so that it stays if the other side is cut off
        tries: list[dict[str, Any]] = []
        for way in args.ways:
            of_way: list[dict[str, Any]] = []
            for rows in args.trl_micro or ((4,) if args.smoke else micro):
                settings = {"trl": {"way": way, "micro": rows}}
                of_way.append(sides.run_side(script, "trl", {**spec, **settings}, folder, lib, args.gpu))
                tries.append(of_way[-1])
                record |= {"trl": sides.best_of(tries), "trl_tries": tries}
                sides.finish(record, args.out, remarks)
                if enough(of_way):
                    break


def posttrain_settings(args: argparse.Namespace, largest: int) -> list[dict[str, Any]]:
    """posttrain's settings to try: each micro-batch, as it is and compiled."""
    ways = {"off": (False,), "on": (True,), "both": (False, True)}[args.compile]
    sizes = dict.fromkeys(min(micro, largest) for micro in args.micro)
    return [{"micro": micro, "compile": compiled} for micro in sizes for compiled in ways]


def arguments(doc: str | None, steps: int, ways: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--micro", type=int, nargs="*", default=[16], help="posttrain's batch.micro_size, to be tried")
    parser.add_argument("--compile", choices=["off", "on", "both"], default="off", help="posttrain's model.compile")
    parser.add_argument("--ways", nargs="*", choices=ways, default=list(ways), help="TRL's settings to try")
    parser.add_argument("--trl-micro", type=int, nargs="*", help="micro-batches to try, largest first")
    parser.add_argument("--gpu", type=int, default=0, help="the GPU that NVML is asked about")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="on a CPU with the tiny model: does the script run?")
    parser.add_argument("--recompute", type=Path, metavar="FILE", help="print the ratios of a committed JSON")
    parser.add_argument("--worker", choices=["posttrain", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    return parser.parse_args()
