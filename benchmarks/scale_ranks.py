"""Tokens a second of work B (`rl_step.py`, posttrain's side) on 1, 2 and 4 GPUs of one machine.

    python benchmarks/scale_ranks.py --lora --ranks 1 2 --out benchmarks/results/scale_lora_x2.json
    python benchmarks/scale_ranks.py --lora --ranks 1 4 --weak --out benchmarks/results/scale_lora_x4.json
    python benchmarks/scale_ranks.py --recompute benchmarks/results/scale_lora_x4.json
    python benchmarks/scale_ranks.py --smoke              # tiny, transformers generate, on a CPU

The step is the same for every number of GPUs (strong scaling): 64 prompts x 8 of the same lengths. With --weak each
number is measured again with 64 prompts x 8 per GPU (weak scaling). The first two steps are excluded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import rl_posttrain
import rl_work
import sides

from posttrain.run import ranks


def main() -> None:
    args = arguments()
    if args.worker:
        work(json.loads(args.worker.read_text()))
        return
    if args.recompute:
        print(table(json.loads(args.recompute.read_text())))
        return
    counts = args.ranks or ([1, 2] if args.smoke else [1, 2, 4])
    lib = None if args.smoke else sides.nvml()
    with tempfile.TemporaryDirectory(prefix="scale-") as scratch:
        spec = specification(args, Path(scratch))
        setting = {**rl_work.setting(spec), **spec["posttrain"]}
        record: dict[str, Any] = {"lora": args.lora, **sides.environment(lib)}
        record |= {"setting": setting, "ranks": {}}
        for n in counts:
            works = {str(n): spec}
            if args.weak and n > 1:
                works[f"{n} weak"] = specification(args, Path(scratch), times=n)
            for name, work_of_n in works.items():
                record["ranks"][name] = measured(work_of_n, n, Path(scratch) / name.replace(" ", "-"))
                print(table(record), flush=True)
                sides.write(record, args.out)  # after each: results are kept if the next one is killed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", help="numbers of GPUs (default: 1 2 4)")
    parser.add_argument("--lora", action="store_true", help="train a rank-16 adapter on all linear layers")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro-tokens", type=int, default=8192, help="batch.micro_tokens")
    parser.add_argument("--share", type=float, default=None, help="vllm.gpu_memory (default: 0.3)")
    parser.add_argument("--sleep", action="store_true", help="vllm.sleep")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--compile", action="store_true", help="model.compile")
    parser.add_argument("--merge-adapter", action="store_true", help="vllm.merge_adapter")
    parser.add_argument("--models", type=Path, help="keep the models here, for the next run on this machine")
    parser.add_argument("--weak", action="store_true", help="also with 64 prompts x 8 for every GPU")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU: does the script run?")
    parser.add_argument("--recompute", type=Path, metavar="FILE", help="print the table of a committed JSON")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(correction="none")
    return parser.parse_args()


def specification(args: argparse.Namespace, folder: Path, times: int = 1) -> dict[str, Any]:
    """Return work B with a multiple of its prompts."""
    return rl_work.specification(args, "B", folder, times=times)


def measured(spec: dict[str, Any], count: int, folder: Path) -> dict[str, Any]:
    """Return seconds and tokens by step with `count` processes."""
    folder.mkdir()
    out, path = folder / "result.json", folder / "spec.json"
    path.write_text(json.dumps({**spec, "out": str(out), "run": str(folder / "run")}))
    code = ranks.launch([sys.executable, __file__, "--worker", str(path)], count)
    if code:
        sys.exit(code)
    return json.loads(out.read_text())


def work(spec: dict[str, Any]) -> None:
    """Run the benchmark in each process; rank 0 writes its steps."""
    ranks.claim_gpu()
    ranks.end_with_launcher()
    from posttrain.train import distributed

    result: dict[str, Any] = {}
    with distributed.join_process_group():
        rl_posttrain.run_posttrain(spec, result)
        if distributed.is_main():
            del result["began"], result["marks"]  # times of a process that has ended
            Path(spec["out"]).write_text(json.dumps(result))


def table(record: dict[str, Any]) -> str:
    """Return seconds by phase, tokens per second, and the ratio to the first."""
    lines = [f"work B  {record['card']}  steps {sides.LEFT_OUT + 1} and later"]
    first = None
    for name, side in record["ranks"].items():
        rate = 1 / sides.seconds_a_token(side)
        first = first or rate
        phases = ", ".join(f"{name} {sides.mean(s[sides.LEFT_OUT :]):.2f}" for name, s in side["phases"].items())
        seconds = sides.seconds_a_step(side)
        how = f"{name.removesuffix(' weak'):>2} ranks{', as much each' if 'weak' in name else '':14}"
        lines.append(f"{how}  {seconds:8.2f} s a step ({phases})  {rate:8.0f} tokens/s  x {rate / first:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
