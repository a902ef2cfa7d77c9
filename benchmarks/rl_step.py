"""One RL step of posttrain and TRL's GRPOTrainer with colocated vLLM: same model, prompts, lengths and update.

    python benchmarks/rl_step.py --work A --out benchmarks/results/rl_A_h100.json
    python benchmarks/rl_step.py --work B --lora --out benchmarks/results/rl_B_lora_h100.json
    python benchmarks/rl_step.py --work V --out benchmarks/results/rl_V_h200.json
    python benchmarks/rl_step.py --recompute benchmarks/results/rl_A_h100.json
    python benchmarks/rl_step.py --smoke                  # all works on a CPU, transformers generate, tiny models

Work A: SmolLM2-135M-Instruct, 64 prompts x 8, up to 512 new tokens, ended by EOS. Work B: a 1.39B Qwen2 with random
weights, 64 x 8, lengths from one seeded list with EOS ignored (TRL by its `rollout_func`). Work L: the same model with
a rank-16 adapter, 32 x 8, up to 3,500 new tokens, 850,000 tokens a step. All: reward = share of even token ids, GRPO
loss (mean over each row), no KL, one update a step, float32 trained weights and AdamW, bfloat16 products, float32
adapters on a bfloat16 base with --lora.

Each side runs alone in a subprocess, five steps (L: three, V: four); the first two (L and V: one) are excluded. TRL's
side tries micro-batch sizes with and without checkpointing on one micro-batch of the longest rows, and runs its steps
with the fastest that fits; all tries are in its `trials`, and its peak is the peak of the steps. TRL runs with sleep
off and on, and the faster counts; both are in `trl_tries`. By default neither side corrects for the mismatch between
engine and trainer; --correction tis enables truncated importance sampling on both (TRL's default), which also makes TRL
report its mismatch (`gap`: mean |trainer - engine| log-prob by step).

"before step 1" is the time from the start of the process to the start of its first step. With --warm each side is
started once before, so that both have warm compilation caches. --minutes ends a side that takes too long; its completed
steps count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import rl_posttrain
import rl_trl
import sides
from rl_work import WORKS, setting, specification

# Rows per forward pass to try; c: with checkpointing. Entries after one that does not fit are larger.
TRL_WAYS = {
    "A": ("64", "128", "128c"),
    "B --lora": ("8", "16", "32", "32c", "64c"),
    "B": ("8", "16", "32", "32c"),
    "L": ("4", "8", "16c", "32c"),
    "V": ("16", "32", "64c"),
}


def main() -> None:
    args = arguments()
    if args.worker:
        spec = json.loads(Path(args.spec).read_text())
        with sides.reporting(spec) as result:
            run = {"posttrain": rl_posttrain.run_posttrain, "trl": rl_trl.run_trl}[args.worker]
            run(spec, result, partial(sides.report, spec, result))
        sys.stdout.flush()
        return
    if args.recompute:
        print(sides.table(json.loads(args.recompute.read_text()), floors))
        return
    for work in WORKS if args.smoke and not args.work else (args.work or "A",):
        compare(args, work)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=list(WORKS), help="default: A, in a smoke test all")
    parser.add_argument("--lora", action="store_true", help="train a rank-16 adapter on all linear layers")
    parser.add_argument("--steps", type=int, help="default: 5, of L 3, of V 4")
    parser.add_argument("--trl-steps", type=int, help="fewer steps of TRL's side, whose steps are long")
    parser.add_argument("--correction", choices=["none", "tis"], default="none")
    parser.add_argument("--micro-tokens", type=int, default=16384, help="posttrain's batch.micro_tokens")
    parser.add_argument(
        "--share", type=float, default=None, help="posttrain's vllm.gpu_memory (A: 0.15, B and V: 0.3, L: 0.2)"
    )
    parser.add_argument("--engines", type=int, default=1, help="posttrain's vllm.engines; --share is of one")
    parser.add_argument("--sleep", action="store_true", help="posttrain's vllm.sleep")
    parser.add_argument("--checkpointing", action="store_true", help="posttrain: recompute activations")
    parser.add_argument("--compile", action="store_true", help="posttrain: model.compile")
    parser.add_argument(
        "--merge-adapter", action="store_true", help="posttrain: vllm.merge_adapter, as TRL always does"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="posttrain: of products")
    parser.add_argument("--trl-share", type=float, default=0.3, help="TRL's vllm_gpu_memory_utilization")
    parser.add_argument("--trl-sleep", choices=["off", "on", "both"], default="both")
    parser.add_argument("--trl-ways", nargs="*", help="micro-batches to try, smallest first; 16c: with checkpointing")
    parser.add_argument("--alone", type=int, default=2, help="how often generation is measured alone, for the floor")
    parser.add_argument("--sides", choices=["both", "posttrain", "trl"], default="both")
    parser.add_argument("--warm", action="store_true", help="start each side once before it is measured")
    parser.add_argument("--minutes", type=float, help="of all sides together; posttrain may take 60% of them")
    parser.add_argument("--models", type=Path, help="keep the models here, for the next run on this machine")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--smoke", action="store_true", help="all works on a CPU with tiny models: does the script run?"
    )
    parser.add_argument("--recompute", type=Path, metavar="FILE", help="print the ratios of a committed JSON")
    parser.add_argument("--worker", choices=["posttrain", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(args: argparse.Namespace, work: str) -> None:
    """Run both sides on one work, one after the other."""
    started = time.monotonic()
    lib = None if args.smoke else sides.nvml()
    with tempfile.TemporaryDirectory(prefix="rl_step-") as scratch:
        folder = Path(scratch)
        spec = specification(args, work, folder)
        record = {"work": work, "lora": spec["lora"], **sides.environment(lib), "setting": setting(spec)}

        def run(side: str, spec: dict[str, Any], share: float) -> dict[str, Any]:
            end = None if args.minutes is None else started + 60 * args.minutes * share
            return run_warm(side, spec, folder, lib, end, warm=args.warm)

        if args.sides != "trl":
            record["posttrain"] = run("posttrain", spec, 0.6 if args.sides == "both" else 1)
            sides.finish(record, args.out, floors)  # kept if the other side is killed
        if args.sides != "posttrain":
            tries: list[dict[str, Any]] = []
            for settings in trl_settings(args, work, spec):
                steps = min(args.trl_steps or spec["steps"], spec["steps"])
                tries.append(run("trl", {**spec, "steps": steps, "trl": settings}, 1))
                record |= {"trl": sides.best_of(tries), "trl_tries": tries}
                sides.finish(record, args.out, floors)


def run_warm(
    side: str, spec: dict[str, Any], folder: Path, lib: Any, end: float | None, *, warm: bool
) -> dict[str, Any]:
    """Run one side, until `end` by `time.monotonic`. warm: it is started once before, which gives its
    `cold_start_s`."""

    def seconds() -> float | None:
        return None if end is None else max(end - time.monotonic(), 1)

    cold: dict[str, Any] = {}
    if warm:
        first = sides.run_side(__file__, side, {**spec, "start_only": True}, folder, lib, seconds())
        if "error" in first:
            return first
        cold = {"cold_start_s": first["start_s"]}
    found = {**sides.run_side(__file__, side, spec, folder, lib, seconds()), **cold}
    if "trials" in found and "micro" in found:
        found["settings"] = {key: found.pop(key) for key in ("micro", "checkpointing")} | found["settings"]
        del found["settings"]["ways"]  # they are the trials
    return found


def trl_settings(args: argparse.Namespace, work: str, spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return TRL's settings, for each sleep setting."""
    ways = args.trl_ways or (
        ("4", "8c") if args.smoke else TRL_WAYS["B --lora" if work == "B" and spec["lora"] else work]
    )
    for sleep in ("off",) if args.smoke else ("off", "on") if args.trl_sleep == "both" else (args.trl_sleep,):
        pairs = [(int(way.removesuffix("c")), way.endswith("c")) for way in ways]
        yield {"ways": pairs, "sleep": sleep == "on", "share": args.trl_share}


