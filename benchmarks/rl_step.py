"""One RL step of posttrain against TRL's GRPOTrainer with colocated vLLM: same model, prompts, lengths and update.

    python benchmarks/rl_step.py --work A --out benchmarks/results/rl_A_h100.json
    python benchmarks/rl_step.py --work B --lora --out benchmarks/results/rl_B_lora_h100.json
    python benchmarks/rl_step.py --recompute benchmarks/results/rl_A_h100.json
    python benchmarks/rl_step.py --smoke                  # both works on a CPU, transformers generate, tiny models

Work A: SmolLM2-135M-Instruct, 64 prompts x 8, up to 512 new tokens, ended by EOS. Work B: a 1.39B Qwen2 with random
weights, 64 x 8, lengths from one seeded list with EOS ignored (TRL by its `rollout_func`). Both: reward = share of even
token ids, GRPO loss (mean over each row), no KL, one update a step, float32 trained weights and AdamW, bfloat16
products, float32 adapters on a bfloat16 base with --lora.

Each side runs alone in a subprocess, five steps; the first two are left out. TRL runs with sleep off and on, each with
the largest micro-batch that fits, and its fastest counts; the others are in `trl_tries`. By default neither side
corrects for the gap between engine and trainer; --correction tis switches truncated importance sampling on in both
(TRL's default), which also makes TRL report its gap (`gap`: mean |trainer - engine| log-prob by step).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rl_posttrain
import rl_trl
import sides
from rl_work import setting, specification

# Rows a forward pass, largest first, by work and sleep: twice the first is far over 80 GB.
TRL_MICRO: dict[str, dict[str, tuple[int, ...]]] = {
    "A": {"off": (64, 32, 16, 8), "on": (128, 64, 32, 16, 8)},
    "B --lora": {"off": (16, 8, 4), "on": (16, 8, 4)},
    "B": {"off": (8, 4), "on": (16, 8, 4)},
}


def main() -> None:
    args = arguments()
    if args.worker:
        spec = json.loads(Path(args.spec).read_text())
        with sides.reporting(spec) as result:
            {"posttrain": rl_posttrain.run_posttrain, "trl": rl_trl.run_trl}[args.worker](spec, result)
        sys.stdout.flush()
        return
    if args.recompute:
        print(sides.table(json.loads(args.recompute.read_text()), floors))
        return
    for work in ("A", "B") if args.smoke else (args.work,):
        compare(args, work)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=["A", "B"], default="A")
    parser.add_argument("--lora", action="store_true", help="train a rank-16 adapter on all linear layers")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--correction", choices=["none", "tis"], default="none")
    parser.add_argument("--micro-tokens", type=int, default=16384, help="posttrain's batch.micro_tokens")
    parser.add_argument("--share", type=float, default=None, help="posttrain's vllm.gpu_memory (A: 0.15, B: 0.3)")
    parser.add_argument("--sleep", action="store_true", help="posttrain's vllm.sleep")
    parser.add_argument("--checkpointing", action="store_true", help="posttrain: recompute activations")
    parser.add_argument("--compile", action="store_true", help="posttrain: model.compile")
    parser.add_argument(
        "--merge-adapter", action="store_true", help="posttrain: vllm.merge_adapter, as TRL always does"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="posttrain: of products")
    parser.add_argument("--trl-share", type=float, default=0.3, help="TRL's vllm_gpu_memory_utilization")
    parser.add_argument("--trl-sleep", choices=["off", "on", "both"], default="both")
    parser.add_argument("--trl-micro", type=int, nargs="*", help="micro-batches to try, largest first")
    parser.add_argument("--trl-checkpointing", action="store_true", help="TRL: recompute activations (its default)")
    parser.add_argument("--sides", choices=["both", "posttrain", "trl"], default="both")
    parser.add_argument("--models", type=Path, help="keep the models here, for the next run on this machine")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--smoke", action="store_true", help="both works on a CPU with tiny models: does the script run?"
    )
    parser.add_argument("--recompute", type=Path, metavar="FILE", help="print the ratios of a committed JSON")
    parser.add_argument("--worker", choices=["posttrain", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(args: argparse.Namespace, work: str) -> None:
    """Both sides on one work, one after the other."""
    lib = None if args.smoke else sides.nvml()
    with tempfile.TemporaryDirectory(prefix="rl_step-") as scratch:
        folder = Path(scratch)
        spec = specification(args, work, folder)
        record = {"work": work, "lora": args.lora, **sides.environment(lib), "setting": setting(spec)}
        if args.sides != "trl":
            record["posttrain"] = sides.run_side(__file__, "posttrain", spec, folder, lib)
            sides.finish(record, args.out, floors)  # so that it stays if the other side is cut off
        if args.sides != "posttrain":
            tries: list[dict[str, Any]] = []
            for one in trl_tries(args, work, spec, folder, lib):
                tries.append(one)
                record |= {"trl": sides.best_of(tries), "trl_tries": tries}
                sides.finish(record, args.out, floors)


def trl_tries(
    args: argparse.Namespace, work: str, spec: dict[str, Any], folder: Path, lib: Any
) -> Iterator[dict[str, Any]]:
    """For each way of sleeping, the largest micro-batch that fits; attempts that ran out of memory are told as well."""
    sizes = TRL_MICRO["B --lora" if work == "B" and args.lora else work]
    for sleep in ("off",) if args.smoke else ("off", "on") if args.trl_sleep == "both" else (args.trl_sleep,):
        for micro in args.trl_micro or ((8,) if args.smoke else sizes[sleep]):
            settings = {
                "micro": micro,
                "sleep": sleep == "on",
                "share": args.trl_share,
                "checkpointing": args.trl_checkpointing,
            }
            found = sides.run_side(__file__, "trl", {**spec, "trl": settings}, folder, lib)
            yield found
            if not found.get("out_of_memory"):
                break


def floors(record: dict[str, Any]) -> list[str]:
    """Generation alone at vLLM's own rate, and the update at 45% of the card's bf16 rate."""
    side = record.get("posttrain", {})
    if "generate_alone_s" not in side or "step_s" not in side:
        return []
    tokens = sides.mean(side["tokens"][sides.LEFT_OUT :])
    update = sides.floor_update_s(record["card"], record["setting"]["parameters"], tokens, lora=record["lora"])
    if update is None:
        return []
    generate = min(side["generate_alone_s"])
    return [f"floor: {generate:.2f} s generation alone + {update:.2f} s update = {generate + update:.2f} s a step"]


if __name__ == "__main__":
    main()
