"""RL with tools on a real model: SFT on generated traces, then RL, once with the calculator and once with search.

    SMOLLM2=/path/SmolLM2-135M-Instruct.gguf python benchmarks/tools_rl.py --out benchmarks/results/tools_rl_h100.json
    python benchmarks/tools_rl.py --smoke          # the same path on a CPU: tiny model, transformers engine

For each task: traces of which three in ten guess and three in ten call twice; sft; rl for its reward; rl with
group_rewards optimal_tool_calls (OTC); evaluations of the start and of all three on held-out prompts. The JSON
holds the evaluations (correct, calls a completion), rewards and calls of every step, seconds, and the gap between
engine and trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import sides

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "recipes" / "tools" / "data.py"
TASKS: dict[str, dict[str, Any]] = {
    "calculator": {
        "tools": [{"use": "calculator"}],
        "traces": f"{DATA}:product_traces",
        "problems": f"{DATA}:products",
        "reward": {"use": "math.accuracy", "params": {"extract": ["answer_tag"]}},
    },
    "search": {
        "tools": [{"use": "search", "params": {"folder": str(DATA.parent / "towns"), "top": 1}}],
        "traces": f"{DATA}:question_traces",
        "problems": f"{DATA}:questions",
        "reward": {"use": "qa.search_r2"},
    },
}


def settings(smoke: bool) -> dict[str, Any]:
    """Return the sizes of the real run and of the smoke test."""
    if smoke:
        coin = {
            "use": f"{DATA.parents[1] / 'quickstart_random.py'}:coin",
            "weight": 0.1,
        }  # otherwise no step makes an update
        return {"model": {"path": "tiny"}, "engine": {}, "traces": 64, "steps": 2, "prompts": 2, "group": 4,
                "held_out": 8, "lr": (4e-3, 3e-4), "sampling": {"max_new_tokens": 64, "turn_tokens": 16},
                "rewards": [coin]}  # fmt: skip
    path = os.environ.get("SMOLLM2")
    if not path:
        raise SystemExit("write SMOLLM2=/path/to/SmolLM2-135M-Instruct.gguf before the command, or --smoke behind it")
    engine = {"engine": "vllm", "vllm": {"enforce_eager": True, "gpu_memory": 0.15}}
    return {"model": {"path": path}, "engine": engine, "traces": 960, "rewards": [],
            "steps": 15, "prompts": 32, "group": 8, "held_out": 200, "lr": (2e-4, 1e-5),
            "sampling": {"max_new_tokens": 256, "turn_tokens": 80}}  # fmt: skip


def run(values: dict[str, Any], folder: Path) -> tuple[dict[str, Any], float]:
    """Run one stage; return its summary and seconds."""
    from posttrain.pipeline import run_stage
    from posttrain.recipe.load import load_dict
    from posttrain.run.directory import RunDirectory

    started = time.perf_counter()
    loaded = load_dict(values, base_dir=HERE, where=folder.name)
    with RunDirectory.open(folder, name=folder.name, text=json.dumps(values), resolved=loaded.resolved) as directory:
        summary = run_stage(loaded.recipe, directory)
    return summary, round(time.perf_counter() - started, 1)


def task(name: str, size: dict[str, Any], root: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run all stages of one task; `keep` gets the results so far after every evaluation."""
    given = TASKS[name]
    acting = {"tools": given["tools"], "tool_prompt": "none", "scoring": {"workers": 4, "max_bad_gold": 1.0}}
    rewards = [given["reward"], {"use": "efficiency.tool_calls", "weight": 0}]
    sampling = {**size["sampling"], "max_turns": 4}
    seconds: dict[str, float] = {}
    curves: dict[str, Any] = {}

    def stage(label: str, values: dict[str, Any]) -> dict[str, Any]:
        summary, seconds[label] = run(values, root / name / label)
        return summary

    def evaluate(label: str, model: dict[str, Any]) -> dict[str, Any]:
        data = {"source": given["problems"], "size": size["held_out"], "seed": 77}
        summary = stage(f"eval-{label}", {"stage": "eval", "model": model, "data": data, "rewards": rewards,
                                          "sampling": sampling, "engine": size["engine"], **acting})  # fmt: skip
        records = [json.loads(line) for line in Path(summary["completions"]).read_text().splitlines()]
        calls = [sum(len(turn["calls"]) for turn in record["turns"]) for record in records]
        right = [record["correct"] is True for record in records]
        return {"correct": sum(right) / len(right), "calls": sum(calls) / len(calls)}

    found: dict[str, Any] = {}

    def evaluated(label: str, model: dict[str, Any]) -> None:
        found[label] = evaluate(label, model)
        keep({"evaluations": found, "curves": curves, "seconds": seconds})

    evaluated("start", size["model"])
    sft = stage("sft", {
        "stage": "sft", "model": size["model"], "optim": {"lr": size["lr"][0], "schedule": "cosine"},
        "data": {"source": given["traces"], "size": size["traces"], "train_on": "assistant"},
        "batch": {"size": 32}, "run": {"epochs": 1},
    })  # fmt: skip
    evaluated("sft", {"path": sft["model"]})
    for label, group_rewards in (("rl", []), ("otc", [{"use": "optimal_tool_calls"}])):
        trained = stage(label, {
            "stage": "rl", "model": {"path": sft["model"]}, "rewards": [*rewards, *size["rewards"]],
            "group_rewards": group_rewards,
            "data": {"source": given["problems"], "size": 2000, "seed": 1}, **acting,
            "rollout": {"prompts_per_step": size["prompts"], "group_size": size["group"], **sampling, **size["engine"]},
            "advantage": {"scale": "none"}, "loss": {"aggregation": "token_mean"},
            "optim": {"lr": size["lr"][1], "warmup_steps": 2}, "run": {"steps": size["steps"]},
        })  # fmt: skip
        rows = [json.loads(line) for line in (root / name / label / "metrics.jsonl").read_text().splitlines()]
        keys = ("rewards/accuracy/mean", "correct", "turns/calls", "turns/mean", "mismatch/mean", "time/step")
        curves[label] = {key: [row.get(key) for row in rows] for key in keys if key in rows[0]}
        evaluated(label, {"path": trained["model"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny model on a CPU: the path, not the figures")
    parser.add_argument("--task", choices=[*TASKS, "both"], default="both")
    parser.add_argument("--out", type=Path, help="where the JSON goes; default: stdout")
    options = parser.parse_args()
    size = settings(options.smoke)
    with tempfile.TemporaryDirectory(prefix="posttrain-tools-") as root:
        record: dict[str, Any] = sides.environment(None if options.smoke else sides.nvml())
        for name in TASKS if options.task == "both" else [options.task]:
            task(name, size, Path(root), partial(keep, record, name, options.out))
    if options.out is None:
        print(json.dumps(record, indent=1))


def keep(record: dict[str, Any], name: str, out: Path | None, found: dict[str, Any]) -> None:
    """Put a task's results into the record and the file, so that they are kept if the run is killed."""
    record[name] = found
    sides.write(record, out)


if __name__ == "__main__":
    main()
