"""GPU memory predicted by `posttrain plan` compared with a run's, for work A and work B (`rl_step.py`), by phase.

    python benchmarks/plan_peak.py --out benchmarks/results/plan_peak_h100.json     # A, B with LoRA, B full, L
    python benchmarks/plan_peak.py --works B_full --sleep --checkpointing
    python benchmarks/plan_peak.py --smoke                                           # tiny, on a CPU: does it run?

Each work runs three steps in a separate process. The peak is sampled by NVML at 20 Hz, minus the memory used before; it
includes memory that torch's allocator reserves. By phase: the peak allocated by torch, including vLLM's part.
Exit code 1 if a predicted peak is more than --tolerance from the measured one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rl_posttrain
import rl_work
import sides
from clocks import replaced

# name -> (work of rl_step.py, with LoRA, batch.micro_tokens, vllm.gpu_memory, compiled and with a merged adapter)
WORKS = {
    "A": ("A", False, 16384, 0.15, False),
    "B_lora": ("B", True, 8192, 0.3, False),
    "B_full": ("B", False, 8192, 0.3, False),
    "L": ("L", True, 14336, 0.2, True),
}
STEPS = 3


def main() -> None:
    args = arguments()
    if args.worker:
        spec = json.loads(Path(args.spec).read_text())
        with sides.reporting(spec) as result:
            measure(spec, result)
        return
    lib = None if args.smoke else sides.nvml()
    record: dict[str, Any] = {**sides.environment(lib), "tolerance": args.tolerance, "works": {}}
    for name in args.works:
        with tempfile.TemporaryDirectory(prefix="plan_peak-") as scratch:
            spec = specification(args, name, Path(scratch))
            record["works"][name] = sides.run_side(__file__, "posttrain", spec, Path(scratch), lib)
        print(table(name, record["works"][name]), flush=True)
        sides.write(record, args.out)
    found = [ratio(work) for work in record["works"].values()]
    sys.exit(not all(r is not None and (args.smoke or abs(r - 1) <= args.tolerance) for r in found))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="*", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--micro-tokens", type=int, help="another batch.micro_tokens")
    parser.add_argument("--share", type=float, help="another vllm.gpu_memory")
    parser.add_argument("--sleep", action="store_true", help="vllm.sleep")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--models", type=Path, help="keep the models here, for the next run on this machine")
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU: does the script run?")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    return parser.parse_args()


def specification(args: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """Return the specification of rl_step.py for this work."""
    work, lora, micro_tokens, share, compiled = WORKS[name]
    asked = {
        "lora": lora,
        "smoke": args.smoke,
        "steps": STEPS,
        "correction": "none",
        "micro_tokens": args.micro_tokens or micro_tokens,
        "share": args.share or share,
        "sleep": args.sleep,
        "checkpointing": args.checkpointing,
        "models": args.models,
        "compile": compiled and not args.smoke,
        "merge_adapter": compiled,
    }
    return rl_work.specification(argparse.Namespace(**asked), work, folder)


def measure(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """In a separate process: predict from the recipe, run it, and record the peak allocation of each phase."""
    import torch

    from posttrain.recipe.load import load_dict
    from posttrain.recipe.stages import RlRecipe
    from posttrain.run.watchdog import Watchdog
    from posttrain.train import memory_plan, plan

    loaded = load_dict(rl_posttrain.posttrain_recipe(spec), base_dir=rl_work.HERE, where="benchmark")
    recipe = loaded.require(RlRecipe)
    _, longest = plan.count_rows_and_tokens(recipe)
    shape = memory_plan.shape_of(memory_plan.skeleton(recipe), recipe.model.lora)
    found = memory_plan.predict_phases(recipe, shape, longest, memory_plan.Machine.here())
    result |= {"predicted": found.parts, "predicted_peak_gib": round(found.peak / sides.GIB, 3), "allocated_gib": {}}
    inner = Watchdog.phase
    gpu = torch.cuda.is_available()

    @contextlib.contextmanager
    def noted(self: Watchdog, name: str) -> Iterator[None]:
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        with inner(self, name):
            yield
        if gpu:
            peak = round(torch.cuda.max_memory_allocated() / sides.GIB, 3)
            result["allocated_gib"][name] = max(peak, result["allocated_gib"].get(name, 0.0))

    with replaced(Watchdog, "phase", noted):
        rl_posttrain.run_posttrain(spec, result)


def ratio(work: dict[str, Any]) -> float | None:
    """Return predicted / measured peak; None if the run failed."""
    if "error" in work:
        return None
    return work["predicted_peak_gib"] / max(work["peak_gib"] - work["idle_gib"], 1e-9)


def table(name: str, work: dict[str, Any]) -> str:
    """Return the prediction by phase and part beside the measurement."""
    if "predicted" not in work:
        return f"{name}: failed: {work.get('error')}"
    lines = [f"{name}: GiB by phase, predicted (measured by torch)"]
    for phase, parts in work["predicted"].items():
        measured = work["allocated_gib"].get(phase)
        total = sum(parts.values()) / sides.GIB
        lines.append(f"  {phase:12}{total:8.2f}" + (f"   ({measured:.2f})" if measured is not None else ""))
        lines += [f"    {part:28}{size / sides.GIB:8.2f}" for part, size in parts.items()]
    if "error" in work:
        return "\n".join([*lines, f"  failed: {work['error']}"])
    taken = work["peak_gib"] - work["idle_gib"]
    lines.append(f"  peak: predicted {work['predicted_peak_gib']:.2f}, measured {taken:.2f}, ratio {ratio(work):.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
