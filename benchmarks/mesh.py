"""`model.parallel` on several GPUs of one machine compared with one GPU: equality, resuming, speed.

    python benchmarks/mesh.py --ranks 2 --out benchmarks/results/mesh_x2.json        # about five minutes on two H200s
    python benchmarks/mesh.py --parts equal resume --ranks 2 --out ...
    python benchmarks/mesh.py --ranks 4 --smoke                                      # tiny, gloo on a CPU

equal   five updates of sft, dpo and rl (stored completions), full and LoRA, in float32 (1e-5) and bfloat16 (1e-3): the
        largest difference of losses and gradient norms from one GPU. "micro-batches": the same on one GPU with other
        micro-batches, which shows the effect of rounding alone on dpo.
resume  stops after two steps, saved by all ranks; one GPU resumes up to step five.
speed   tokens/s of sft on the 1.39B model with 32 rows of 2,000 tokens per step, 32,000 tokens per pass: one GPU,
        replicated on all, sharded over all.
context three updates of the 1.39B model on rows of 32,000 tokens: one GPU, and all GPUs on parts of the same rows.
tensor  as `equal`, with tensor parallelism; and sft of a small mixture of experts with tensor or expert parallelism.

One worker per number of ranks runs all recipes one after another. Results of a worker stay in the JSON if the next one
fails; the exit code is 1 if a difference exceeds its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import clocks
import folders
import sides

from posttrain.errors import Interrupted
from posttrain.run import ranks

PARTS = ("equal", "resume", "speed", "context", "tensor")
COMPARED = ("equal", "resume", "context", "tensor")
ALLOWED = {"float32": 1e-5, "bfloat16": 1e-3}
# 2.4M weights; tokens are characters
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
DIVISIONS: dict[str, dict[str, Any]] = {
    "divided": {},
    "context": {"context": 2},
    "copies": {"shard": 1, "replicate": 2},
    "hybrid": {"replicate": 2},
    "tensor": {"tensor": None},
    "expert": {"expert": None},
}
LEFT_OUT = 2  # steps of the speed part
Values = dict[str, Any]


def main() -> None:
    args = arguments()
    if args.worker:
        work(json.loads(args.worker.read_text()))
        return
    lib = None if args.smoke else sides.nvml()
    record: Values = {"ranks": args.ranks, **sides.environment(lib), "runs": {}}
    with tempfile.TemporaryDirectory(prefix="mesh-") as scratch:
        home = Path(scratch)
        write_rows(home, args.smoke)
        model = folders.tiny(home / "tiny")
        if not args.smoke:
            model = folders.random_qwen2(home / "small", model, **SMALL)
        for part in args.parts:
            one, several = jobs(part, home, model, args)
            for count, some in ((1, one), (args.ranks, several)):
                record["runs"] |= run_all(some, count, home, record, args.out)
            if part == "resume":  # one GPU resumes where several have stopped
                record["runs"] |= run_all([resumed(job) for job in several], 1, home, record, args.out)
            record |= {part: gaps(record["runs"], part) for part in COMPARED}
            record["speed"] = speeds(record["runs"])
            sides.write(record, args.out)
    compared = {name: found for part in COMPARED for name, found in record[part].items()}
    for name, found in compared.items():
        one, each = found["peaks_gib"]
        print(f"{name}: gap {found['gap']:.2e}, {found['allowed']:.0e} allowed; peak {each:.1f} of {one:.1f} GiB")
    for name, found in record["speed"].items():
        print(f"{name}: {found['tokens_per_s']:,.0f} tokens/s, {found['peak_gib']:.1f} GiB")
    wrong = [name for name, found in compared.items() if not found["gap"] <= found["allowed"]]
    failed = [name for name, run in record["runs"].items() if "error" in run]
    print(f"wrong: {wrong or 'none'}; failed: {failed or 'none'}")
    sys.exit(bool(wrong or failed))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, each with a GPU (default: 2)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--stages", nargs="*", choices=["sft", "dpo", "rl"], default=["sft", "dpo", "rl"])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU: does the script run?")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- runs ---


def jobs(part: str, home: Path, model: Path, args: argparse.Namespace) -> tuple[list[Values], list[Values]]:
    """Return the runs of a part on one GPU, and on several. A run is {name, recipe, output, resume, saves}."""
    if part == "context":
        large = large_model(home, model, args.smoke)
        recipes = {kind: context_recipe(large, args.smoke, **more) for kind, more in kinds().items()}
        dtype = recipes["full"]["model"]["dtype"]
        one_gpu = [job(f"context/{kind} {dtype}, one", recipe, home) for kind, recipe in recipes.items()]
        parallel = {"parallel": {"context": args.ranks}}
        return one_gpu, [
            job(f"context/{kind} {dtype}, context", {**recipe, "model": {**recipe["model"], **parallel}}, home)
            for kind, recipe in recipes.items()
        ]
    if part == "speed":
        large = large_model(home, model, args.smoke)
        one = {kind: speed_recipe(large, args.smoke, **more) for kind, more in kinds().items()}
        speeds: dict[str, dict[str, Any] | None] = {"divided": {}, "whole": None}
        several = {
            f"{kind}, {division}": speed_recipe(large, args.smoke, **more, parallel=parallel)
            for kind, more in kinds().items()
            for division, parallel in speeds.items()
        }
        return [job(f"speed/one: {name}", recipe, home) for name, recipe in one.items()], [
            job(f"speed/{args.ranks}: {name}", recipe, home) for name, recipe in several.items()
        ]
    divisions = {
        "equal": ["divided", "context", "copies" if args.ranks == 2 else "hybrid"],
        "resume": ["divided"],
        "tensor": ["tensor"],
    }[part]
    one_gpu, several_gpus = list[Values](), list[Values]()
    dtypes = ["float32"] if args.smoke or part == "resume" else list(ALLOWED)
    for stage in args.stages:
        for kind, more in kinds().items():
            for dtype in dtypes:
                recipe = small_recipe(stage, model, dtype=dtype, **more)
                name = f"{part}/{stage} {kind} {dtype}"
                single, divided = divided_jobs(name, recipe, divisions, home, args.ranks)
                one_gpu.append(single)
                several_gpus += divided
                if part == "equal" and stage == "dpo":
                    batch = {**recipe["batch"], "micro_size": 2 * recipe["batch"]["micro_size"]}
                    one_gpu.append(job(f"{name}, micro-batches", {**recipe, "batch": batch}, home))
    if part == "tensor" and "sft" in args.stages:
        mixture = folders.random_mixture(home / "mixture", model)
        recipe = small_recipe("sft", mixture, dtype="float32")
        single, divided = divided_jobs("tensor/sft mixture float32", recipe, ["tensor", "expert"], home, args.ranks)
        return [*one_gpu, single], [*several_gpus, *divided]
    if part == "resume":
        for each in several_gpus:
            each["recipe"]["run"] = {**each["recipe"]["run"], "steps": 2}
    return one_gpu, several_gpus


def divided_jobs(
    name: str, recipe: Values, divisions: list[str], home: Path, ranks: int
) -> tuple[Values, list[Values]]:
    """Return the run of a recipe on one GPU, and its runs on several. A mesh size of None is the number of GPUs."""
    several = []
    for division in divisions:
        parallel = {key: ranks if number is None else number for key, number in DIVISIONS[division].items()}
        divided = {**recipe, "model": {**recipe["model"], "parallel": parallel}}
        several.append(job(f"{name}, {division}", divided, home))
    return job(f"{name}, one", recipe, home), several


def large_model(home: Path, tokenizer_from: Path, smoke: bool) -> Path:
    """The 1.39B model with positions for rows of 32,000 tokens."""
    if smoke:
        return tokenizer_from
    return folders.random_qwen2(home / "large", tokenizer_from, vocab_size=49_152, max_position_embeddings=40_960)


def kinds() -> dict[str, Values]:
    return {"full": {}, "lora": {"lora": {"rank": 16}}}


def job(name: str, recipe: Values, home: Path) -> Values:
    output = str(home / "runs" / name.replace("/", "-"))
    saves = not name.startswith(("context", "speed"))  # the large model
    return {"name": name, "recipe": recipe, "output": output, "resume": False, "saves": saves}


def resumed(stopped: Values) -> Values:
    """Return the run on one GPU that resumes `stopped` up to step five."""
    recipe = stopped["recipe"]
    model = {key: value for key, value in recipe["model"].items() if key != "parallel"}
    recipe = {**recipe, "model": model, "run": {**recipe["run"], "steps": 5}}
    return {**stopped, "name": stopped["name"].replace("divided", "resumed"), "recipe": recipe, "resume": True}


def small_recipe(stage: str, model: Path, **more: Any) -> Values:
    of_stage: Values = {
        "sft": {"data": {"source": "rows.jsonl"}, "batch": {"size": 12, "micro_size": 2, "packing": True}},
        # bfloat16 rounds sums of 130 log-probs by whole units: with the usual beta of 0.1 their differences move losses
        # by more than 1e-3, on one GPU with other micro-batches too
        "dpo": {
            "data": {"source": "pairs.jsonl"},
            "loss": {"use": "dpo", "beta": 0.01},
            "batch": {"size": 6, "micro_size": 1},
        },
        "rl": {
            "data": {"source": "rows.jsonl"},
            "rollout": {"engine": "stored", "prompts_per_step": 24, "group_size": 1, "max_new_tokens": 256},
            "rewards": [{"use": "digits.py:digits"}],
            "scoring": {"workers": 1, "correct_at": 0.5},
            "advantage": "reward",
            "kl": {"coef": 0.05},
            "batch": {"micro_tokens": 512},
        },
    }[stage]
    rate = 1e-3 if "lora" in more else 1e-5 if stage == "dpo" else 1e-4  # at 1e-4 the loss of dpo rises at first
    run = {"steps": 5, "save_every": 2}
    return {"stage": stage, **of_stage, "model": {"path": str(model), **more}, "optim": {"lr": rate}, "run": run}


def speed_recipe(model: Path, smoke: bool, **more: Any) -> Values:
    section = {"path": str(model), "dtype": "float32" if smoke else "bfloat16", "gradient_checkpointing": True, **more}
    return {
        "stage": "sft",
        "data": {"source": "long.jsonl"},
        "model": {key: value for key, value in section.items() if value is not None},
        "batch": {"size": 32, "micro_size": 16, "packing": True},
        "optim": {"lr": 1e-5},
        "run": {"steps": 4 if smoke else 8},
    }


def context_recipe(model: Path, smoke: bool, **more: Any) -> Values:
    """Return a recipe with one row per micro-batch, so that a GPU has only a part of that row."""
    recipe = speed_recipe(model, smoke, **more)
    batch = {"size": 2, "micro_size": 1, "packing": True}
    return {**recipe, "data": {"source": "longest.jsonl"}, "batch": batch, "run": {"steps": 3}}


def write_rows(home: Path, smoke: bool) -> None:
    """Write rows, pairs and rows of 2,000 tokens of seeded letters (one token per character), and a reward."""
    draw = random.Random("mesh/rows")

    def text(length: int) -> str:
        return "".join(draw.choice("0123456789 abcdefgh") for _ in range(length))

    most = 60 if smoke else 250
    rows = [(text(draw.randrange(8, 40)), text(draw.randrange(30, most)), text(draw.randrange(30, most)))
            for _ in range(128)]  # fmt: skip
    with (home / "rows.jsonl").open("w") as plain, (home / "pairs.jsonl").open("w") as pairs:
        for prompt, one, other in rows:
            plain.write(json.dumps({"prompt": prompt, "completion": one}) + "\n")
            pairs.write(json.dumps({"prompt": prompt, "chosen": one, "rejected": other}) + "\n")
    with (home / "long.jsonl").open("w") as long:
        for _ in range(8 * 32):
            long.write(json.dumps({"prompt": text(20), "completion": text(100 if smoke else 1_970)}) + "\n")
    with (home / "longest.jsonl").open("w") as longest:
        for _ in range(8):
            longest.write(json.dumps({"prompt": text(20), "completion": text(300 if smoke else 31_970)}) + "\n")
    (home / "digits.py").write_text("def digits(completion):\n    return sum(c.isdigit() for c in completion) / 100\n")


# --- execution ---


def run_all(some: list[Values], count: int, home: Path, record: Values, out: Path | None) -> dict[str, Values]:
    """Return the results of all jobs by name. A worker that fails is started again without the failed job."""
    results = home / f"results-{count}.json"
    results.write_text("{}")
    broken_ones = 0
    while left := [job for job in some if job["name"] not in json.loads(results.read_text())]:
        spec = home / "spec.json"
        spec.write_text(json.dumps({"jobs": left, "results": str(results), "home": str(home)}))
        began = time.perf_counter()
        try:
            code = ranks.launch([sys.executable, __file__, "--worker", str(spec)], count)
        except Interrupted:
            raise
        except Exception as error:
            print(error, file=sys.stderr)
            code = 1
        found = json.loads(results.read_text())
        if code:
            broken = next((job["name"] for job in left if job["name"] not in found), None)
            if broken is not None:
                found[broken] = {"error": f"exit code {code}"}
                results.write_text(json.dumps(found))
                broken_ones += 1
        print(f"{count} ranks: {len(found)} of {len(some)} runs, {time.perf_counter() - began:.0f} s", flush=True)
        sides.write({**record, "runs": record["runs"] | found}, out)
        if broken_ones == 3:
            break  # after three failures the others would fail too, at half a minute each
    return json.loads(results.read_text())


def work(spec: Values) -> None:
    """Run all jobs one after another in a worker; rank 0 writes their results."""
    ranks.claim_gpu()
    ranks.end_with_launcher()
    from posttrain.train import distributed

    with distributed.join_process_group():
        for one in spec["jobs"]:
            began = time.perf_counter()
            try:
                found = train(one, Path(spec["home"]))
            except Exception as error:
                traceback.print_exc()
                if not distributed.all_ranks_raise(error):
                    raise
                found = {"error": f"{type(error).__name__}: {error}"[:500]}
            if distributed.is_main():
                results = Path(spec["results"])
                entry = {**found, "seconds": time.perf_counter() - began}
                results.write_text(json.dumps(json.loads(results.read_text()) | {one["name"]: entry}))
            distributed.barrier()


def train(one: Values, home: Path) -> Values:
    """Run one recipe; return its metrics by step."""
    import gc

    import torch

    from posttrain import pipeline
    from posttrain.recipe.load import load_dict
    from posttrain.run.directory import RunDirectory
    from posttrain.run.metrics import read_metrics
    from posttrain.train import checkpoint, distributed, hf_trainer

    loaded = load_dict(one["recipe"], base_dir=home, where="mesh")
    output = Path(one["output"])

    def open_it() -> RunDirectory:
        return RunDirectory.open(output, name="mesh", text="", resolved={}, resume=one["resume"])

    with contextlib.ExitStack() as stack:
        opened = distributed.open_directory(open_it) if distributed.world() > 1 else open_it()
        directory = stack.enter_context(opened)
        if not one["saves"]:  # 17 GB after the last step, outside the measurement
            stack.enter_context(clocks.replaced(checkpoint, "save", lambda *_, **__: None))
            stack.enter_context(clocks.replaced(hf_trainer, "save_model", lambda *_, **__: {}))
        pipeline.run_stage(loaded.recipe, directory)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    names = ("loss", "grad_norm", "num_tokens", "time/step", "time/tokens_per_s", "memory/allocated_gib")
    rows = read_metrics(output)
    return {name: [row[name] for row in rows] for name in names if rows and name in rows[0]}


# --- results ---


def gaps(runs: dict[str, Values], part: str) -> dict[str, Values]:
    """Return the largest relative difference of losses and gradient norms of each run from one GPU."""
    found: dict[str, Values] = {}
    for name, run in runs.items():
        base = runs.get(f"{name.rpartition(',')[0]}, one", {})
        if not name.startswith(part) or name.endswith(", one") or "error" in run or "error" in base:
            continue
        if part == "resume" and not name.endswith("resumed"):
            continue
        shares = [gap(run[key], base[key]) for key in ("loss", "grad_norm")]
        peaks = [max(of.get("memory/allocated_gib", [0.0])) for of in (base, run)]
        dtype = name.rpartition(",")[0].split()[-1]
        found[name] = {"gap": max(shares), "allowed": ALLOWED[dtype], "updates": len(run["loss"]), "peaks_gib": peaks}
    return found


def gap(values: list[float], others: list[float]) -> float:
    """Return the largest difference relative to the largest value, because losses may cross 0."""
    if len(values) != len(others):
        return float("inf")
    size = max(map(abs, others)) or 1.0
    return max(abs(a - b) for a, b in zip(values, others, strict=True)) / size


def speeds(runs: dict[str, Values]) -> dict[str, Values]:
    """Return median tokens/s and the peak memory of one rank for each run of the speed part."""
    return {
        name: {
            "tokens_per_s": statistics.median(run["time/tokens_per_s"][LEFT_OUT:]),
            "peak_gib": max(run.get("memory/allocated_gib", [0.0])),
        }
        for name, run in runs.items()
        if name.startswith("speed") and "error" not in run
    }


if __name__ == "__main__":
    main()
