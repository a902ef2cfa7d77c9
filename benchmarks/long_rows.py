"""Memory and time of long rows on one GPU, with and without offloading, compared with `posttrain plan`: a 1.39B model,
SFT.

    python benchmarks/long_rows.py --out benchmarks/results/long_rows.json     # about four minutes on one H200
    python benchmarks/long_rows.py --runs "full" "full, both offloads"
    python benchmarks/long_rows.py --smoke                                     # tiny, on a CPU: does it run?

Rows of 16,000 tokens with full training, rows of 32,000 with LoRA; two rows per step, one per forward pass. One process
runs all settings one after another; the JSON is written after each. Reported: median seconds per step without the
first, the peak of torch's allocator in a step, pinned host memory, and the planned values of both. Exit code 1 if a
run fails, if a planned peak differs by more than --tolerance from the measured one, or if a loss differs by more than
1% from the first run of its kind.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import folders
import sides
from clocks import replaced

Values = dict[str, Any]
CHECKPOINTING = {"gradient_checkpointing": True}
ACTIVATIONS = {**CHECKPOINTING, "activation_offloading": True}
LORA = {"lora": {"rank": 16}}
# name -> (keys of `model`, of `optim`); others are compared with the first of their kind
RUNS: dict[str, tuple[Values, Values]] = {
    "full, both offloads": (ACTIVATIONS, {"offload": True}),
    "full": (CHECKPOINTING, {}),
    "full, activations": (ACTIVATIONS, {}),
    "full, optimiser": (CHECKPOINTING, {"offload": True}),
    "full, both offloads, half weights": (
        {**ACTIVATIONS, "half_weights": True, "dtype": "bfloat16"},
        {"offload": True},
    ),
    "full, selective": ({"gradient_checkpointing": "selective"}, {}),
    "lora": ({**CHECKPOINTING, **LORA}, {}),
    "lora, activations": ({**ACTIVATIONS, **LORA}, {}),
    "lora, activations, selective": ({**ACTIVATIONS, **LORA, "gradient_checkpointing": "selective"}, {}),
}
STEPS = 4
LENGTHS = {"full": 16_000, "lora": 32_000}


def main() -> None:
    args = arguments()
    record: Values = {
        **sides.environment(None if args.smoke else sides.nvml()),
        "tolerance": args.tolerance,
        "runs": {},
    }
    with tempfile.TemporaryDirectory(prefix="long-rows-") as scratch:
        home = Path(scratch)
        write_rows(home, args.smoke)
        model = folders.tiny(home / "tiny")
        if not args.smoke:
            model = folders.random_qwen2(home / "large", model, vocab_size=49_152, max_position_embeddings=40_960)
        for name in args.runs:
            record["runs"][name] = run(name, model, home, args.smoke)
            print(line(name, record["runs"][name]), flush=True)
            sides.write(record, args.out)
    wrong = wrong_runs(record["runs"], args.tolerance)
    print(f"wrong: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU: does the script run?")
    return parser.parse_args()


def write_rows(home: Path, smoke: bool) -> None:
    """Write rows of seeded letters, one token per character, with the length of their kind."""
    draw = random.Random("long rows")
    for kind, length in LENGTHS.items():
        count = (length // 100 if smoke else length) - 60  # the template's own tokens
        rows = ["".join(draw.choice("0123456789 abcdefgh") for _ in range(count)) for _ in range(2 * STEPS)]
        text = "".join(json.dumps({"prompt": "Say it.", "completion": row}) + "\n" for row in rows)
        (home / f"{kind}.jsonl").write_text(text)


def recipe_of(name: str, model: Path, smoke: bool) -> Values:
    own, optim = RUNS[name]
    kind = name.partition(",")[0]
    return {
        "stage": "sft",
        "model": {"path": str(model), "dtype": "float32" if smoke else "bfloat16", **own},
        "data": {"source": f"{kind}.jsonl"},
        "batch": {"size": 2, "micro_size": 1, "packing": True},
        "optim": {"lr": 1e-5 if kind == "full" else 1e-4, **optim},
        "run": {"steps": STEPS},
    }


def run(name: str, model: Path, home: Path, smoke: bool) -> Values:
    """Run one setting and return its measurements and plan. An error is a part of the result."""
    import torch

    from posttrain import pipeline
    from posttrain.models import activation_offload
    from posttrain.recipe.load import load_dict
    from posttrain.run.directory import RunDirectory
    from posttrain.run.metrics import read_metrics
    from posttrain.train import checkpoint
    from posttrain.train.plan import plan

    began, gpu = time.perf_counter(), torch.cuda.is_available()
    found: Values = {}
    output = home / name.replace(", ", "-").replace(" ", "-")
    try:
        recipe = load_dict(recipe_of(name, model, smoke), base_dir=home, where="long_rows").recipe
        planned = plan(recipe)
        parts = planned["memory_gib"]["update"]
        found["planned_gib"] = parts["sum"] - parts.get("CUDA context", 0.0)  # not allocated by torch's allocator
        found |= {"planned_parts_gib": parts, "planned_host_gib": round(sum(planned["host_gib"].values()), 2)}
        if gpu:
            torch.cuda.reset_peak_host_memory_stats()
        with (
            RunDirectory.open(output, name=name, text="", resolved={}, resume=False) as directory,
            replaced(
                checkpoint, "save", lambda *_, **__: None
            ),  # the final model is not measured, and takes most of the time
            replaced(activation_offload, "SMALLEST", 0 if smoke else activation_offload.MIN_BYTES),
        ):
            pipeline.run_stage(recipe, directory)
        rows = read_metrics(output)
        found |= {key: [row[key] for row in rows] for key in ("loss", "grad_norm", "time/step", "time/tokens_per_s")}
        found["step_s"] = statistics.median(found["time/step"][1:])
        found["tokens_per_s"] = statistics.median(found["time/tokens_per_s"][1:])
        if gpu:
            found["peak_gib"] = max(row["memory/allocated_gib"] for row in rows)
            found["reserved_gib"] = max(row["memory/reserved_gib"] for row in rows)
            found["host_gib"] = torch.cuda.host_memory_stats().get("active_bytes.peak", 0) / sides.GIB
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"[:500]
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    return {**found, "seconds": time.perf_counter() - began}


def wrong_runs(runs: dict[str, Values], tolerance: float) -> list[str]:
    """Return short descriptions of runs outside the tolerances."""
    wrong, first = [], dict[str, Values]()
    for name, one in runs.items():
        if "error" in one:
            wrong.append(f"{name}: {one['error']}")
            continue
        base = first.setdefault(name.partition(",")[0], one)
        gap = max(abs(a - b) / abs(b) for a, b in zip(one["loss"], base["loss"], strict=True))
        if gap > 0.01:
            wrong.append(f"{name}: losses {gap:.1%} apart")
        if "peak_gib" in one and abs(ratio(one) - 1) > tolerance:
            wrong.append(f"{name}: planned / measured peak {ratio(one):.3f}")
    return wrong


def ratio(one: Values) -> float:
    """Return planned / measured peak."""
    return float(one["planned_gib"] / one["peak_gib"])


def line(name: str, one: Values) -> str:
    """Return a run's result as a line of text."""
    if "error" in one:
        return f"{name}: {one['error']}"
    said = f"{name}: {one['step_s']:.2f} s a step, {one['tokens_per_s']:,.0f} tokens/s"
    said += f", planned {one['planned_gib']:.1f} GiB"
    if "peak_gib" in one:
        said += f", measured {one['peak_gib']:.1f} (ratio {ratio(one):.3f}), on the host {one['host_gib']:.1f}"
    return f"{said} ({one['planned_host_gib']:.1f} planned); {one['seconds']:.0f} s in all"


if __name__ == "__main__":
    main()
