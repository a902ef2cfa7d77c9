"""Work B (`rl_step.py`, posttrain's side) on two GPUs: one alone, both with an engine each, and one that trains while
the other generates. Without --lora all weights are trained and sent by NCCL; with --merge-adapter merged LoRA weights
too.

    python benchmarks/server.py --out benchmarks/results/server_full.json
    python benchmarks/server.py --lora --out benchmarks/results/server_lora.json
    python benchmarks/server.py --lora --merge-adapter --runs server --out benchmarks/results/server_merged.json
    python benchmarks/server.py --recompute benchmarks/results/server_lora.json
    python benchmarks/server.py --smoke        # tiny, on a CPU, transformers generate: does the script run?

- `one`: the synchronous loop on GPU 0, vLLM colocated. The others' ratios are to it.
- `both`: the same on both GPUs (`--gpus 2`), each with its engine.
- `server`: GPU 0 trains, `vllm serve` on GPU 1, `rollout.staleness: 1`, engine log-probs of every token for the
  correction that old rollouts need. The phase `sync` is a weight update with its probe.
- `server-4`: `server` with `rollout.staleness: 4`.
- `pair`: `server` with two engines on GPU 1.

The step is the same for all: 64 prompts x 8 of the same lengths (`scale_ranks.py --weak` has more for two GPUs). The
first two steps are excluded. About 11 minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import rl_work
import scale_ranks
import sides

from posttrain.errors import RunError
from posttrain.run import ranks

RUNS: dict[str, tuple[int, dict[str, Any]]] = {  # name -> training processes, what differs
    "one": (1, {}),
    "both": (2, {}),
    "server": (1, {"server": {"devices": [1]}, "staleness": 1, "share": None}),
    "server-4": (1, {"server": {"devices": [1]}, "staleness": 4, "share": None}),
    "pair": (1, {"server": {"devices": [1, 1]}, "staleness": 1, "share": None}),
}


def main() -> None:
    args = arguments()
    if args.recompute:
        print(table(json.loads(args.recompute.read_text())))
        return
    lib = None if args.smoke else sides.nvml()
    with tempfile.TemporaryDirectory(prefix="server-") as scratch:
        spec = scale_ranks.specification(args, Path(scratch))
        record: dict[str, Any] = {"work": "B", "lora": args.lora, **sides.environment(lib)}
        record |= {"setting": rl_work.setting(spec), "runs": {}}
        for name in args.runs:
            record["runs"][name] = measured(spec, name, Path(scratch), args)
            sides.write(record, args.out)  # after each: results are kept if the next one is killed
            print(table(record), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", action="store_true", help="train a rank-16 adapter on all linear layers")
    parser.add_argument("--runs", nargs="*", choices=[*RUNS], default=[*RUNS])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro-tokens", type=int, default=8192, help="batch.micro_tokens")
    parser.add_argument("--server-micro-tokens", type=int, help="the same of `server`, whose GPU holds no engine")
    parser.add_argument("--share", type=float, default=None, help="vllm.gpu_memory of `one` and `both` (default: 0.3)")
    parser.add_argument("--sleep", action="store_true", help="vllm.sleep of `one` and `both`")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--compile", action="store_true", help="model.compile")
    parser.add_argument("--merge-adapter", action="store_true", help="vllm.merge_adapter")
    parser.add_argument("--models", type=Path, help="keep the models here, for the next run on this machine")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU: does the script run?")
    parser.add_argument("--recompute", type=Path, metavar="FILE", help="print the table of a committed JSON")
    parser.set_defaults(correction="none")
    return parser.parse_args()


def measured(spec: dict[str, Any], name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, phases and tokens by step of one run, or its error."""
    processes, changes = RUNS[name]
    settings = {**spec["posttrain"], **changes}
    if "server" in changes:
        settings |= {"sleep": False, "micro_tokens": args.server_micro_tokens or settings["micro_tokens"]}
        spec = {**spec, "correction": "tis"}
    out, path = folder / f"{name}.json", folder / f"{name}.spec.json"
    path.write_text(json.dumps({**spec, "posttrain": settings, "out": str(out), "run": str(folder / name)}))
    try:
        code = ranks.launch([sys.executable, scale_ranks.__file__, "--worker", str(path)], processes)
    except RunError as error:
        return {"settings": settings, "error": str(error)}
    if code:
        return {"settings": settings, "error": f"exit code {code}; its messages are above"}
    return {"settings": settings, "processes": processes, **json.loads(out.read_text())}


def table(record: dict[str, Any]) -> str:
    """Return seconds by phase, tokens per second, and the ratio to `one`."""
    lines = [f"work B  {record['card']}  steps {sides.LEFT_OUT + 1} and later"]
    base = record["runs"].get("one", {})
    for name, run in record["runs"].items():
        if "error" in run:
            lines.append(f"{name:>8}  failed: {run['error'].strip().splitlines()[-1]}")
            continue
        rate = 1 / sides.seconds_a_token(run)
        ratio = f"  x {rate * sides.seconds_a_token(base):.2f}" if "step_s" in base else ""
        phases = ", ".join(f"{phase} {sides.mean(s[sides.LEFT_OUT :]):.2f}" for phase, s in run["phases"].items())
        lines.append(f"{name:>8}  {sides.seconds_a_step(run):7.2f} s a step  {rate:8.0f} tokens/s{ratio}  ({phases})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