def floors(record: dict[str, Any]) -> list[str]:
    """Return the lower bounds: generation alone at vLLM's own rate, and the update at 45% of the GPU's bf16 rate; TRL's
    trials."""
    lines = [trial_line(one) for one in record.get("trl", {}).get("trials", [])]
    side = record.get("posttrain", {})
    if "generate_alone_s" not in side or "step_s" not in side:
        return lines
    tokens = sides.mean(sides.counted(side, side["tokens"]))
    update = sides.floor_update_s(record["card"], record["setting"]["parameters"], tokens, lora=record["lora"])
    if update is None:
        return lines
    generate = min(side["generate_alone_s"])
    floor = generate + update
    return [
        *lines,
        f"floor: {generate:.2f} s generation alone + {update:.2f} s update = {floor:.2f} s a step,"
        f" {floor / sides.seconds_a_step(side):.0%} of posttrain's",
    ]


def trial_line(one: dict[str, Any]) -> str:
    """Return a line about one of TRL's tries."""
    found = "out of memory" if "out_of_memory" in one else f"{one['update_s_per_1m']:.1f} s of update per 1M tokens"
    return f"trl trial: micro-batch {one['micro']}{', checkpointing' if one['checkpointing'] else ''}: {found}"


if __name__ == "__main__":
    main()
